"""Whether audio is what it is declared to be: looked at once a second, flagged once a session, never refused.

At each full second of a session the newest 200 ms are inspected, the same samples whatever the framing. What is wrong must show at
several inspections in a row before it is flagged; silence says nothing either way.

* ``clipping``: samples stand at full scale, many and next to each other.
* ``dc_offset``: the mean is far from zero; silence then looks loud to anything that measures levels.
* ``narrowband``: declared at 16 kHz, but nothing lies above 4 kHz: a telephone line that somebody resampled. Harmless, and worth knowing.
* ``rate_too_high``, ``rate_too_low``: by the recorder's clock half (or a quarter), or double, the declared samples came: 8 kHz audio
  under a 16 kHz label, or the reverse. Spectra cannot tell, because speech at double speed looks like a higher voice; the clock can.
* ``mulaw_as_pcm``, ``alaw_as_pcm``: declared as linear PCM at 16 kHz, but neighbouring samples have far more in common once its bytes
  are read as G.711.
* ``noise_as_speech``: loud and white. Linear PCM under a G.711 label, or the wrong byte order, sounds like that.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.fft import rfft

from agents.vad.decode import FULL_SCALE, decode
from agents.vad.resample import NARROWBAND_HZ
from schemas.records import SAMPLE_RATE_HZ, Encoding

__all__ = ["BLOCK_SAMPLES", "FLAGS", "PERIOD_SAMPLES", "Finding", "Inspector", "Notes"]

#: Inspections are a second apart, and hear 200 ms.
PERIOD_SAMPLES: Final = SAMPLE_RATE_HZ
BLOCK_SAMPLES: Final = SAMPLE_RATE_HZ // 5

#: In the order of their bits in a snapshot; new ones at the end.
FLAGS: Final = (
    "clipping",
    "dc_offset",
    "narrowband",
    "rate_too_high",
    "rate_too_low",
    "mulaw_as_pcm",
    "alaw_as_pcm",
    "noise_as_speech",
)
#: So many inspections in a row must agree; a voice may lack high tones for a while, so that takes longest.
_PATIENCE: Final = {"narrowband": 8}
_USUAL_PATIENCE: Final = 3

#: Under -55 dB of full scale is silence.
_SILENCE_RMS: Final = FULL_SCALE * 10 ** (-55 / 20)
#: Clipped: within 0.5 % of a line's largest value (G.711 ends at 32,124 and 32,256), twice in a row, for 0.5 % of the samples.
_CLIPPED: Final = round(32_124 * 0.995)
_CLIPPED_SHARE: Final = 0.005
#: An offset of 1 % of full scale (-40 dB), and more than a tenth of all there is.
_OFFSET: Final = FULL_SCALE / 100
_OFFSET_SHARE: Final = 0.1
#: Above 4.4 kHz (the resampler's slope ends there) lies less than a millionth of the power: 16-bit rounding and nothing else.
_BAND_EDGE_HZ: Final = 4_400
_EMPTY_SHARE: Final = 1e-6
#: By the clock, a quarter (a byte a sample too), half or double the samples, give or take a tenth: drift is a thousand times smaller.
_TOO_FEW: Final = (0.25, 0.5)
_TOO_MANY: Final = (2.0,)
_GIVE_OR_TAKE: Final = 0.1
#: Neighbouring samples of speech correlate by 0.7 to 0.99, also when G.711's other law reads them, but less; the halves of linear samples
#: read as G.711 by less than 0.2; pairs of G.711 bytes read as linear samples by 0.3 to 0.8.
_LAWS: Final[tuple[Encoding, ...]] = ("mulaw", "alaw")
_SMOOTH: Final = 0.6
_SMOOTHER: Final = 0.1
#: White: geometric over arithmetic mean of the power spectrum; 0.56 is pure white noise. Loud: over -14 dB.
_WHITE: Final = 0.45
_LOUD_RMS: Final = FULL_SCALE * 10 ** (-14 / 20)
_LOG_GUARD: Final = 1e-3
#: What the resampler passes of 8 kHz audio.
_NARROW_END_HZ: Final = 3_400


class Finding(NamedTuple):
    """A flag to raise, and what was seen."""

    flag: str
    detail: str


class Notes(msgspec.Struct, frozen=True, array_like=True):
    """What an inspector remembers.

    Attributes:
        inspected_to: the sample that the last inspection ended with.
        captured_us: by the recorder's clock, when the frame that held it was captured, and
        captured_to: that frame's last sample.
        raised: a bit for each flag that was raised.
        runs: for each flag, how many inspections in a row have seen it.
    """

    inspected_to: int = 0
    captured_us: int = 0
    captured_to: int = 0
    raised: int = 0
    runs: tuple[int, ...] = ()


class Inspector:
    """One session's."""

    def __init__(self, notes: Notes | None = None) -> None:
        #: What it remembers; assign to go on from there.
        self.notes = notes or Notes()

    def due(self, end_sample: int) -> int | None:
        """Return where an inspection is due, if one is, audio being there up to a sample; of a very long frame, only the last second's."""
        last = end_sample // PERIOD_SAMPLES * PERIOD_SAMPLES
        return last if last > self.notes.inspected_to else None

    def inspect(
        self, at_sample: int, block: NDArray[np.int16], encoding: Encoding, rate_hz: int, captured_us: int, captured_to: int
    ) -> list[Finding]:
        """Inspect once.

        Args:
            at_sample: where the block ends.
            block: ``BLOCK_SAMPLES`` at 16 kHz.
            encoding: as declared.
            rate_hz: as declared.
            captured_us: when the last sample of the frame at hand was captured, by the recorder's clock.
            captured_to: one past that sample.

        Returns:
            Flags that were not raised before.
        """
        notes = self.notes
        seen = self._pace(captured_us, captured_to) | _look(block, encoding, rate_hz)
        runs = list(notes.runs) or [0] * len(FLAGS)
        raised, found = notes.raised, []
        for number, flag in enumerate(FLAGS):
            if flag not in seen:
                continue
            detail = seen[flag]
            runs[number] = min(runs[number] + 1, 255) if detail is not None else 0
            if detail is not None and runs[number] >= _PATIENCE.get(flag, _USUAL_PATIENCE) and not raised >> number & 1:
                raised |= 1 << number
                found.append(Finding(flag, detail))
        self.notes = Notes(at_sample, captured_us, captured_to, raised, tuple(runs))
        return found

    def _pace(self, captured_us: int, captured_to: int) -> dict[str, str | None]:
        """Compare the audio since the last inspection with the recorder's clock."""
        notes = self.notes
        elapsed_us = captured_us - notes.captured_us
        if not notes.captured_us or elapsed_us <= 0:
            return {}
        pace = (captured_to - notes.captured_to) / SAMPLE_RATE_HZ / (elapsed_us / 1e6)
        told = f"{pace:.2f} s of audio come in a second"
        return {
            "rate_too_high": told if _is_about(pace, _TOO_FEW) else None,
            "rate_too_low": told if _is_about(pace, _TOO_MANY) else None,
        }


