"""Run the recipe: ``python -m ops.train all …`` does all of it."""

from ops.train.command import main

main()
