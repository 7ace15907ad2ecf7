"""Thousands of short calls through one set of workers: does anything grow?

Parts: ``vitals`` (what processes and topics hold, sampled), ``growth`` (what of that is growth, pure), ``run`` (the calls), ``report``
(JSON, table, picture), ``command`` (``asr soak``).
"""
