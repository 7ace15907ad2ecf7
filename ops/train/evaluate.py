"""Word errors of a model in training, decoded greedily as it would stream."""

# ruff: noqa: S311 - seeded draws, no secrets
from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from agents.inference.conformer.model import StreamingModel
from ops.train.augment import Mixer, line
from ops.train.clips import Clip, digit_clips, read_shard
from ops.train.features import fbank
from ops.train.search import Fusion, prefix_beam_search
from ops.train.tokens import BLANK, SOS_EOS, Tokens

__all__ = ["Utterance", "development_sets", "greedy", "judge", "log_probabilities", "named_sets", "word_errors"]

#: Blocks of 200 ms that look 3.2 s back.
BLOCK_FRAMES: Final = 5
LEFT_BLOCKS: Final = 16
#: Utterances encoded at once.
_BATCH: Final = 8
_FULL_SCALE: Final = 32767.0
#: What the attention decoder's score counts beside the search's.
_ATTENTION_WEIGHT: Final = 1.0


class Utterance(NamedTuple):
    """Features and what was said."""

    name: str
    #: (frames, 80) float32.
    features: np.ndarray
    text: str


def orders(path: Path) -> list[Utterance]:
    """Return the recorded orders of a prepared split, whole, with the silence around them."""
    return [Utterance(clip.name, fbank(clip.pcm), clip.text) for clip in read_shard(path)]


def digit_strings(clips: Sequence[Clip], speaker: str, count: int, *, mulaw: bool = False, seed: int = 7) -> list[Utterance]:
    """Return numbers of 3 to 16 digits put together from one speaker's single digits, over a telephone line if asked."""
    mixer, choose, utterances = Mixer(clips, [], []), random.Random(seed), []
    for number in range(count):
        piece = mixer.digit_piece(choose, speaker)
        samples = np.pad(piece.samples, 4_000)
        samples = line(samples, mulaw=True) if mulaw else samples
        utterances.append(Utterance(f"{speaker}-{number}", fbank(np.round(np.clip(samples, -1, 1) * _FULL_SCALE)), piece.text))
    return utterances


def over_the_telephone(path: Path) -> list[Utterance]:
    """Return the orders of a prepared split after 8 kHz and mu-law."""
    return [
        Utterance(clip.name, fbank(np.round(np.clip(line(clip.pcm / np.float32(_FULL_SCALE), mulaw=True), -1, 1) * _FULL_SCALE)), clip.text)
        for clip in read_shard(path)
    ]


def named_sets(prepared_dir: Path, audio_dir: Path, split: str, digit_speaker: str) -> dict[str, list[Utterance]]:
    """Return the sets of a split, ``dev`` or ``test``, each wide-band and over the telephone; the test digits are Lucas's."""
    speaker = "lucas" if split == "test" else digit_speaker
    digits = list(digit_clips(audio_dir, [speaker]))
    return {
        "orders": orders(prepared_dir / f"{split}.npz"),
        "orders_mulaw": over_the_telephone(prepared_dir / f"{split}.npz"),
        "digits": digit_strings(digits, speaker, 60),
        "digits_mulaw": digit_strings(digits, speaker, 60, mulaw=True),
    }


def development_sets(prepared_dir: Path, audio_dir: Path, digit_speaker: str) -> dict[str, list[Utterance]]:
    """Return the sets that training is judged by after each epoch; the test sets are not among them."""
    sets = named_sets(prepared_dir, audio_dir, "dev", digit_speaker)
    del sets["digits_mulaw"]
    return sets


@torch.inference_mode()
def _encode(
    model: StreamingModel, utterances: Sequence[Utterance], block_frames: int = BLOCK_FRAMES, left_blocks: int = LEFT_BLOCKS
) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Return the encoder's output and the CTC log-probabilities of each utterance, (encoder frames, size or vocabulary) float32."""
    order = sorted(range(len(utterances)), key=lambda number: len(utterances[number].features))
    results: list[tuple[torch.Tensor, np.ndarray]] = [(torch.zeros(0), np.zeros(0))] * len(utterances)
    for first in range(0, len(order), _BATCH):
        numbers = order[first : first + _BATCH]
        frames = torch.tensor([len(utterances[number].features) for number in numbers])
        features = torch.zeros(len(numbers), int(frames.max()), utterances[0].features.shape[1])
        for row, number in enumerate(numbers):
            features[row, : frames[row]] = torch.from_numpy(utterances[number].features)
        with torch.autocast("cpu", torch.bfloat16):
            hidden, lengths = model.encoder(features, frames, block_frames, left_blocks)
            scores = model.ctc(hidden)
        for row, number in enumerate(numbers):
            results[number] = hidden[row, : lengths[row]].float(), scores[row, : lengths[row]].numpy()
    return results


