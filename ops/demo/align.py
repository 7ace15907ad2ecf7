"""Makes the word times of the bundled clips anew: ``python -m ops.demo.align``.

A tool for whoever adds a clip: put the file and its transcript into ``calls/MANIFEST.tsv``, install ``pocketsphinx`` (the project does not
need it otherwise) and run it. Forced alignment places each word of the known transcript on the audio, in steps of 10 ms; the last
column of the manifest is written anew with where each word ends.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Final

from ops.demo.calls import MANIFEST_COLUMNS, calls_folder, read_clip, read_manifest
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["main", "word_ends_ms"]

_FRAME_MS: Final = 10
_NOT_IN_WORDS: Final = re.compile(r"[^a-z' ]")
_PRONUNCIATION: Final = re.compile(r"\(\d+\)$")


def word_ends_ms(decoder: Any, pcm: bytes, transcript: str) -> list[int]:
    """Return where each word of the transcript ends, in ms from the start of the audio (int16, 16 kHz).

    Raises:
        ValueError: the words cannot be placed on the audio.
    """
    words = _NOT_IN_WORDS.sub("", transcript.lower().replace("-", " ")).split()
    decoder.set_align_text(" ".join(words))
    decoder.start_utt()
    decoder.process_raw(pcm, full_utt=True)
    decoder.end_utt()
    placed = [part for part in decoder.seg() or () if not part.word.startswith(("<", "["))]
    if [_PRONUNCIATION.sub("", part.word) for part in placed] != words:
        raise ValueError(f"the audio does not hold these words: {transcript!r}")
    return [(part.end_frame + 1) * _FRAME_MS for part in placed]


def main() -> None:
    """Write the manifest anew."""
    # Imported by name: it is no dependency, and ships no types.
    pocketsphinx = importlib.import_module("pocketsphinx")
    decoder = pocketsphinx.Decoder(samprate=SAMPLE_RATE_HZ, lm=None, loglevel="FATAL", bestpath=False)
    lines = ["\t".join(MANIFEST_COLUMNS)]
    for row in read_manifest():
        if row["transcript"]:
            ends = word_ends_ms(decoder, read_clip(row["file"]).tobytes(), row["transcript"])
            row["word_ends_ms"] = " ".join(map(str, ends))
        lines.append("\t".join(row[column] for column in MANIFEST_COLUMNS))
    (calls_folder() / "MANIFEST.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
