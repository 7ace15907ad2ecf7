"""Run the recipe: ``python -m ops.train.vad --audio-dir DIR``."""

from ops.train.vad.command import main

if __name__ == "__main__":
    main()
