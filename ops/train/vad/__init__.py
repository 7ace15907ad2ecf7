"""The recipe of TinyVAD: from recordings to the bundled model with one command, ``python -m ops.train.vad``."""
