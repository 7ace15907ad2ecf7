"""From CTC posteriors to text: beam search with hotwords and a language model, endpoints, rescoring. Numbers in, numbers out; no model."""
