import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.vad.detectors import Channel, Detectors, Thresholds
from agents.vad.front import Front
from streams.settings import load_settings

ALL = ["fusion", "traditional", "tiny", "silero", "off"]
USUAL = Thresholds(0.85, 0.5, 0.0)
HOP = 160


def detectors(vad):
    return Detectors(load_settings(vad=vad))


def fronts(count, speech):
    made = [Front(0, denoise=True, lookback_samples=160) for _ in range(count)]
    return made, speech.astype(np.float32)[:64_000] / 32_768


@pytest.mark.parametrize("vad", ALL)
def test_every_hop_is_decided_once_in_order_whatever_the_pieces_and_the_company(vad, speech):
    ours = detectors(vad)
    (whole, *parts), samples = fronts(4, speech)
    alone = ours.start(0)
    whole.push(samples, 16_000)
    (expected,) = ours.decide([Channel(alone, whole.heard, USUAL)])
    assert len(expected) == ours.decidable_hops(whole.heard.end) == alone.next_hop

    listeners = [ours.start(0) for _ in parts]
    decided = [[], [], []]
    rng = np.random.default_rng(1)
    places = [0, 0, 0]
    while min(places) < len(samples):
        for row, part in enumerate(parts):
            size = int(rng.integers(0, 5_000))
            part.push(samples[places[row] : places[row] + size], 16_000)
            places[row] = min(len(samples), places[row] + size)
        for row, mine in enumerate(
            ours.decide([Channel(*each, USUAL) for each in zip(listeners, [part.heard for part in parts], strict=True)])
        ):
            decided[row].append(mine)
            parts[row].heard.forget(ours.needed_from_sample(listeners[row]))
    for listener, mine in zip(listeners, decided, strict=True):
        assert np.array_equal(np.concatenate(mine), expected)
        assert (listener.next_hop, listener.next_heard, listener.next_window) == (alone.next_hop, alone.next_heard, alone.next_window)
        assert np.array_equal(listener.opinions, alone.opinions)
        assert np.array_equal(listener.neural, alone.neural)
        assert np.array_equal(listener.traditional, alone.traditional)


@pytest.mark.parametrize("vad", ALL)
def test_what_is_needed_to_decide_up_to_a_sample_is_enough(vad):
    ours = detectors(vad)
    for end in range(0, 4_000, 37):
        assert ours.decidable_hops(ours.needed_samples(end)) * HOP >= end


def test_nothing_to_hear_is_nothing_to_decide(speech):
    ours = detectors("fusion")
    front = Front(0, denoise=False, lookback_samples=ours.lookback_samples)
    listener = ours.start(0)
    assert ours.decide([]) == []
    assert [len(mine) for mine in ours.decide([Channel(listener, front.heard, USUAL)])] == [0]
    front.push(speech[:300].astype(np.float32) / 32_768, 16_000)
    assert [len(mine) for mine in ours.decide([Channel(listener, front.heard, USUAL)])] == [0]


def test_a_listener_of_other_detectors_is_replaced_where_it_stands():
    listener = detectors("traditional").start(12_800)
    adopted = detectors("fusion").adopt(listener)
    assert adopted is not listener
    assert (adopted.next_hop, adopted.next_heard) == (80, 80)
    assert detectors("traditional").adopt(listener) is listener


def test_without_detectors_all_is_speech(speech):
    ours = detectors("off")
    front = Front(0, denoise=False)
    front.push(speech[:1_700].astype(np.float32) / 32_768, 16_000)
    (decided,) = ours.decide([Channel(ours.start(0), front.heard, USUAL)])
    assert decided.tolist() == [True] * 10


def test_a_trained_detector_can_be_put_in_the_place_of_silero(speech):
    class Loud:
        window_samples = 160
        context_samples = 0
        state_size = 1

        def __call__(self, windows, states):
            return (np.abs(windows).max(axis=1) > 0.1).astype(np.float32), states + 1

    ours = Detectors(load_settings(vad="silero"), Loud())
    front = Front(0, denoise=False, lookback_samples=ours.lookback_samples)
    front.push(speech[:48_000].astype(np.float32) / 32_768, 16_000)
    listener = ours.start(0)
    (decided,) = ours.decide([Channel(listener, front.heard, USUAL)])
    loud = np.abs(speech[:48_000].reshape(-1, 160).astype(np.float32) / 32_768).max(axis=1) > 0.1
    assert np.array_equal(decided, loud)
    assert listener.neural.tolist() == [300]


@settings(max_examples=20, deadline=None)
@given(vad=st.sampled_from(["fusion", "tiny", "traditional"]), pieces=st.lists(st.integers(1, 9_000), min_size=1, max_size=12))
def test_the_streaming_form_is_the_offline_form(vad, pieces, speech):
    ours = detectors(vad)
    (whole, streamed), samples = fronts(2, speech)
    whole.push(samples, 16_000)
    (expected,) = ours.decide([Channel(ours.start(0), whole.heard, USUAL)])
    listener, decided, begin = ours.start(0), [], 0
    while begin < len(samples):
        size = pieces[len(decided) % len(pieces)]
        streamed.push(samples[begin : begin + size], 16_000)
        decided += ours.decide([Channel(listener, streamed.heard, USUAL)])
        streamed.heard.forget(ours.needed_from_sample(listener))
        begin += size
    assert np.array_equal(np.concatenate(decided), expected)


def test_thresholds_are_each_channels_own(speech):
    ours = detectors("fusion")
    made, samples = fronts(3, speech)
    for front in made:
        front.push(samples, 16_000)
    strict, usual, lax = Thresholds(1.0, 0.5, 20.0), USUAL, Thresholds(0.5, 0.01, 0.0)
    shares = [
        mine.mean() for mine in ours.decide([Channel(ours.start(0), f.heard, t) for f, t in zip(made, (strict, usual, lax), strict=True)])
    ]
    assert shares[0] < shares[1] < shares[2]
