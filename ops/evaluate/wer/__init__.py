"""Word errors of recorded calls, through the whole system."""
