import numpy as np
import pytest

from agents.vad.segmenter import Rules
from ops.evaluate.vad.measure import Tally, segments_of
from ops.evaluate.vad.testset import TestScene, regions
from streams.settings import load_settings

RULES = Rules.of(load_settings())


def hops(count, *spans):
    speech = np.zeros(count, np.bool_)
    for begin, end in spans:
        speech[begin:end] = True
    return speech


def scene(speech):
    samples = np.zeros(len(speech) * 160, np.float32)
    return TestScene("s", "recorded", "room", "room.wav", 5, "wide", samples, speech, ())


def tally(reference, decided):
    made = Tally()
    one = scene(reference)
    made.add(one, *segments_of(decided, RULES, len(one.samples)))
    return made.figures()


def test_regions_join_short_gaps_and_drop_specks():
    assert regions(hops(1_000, (100, 200), (229, 300), (400, 405), (500, 520))) == [(100, 300), (500, 520)]
    assert regions(hops(10)) == []


def test_what_is_right_is_right():
    speech = hops(1_000, (100, 200), (400, 600))
    figures = tally(speech, speech)
    assert (figures.false_trigger_rate, figures.segment_merge_accuracy, figures.speech_kept) == (0, 1, 1)
    assert (figures.noise_time_triggered, figures.missed_speech) == (0, 0)
    assert (figures.onset_error_ms.p50, figures.end_error_ms.p95) == (0, 0)
    assert (figures.segments, figures.cancelled, figures.regions) == (2, 0, 2)


def test_a_segment_in_noise_is_a_false_trigger_and_a_cancelled_one_is_not():
    figures = tally(hops(1_000, (100, 200)), hops(1_000, (100, 200), (500, 550), (700, 710)))
    assert (figures.segments, figures.cancelled) == (2, 1)
    assert figures.false_trigger_rate == 0.5
    # 300 ms of pre-roll, 500 of the decision, 200 of tail; of 1,000 hops 100 are speech and 60 lie next to it.
    assert figures.noise_time_triggered == pytest.approx(100 / 840)


def test_a_region_in_two_pieces_did_not_come_back():
    figures = tally(hops(1_000, (100, 400)), hops(1_000, (100, 200), (240, 400)))
    assert figures.segment_merge_accuracy == 0
    assert figures.speech_kept == 1.0
    assert tally(hops(1_000, (100, 400)), hops(1_000, (100, 200), (229, 400))).segment_merge_accuracy == 1


def test_a_region_half_covered_did_not_come_back():
    figures = tally(hops(1_000, (100, 400)), hops(1_000, (100, 300)))
    assert figures.segment_merge_accuracy == 0
    assert figures.missed_speech == pytest.approx(80 / 300)


def test_nothing_returned_is_no_number():
    figures = tally(hops(100), hops(100))
    assert figures.false_trigger_rate is None
    assert figures.segment_merge_accuracy is None
    assert figures.speech_kept is None
    assert figures.noise_time_triggered == 0


def test_late_and_early():
    figures = tally(hops(1_000, (100, 400)), hops(1_000, (103, 402)))
    assert (figures.onset_error_ms.p50, figures.end_error_ms.p50) == (30, 20)
