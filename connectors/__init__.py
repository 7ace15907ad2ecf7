"""The edges: audio comes in from recorders, transcripts go out to people."""
