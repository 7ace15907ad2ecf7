"""Which recordings there are, who speaks in them, and which of them training never hears.

``sources.tsv`` names every recording by its path below the audio folder, with its licence and where it comes from. A recording, a
speaker, a noise and a piece of music belong to one split each: *train*; *development*, on which thresholds and the like are chosen; or
*held_out*, for the evaluation alone.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError

__all__ = ["SPLITS", "Kind", "Recording", "Split", "of_kind", "read_audio", "recordings"]

Split = Literal["train", "development", "held_out"]
Kind = Literal["speech", "digits", "noise", "keyboard", "music", "tone"]

SPLITS: Final[tuple[Split, ...]] = ("train", "development", "held_out")
#: G.711 without any header.
_ALAW_SUFFIX: Final = ".alaw"
_TELEPHONE_HZ: Final = 8_000


@dataclass(frozen=True, slots=True)
class Recording:
    """One file.

    Attributes:
        name: its path below the audio folder.
        path: where it is here.
        kind: what is on it; *digits* are single ones, to be strung together.
        speaker: who speaks.
        split: whether training may hear it.
        source: where it comes from.
        licence: under which licence.
    """

    name: str
    path: Path
    kind: Kind
    speaker: str
    split: Split
    source: str
    licence: str


def recordings(audio_dir: Path, split: Split, *kinds: Kind) -> list[Recording]:
    """Return a split's recordings, in the order of their names.

    Args:
        audio_dir: the folder that holds them.
        split: which of them.
        kinds: only these; none: all kinds.

    Raises:
        UserError: the folder lacks some of them.
    """
    found = []
    with resources.files(__package__).joinpath("sources.tsv").open(encoding="utf-8") as table:
        rows = [row for row in csv.DictReader(table, delimiter="\t") if row["split"] == split and (not kinds or row["kind"] in kinds)]
    for row in rows:
        paths = sorted(audio_dir.glob(row["path"]))
        if not paths:
            raise UserError(
                f"{audio_dir} lacks {row['path']}",
                f"It comes from {row['source']} ({row['licence']}); sources.tsv lists all that is needed.",
            )
        for path in paths:
            speaker = row["speaker"].replace("*", path.name.partition("_")[0])
            name = path.relative_to(audio_dir).as_posix()
            found.append(Recording(name, path, row["kind"], speaker, split, row["source"], row["licence"]))  # type: ignore[arg-type]
    return sorted(found, key=lambda each: each.name)


def of_kind(found: Sequence[Recording], *kinds: Kind) -> list[Recording]:
    """Return the recordings of some kinds."""
    return [each for each in found if each.kind in kinds]


def read_audio(path: Path) -> NDArray[np.float32]:
    """Return a file's first channel at 16 kHz, float32 in [-1, 1)."""
    import soundfile
    import soxr

    if path.suffix == _ALAW_SUFFIX:
        from agents.vad.decode import decode

        samples, rate_hz = decode(path.read_bytes(), "alaw"), _TELEPHONE_HZ
    else:
        channels, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
        samples = np.ascontiguousarray(channels[:, 0])
    if rate_hz != SAMPLE_RATE_HZ:
        samples = soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ)
    return samples.astype(np.float32)
