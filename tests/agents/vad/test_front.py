import numpy as np
import pytest

from agents.vad.decode import decode, to_int16
from agents.vad.front import SETTLE_SAMPLES, START_GRID_SAMPLES, Front, Track


def test_a_track_gives_what_it_keeps_and_says_what_it_does_not():
    track = Track(100, np.int16)
    track.append(np.arange(50, dtype=np.int16))
    track.forget(120)
    assert (track.start, track.end) == (120, 150)
    assert track[120:123].tolist() == [20, 21, 22]
    with pytest.raises(IndexError, match="samples 119 to 121 are wanted of 120 to 150"):
        track[119:121]
    with pytest.raises(IndexError):
        track[149:151]
    track.forget(1_000)
    assert (track.start, track.end) == (150, 150)


def test_it_starts_on_the_grid_with_silence_up_to_its_first_sample(speech):
    start = START_GRID_SAMPLES + 777
    front = Front(start, denoise=False, lookback_samples=160)
    front.push(speech[:3_200].astype(np.float32) / 32_768, 16_000)
    assert (front.base_sample, front.end_sample) == (START_GRID_SAMPLES, start + 3_200)
    assert not front.heard[START_GRID_SAMPLES - 160 : start].any()
    assert np.array_equal(front.original[start : start + 3_200], speech[:3_200])


def test_the_rate_may_change_and_nothing_is_lost_at_the_seams(speech, prompt):
    narrow = decode(prompt[:4_000], "mulaw")
    front = Front(0, denoise=False)
    wide = speech[20_000:23_200].astype(np.float32) / 32_768
    for samples, rate_hz in ((wide, 16_000), (narrow[:1_000], 8_000), (narrow[1_000:], 8_000), (wide, 16_000), (narrow, 8_000)):
        front.push(samples, rate_hz)
    front.silence(100)
    assert front.original.end == front.end_sample == 2 * 3_200 + 2 * 8_000 + 100
    assert np.array_equal(front.original[3_200 : 3_200 + 8_000], front.original[14_400 : 14_400 + 8_000])
    assert np.array_equal(front.original[11_200:14_400], to_int16(wide))


def test_finishing_lets_out_what_filters_owe(prompt):
    front = Front(0, denoise=True)
    front.push(decode(prompt[:8_000], "mulaw"), 8_000)
    assert front.original.end < front.end_sample == 16_000
    assert front.heard.end < 16_000
    front.finish(16_500)
    assert front.original.end == 16_000
    assert front.heard.end >= 16_500


@pytest.mark.parametrize("start", [12_345, 40_000, 55_555])
def test_one_that_begins_anywhere_later_is_equal_to_the_bit_once_it_has_settled(speech, start):
    samples = speech.astype(np.float32) / 32_768
    whole, later = Front(0, denoise=True), Front(start, denoise=True)
    whole.push(samples, 16_000)
    later.push(samples[start:], 16_000)
    settled = start + SETTLE_SAMPLES
    assert np.array_equal(whole.heard[settled : whole.heard.end], later.heard[settled : later.heard.end])
