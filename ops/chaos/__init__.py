"""Chaos: calls of known audio through the real system while its processes are killed, and an independent checker of what came out."""
