"""The second stage: speech into acoustic features."""
