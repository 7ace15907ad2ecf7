"""The training: shards of examples, then epochs over them, each saved so that a stopped run goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import binary_closing
from torch import Tensor

from agents.vad.tiny.network import BLOCK_HOPS, DELAY_BLOCKS, STATE_SIZE, TinyVad
from ops.train.vad.examples import Examples, Material, make

__all__ = ["prepare", "train"]

SHARD_SCENES: Final = 400
#: Seeds: training shards count from 0, hard ones from here.
_HARD_SEED: Final = 500_000
#: The shard that chooses the best epoch, made of the development split; half its scenes are hard.
_CHECK_SEED: Final = 1_000_001
_CHECK_SCENES: Final = 200
_CHECK_HARD: Final = 0.5
#: After so many of all epochs, the scenes whose noise passes most for speech are mined: so large a share of all comes once more an epoch.
_MINED_AFTER: Final = 0.35
_MINED: Final = 0.2
#: What passes for speech: hops of more than this probability.
_FOOLED: Final = 0.8

_BATCH_SCENES: Final = 16
_RATE: Final = 3e-3
_WARM_UP_STEPS: Final = 100
#: Scenes are played louder and softer, and their spectrum tilted, by up to so much (natural logarithm of power: 1 is 4.3 dB).
_GAIN: Final = 1.5
_TILT: Final = 1.0
#: Around a boundary nobody can say for sure: two hops on either side do not count.
_BOUNDARY_HOPS: Final = 2
#: Pauses up to 200 ms count as speech: segments close no sooner anyway, and what is uneven for a moment is no end.
_JOINED_HOPS: Final = 20

Say = Callable[[str], None]


def prepare(audio_dir: Path, work_dir: Path, shards: int, hard_shards: int, say: Say, music_dir: Path | None = None) -> None:
    """Make the shards that are missing.

    Args:
        audio_dir: the recordings of ``sources.tsv``.
        work_dir: where shards are kept.
        shards: how many to train on.
        hard_shards: and how many of hard scenes.
        say: is told what is going on.
        music_dir: a folder of more music, for the hard ones.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    if missing := _missing(work_dir, [_CHECK_SEED]):
        say("reading and labelling the recordings of development")
        _make(Material(audio_dir, "development"), work_dir, missing, _CHECK_SCENES, say)
    if missing := _missing(work_dir, _seeds(shards, hard_shards)):
        say("reading and labelling the recordings to train on")
        _make(Material(audio_dir, "train", music_dir), work_dir, missing, SHARD_SCENES, say)


def _seeds(shards: int, hard_shards: int) -> list[int]:
    return [*range(shards), *range(_HARD_SEED, _HARD_SEED + hard_shards)]


def _missing(work_dir: Path, seeds: Iterable[int]) -> list[int]:
    return [seed for seed in seeds if not _shard(work_dir, seed).exists()]


def _make(material: Material, work_dir: Path, seeds: Iterable[int], scenes: int, say: Say) -> None:
    for seed in seeds:
        path = _shard(work_dir, seed)
        say(f"making {path.name}, {scenes} scenes")
        hard_share = _CHECK_HARD if seed == _CHECK_SEED else float(seed >= _HARD_SEED)
        _save(path, make(material, seed, scenes, hard_share))


def _shard(work_dir: Path, seed: int) -> Path:
    return work_dir / f"examples-{seed:07d}.npz"


def _save(path: Path, examples: Examples) -> None:
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.savez(file, **examples._asdict())
    partial.replace(path)


def _load(path: Path) -> Examples:
    with np.load(path) as arrays:
        return Examples(**{name: arrays[name] for name in Examples._fields})


