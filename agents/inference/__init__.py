"""The third stage: features, or audio, into text."""
