"""The stages: one package each, a thin agent around plain numpy and torch code."""
