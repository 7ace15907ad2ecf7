"""Transcripts to browsers: an HTTP and WebSocket server over the result topics, and the live page."""