def _targets(examples: Examples) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the wanted probabilities and their weights, as late as the network gives its own."""
    certain = ~examples.doubtful
    joined = binary_closing(np.pad(examples.speech, ((0, 0), (_JOINED_HOPS, _JOINED_HOPS))), np.ones((1, _JOINED_HOPS), np.bool_))
    speech = joined[:, _JOINED_HOPS:-_JOINED_HOPS]
    for shift in range(1, _BOUNDARY_HOPS + 1):
        differs = speech[:, shift:] != speech[:, :-shift]
        certain[:, shift:] &= ~differs
        certain[:, :-shift] &= ~differs
    late = DELAY_BLOCKS * BLOCK_HOPS
    return (
        np.pad(speech, ((0, 0), (late, 0)))[:, : speech.shape[1]].astype(np.float32),
        np.pad(certain, ((0, 0), (late, 0)))[:, : speech.shape[1]].astype(np.float32),
    )


def _loss(network: TinyVad, logs: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    logits, _ = network.logits(logs, torch.zeros(len(logs), STATE_SIZE))
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return (each * weight).sum() / weight.sum()


def _varied(logs: Tensor, generator: torch.Generator) -> Tensor:
    """Play scenes louder or softer, and through a tilted line; what the guard against zero left is moved along, which does no harm."""
    batch, _, bands = logs.shape
    gain = (torch.rand(batch, 1, 1, generator=generator) * 2 - 1) * _GAIN
    tilt = (torch.rand(batch, 1, 1, generator=generator) * 2 - 1) * _TILT * torch.linspace(-1, 1, bands)
    return logs + gain + tilt


class _Shards:
    """Examples side by side, with the wanted outputs and their weights."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        targets = [_targets(part) for part in parts]
        self.logs = np.concatenate([part.bands for part in parts])
        self.wanted = np.concatenate([part[0] for part in targets])
        self.weight = np.concatenate([part[1] for part in targets])

    def loss(self, network: TinyVad, rows: NDArray[np.intp], generator: torch.Generator | None = None) -> Tensor:
        logs = torch.from_numpy(self.logs[rows].astype(np.float32))
        if generator is not None:
            logs = _varied(logs, generator)
        return _loss(network, logs, torch.from_numpy(self.wanted[rows]), torch.from_numpy(self.weight[rows]))

    def fooling(self, network: TinyVad) -> NDArray[np.float32]:
        """Return for each scene how much of its noise the network takes for speech."""
        fooled = []
        with torch.inference_mode():
            for begin in range(0, len(self.logs), _BATCH_SCENES):
                rows = slice(begin, begin + _BATCH_SCENES)
                logs = torch.from_numpy(self.logs[rows].astype(np.float32))
                speech = torch.sigmoid(network.logits(logs, torch.zeros(len(logs), STATE_SIZE))[0]).numpy()
                noise = (self.weight[rows] > 0) & (self.wanted[rows] == 0)
                fooled.append((((speech > _FOOLED) + speech) * noise).mean(axis=1))
        return np.concatenate(fooled)


def train(work_dir: Path, shards: int, hard_shards: int, epochs: int, say: Say) -> TinyVad:
    """Train on the shards; go on from the last saved epoch, if there is one.

    Returns:
        The network of the best epoch.
    """
    torch.manual_seed(1)
    network = TinyVad()
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=1e-3)
    heard = _Shards([_load(_shard(work_dir, seed)) for seed in _seeds(shards, hard_shards)])
    check = _Shards([_load(_shard(work_dir, _CHECK_SEED))])

    saved = work_dir / "last.pt"
    done, best = 0, math.inf
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        done, best = state["done"], state["best"]
        say(f"going on after epoch {done}")
    for epoch in range(done, epochs):
        scenes = np.arange(len(heard.logs))
        if epoch >= round(_MINED_AFTER * epochs):
            hardest = np.argsort(-heard.fooling(network), kind="stable")[: round(_MINED * len(scenes))]
            scenes = np.concatenate([scenes, hardest])
        total = _epoch(network, optimizer, heard, scenes, epoch, epochs)
        with torch.inference_mode():
            checked = check.loss(network, np.arange(len(check.logs))).item()
        say(f"epoch {epoch + 1} of {epochs}: loss {total:.4f}, on the check shard {checked:.4f}")
        if checked < best:
            best = checked
            torch.save(network.state_dict(), work_dir / "best.pt")
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "done": epoch + 1, "best": best}
        torch.save(state, work_dir / "last.part")
        (work_dir / "last.part").replace(saved)
    network.load_state_dict(torch.load(work_dir / "best.pt", weights_only=True))
    return network.eval()


def _epoch(network: TinyVad, optimizer: torch.optim.Optimizer, heard: _Shards, scenes: NDArray[np.intp], epoch: int, epochs: int) -> float:
    """Go through scenes once, in an order that the epoch's number gives, and return the mean loss."""
    generator = torch.Generator().manual_seed(epoch)
    order = scenes[torch.randperm(len(scenes), generator=generator).numpy()]
    steps = max(1, len(order) // _BATCH_SCENES)
    total = 0.0
    for step in range(steps):
        warm = min(1, (epoch * steps + step + 1) / _WARM_UP_STEPS)
        progress = (epoch + step / steps) / epochs
        for group in optimizer.param_groups:
            group["lr"] = _RATE * warm * 0.5 * (1 + math.cos(math.pi * progress))
        loss = heard.loss(network, np.sort(order[step * _BATCH_SCENES : (step + 1) * _BATCH_SCENES]), generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    return total / steps
