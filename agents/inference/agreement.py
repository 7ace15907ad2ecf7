"""LocalAgreement-2: of a text that is decoded anew as audio comes, the part that two decodings in a row agree on is stable."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

__all__ = ["Agreement"]


class Agreement:
    """The hypotheses of one segment.

    What was stable stays so, as newer hypotheses begin with it too; a model that changes its mind takes it back.
    """

    def __init__(self) -> None:
        self.text = ""
        self.stable_text = ""
        self._words: Sequence[str] = ()

    def update(self, words: Sequence[str]) -> bool:
        """Take the next hypothesis; return whether a text changed.

        Args:
            words: its words, each with the space that stands before it.
        """
        # All that the last hypothesis and this one begin with: at least what was stable, unless the model changed its mind about it.
        agreed = _common(self._words, words)
        self._words = tuple(words)
        text = "".join(words).strip()
        stable_text = "".join(words[:agreed]).strip()
        changed = (text, stable_text) != (self.text, self.stable_text)
        self.text, self.stable_text = text, stable_text
        return changed


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many words two texts have in common at their beginning; case and punctuation aside."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if _bare(left) != _bare(right):
            break
        count += 1
    return count


def _bare(word: str) -> str:
    return "".join(char for char in word.casefold() if not unicodedata.category(char).startswith(("P", "Z")))
