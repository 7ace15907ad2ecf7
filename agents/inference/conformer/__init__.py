"""The streaming Conformer engine: WeNet's models, in torch, batch-first."""
