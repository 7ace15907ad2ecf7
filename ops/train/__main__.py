"""Run the recipe: ``python -m ops.train prepare …``, then ``python -m ops.train asr …``."""

from ops.train.command import main

main()
