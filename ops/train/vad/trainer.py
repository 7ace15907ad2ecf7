"""The training: shards of examples, then epochs over them, each saved so that a stopped run goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import binary_closing
from torch import Tensor

from agents.vad.tiny.network import BLOCK_HOPS, DELAY_BLOCKS, STATE_SIZE, TinyVad
from ops.train.vad.examples import Examples, Material, make

__all__ = ["EPOCHS", "SHARDS", "prepare", "train"]

SHARDS: Final = 8
SHARD_SCENES: Final = 400
#: The seed of the shard that chooses the best epoch; training shards count from 0.
_CHECK_SEED: Final = 1_000_000
_CHECK_SCENES: Final = 150

EPOCHS: Final = 24
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


def prepare(audio_dir: Path, work_dir: Path, shards: int, say: Say) -> None:
    """Make the shards that are missing."""
    work_dir.mkdir(parents=True, exist_ok=True)
    wanted = {work_dir / f"examples-{seed:07d}.npz": (seed, SHARD_SCENES) for seed in range(shards)}
    wanted[work_dir / f"examples-{_CHECK_SEED:07d}.npz"] = _CHECK_SEED, _CHECK_SCENES
    missing = {path: what for path, what in wanted.items() if not path.exists()}
    if not missing:
        return
    say("reading and labelling recordings")
    material = Material(audio_dir, "train")
    for path, (seed, scenes) in missing.items():
        say(f"making {path.name}, {scenes} scenes")
        examples = make(material, seed, scenes)
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


def train(work_dir: Path, shards: int, epochs: int, say: Say) -> TinyVad:
    """Train on the shards; go on from the last saved epoch, if there is one.

    Returns:
        The network of the best epoch.
    """
    torch.manual_seed(1)
    network = TinyVad()
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=1e-3)
    parts = [_load(work_dir / f"examples-{seed:07d}.npz") for seed in range(shards)]
    targets = [_targets(part) for part in parts]
    logs = np.concatenate([part.bands for part in parts])
    wanted = np.concatenate([part[0] for part in targets])
    weight = np.concatenate([part[1] for part in targets])
    check = _load(work_dir / f"examples-{_CHECK_SEED:07d}.npz")
    check_wanted, check_weight = map(torch.from_numpy, _targets(check))
    check_logs = torch.from_numpy(check.bands.astype(np.float32))

    saved = work_dir / "last.pt"
    done, best = 0, math.inf
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        done, best = state["done"], state["best"]
        say(f"going on after epoch {done}")
    steps_per_epoch = len(logs) // _BATCH_SCENES
    for epoch in range(done, epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(logs), generator=generator).numpy()
        total = 0.0
        for number in range(steps_per_epoch):
            step = epoch * steps_per_epoch + number
            progress = step / (epochs * steps_per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min(1, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))
            rows = np.sort(order[number * _BATCH_SCENES : (number + 1) * _BATCH_SCENES])
            batch = _varied(torch.from_numpy(logs[rows].astype(np.float32)), generator)
            loss = _loss(network, batch, torch.from_numpy(wanted[rows]), torch.from_numpy(weight[rows]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        with torch.inference_mode():
            checked = _loss(network, check_logs, check_wanted, check_weight).item()
        say(f"epoch {epoch + 1} of {epochs}: loss {total / steps_per_epoch:.4f}, on the check shard {checked:.4f}")
        if checked < best:
            best = checked
            torch.save(network.state_dict(), work_dir / "best.pt")
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "done": epoch + 1, "best": best}
        torch.save(state, work_dir / "last.part")
        (work_dir / "last.part").replace(saved)
    network.load_state_dict(torch.load(work_dir / "best.pt", weights_only=True))
    return network.eval()
