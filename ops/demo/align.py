"""Makes the word times of new bundled clips: ``python -m ops.demo.align``.

A tool for whoever adds a clip: put the file and its transcript into ``calls/MANIFEST.tsv``, leave the last column empty, install
``asr-streams[train]`` and run it. Forced alignment places each word of the known transcript on the audio, in steps of 10 ms; the empty
columns are filled with where each word ends.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ops.demo.calls import MANIFEST_COLUMNS, calls_folder, read_clip, read_manifest
from ops.train.clips import align
from schemas.records import SAMPLE_RATE_HZ

__all__ = ["main", "word_ends_ms"]

_NOT_IN_WORDS: Final = re.compile(r"[^a-z' ]")


def word_ends_ms(pcm: NDArray[np.int16], transcript: str) -> list[int]:
    """Return where each word of the transcript ends, in ms from the start of the audio (int16, 16 kHz).

    Raises:
        ValueError: the words cannot be placed on the audio.
    """
    words, _, _ = align(pcm, _NOT_IN_WORDS.sub("", transcript.lower().replace("-", " ")))
    if not words:
        raise ValueError(f"the audio does not hold these words: {transcript!r}")
    return [word.end * 1_000 // SAMPLE_RATE_HZ for word in words]


def main() -> None:
    """Fill the manifest."""
    lines = ["\t".join(MANIFEST_COLUMNS)]
    for row in read_manifest():
        if row["transcript"] and not row["word_ends_ms"]:
            row["word_ends_ms"] = " ".join(map(str, word_ends_ms(read_clip(row["file"]), row["transcript"])))
        lines.append("\t".join(row[column] for column in MANIFEST_COLUMNS))
    (calls_folder() / "MANIFEST.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