def log_probabilities(
    model: StreamingModel, utterances: Sequence[Utterance], block_frames: int = BLOCK_FRAMES, left_blocks: int = LEFT_BLOCKS
) -> list[np.ndarray]:
    """Return the CTC log-probabilities of each utterance, (encoder frames, vocabulary) float32."""
    return [scores for _, scores in _encode(model, utterances, block_frames, left_blocks)]


@torch.inference_mode()
def decoder_scores(model: StreamingModel, memory: torch.Tensor, hypotheses: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the attention decoder's natural log-probability of each hypothesis, its end included."""
    longest = max(map(len, hypotheses))
    inputs = torch.full((len(hypotheses), longest + 1), SOS_EOS)
    targets = torch.full((len(hypotheses), longest + 1), -1)
    for row, tokens in enumerate(hypotheses):
        inputs[row, 1 : len(tokens) + 1] = targets[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        targets[row, len(tokens)] = SOS_EOS
    frames = torch.full((len(hypotheses),), len(memory))
    scores = torch.log_softmax(model.left_to_right(memory.expand(len(hypotheses), -1, -1), frames, inputs).float(), -1)
    picked = scores.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
    return [float(score) for score in (picked * (targets >= 0)).sum(1)]


def judge(model: StreamingModel, tokens: Tokens, sets: Mapping[str, Sequence[Utterance]], fusion: Fusion | None) -> list[dict[str, Any]]:
    """Return a row of word errors for each set, context and decoding."""
    import jiwer
    from rich.progress import track

    rows = []
    for name, utterances in sets.items():
        for context, block_frames, left_blocks in (("blocks of 5, 8 back", 5, 8), ("blocks of 5, 16 back", 5, 16), ("full", 0, -1)):
            texts: dict[str, list[str]] = defaultdict(list)
            for memory, scores in track(_encode(model, utterances, block_frames, left_blocks), f"{name}, {context}"):
                texts["greedy"].append(tokens.decode(greedy(scores)))
                found = prefix_beam_search(scores, tokens)
                texts["beam"].append(found[0][1])
                if fusion is not None:
                    found = prefix_beam_search(scores, tokens, fusion=fusion)
                    texts["beam, n-gram"].append(found[0][1])
                attention = decoder_scores(model, memory, [prefix for _, _, prefix in found])
                best = max(zip(found, attention, strict=True), key=lambda pair: pair[0][0] + _ATTENTION_WEIGHT * pair[1])
                texts["beam, rescored" if fusion is None else "beam, n-gram, rescored"].append(best[0][1])
            for decoding, hypotheses in texts.items():
                errors = jiwer.process_words([utterance.text for utterance in utterances], hypotheses)
                rows.append(
                    {
                        "set": name, "context": context, "decoding": decoding, "wer": round(100 * errors.wer, 2),
                        "substitutions": errors.substitutions, "deletions": errors.deletions, "insertions": errors.insertions,
                    }
                )  # fmt: skip
    return rows


def greedy(scores: np.ndarray) -> list[int]:
    """Return the tokens of the best path."""
    best = scores.argmax(1)
    kept = best[np.concatenate(([True], best[1:] != best[:-1]))]
    return [int(token) for token in kept if token != BLANK]


def word_errors(
    model: StreamingModel,
    tokens: Tokens,
    utterances: Sequence[Utterance],
    *,
    block_frames: int = BLOCK_FRAMES,
    left_blocks: int = LEFT_BLOCKS,
) -> tuple[float, list[tuple[str, str, str]]]:
    """Return the word error rate in percent, and each utterance's name, text and hypothesis."""
    import jiwer

    rows = [
        (utterance.name, utterance.text, tokens.decode(greedy(scores)))
        for utterance, scores in zip(utterances, log_probabilities(model, utterances, block_frames, left_blocks), strict=True)
    ]
    return 100 * float(jiwer.wer([text for _, text, _ in rows], [hypothesis for _, _, hypothesis in rows])), rows
