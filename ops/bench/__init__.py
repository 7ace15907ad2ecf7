"""``asr bench``: how fast it is, with what every figure needs to be believed: its distribution, the processor, the versions."""
