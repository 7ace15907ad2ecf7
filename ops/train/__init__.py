"""The recipe of the bundled model: from recordings to ``final.pt`` with one command, ``python -m ops.train``."""
