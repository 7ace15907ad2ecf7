"""Voice activity detection: from what recorders send to segments of speech, and an answer for every frame of silence."""
