"""The model's units: byte-pair pieces of the line's language.

Words of the menu become one piece or two, which the recogniser says without losing doubled letters; the rest of English can still be
spelt, which hotwords need.
"""

# ruff: noqa: S311 - seeded draws, no secrets
from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

__all__ = ["BLANK", "SOS_EOS", "UNKNOWN", "Tokens", "train_tokens"]

BLANK: Final = 0
UNKNOWN: Final = 1
SOS_EOS: Final = 2
_SPECIAL: Final = ("<blank>", "<unk>", "<sos/eos>")


class Tokens:
    """Text to token numbers and back."""

    def __init__(self, bpe_model: Path) -> None:
        import sentencepiece

        self._pieces: Any = sentencepiece.SentencePieceProcessor(model_file=str(bpe_model))
        # sentencepiece's own number 0 is the unknown piece.
        self.units = [*_SPECIAL, *(self._pieces.id_to_piece(number) for number in range(1, self._pieces.get_piece_size()))]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [number + len(_SPECIAL) - 1 if number else UNKNOWN for number in self._pieces.encode(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.units[token] for token in tokens if token >= len(_SPECIAL)).replace("▁", " ").strip()


def train_tokens(path: Path, transcripts: Iterable[str], pieces: int, seed: int) -> None:
    """Train ``pieces`` byte-pair pieces on the transcripts and on generated phrases, and write the sentencepiece model."""
    import sentencepiece

    from ops.train.phrases import phrase, small_talk

    choose = random.Random(seed)
    sentences = [*transcripts, *(phrase(choose) for _ in range(5_000)), *(small_talk(choose) for _ in range(5_000))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, vocab_size=pieces, model_type="bpe", character_coverage=1.0,
            unk_id=0, bos_id=-1, eos_id=-1, num_threads=1, minloglevel=2,
        )  # fmt: skip
