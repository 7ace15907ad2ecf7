"""The recorder: sends audio as live calls to ``asr.audio``.

Parts: ``media`` (files to samples), ``framing`` (samples to frames with exact positions), ``session`` (frames to numbered records),
``producer`` (records to Kafka), ``recorder`` (who sends what when), ``command`` (``asr record``).
"""
