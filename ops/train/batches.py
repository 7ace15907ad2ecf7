"""A stream of batches, mixed in worker processes while the model learns from earlier ones."""

# ruff: noqa: S311 - seeded draws, no secrets
from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ops.train.augment import IGNORED_PHONE, Example, Mixer, masked
from ops.train.clips import read_audio as read_pcm
from ops.train.clips import read_shard
from ops.train.tokens import Tokens
from ops.train.vad.sources import recordings

__all__ = ["Batch", "batch_stream"]

#: Padded feature frames to a batch: 45 s of sound, about a dozen utterances. Small, so that updates are many.
BATCH_FRAMES: Final = 4_500
#: Examples drawn before they are sorted into batches of like length.
_POOL_EXAMPLES: Final = 96
_PADDING_TOKEN: Final = -1


#: Features, tokens and phones.
_Row: TypeAlias = "tuple[np.ndarray, list[int], np.ndarray]"


class Batch(NamedTuple):
    """Examples, padded."""

    #: (B, T, 80) float32.
    features: Tensor
    feature_frames: Tensor
    #: (B, L) int64, padded with -1.
    tokens: Tensor
    token_counts: Tensor
    #: (B, encoder frames) int64.
    phones: Tensor


def collate(examples: list[_Row]) -> Batch:
    """Pad examples of features, tokens and phones to one batch."""
    frames = torch.tensor([len(features) for features, _, _ in examples])
    counts = torch.tensor([len(tokens) for _, tokens, _ in examples])
    batch = Batch(
        features=torch.zeros(len(examples), int(frames.max()), examples[0][0].shape[1]),
        feature_frames=frames,
        tokens=torch.full((len(examples), max(1, int(counts.max()))), _PADDING_TOKEN),
        token_counts=counts,
        phones=torch.full((len(examples), (int(frames.max()) - 3) // 4), IGNORED_PHONE),
    )
    for row, (features, tokens, phones) in enumerate(examples):
        batch.features[row, : len(features)] = torch.from_numpy(features)
        batch.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        batch.phones[row, : len(phones)] = torch.from_numpy(phones)
    return batch


def make_mixer(data_dir: Path, audio_dir: Path, synthetic_share: float, number_share: float, strength: float = 1.0) -> Mixer:
    """Read every shard that is there, and the noise and music that are not held out."""
    clips = [clip for path in sorted(data_dir.glob("*.npz")) if "unfinished" not in path.name for clip in read_shard(path)]
    noise, music = ([read_pcm(each.path) for each in recordings(audio_dir, "train", kind)] for kind in ("noise", "music"))
    return Mixer(clips, noise, music, synthetic_share, number_share, strength)


class _Stream(IterableDataset[Batch]):
    def __init__(
        self,
        data_dir: Path,
        audio_dir: Path,
        bpe_model: Path,
        mean: np.ndarray,
        synthetic_share: float,
        number_share: float,
        strength: float,
        seed: int,
        batches: int,
    ) -> None:
        self._arguments = (data_dir, audio_dir, synthetic_share, number_share, strength)
        self._bpe_model, self._mean, self._seed, self._batches = bpe_model, mean, seed, batches

    def _pool(self, mixer: Mixer, tokens: Tokens, choose: random.Random) -> list[list[_Row]]:
        examples: list[_Row] = []
        while len(examples) < _POOL_EXAMPLES:
            example: Example = mixer.example(choose)
            numbers = tokens.encode(example.text)
            # CTC needs a frame for each token and one between equal neighbours.
            repeats = sum(before == after for before, after in itertools.pairwise(numbers))
            if len(example.phones) > len(numbers) + repeats:
                examples.append((masked(example.features, self._mean, choose), numbers, example.phones))
        examples.sort(key=lambda row: len(row[0]))
        batches: list[list[_Row]] = [[]]
        for row in examples:
            if batches[-1] and (len(batches[-1]) + 1) * len(row[0]) > BATCH_FRAMES:
                batches.append([])
            batches[-1].append(row)
        choose.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        torch.set_num_threads(1)
        mixer, tokens = make_mixer(*self._arguments), Tokens(self._bpe_model)
        choose = random.Random(f"{self._seed}/{worker}")
        left = self._batches // workers
        while left > 0:
            for batch in self._pool(mixer, tokens, choose)[:left]:
                yield collate(batch)
                left -= 1


def batch_stream(
    data_dir: Path,
    audio_dir: Path,
    bpe_model: Path,
    mean: np.ndarray,
    *,
    synthetic_share: float,
    number_share: float,
    strength: float,
    seed: int,
    batches: int,
    workers: int,
) -> DataLoader[Batch]:
    """Return ``batches`` batches drawn with ``seed``."""
    stream = _Stream(data_dir, audio_dir, bpe_model, mean, synthetic_share, number_share, strength, seed, batches)
    return DataLoader(stream, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None)
