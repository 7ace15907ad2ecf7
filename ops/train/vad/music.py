"""Music for those who wait: composed at random, played on the instruments of a SoundFont; and recorded pieces in another tempo or key.

Real music on hold is rare in freely licensed form, and a detector that has heard two pieces knows two pieces. So each call of
:func:`played` is another piece: its own tempo, key, chords, parts and instruments, from string pads to music boxes.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError

__all__ = ["in_tempo", "played"]

Samples = NDArray[np.float32]

#: TimGM6mb, a General MIDI SoundFont (GPL-2), lies in the package pretty_midi.
_SOUND_FONT: Final = "TimGM6mb.sf2"
_DRUM_BANK: Final = 128

_SCALES: Final = (
    (0, 2, 4, 5, 7, 9, 11),
    (0, 2, 3, 5, 7, 8, 10),
    (0, 2, 3, 5, 7, 9, 10),
    (0, 2, 4, 5, 7, 9, 10),
)
#: Roots of chords, as degrees of the scale, a bar each.
_PROGRESSIONS: Final = ((0, 4, 5, 3), (0, 3, 4, 4), (1, 4, 0, 0), (0, 5, 3, 4), (5, 3, 0, 4), (0, 2, 3, 3), (0, 6, 5, 4), (0, 0, 3, 4))

# General MIDI programs, by what they are good for.
_KEYS: Final = tuple(range(24))
_PLUCKED: Final = (*range(24, 32), 45, 46, *range(104, 109))
_PADS: Final = (*range(16, 24), *range(48, 56), *range(88, 96))
_BASSES: Final = (*range(32, 40), 43, 58)
_LEADS: Final = (*range(16), *range(24, 32), *range(40, 45), *range(56, 88), *range(104, 112))
_KICK, _SNARE, _CLAP, _HAT, _OPEN_HAT, _RIDE = 36, 38, 39, 42, 46, 51
_HAND_DRUMS: Final = (37, 54, 56, 60, 61, 62, 63, 64, 69, 70, 75)

_STEPS: Final = 16  #: a bar has so many sixteenths
_MODULATION, _VOLUME = 1, 7
_BEND_CENTRE: Final = 8_192


class _Event(NamedTuple):
    """Something that a player does: a note on (velocity above 0) or off, or a bend of the pitch."""

    at_sample: int
    channel: int
    key: int
    velocity: int
    bend: int = _BEND_CENTRE


class _Score:
    """Notes of all parts, in sixteenths."""

    def __init__(self, rng: np.random.Generator, step_samples: float) -> None:
        self._rng, self._step = rng, step_samples
        self._swing = rng.uniform(0, 0.35) if rng.random() < 0.3 else 0.0
        self.events: list[_Event] = []

    def note(self, channel: int, key: int, at: float, duration: float, velocity: float) -> None:
        """Add a note, as late or early and as loud as people play."""
        late = self._swing if int(at) % 2 else 0.0
        begin = (at + late) * self._step + self._rng.normal(0, 0.006) * SAMPLE_RATE_HZ
        loud = int(np.clip(velocity * self._rng.normal(1, 0.12), 12, 127))
        key = int(np.clip(key, 12, 115))
        self.events.append(_Event(max(0, int(begin)), channel, key, loud))
        self.events.append(_Event(max(1, int(begin + duration * self._step)), channel, key, 0))

    def slide(self, channel: int, at: float, semitones: float) -> None:
        """Let the pitch begin off the note, and come to it within a sixteenth, as a singer or a sax would."""
        for part in np.linspace(1, 0, 6):
            bend = int(_BEND_CENTRE * (1 + semitones / 2 * part))
            self.events.append(_Event(int((at + (1 - part)) * self._step), channel, 0, 0, min(max(bend, 1), 16_383)))


def _drums(rng: np.random.Generator, score: _Score, channel: int, bars: int) -> None:
    kick = rng.random(_STEPS) < np.where(np.arange(_STEPS) % 4 == 0, rng.choice((0.5, 1.0)), 0.12)
    snare = np.isin(np.arange(_STEPS), (4, 12)) | (rng.random(_STEPS) < 0.06)
    hat_every = int(rng.choice((1, 2, 4)))
    hat, back = int(rng.choice((_HAT, _RIDE, _OPEN_HAT, 70))), int(rng.choice((_SNARE, _CLAP, 37, 40)))
    extra = int(rng.choice(_HAND_DRUMS)) if rng.random() < 0.4 else 0
    pattern = rng.random(_STEPS) < 0.3
    for bar in range(bars):
        for step in range(_STEPS):
            at = bar * _STEPS + step
            if kick[step]:
                score.note(channel, _KICK, at, 1, 100)
            if snare[step]:
                score.note(channel, back, at, 1, 90)
            if step % hat_every == 0:
                score.note(channel, hat, at, 1, 70)
            if extra and pattern[step]:
                score.note(channel, extra, at, 1, 75)


def _bass(rng: np.random.Generator, score: _Score, channel: int, chords: list[list[int]]) -> None:
    every, octave = int(rng.choice((2, 4, 8, 16))), int(rng.choice((-24, -12)))
    for bar, chord in enumerate(chords):
        for step in range(0, _STEPS, every):
            tone = chord[0] if step == 0 or rng.random() < 0.6 else chord[int(rng.integers(len(chord)))]
            score.note(channel, tone + octave, bar * _STEPS + step, every * rng.uniform(0.5, 1), 95)


def _pad(rng: np.random.Generator, score: _Score, channel: int, chords: list[list[int]]) -> None:
    held = rng.random() < 0.55
    rhythm = rng.random(_STEPS) < rng.uniform(0.15, 0.5)
    rhythm[0] = True
    for bar, chord in enumerate(chords):
        for step in (0,) if held else np.flatnonzero(rhythm).tolist():
            strum = rng.uniform(0, 0.25)
            for number, tone in enumerate(chord):
                score.note(channel, tone, bar * _STEPS + step + strum * number, _STEPS * 0.97 if held else rng.uniform(0.6, 3), 70)


def _arpeggio(rng: np.random.Generator, score: _Score, channel: int, chords: list[list[int]]) -> None:
    every, order = int(rng.choice((1, 2, 2, 4))), rng.permutation(6)
    for bar, chord in enumerate(chords):
        tones = [*chord, *(tone + 12 for tone in chord)]
        for number, step in enumerate(range(0, _STEPS, every)):
            score.note(channel, tones[order[number % len(order)] % len(tones)], bar * _STEPS + step, every * rng.uniform(0.6, 2.5), 75)


def _melody(rng: np.random.Generator, score: _Score, channel: int, scale: NDArray[np.intp], chords: list[list[int]]) -> None:
    degree, at, end = int(rng.integers(0, 10)), 0.0, len(chords) * _STEPS
    lengths = rng.choice((1, 2, 2, 3, 4, 4, 6, 8, 12), 4)
    rests, slides = rng.uniform(0, 0.3), rng.uniform(0, 0.6) if rng.random() < 0.4 else 0.0
    while at < end:
        length = float(rng.choice(lengths))
        if rng.random() > rests:
            key = int(scale[degree % len(scale)]) + 12 * (degree // len(scale))
            score.note(channel, key, at, length * rng.uniform(0.6, 1.05), 100)
            if rng.random() < slides:
                score.slide(channel, at, float(rng.uniform(-2, 1)))
        at += length
        degree = int(np.clip(degree + rng.choice((-4, -2, -1, -1, 0, 1, 1, 2, 4)), -5, 16))


@cache
def _sound_font() -> Path:
    package = find_spec("pretty_midi")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / _SOUND_FONT
        if path.is_file():
            return path
    raise UserError(f"The SoundFont {_SOUND_FONT} is missing", "Install it for training: pip install --no-deps pretty_midi tinysoundfont.")


def _synth() -> tuple[Any, int]:
    try:
        import tinysoundfont
    except ModuleNotFoundError as missing:
        raise UserError("tinysoundfont is not installed", "Install it for training: pip install --no-deps tinysoundfont.") from missing

    synth = tinysoundfont.Synth(samplerate=SAMPLE_RATE_HZ, gain=-6)
    return synth, synth.sfload(str(_sound_font()))


def played(rng: np.random.Generator, length: int) -> Samples:
    """Compose and play a piece.

    Returns:
        float32 at 16 kHz, of any level.

    Raises:
        UserError: the synthesiser or its SoundFont is not installed.
    """
    synth, font = _synth()
    step_samples = 60 / rng.uniform(55, 170) / 4 * SAMPLE_RATE_HZ
    lead_in = rng.uniform(0, 1) * _STEPS * step_samples  # it has begun before anybody listens
    bars = int((length + lead_in) / step_samples / _STEPS) + 1
    scale = np.array(_SCALES[int(rng.integers(len(_SCALES)))]) + int(rng.integers(52, 66))
    roots = _PROGRESSIONS[int(rng.integers(len(_PROGRESSIONS)))]
    size = int(rng.choice((3, 3, 4)))

    def tone(degree: int) -> int:
        return int(scale[degree % len(scale)]) + 12 * (degree // len(scale))

    chords = [[tone(roots[bar % len(roots)] + 2 * number) for number in range(size)] for bar in range(bars)]
    score, channel = _Score(rng, step_samples), 0
    parts = rng.random(5) < (0.6, 0.7, 0.75, 0.4, 0.75)
    if not parts[1:].any():
        parts[4] = True
    families = (None, _BASSES, _PADS if rng.random() < 0.5 else (*_KEYS, *_PLUCKED), (*_KEYS, *_PLUCKED), _LEADS)
    detune = float(rng.normal(0, 25)) / 100  # of a semitone: tapes and old codecs run at any speed
    for number, (wanted, family) in enumerate(zip(parts, families, strict=True)):
        if not wanted:
            continue
        if family is None:
            synth.program_select(channel, font, _DRUM_BANK, int(rng.choice((0, 8, 16, 24, 25, 32, 40))), True)
        else:
            synth.program_select(channel, font, 0, int(rng.choice(family)))
            synth.set_tuning(channel, detune)
            synth.control_change(channel, _MODULATION, int(rng.integers(0, 100)) if rng.random() < 0.4 else 0)
        synth.control_change(channel, _VOLUME, int(rng.integers(45, 127)))
        if number == 0:
            _drums(rng, score, channel, bars)
        elif number == 1:
            _bass(rng, score, channel, chords)
        elif number == 2:
            _pad(rng, score, channel, chords)
        elif number == 3:
            _arpeggio(rng, score, channel, chords)
        else:
            _melody(rng, score, channel, scale + int(rng.choice((0, 0, 12))), chords)
        channel += 1
    whole = _perform(synth, sorted(score.events), length + int(lead_in))[int(lead_in) :]
    # A rest of all parts is not silence: the line hisses.
    return whole + np.float32(0.001) * rng.standard_normal(length).astype(np.float32)


def _perform(synth: Any, events: list[_Event], length: int) -> Samples:
    out = np.empty(length, np.float32)
    place = 0
    for event in (*events, _Event(length, 0, 0, 0)):
        to = min(event.at_sample, length)
        if to > place:
            stereo = np.frombuffer(synth.generate(to - place), np.float32)
            out[place:to] = stereo.reshape(-1, 2).sum(axis=1)
            place = to
        if place == length:
            break
        if event.bend != _BEND_CENTRE or not event.key:
            synth.pitchbend(event.channel, event.bend)
        elif event.velocity:
            synth.noteon(event.channel, event.key, event.velocity)
        else:
            synth.noteoff(event.channel, event.key)
    return out


def in_tempo(samples: Samples, factor: float) -> Samples:
    """Return samples so much faster, their pitch kept; FFmpeg's ``atempo`` does it, for factors from 0.5 to 2."""
    from fractions import Fraction

    from av.audio.frame import AudioFrame
    from av.filter import Graph

    graph = Graph()
    source = graph.add_abuffer(format="fltp", sample_rate=SAMPLE_RATE_HZ, layout="mono", time_base=Fraction(1, SAMPLE_RATE_HZ))
    tempo, sink = graph.add("atempo", str(factor)), graph.add("abuffersink")
    source.link_to(tempo)
    tempo.link_to(sink)
    graph.configure()
    frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples[np.newaxis]), format="fltp", layout="mono")
    frame.sample_rate, frame.pts = SAMPLE_RATE_HZ, 0
    graph.push(frame)
    graph.push(None)
    pieces = []
    while True:
        try:
            pieces.append(graph.pull().to_ndarray()[0])
        except (BlockingIOError, EOFError):
            return np.concatenate(pieces).astype(np.float32)
