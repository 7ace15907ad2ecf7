"""The detectors over all channels at once: from what is heard to one decision a hop.

Our own two, the traditional one and TinyVAD, hear the same spectra, which are computed once; a network from elsewhere, such as Silero,
hears samples. They need not be equally fast: the traditional detector judges a hop as soon as it is heard, a network some time later.
Opinions wait for the slower one, and a hop is decided when all have spoken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from agents.vad.front import Track
from agents.vad.fusion import confirm, fuse
from agents.vad.spectrum import HOP_SAMPLES, WINDOW_SAMPLES, power_spectra
from agents.vad.traditional import Traditional
from streams.settings import Settings

__all__ = ["Channel", "Detectors", "Listener", "NeuralDetector", "SpectralDetector", "Thresholds"]

_Value = TypeVar("_Value", np.bool_, np.float32)


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


class SpectralDetector(Protocol):
    """A trained detector that hears spectra, some hops at a time, and speaks of hops a little before."""

    @property
    def unit_hops(self) -> int:
        """It hears so many hops at a time, counted from the session's start."""

    @property
    def delay_hops(self) -> int:
        """It speaks of hops so many before those that it hears."""

    @property
    def state_size(self) -> int:
        """Length of a channel's state."""

    def __call__(
        self, power: NDArray[np.float32], counts: NDArray[np.intp], states: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the probability of speech ``delay_hops`` before each hop, and the new states; no channel's may depend on the others.

        Args:
            power: spectra, float32, all channels' hops one after the other x ``BINS``.
            counts: how many hops each channel has, in falling order.
            states: float32, channels x ``state_size``; zeros at the start of a channel.
        """


class Thresholds(NamedTuple):
    """What a channel's decisions turn on, as configured for it.

    Attributes:
        confidence: the network decides where its confidence, either way, is above this.
        probability: the network calls speech what is more probable than this.
        margin_db: the traditional detector wants speech to stand out from noise by so much more than its usual.
        onset: speech begins only where TinyVAD finds it more probable than this.
        closing_hops: a pause of so many hops ends it.
    """

    confidence: float
    probability: float
    margin_db: float
    onset: float = 0.0
    closing_hops: int = 30

    @classmethod
    def of(cls, settings: Settings) -> Thresholds:
        """Return them as configured."""
        closing_hops = settings.samples(settings.vad_closing_ms) // HOP_SAMPLES
        return cls(settings.vad_confidence, settings.vad_threshold, settings.vad_margin_db, settings.vad_onset, closing_hops)


@dataclass(slots=True)
class Listener:
    """Where the detectors are with one channel: all that they must know to go on, besides the audio.

    Attributes:
        next_hop: the hop to decide next; hops count 160 samples from the session's start.
        next_heard: the hop whose spectrum is to be heard next.
        opinions: what the traditional detector thinks of the last hops before ``next_heard``, as far back as they are not decided.
        next_window: the window that a network from elsewhere is to hear next, counted likewise.
        probability: what it said of the window before.
        neural: the network's state.
        traditional: the traditional detector's state.
        since: hops since the last speech.
        confirmed: whether that speech was certain anywhere.
    """

    next_hop: int
    next_heard: int
    opinions: NDArray[np.bool_]
    next_window: int
    probability: np.float32
    neural: NDArray[np.float32]
    traditional: NDArray[np.float32]
    # Nobody knows the noise yet where audio begins, so nobody is certain: what begins with it need not be.
    since: int = 0
    confirmed: bool = True


class Channel(NamedTuple):
    """What the detectors need of a channel."""

    listener: Listener
    heard: Track[np.float32]
    thresholds: Thresholds


class Detectors:
    """Decides hops, for all channels that have some.

    Args:
        settings: which detectors.
        neural: the trained detector to use; unset: the configured one.
    """

    def __init__(self, settings: Settings, neural: NeuralDetector | SpectralDetector | None = None) -> None:
        self._traditional = Traditional() if settings.vad in ("fusion", "traditional") else None
        self._windowed: NeuralDetector | None = None
        self._spectral: SpectralDetector | None = None
        if settings.vad in ("fusion", "tiny", "silero"):
            neural = neural or _configured(settings)
            if hasattr(neural, "window_samples"):
                self._windowed = cast("NeuralDetector", neural)
            else:
                self._spectral = neural
        self._state_size = neural.state_size if neural is not None else 0
        self._hears_spectra = self._traditional is not None or self._spectral is not None
        self._unit_hops = self._spectral.unit_hops if self._spectral else 1
        self._delay_hops = self._spectral.delay_hops if self._spectral else 0
        #: A detector may look back this far from the start of the hop, or the window, that it judges.
        self.lookback_samples: Final = max(WINDOW_SAMPLES - HOP_SAMPLES, self._windowed.context_samples if self._windowed else 0)

    def warm_up(self) -> None:
        """Run all once, so that the first step is as fast as the next."""
        heard = Track(-self.lookback_samples, np.float32)
        heard.append(np.zeros(self.lookback_samples + self.needed_samples(HOP_SAMPLES), np.float32))
        self.decide([Channel(self.start(0), heard, Thresholds(1.0, 0.5, 0.0))])

    def start(self, start_sample: int) -> Listener:
        """Return a listener that decides the hop at a sample next; where a channel starts, that is a multiple of all steps."""
        hop = start_sample // HOP_SAMPLES
        return Listener(
            next_hop=hop,
            next_heard=hop // self._unit_hops * self._unit_hops,
            opinions=np.zeros(0, np.bool_),
            next_window=start_sample // self._windowed.window_samples if self._windowed else 0,
            probability=np.float32(0),
            neural=np.zeros(self._state_size, np.float32),
            traditional=self._traditional.fresh() if self._traditional else np.zeros(0, np.float32),
        )

    def adopt(self, listener: Listener) -> Listener:
        """Return a listener from elsewhere if it was made for these detectors, else one that starts afresh where it stands."""
        fresh = self.start(listener.next_hop * HOP_SAMPLES + HOP_SAMPLES // 2)
        alike = len(fresh.neural) == len(listener.neural) and len(fresh.traditional) == len(listener.traditional)
        return listener if alike and listener.next_heard % self._unit_hops == 0 else fresh

    def decidable_hops(self, heard_to_sample: int) -> int:
        """Return up to which hop all are decidable once everything before a sample is heard.

        A network that hears windows decides a hop by the one that holds its middle, so that window must be complete.
        """
        hops = self._hearable_hops(heard_to_sample) - self._delay_hops
        if self._windowed is None:
            return max(0, hops)
        windows = heard_to_sample // self._windowed.window_samples
        by_window = (windows * self._windowed.window_samples - HOP_SAMPLES // 2 + HOP_SAMPLES - 1) // HOP_SAMPLES
        return min(hops, by_window)

    def needed_samples(self, end_sample: int) -> int:
        """Return what must be heard, at most, so that every hop that begins before a sample is decidable."""
        by_hops = end_sample + (self._delay_hops + self._unit_hops) * HOP_SAMPLES
        return by_hops + (self._windowed.window_samples if self._windowed else 0)

    def needed_from_sample(self, listener: Listener) -> int:
        """Return the first sample that a listener still needs."""
        by_hop = (listener.next_heard + 1) * HOP_SAMPLES - WINDOW_SAMPLES
        if self._windowed is None:
            return by_hop
        return min(by_hop, listener.next_window * self._windowed.window_samples - self._windowed.context_samples)

    def decide(self, channels: Sequence[Channel]) -> list[NDArray[np.bool_]]:
        """Decide every hop that can be decided, and move the listeners past it.

        Args:
            channels: those that may have some.

        Returns:
            For each channel whether its hops from ``next_hop`` (as it was) are speech.
        """
        opinions, late = self._hear_spectra(channels) if self._hears_spectra else ([], [])
        counts = self._hop_counts(channels)
        probabilities: list[NDArray[np.float32]] = []
        if self._windowed is not None:
            probabilities = _hear_windows(self._windowed, channels, counts)
        elif self._spectral is not None:
            probabilities = [said[len(said) - count :] for said, count in zip(late, counts, strict=True)]
        speech = [np.ones(count, np.bool_) for count in counts]
        if self._traditional is not None:
            for number, (channel, mine, count) in enumerate(zip(channels, opinions, counts, strict=True)):
                waiting = np.concatenate([channel.listener.opinions, mine])
                speech[number], channel.listener.opinions = waiting[:count], waiting[count:]
        if probabilities:
            speech = self._by_network(channels, probabilities, speech)
        for channel, count in zip(channels, counts, strict=True):
            channel.listener.next_hop += count
        return speech

    def _by_network(
        self, channels: Sequence[Channel], probabilities: Sequence[NDArray[np.float32]], traditional: Sequence[NDArray[np.bool_]]
    ) -> list[NDArray[np.bool_]]:
        """Return what the network makes of each channel's hops, alone or with the traditional detector; for all of them at once."""
        counts = [len(mine) for mine in traditional]
        probability = np.concatenate(probabilities)
        configured = [(each.confidence, each.probability, each.onset) for _, _, each in channels]
        confidence, even, onset = np.array(configured, np.float32).repeat(counts, axis=0).T
        decided = probability > even
        if self._traditional is not None:
            decided = fuse(probability, np.concatenate(traditional), confidence, even)
        speech = _cut(decided, counts)
        if self._spectral is not None:
            for number, (channel, certain) in enumerate(zip(channels, _cut(probability > onset, counts), strict=True)):
                listener, closing_hops = channel.listener, channel.thresholds.closing_hops
                speech[number], listener.since, listener.confirmed = confirm(
                    speech[number], certain, closing_hops, listener.since, listener.confirmed
                )
        return speech

    def _hearable_hops(self, heard_to_sample: int) -> int:
        return heard_to_sample // HOP_SAMPLES // self._unit_hops * self._unit_hops

    def _hop_counts(self, channels: Sequence[Channel]) -> list[int]:
        """Return how many hops of each channel have become decidable."""
        return [max(0, self.decidable_hops(channel.heard.end) - channel.listener.next_hop) for channel in channels]

    def _hear_spectra(self, channels: Sequence[Channel]) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.float32]]]:
        """Let the detectors of our own hear what is new.

        Returns:
            For each channel what the traditional detector thinks of the new hops from ``next_hop`` on, and what TinyVAD says meanwhile, of
            as many hops a little before; empty without the one or the other.
        """
        counts = np.array([max(0, self._hearable_hops(heard.end) - listener.next_heard) for listener, heard, _ in channels], np.intp)
        order = np.argsort(-counts, kind="stable")
        order = order[: int((counts > 0).sum())]
        opinions = [np.zeros(0, np.bool_)] * len(channels)
        probabilities = [np.zeros(0, np.float32)] * len(channels)
        if not len(order):
            return opinions, probabilities
        busy, hops = [channels[index] for index in order], counts[order]
        power = _new_spectra(busy, hops)
        if self._traditional is not None:
            margins = np.array([channel.thresholds.margin_db for channel in busy], np.float32)
            states = np.stack([channel.listener.traditional for channel in busy])
            speech, states = self._traditional(power, hops, states, margins)
            for index, mine, state, channel in zip(order, _cut(speech, hops), states, busy, strict=True):
                listener = channel.listener
                # A listener that starts between two steps hears a few hops before the first that it decides.
                opinions[index] = mine[max(0, listener.next_hop - listener.next_heard) :]
                listener.traditional = state
        if self._spectral is not None:
            states = np.stack([channel.listener.neural for channel in busy])
            said, states = self._spectral(power, hops, states)
            for index, late, state, channel in zip(order, _cut(said, hops), states, busy, strict=True):
                probabilities[index] = late
                channel.listener.neural = state
        for channel, count in zip(busy, hops, strict=True):
            channel.listener.next_heard += int(count)
        return opinions, probabilities


