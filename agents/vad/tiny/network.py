"""TinyVAD in torch: for training, and to run where torch is the inference engine.

The network steps by blocks of four hops (40 ms). A dense layer looks at the six hops up to a block's end; three residual layers look
back over 560 ms of blocks; a memory, each part of which says itself how fast it forgets, keeps what is worth keeping of the seconds
before, which is what tells music from talk; four outputs a block say how likely the hops *four blocks before* are speech: 160 ms of what
follows are known by then. The tail of a segment is longer, so what is forwarded of it need not wait for that. What it hears of a hop is
the logarithm of the power in each band, and how far each stands above a floor that falls quickly and rises slowly, so that steady noise
of any loudness looks alike.

All it remembers is one state vector a channel, so a call that follows goes on where the last one ended, to the bit, whatever the calls.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from agents.vad.tiny.bands import BANDS

__all__ = [
    "BLOCK_HOPS",
    "CHANNELS",
    "COARSE_FACTOR",
    "CONTEXT_HOPS",
    "DELAY_BLOCKS",
    "DILATIONS",
    "INNER",
    "LOG_GUARD",
    "MEMORY",
    "STATE_SIZE",
    "TinyVad",
    "rounded",
]

BLOCK_HOPS: Final = 4
#: The probabilities that a block yields are those of this many blocks before.
DELAY_BLOCKS: Final = 4
#: Hops before a block that its first layer sees too.
CONTEXT_HOPS: Final = 2
CHANNELS: Final = 40
INNER: Final = 60
DILATIONS: Final = (1, 2, 4)
MEMORY: Final = 64
HEAD: Final = 32

#: What is heard of a band: (ln(power + guard) + 10) / 5 lies between -2.6 and 2.
LOG_GUARD: Final = 1e-10
LOG_SHIFT: Final = 10.0
LOG_SCALE: Final = 0.2
#: The floor moves by these shares of the difference, each block: down within 100 ms, up within 4 s.
FLOOR_DOWN: Final = 0.3
FLOOR_UP: Final = 0.01

#: Before training, the parts of the memory take in shares from this to that a block: they last from 80 ms to 4 s.
_SLOWEST, _FASTEST = 0.01, 0.5

#: Both views of each band.
FEATURES: Final = 2 * BANDS
#: The floor, the context hops, what each dilated layer saw before, and the memory.
STATE_SIZE: Final = BANDS + CONTEXT_HOPS * BANDS + 2 * sum(DILATIONS) * CHANNELS + MEMORY


#: Float32 has 24 significant bits; this leaves 8 of them: 2**(24 - 8) + 1.
COARSE_FACTOR: Final = 65_537.0
_PASTS: Final = slice(BANDS + CONTEXT_HOPS * BANDS, STATE_SIZE - MEMORY)


def rounded(state: Tensor) -> Tensor:
    """Return a state as it is kept between blocks: in half precision, and what the layers saw before to 8 significant bits."""
    kept = state.clone()
    large = kept[:, _PASTS] * COARSE_FACTOR
    kept[:, _PASTS] = large - (large - kept[:, _PASTS])
    return kept.half().float()


class _Layer(nn.Module):
    """A residual layer that sees a block, and those one and two dilations before it."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.wide = nn.Linear(3 * CHANNELS, INNER)
        self.narrow = nn.Linear(INNER, CHANNELS)

    def forward(self, blocks: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new blocks, and the new past: batch x time x ``CHANNELS`` each."""
        count = blocks.shape[1]
        known = torch.cat([past, blocks], 1)
        taps = [known[:, lag : lag + count] for lag in (0, self.dilation, 2 * self.dilation)]
        new = blocks + self.narrow(torch.relu(self.wide(torch.cat(taps, 2))))
        return new, known[:, count:]


class _Memory(nn.Module):
    """A recurrent layer whose gates depend on what it hears alone, and not on what it remembers: so it is cheap to train and to run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(CHANNELS, MEMORY)
        self.content = nn.Linear(CHANNELS, MEMORY)
        with torch.no_grad():
            self.gate.bias.copy_(torch.logit(torch.logspace(math.log10(_SLOWEST), math.log10(_FASTEST), MEMORY)))

    def forward(self, blocks: Tensor, memory: Tensor) -> Tensor:
        """Return what is remembered after each block, batch x time x ``MEMORY``, from what was before the first, batch x ``MEMORY``."""
        gates, contents = torch.sigmoid(self.gate(blocks)), torch.tanh(self.content(blocks))
        remembered = []
        for gate, content in zip(gates.unbind(1), contents.unbind(1), strict=True):
            memory = torch.lerp(memory, content, gate)
            remembered.append(memory)
        return torch.stack(remembered, 1)


class TinyVad(nn.Module):
    """The network; 54,000 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear((CONTEXT_HOPS + BLOCK_HOPS) * FEATURES, CHANNELS)
        self.layers = nn.ModuleList(_Layer(dilation) for dilation in DILATIONS)
        self.memory = _Memory()
        self.head = nn.Linear(CHANNELS + MEMORY, HEAD)
        self.out = nn.Linear(HEAD, BLOCK_HOPS)

    def forward(self, powers: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Hear whole blocks.

        Args:
            powers: of the bands, float32, batch x hops x ``BANDS``.
            state: float32, batch x ``STATE_SIZE``; zeros at a channel's start.

        Returns:
            The probabilities of speech, batch x hops, each ``DELAY_BLOCKS`` late, and the state after them.
        """
        logits, state = self.logits(torch.log(powers + LOG_GUARD), state)
        return torch.sigmoid(logits), state

    def logits(self, logs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same from the logarithms of the powers; the probabilities come as logits."""
        batch, hops, _ = logs.shape
        sizes = [BANDS, CONTEXT_HOPS * BANDS, *(2 * dilation * CHANNELS for dilation in DILATIONS), MEMORY]
        floor, context, *pasts, memory = torch.split(state, sizes, 1)
        levels = (logs + LOG_SHIFT) * LOG_SCALE
        floors = _floors(levels.view(batch, -1, BLOCK_HOPS, BANDS).mean(2), floor)
        known = torch.cat([context.view(batch, CONTEXT_HOPS, BANDS), levels], 1)
        seen = known.unfold(1, CONTEXT_HOPS + BLOCK_HOPS, BLOCK_HOPS).transpose(2, 3)
        seen = torch.cat([seen, seen - floors[:, :, None]], 3).flatten(2)
        blocks = torch.relu(self.first(seen))
        after = [floors[:, -1], known[:, hops:].flatten(1)]
        for layer, past in zip(self.layers, pasts, strict=True):
            blocks, past = layer(blocks, past.view(batch, -1, CHANNELS))
            after.append(past.flatten(1))
        remembered = self.memory(blocks, memory)
        after.append(remembered[:, -1])
        logits = self.out(torch.relu(self.head(torch.relu(torch.cat([blocks, remembered], 2)))))
        return logits.flatten(1), torch.cat(after, 1)


def _floors(levels: Tensor, floor: Tensor) -> Tensor:
    """Return the floor after each block, batch x blocks x ``BANDS``."""
    floors = []
    with torch.no_grad():
        for level in levels.unbind(1):
            rise = level - floor
            floor = floor + rise * torch.where(rise < 0, FLOOR_DOWN, FLOOR_UP)
            floors.append(floor)
    return torch.stack(floors, 1)
