"""Two transcripts of one call, word by word. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final, Literal, NamedTuple

import msgspec

from connectors.results import to_ms
from schemas.records import Transcript

__all__ = ["Comparison", "Difference", "Piece", "compare", "pieces"]

#: Words between spaces; where a script has none, its characters.
_TOKEN: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")
_MARKS: Final = re.compile(r"[^\w']+")

Kind = Literal["same", "changed", "missing", "added"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A place where the replay says something else. ``at_ms`` counts from the session's start."""

    kind: Kind
    stored: str
    replayed: str
    at_ms: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it is stored, and as the replay has it. These names are the keys of the JSON.

    Attributes:
        session_id: the session.
        channel_id: its channel.
        conversation_id: its call.
        identical: whether all segments are the same: bounds and text, letter by letter.
        stored_segments: how many segments are stored.
        replayed_segments: how many the replay has.
        stored_words: how many words are stored.
        replayed_words: how many the replay has.
        differing_words: words that are changed, missing or added, whatever their case and punctuation.
        differences: where.
        stored_text: all that is stored.
        replayed_text: all that the replay has.
        stored_engine: what recognised it then.
        stored_model: the digest of its model.
        replayed_engine: what recognised it now.
        replayed_model: the digest of its model.
        note: what else is to be known of it.
    """

    session_id: str
    channel_id: str
    conversation_id: str
    identical: bool
    stored_segments: int
    replayed_segments: int
    stored_words: int
    replayed_words: int
    differing_words: int
    differences: tuple[Difference, ...]
    stored_text: str
    replayed_text: str
    stored_engine: str
    stored_model: str
    replayed_engine: str
    replayed_model: str
    note: str = ""


class Piece(NamedTuple):
    """A run of words that are the same in both, or not."""

    kind: Kind
    stored: tuple[str, ...]
    replayed: tuple[str, ...]
    at_ms: int


class _Word(NamedTuple):
    text: str
    plain: str
    at_ms: int


def compare(
    session_id: str,
    channel_id: str,
    conversation_id: str,
    stored: Sequence[Transcript],
    replayed: Sequence[Transcript],
    note: str = "",
) -> Comparison:
    """Return how two transcripts of a call differ.

    Args:
        session_id: the session.
        channel_id: its channel.
        conversation_id: its call.
        stored: its finals, in the order of their audio.
        replayed: the same of the replay.
        note: what else is to be known.
    """
    differing = [piece for piece in pieces(stored, replayed) if piece.kind != "same"]
    return Comparison(
        session_id=session_id,
        channel_id=channel_id,
        conversation_id=conversation_id,
        identical=[_canonical(final) for final in stored] == [_canonical(final) for final in replayed],
        stored_segments=len(stored),
        replayed_segments=len(replayed),
        stored_words=len(_words(stored)),
        replayed_words=len(_words(replayed)),
        differing_words=sum(max(len(piece.stored), len(piece.replayed)) for piece in differing),
        differences=tuple(
            Difference(kind=piece.kind, stored=" ".join(piece.stored), replayed=" ".join(piece.replayed), at_ms=piece.at_ms)
            for piece in differing
        ),
        stored_text=_text(stored),
        replayed_text=_text(replayed),
        stored_engine=stored[-1].engine if stored else "",
        stored_model=stored[-1].model_digest if stored else "",
        replayed_engine=replayed[-1].engine if replayed else "",
        replayed_model=replayed[-1].model_digest if replayed else "",
        note=note,
    )


def pieces(stored: Sequence[Transcript], replayed: Sequence[Transcript]) -> list[Piece]:
    """Return both texts as runs of words, the same or different; case and punctuation make no difference."""
    before, after = _words(stored), _words(replayed)
    matcher = SequenceMatcher(None, [word.plain for word in before], [word.plain for word in after], autojunk=False)
    kinds: dict[str, Kind] = {"equal": "same", "replace": "changed", "delete": "missing", "insert": "added"}
    found = []
    for tag, first, last, new_first, new_last in matcher.get_opcodes():
        old, new = before[first:last], after[new_first:new_last]
        at_ms = (old or new)[0].at_ms
        found.append(Piece(kinds[tag], tuple(word.text for word in old), tuple(word.text for word in new), at_ms))
    return found


def _words(finals: Sequence[Transcript]) -> list[_Word]:
    """Return the words as written, each with its time; punctuation that stands alone is none."""
    words = []
    for final in finals:
        tokens = _TOKEN.findall(final.text)
        timed = [word.start_ms for word in final.words]
        # Post-processing may have joined words: their times are then those of the segment.
        times = timed if len(timed) == len(tokens) else [to_ms(final.position_samples)] * len(tokens)
        words += [_Word(token, plain, at_ms) for token, at_ms in zip(tokens, times, strict=True) if (plain := _plain(token))]
    return words


def _plain(token: str) -> str:
    return _MARKS.sub("", token).casefold()


def _text(finals: Sequence[Transcript]) -> str:
    return " ".join(final.text for final in finals if final.text)


def _canonical(final: Transcript) -> tuple[int, int, str]:
    return final.position_samples, final.end_sample, final.text
