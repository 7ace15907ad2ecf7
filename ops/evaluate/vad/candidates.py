"""The detectors that are compared: each turns a channel's audio into a decision for each hop. All of them use the same segmenter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agents.vad.decode import to_int16
from agents.vad.detectors import Channel, Detectors, Thresholds
from agents.vad.front import Front
from agents.vad.fusion import EVEN, confirm
from agents.vad.spectrum import HOP_SAMPLES
from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError
from streams.settings import Settings

__all__ = ["CANDIDATES", "Candidate", "Verdict", "candidate", "cost_of"]

Samples = NDArray[np.float32]

_CHANNELS: Final = 50
_FRAME_SAMPLES: Final = SAMPLE_RATE_HZ // 5
_COST_SECONDS: Final = 4
_COST_RUNS: Final = 3
#: The plain energy detector: this far above full scale's opposite, 40 dB under it.
_ENERGY_DB: Final = -40.0
_WEBRTC_MODE: Final = 2
_POWER_GUARD: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a detector says of a channel: a decision for each hop, and a score that can be cut elsewhere, if it has one."""

    speech: NDArray[np.bool_]
    score: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A detector.

    Attributes:
        name: as tables and JSON have it.
        judge: decides the hops of some channels.
        settings: for those of our own, to measure what they cost in a stream.
    """

    name: str
    judge: Callable[[Sequence[Samples]], list[Verdict]]
    settings: Settings | None = None


def _ours(settings: Settings) -> Callable[[Sequence[Samples]], list[Verdict]]:
    detectors = Detectors(settings)
    thresholds = Thresholds.of(settings)

    def judge(channels: Sequence[Samples]) -> list[Verdict]:
        heard = []
        for samples in channels:
            front = Front(0, denoise=settings.vad_denoise, lookback_samples=detectors.lookback_samples)
            front.push(samples, SAMPLE_RATE_HZ)
            front.finish(detectors.needed_samples(len(samples)))
            heard.append(Channel(detectors.start(0), front.heard, thresholds))
        decided = detectors.decide(heard)
        return [Verdict(mine[: len(samples) // HOP_SAMPLES]) for mine, samples in zip(decided, channels, strict=True)]

    return judge


def _tiny_scores(settings: Settings) -> Callable[[Sequence[Samples]], list[Verdict]]:
    """The network alone, with its probabilities."""
    from agents.vad.spectrum import WINDOW_SAMPLES, power_spectra
    from agents.vad.tiny.detector import TinyDetector

    tiny = TinyDetector(settings.vad_backend)
    closing_hops = Thresholds.of(settings).closing_hops

    def spectra(samples: Samples, count: int) -> NDArray[np.float32]:
        front = Front(0, denoise=settings.vad_denoise, lookback_samples=WINDOW_SAMPLES - HOP_SAMPLES)
        front.push(samples, SAMPLE_RATE_HZ)
        front.finish(count * HOP_SAMPLES)
        audio = front.heard[HOP_SAMPLES - WINDOW_SAMPLES : count * HOP_SAMPLES]
        return power_spectra(np.lib.stride_tricks.sliding_window_view(audio, WINDOW_SAMPLES)[::HOP_SAMPLES])

    def judge(channels: Sequence[Samples]) -> list[Verdict]:
        hops = np.array([len(samples) // HOP_SAMPLES for samples in channels])
        counts = -(-(hops + tiny.delay_hops) // tiny.unit_hops) * tiny.unit_hops
        order = np.argsort(-counts, kind="stable")
        power = np.concatenate([spectra(channels[index], counts[index]) for index in order])
        said, _ = tiny(power, counts[order], np.stack([tiny.fresh()] * len(order)))
        verdicts = [Verdict(np.zeros(0, np.bool_))] * len(channels)
        for index, late in zip(order.tolist(), np.split(said, np.cumsum(counts[order])[:-1]), strict=True):
            score = late[tiny.delay_hops : tiny.delay_hops + hops[index]]
            certain = score > settings.vad_onset
            speech, _, _ = confirm(score > settings.vad_threshold, certain, closing_hops, 0, True)
            verdicts[index] = Verdict(speech, score)
        return verdicts

    return judge


def _silero(_: Settings) -> Callable[[Sequence[Samples]], list[Verdict]]:
    from agents.vad.silero import Silero

    silero = Silero()
    window, context = silero.window_samples, silero.context_samples

    def judge(channels: Sequence[Samples]) -> list[Verdict]:
        order = sorted(range(len(channels)), key=lambda index: -len(channels[index]))
        counts = np.array([-(-len(channels[index]) // window) for index in order])
        padded = [
            np.pad(channels[index], (context, count * window - len(channels[index]))) for index, count in zip(order, counts, strict=True)
        ]
        states = np.zeros((len(order), silero.state_size), np.float32)
        said = np.zeros((len(order), counts[0]), np.float32)
        for number in range(counts[0]):
            active = int((counts > number).sum())
            first = number * window
            batch = np.stack([samples[first : first + context + window] for samples in padded[:active]])
            said[:active, number], states[:active] = silero(batch, states[:active])
        verdicts = [Verdict(np.zeros(0, np.bool_))] * len(channels)
        for row, index in enumerate(order):
            # A hop has the probability of the window that holds its middle.
            middles = np.arange(len(channels[index]) // HOP_SAMPLES) * HOP_SAMPLES + HOP_SAMPLES // 2
            score = said[row, middles // window]
            verdicts[index] = Verdict(score > EVEN, score)
        return verdicts

    return judge


def _webrtc(_: Settings) -> Callable[[Sequence[Samples]], list[Verdict]]:
    try:
        import webrtcvad
    except ModuleNotFoundError as missing:
        raise UserError("WebRTC's detector is not installed", "Install webrtcvad-wheels, or name other detectors.") from missing

    def judge(channels: Sequence[Samples]) -> list[Verdict]:
        verdicts = []
        for samples in channels:
            detector: Any = webrtcvad.Vad(_WEBRTC_MODE)
            pcm = to_int16(samples).astype("<i2").tobytes()
            step = 2 * HOP_SAMPLES
            hops = [detector.is_speech(pcm[begin : begin + step], SAMPLE_RATE_HZ) for begin in range(0, len(pcm) - step + 1, step)]
            verdicts.append(Verdict(np.array(hops, np.bool_)))
        return verdicts

    return judge


def _energy(_: Settings) -> Callable[[Sequence[Samples]], list[Verdict]]:
    def judge(channels: Sequence[Samples]) -> list[Verdict]:
        verdicts = []
        for samples in channels:
            hops = len(samples) // HOP_SAMPLES
            power = np.square(samples[: hops * HOP_SAMPLES]).reshape(hops, HOP_SAMPLES).mean(axis=1)
            score = (10 * np.log10(power + _POWER_GUARD)).astype(np.float32)
            verdicts.append(Verdict(score > _ENERGY_DB, score))
        return verdicts

    return judge


_MAKERS: Final[dict[str, Callable[[Settings], Callable[[Sequence[Samples]], list[Verdict]]]]] = {
    "fusion": _ours,
    "tiny": _tiny_scores,
    "traditional": _ours,
    "silero": _silero,
    "webrtc": _webrtc,
    "energy": _energy,
}
CANDIDATES: Final = tuple(_MAKERS)
_OF_OUR_OWN: Final = ("fusion", "tiny", "traditional", "silero")


def candidate(name: str, settings: Settings) -> Candidate:
    """Return a detector by its name.

    Raises:
        UserError: there is none of that name, or what it needs is not installed.
    """
    if name not in _MAKERS:
        raise UserError(f"There is no detector {name!r}", f"Choose from {', '.join(CANDIDATES)}.")
    own = settings.model_copy(update={"vad": name}) if name in _OF_OUR_OWN else settings
    return Candidate(name, _MAKERS[name](own), own if name in _OF_OUR_OWN else None)


def cost_of(measured: Candidate, samples: Samples) -> float:
    """Return the CPU time of the detector alone, in ms per second of a channel: the lowest of some runs.

    Ours, and Silero, are measured as they work: 50 channels in frames of 200 ms, all in one batch; the others, which know no batches, one
    channel at a time.
    """
    audio = np.resize(samples, _COST_SECONDS * SAMPLE_RATE_HZ)
    runs = [_stream_cost(measured.settings, audio) if measured.settings else _plain_cost(measured, audio) for _ in range(_COST_RUNS)]
    return min(runs)


def _plain_cost(measured: Candidate, audio: Samples) -> float:
    began = time.process_time()
    measured.judge([audio])
    return (time.process_time() - began) * 1_000 / _COST_SECONDS


def _stream_cost(settings: Settings, audio: Samples) -> float:
    detectors = Detectors(settings)
    detectors.warm_up()
    fronts = [Front(0, denoise=False, lookback_samples=detectors.lookback_samples) for _ in range(_CHANNELS)]
    channels = [Channel(detectors.start(0), front.heard, Thresholds.of(settings)) for front in fronts]
    spent = 0.0
    for begin in range(0, len(audio), _FRAME_SAMPLES):
        for number, front in enumerate(fronts):
            front.push(np.roll(audio, 997 * number)[begin : begin + _FRAME_SAMPLES], SAMPLE_RATE_HZ)
        began = time.process_time()
        detectors.decide(channels)
        spent += time.process_time() - began
        for channel, front in zip(channels, fronts, strict=True):
            front.forget(front.original.end, detectors.needed_from_sample(channel.listener))
    return spent * 1_000 / _COST_SECONDS / _CHANNELS