def _cut(values: NDArray[_Value], counts: Sequence[int] | NDArray[np.intp]) -> list[NDArray[_Value]]:
    """Return what belongs to each channel of the values of all, one channel's after the other's."""
    ends = np.cumsum(counts).tolist()
    return [values[end - int(count) : end] for end, count in zip(ends, counts, strict=True)]


def _new_spectra(channels: Sequence[Channel], hops: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the spectra of all channels' next hops, one channel after the other."""
    windows = np.empty((int(hops.sum()), WINDOW_SAMPLES), np.float32)
    place = 0
    for (listener, heard, _), count in zip(channels, hops.tolist(), strict=True):
        first = (listener.next_heard + 1) * HOP_SAMPLES - WINDOW_SAMPLES
        # A window is two hops, so each hop is the second half of one window and the first of the next.
        halves = heard[first : first + (count + 1) * HOP_SAMPLES].reshape(count + 1, HOP_SAMPLES)
        windows[place : place + count, :HOP_SAMPLES] = halves[:-1]
        windows[place : place + count, HOP_SAMPLES:] = halves[1:]
        place += count
    return power_spectra(windows)


def _hear_windows(detector: NeuralDetector, channels: Sequence[Channel], hops: Sequence[int]) -> list[NDArray[np.float32]]:
    """Return a network's probabilities for all channels' next hops, and move its states past all complete windows."""
    by_hop: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(channels)
    if not channels:
        return by_hop
    windows = [_new_windows(detector, channel) for channel in channels]
    order = sorted(range(len(channels)), key=lambda index: -len(windows[index]))
    states = np.stack([channels[index].listener.neural for index in order])
    said = [[channels[index].listener.probability] for index in order]
    for step in range(len(windows[order[0]])):
        active = sum(len(windows[index]) > step for index in order)
        batch = np.stack([windows[index][step] for index in order[:active]])
        probabilities, states[:active] = detector(batch, states[:active])
        for row, probability in enumerate(probabilities):
            said[row].append(probability)
    for row, index in enumerate(order):
        listener = channels[index].listener
        middles = (listener.next_hop + np.arange(hops[index])) * HOP_SAMPLES + HOP_SAMPLES // 2
        by_hop[index] = np.array(said[row], np.float32)[middles // detector.window_samples - (listener.next_window - 1)]
        listener.neural = states[row]
        listener.probability = said[row][-1]
        listener.next_window += len(windows[index])
    return by_hop


def _new_windows(detector: NeuralDetector, channel: Channel) -> NDArray[np.float32]:
    """Return a channel's complete windows that were not heard yet, each with its context."""
    listener, heard, _ = channel
    first = listener.next_window * detector.window_samples
    length = detector.context_samples + detector.window_samples
    count = max(0, heard.end // detector.window_samples - listener.next_window)
    if not count:
        return np.zeros((0, length), np.float32)
    audio = heard[first - detector.context_samples : first + count * detector.window_samples]
    return sliding_window_view(audio, length)[:: detector.window_samples]


def _configured(settings: Settings) -> NeuralDetector | SpectralDetector:
    if settings.vad == "silero":
        from agents.vad.silero import Silero

        return Silero()
    from agents.vad.tiny.detector import TinyDetector

    return TinyDetector(settings.vad_backend)