def _is_about(pace: float, paces: tuple[float, ...]) -> bool:
    return any(abs(pace - each) < _GIVE_OR_TAKE * each for each in paces)


def _look(block: NDArray[np.int16], encoding: Encoding, rate_hz: int) -> dict[str, str | None]:
    """Return for each flag that the block can speak of what it shows, or None if nothing."""
    samples = block.astype(np.float32)
    mean = float(samples.mean())
    level = float(np.sqrt(np.square(samples).mean()))
    off = abs(mean) > _OFFSET and abs(mean) > _OFFSET_SHARE * level
    seen: dict[str, str | None] = {"dc_offset": f"the mean is {mean / FULL_SCALE:+.3f} of full scale" if off else None}
    if level < _SILENCE_RMS:
        return seen
    full = np.abs(block.astype(np.int32)) >= _CLIPPED
    clipped = float((full[1:] & full[:-1]).mean())
    seen["clipping"] = f"{clipped:.1%} of the samples are clipped" if clipped > _CLIPPED_SHARE else None
    power = np.square(np.abs(rfft((samples - mean) * np.hanning(len(samples)).astype(np.float32))))
    edge = round(_BAND_EDGE_HZ * len(samples) / SAMPLE_RATE_HZ)
    if rate_hz == SAMPLE_RATE_HZ:
        empty = float(power[edge:].sum()) < _EMPTY_SHARE * float(power.sum())
        seen["narrowband"] = "nothing lies above 4 kHz" if empty else None
    if encoding == "pcm_s16le" and rate_hz == SAMPLE_RATE_HZ:
        linear = _smoothness(samples)
        smoothness = {law: _smoothness(decode(block.astype("<i2").tobytes(), law)) for law in _LAWS}
        for law in _LAWS:
            likelier = smoothness[law] == max(smoothness.values()) > max(_SMOOTH, linear + _SMOOTHER)
            seen[f"{law}_as_pcm"] = f"its bytes make sense as {law}" if likelier else None
    band = power[1 : round(_NARROW_END_HZ * len(samples) / SAMPLE_RATE_HZ) if rate_hz == NARROWBAND_HZ else None]
    flatness = float(np.exp(np.log(band + _LOG_GUARD).mean()) / (band.mean() + _LOG_GUARD))
    white = level > _LOUD_RMS and flatness > _WHITE
    seen["noise_as_speech"] = f"white noise at {20 * np.log10(level / FULL_SCALE):.0f} dB" if white else None
    return seen


def _smoothness(samples: NDArray[np.float32]) -> float:
    """Return the correlation of neighbouring samples."""
    centred = samples - samples.mean()
    power = float(np.dot(centred, centred))
    return float(np.dot(centred[1:], centred[:-1])) / power if power else 0.0
