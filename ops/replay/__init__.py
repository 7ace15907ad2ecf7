"""Stored calls once more, through another engine or other settings, beside live traffic: for audits, and to compare models.

Parts: ``catalog`` (which calls there are), ``stored`` (what is on the topics of one), ``compare`` (two transcripts of a call, pure),
``run`` (the replay itself), ``command`` (``asr replay``).
"""
