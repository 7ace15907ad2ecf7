"""What a list of hotwords is called: by its content, so that the same name always means the same phrases."""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
import unicodedata
from collections.abc import Iterable
from typing import Final

from schemas.records import Hotword

__all__ = ["hotword_digest", "hotword_version"]

#: 64 bits, hexadecimal: enough to tell lists apart, and short enough for each session's snapshot.
_VERSION_CHARS: Final = 16


def hotword_digest(phrases: Iterable[Hotword]) -> str:
    """Return the SHA-256 of a list's content: phrases as they are compiled, each with its highest boost, whatever their order."""
    boosts: dict[str, float] = {}
    for hotword in phrases:
        phrase = " ".join(unicodedata.normalize("NFKC", hotword.phrase).split())
        # As the schema's float has it, whatever it was before it was encoded.
        boosts[phrase] = max(boosts.get(phrase, -math.inf), ctypes.c_float(hotword.boost).value)
    digest = hashlib.sha256()
    for phrase, boost in sorted(boosts.items()):
        text = phrase.encode()
        digest.update(struct.pack("<If", len(text), boost) + text)
    return digest.hexdigest()


def hotword_version(phrases: Iterable[Hotword]) -> str:
    """Return the version that a list is pushed as: the beginning of its digest; empty for an empty list, which is none."""
    listed = tuple(phrases)
    return hotword_digest(listed)[:_VERSION_CHARS] if listed else ""
