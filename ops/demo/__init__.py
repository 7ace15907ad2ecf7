"""The demo: the whole system on this machine, with calls put together from real recordings."""
