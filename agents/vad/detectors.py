"""The detectors over all channels at once: from what is heard to one decision a hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from agents.vad.front import Track
from agents.vad.fusion import EVEN, fuse
from agents.vad.traditional import HOP_SAMPLES, WINDOW_SAMPLES, Traditional
from streams.settings import Settings

__all__ = ["Detectors", "Listener", "NeuralDetector"]


class NeuralDetector(Protocol):
    """A trained detector: a probability of speech for each window, from the window, what came just before it, and a state."""

    @property
    def window_samples(self) -> int:
        """The step and the length of what it judges."""

    @property
    def context_samples(self) -> int:
        """Samples before the window that it hears too."""

    @property
    def state_size(self) -> int:
        """Length of a channel's state."""

    def __call__(self, windows: NDArray[np.float32], states: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return each channel's probability and new state; a row's result must not depend on the other rows.

        Args:
            windows: float32, channels x (context + window) samples.
            states: float32, channels x ``state_size``; zeros at the start of a channel.
        """


@dataclass(slots=True)
class Listener:
    """Where the detectors are with one channel: all that they must know to go on, besides the audio.

    Attributes:
        next_hop: the hop to decide next; hops count 160 samples from the session's start.
        next_window: the neural detector's window to hear next, counted likewise.
        probability: what it said of the window before.
        neural: its state.
        traditional: the traditional detector's state.
    """

    next_hop: int
    next_window: int
    probability: np.float32
    neural: NDArray[np.float32]
    traditional: NDArray[np.float32]


_Channel = tuple[Listener, Track[np.float32]]


class Detectors:
    """Decides hops, for all channels that have some.

    Args:
        settings: which detectors, and the confidence of their fusion.
        neural: the trained detector to use; unset: the configured one.
    """

    def __init__(self, settings: Settings, neural: NeuralDetector | None = None) -> None:
        self._confidence = settings.vad_confidence
        self._traditional = Traditional() if settings.vad in ("fusion", "traditional") else None
        self._neural: NeuralDetector | None = None
        if settings.vad in ("fusion", "silero"):
            self._neural = neural or _silero()
        #: A detector may look back this far from the start of the hop, or the window, that it judges.
        self.lookback_samples: Final = max(WINDOW_SAMPLES - HOP_SAMPLES, self._neural.context_samples if self._neural else 0)

    def warm_up(self) -> None:
        """Load models and run them once, so that the first step is as fast as the next.

        Raises:
            UserError: a model cannot be had.
        """
        if self._neural is not None:
            length = self._neural.context_samples + self._neural.window_samples
            self._neural(np.zeros((1, length), np.float32), np.zeros((1, self._neural.state_size), np.float32))

    def start(self, start_sample: int) -> Listener:
        """Return a listener that decides the hop at a sample next; where a channel starts, that is a multiple of all steps."""
        return Listener(
            next_hop=start_sample // HOP_SAMPLES,
            next_window=start_sample // self._neural.window_samples if self._neural else 0,
            probability=np.float32(0),
            neural=np.zeros(self._neural.state_size if self._neural else 0, np.float32),
            traditional=self._traditional.fresh() if self._traditional else np.zeros(0, np.float32),
        )

    def adopt(self, listener: Listener) -> Listener:
        """Return a listener from elsewhere if it was made for these detectors, else one that starts afresh where it stands."""
        fresh = self.start(listener.next_hop * HOP_SAMPLES + HOP_SAMPLES // 2)
        alike = len(fresh.neural) == len(listener.neural) and len(fresh.traditional) == len(listener.traditional)
        return listener if alike else fresh

    def decidable_hops(self, heard_to_sample: int) -> int:
        """Return up to which hop all are decidable once everything before a sample is heard.

        The neural detector decides a hop by the window that holds its middle, so that window must be complete.
        """
        hops = heard_to_sample // HOP_SAMPLES
        if self._neural is None:
            return hops
        windows = heard_to_sample // self._neural.window_samples
        by_window = (windows * self._neural.window_samples - HOP_SAMPLES // 2 + HOP_SAMPLES - 1) // HOP_SAMPLES
        return min(hops, by_window)

    def needed_samples(self, end_sample: int) -> int:
        """Return what must be heard, at most, so that every hop that begins before a sample is decidable."""
        return end_sample + HOP_SAMPLES + (self._neural.window_samples if self._neural else 0)

    def needed_from_sample(self, listener: Listener) -> int:
        """Return the first sample that a listener still needs."""
        by_hop = (listener.next_hop + 1) * HOP_SAMPLES - WINDOW_SAMPLES
        if self._neural is None:
            return by_hop
        return min(by_hop, listener.next_window * self._neural.window_samples - self._neural.context_samples)

    def decide(self, channels: Sequence[_Channel]) -> list[NDArray[np.bool_]]:
        """Decide every hop that can be decided, and move the listeners past it.

        Args:
            channels: each one's listener and what it hears.

        Returns:
            For each channel whether its hops from ``next_hop`` (as it was) are speech.
        """
        counts = np.array([max(0, self.decidable_hops(heard.end) - listener.next_hop) for listener, heard in channels], np.intp)
        order = np.argsort(-counts, kind="stable")
        busy = [channels[index] for index in order if counts[index]]
        hops = counts[order][: len(busy)]
        decisions = [np.zeros(0, np.bool_)] * len(channels)
        if busy:
            decided = self._judge(busy, hops)
            for index, mine in zip(order, np.split(decided, np.cumsum(hops)[:-1]), strict=False):
                decisions[index] = mine
        for (listener, _), count in zip(channels, counts, strict=True):
            listener.next_hop += int(count)
        return decisions

    def _judge(self, channels: Sequence[_Channel], hops: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return the decisions of all channels' next hops, one channel after the other; ``hops`` falls."""
        probability = _listen_neural(self._neural, channels, hops) if self._neural else None
        traditional = _listen_traditional(self._traditional, channels, hops) if self._traditional else None
        if probability is None:
            return traditional if traditional is not None else np.ones(int(hops.sum()), np.bool_)
        if traditional is None:
            return probability > EVEN
        return fuse(probability, traditional, self._confidence)


def _listen_traditional(detector: Traditional, channels: Sequence[_Channel], hops: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return the traditional detector's decisions of all channels' next hops, and move its states."""
    windows = []
    for (listener, heard), count in zip(channels, hops, strict=True):
        first = (listener.next_hop + 1) * HOP_SAMPLES - WINDOW_SAMPLES
        audio = heard[first : first + (int(count) - 1) * HOP_SAMPLES + WINDOW_SAMPLES]
        windows.append(sliding_window_view(audio, WINDOW_SAMPLES)[::HOP_SAMPLES])
    states = np.stack([listener.traditional for listener, _ in channels])
    speech, states = detector(np.concatenate(windows), hops, states)
    for (listener, _), state in zip(channels, states, strict=True):
        listener.traditional = state
    return speech


def _listen_neural(detector: NeuralDetector, channels: Sequence[_Channel], hops: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the neural detector's probabilities for all channels' next hops, and move its states past all complete windows."""
    windows = [_new_windows(detector, listener, heard) for listener, heard in channels]
    order = sorted(range(len(channels)), key=lambda index: -len(windows[index]))
    states = np.stack([channels[index][0].neural for index in order])
    said = [[channels[index][0].probability] for index in order]
    for step in range(len(windows[order[0]])):
        active = sum(len(windows[index]) > step for index in order)
        batch = np.stack([windows[index][step] for index in order[:active]])
        probabilities, states[:active] = detector(batch, states[:active])
        for row, probability in enumerate(probabilities):
            said[row].append(probability)
    by_hop: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(channels)
    for row, index in enumerate(order):
        listener = channels[index][0]
        middles = (listener.next_hop + np.arange(hops[index])) * HOP_SAMPLES + HOP_SAMPLES // 2
        by_hop[index] = np.array(said[row], np.float32)[middles // detector.window_samples - (listener.next_window - 1)]
        listener.neural = states[row]
        listener.probability = said[row][-1]
        listener.next_window += len(windows[index])
    return np.concatenate(by_hop)


def _new_windows(detector: NeuralDetector, listener: Listener, heard: Track[np.float32]) -> NDArray[np.float32]:
    """Return a channel's complete windows that were not heard yet, each with its context."""
    first = listener.next_window * detector.window_samples
    length = detector.context_samples + detector.window_samples
    count = max(0, heard.end // detector.window_samples - listener.next_window)
    if not count:
        return np.zeros((0, length), np.float32)
    audio = heard[first - detector.context_samples : first + count * detector.window_samples]
    return sliding_window_view(audio, length)[:: detector.window_samples]


def _silero() -> NeuralDetector:
    from agents.vad.silero import Silero

    return Silero()
