"""Endpoint rules in finals: a segment that no detector ended is cut where speech ends, the same way whatever happens around it."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.features.fbank import Fbank
from agents.inference.conformer.engine import ConformerEngine, ConformerOptions
from agents.inference.engine import Block, FinalText, Finish, Opening, SegmentKey
from agents.inference.models import wenet_directory
from ops.bench.finals import WAYS, _go, _Tally, canonical
from ops.demo.calls import Party, callers, read_clip
from schemas.records import SAMPLE_RATE_HZ
from streams.settings import load_settings

CHUNK_SAMPLES, LOOKAHEAD_SAMPLES, HOP_SAMPLES = 3_200, 240, 160
#: Longer than the second of silence that ends an utterance, and shorter.
LONG_S, SHORT_S = 1.8, 0.4


@pytest.fixture(scope="module")
def engine() -> ConformerEngine:
    return ConformerEngine(wenet_directory(None), ConformerOptions(device="cpu", slots=16, finals_lanes=2, endpoints=True))


def silence(seconds: float) -> np.ndarray:
    """Return what a quiet line sounds like: digital silence is nothing that a model is trained on."""
    samples = round(seconds * SAMPLE_RATE_HZ)
    return np.random.default_rng(samples).normal(0, 4, samples).astype(np.int16)


def trimmed(samples: np.ndarray) -> np.ndarray:
    """Return a recording without the quiet before and after the speech."""
    loud = np.flatnonzero(np.abs(samples) > 0.05 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]


@pytest.fixture(scope="module")
def orders() -> list[np.ndarray]:
    return [trimmed(read_clip(clip.file)) for clip in callers() if clip.file.startswith("order_")][:4]


@pytest.fixture(scope="module")
def audio(orders: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Segments: two orders far apart, two close together, one only, none."""
    one, two, three, four = orders
    return {
        "apart": np.concatenate((silence(0.5), one, silence(LONG_S), two, silence(LONG_S))),
        "close": np.concatenate((silence(0.5), three, silence(SHORT_S), four)),
        "late": np.concatenate((silence(7.0), one, silence(0.3))),
        "none": silence(12.0),
    }


def blocks_of(session: str, samples: np.ndarray) -> list[Block]:
    starts = range(0, len(samples), CHUNK_SAMPLES)
    features = Fbank()([samples[start : start + CHUNK_SAMPLES + LOOKAHEAD_SAMPLES].tobytes() for start in starts])
    return [
        Block(
            key=SegmentKey(session, 0),
            chunk=number,
            hops=-(-min(CHUNK_SAMPLES, len(samples) - start) // HOP_SAMPLES),
            features=each.astype("<f4").tobytes(),
        )
        for number, (start, each) in enumerate(zip(starts, features, strict=True))
    ]


def end(engine: ConformerEngine, audio: dict[str, np.ndarray], *sessions: str) -> dict[str, FinalText]:
    requests = [Finish(key=SegmentKey(session, 0), end_sample=1_600 + len(audio[session])) for session in sessions]
    finals = engine.finish(requests)
    engine.close([request.key for request in requests])
    return dict(zip(sessions, finals, strict=True))


@pytest.fixture(scope="module")
def blocks(audio: dict[str, np.ndarray]) -> dict[str, list[Block]]:
    return {session: blocks_of(session, samples) for session, samples in audio.items()}


def begin(engine: ConformerEngine, *sessions: str) -> None:
    engine.open([Opening(key=SegmentKey(session, 0), start_sample=1_600) for session in sessions])


@pytest.fixture(scope="module")
def expected(engine: ConformerEngine, audio: dict[str, np.ndarray], blocks: dict[str, list[Block]]) -> dict[str, FinalText]:
    found = {}
    for session, some in blocks.items():
        begin(engine, session)
        for block in some:
            engine.step([block])
        found |= end(engine, audio, session)
    return found


def test_an_utterance_ends_a_second_after_its_last_word(
    expected: dict[str, FinalText], audio: dict[str, np.ndarray], orders: list[np.ndarray]
) -> None:
    first, second = expected["apart"].utterances
    assert first.text != second.text
    assert len(first.words) > 1 < len(second.words)
    assert (first.start_sample, second.start_sample) == (1_600, first.end_sample)
    assert (first.end_sample - 1_600) % CHUNK_SAMPLES == 0, "rules are looked at after whole blocks"
    silent_from = 1_600 + len(silence(0.5)) + len(orders[0])
    assert silent_from + 0.6 * SAMPLE_RATE_HZ < first.end_sample < silent_from + LONG_S * SAMPLE_RATE_HZ
    assert second.end_sample <= 1_600 + len(audio["apart"])
    for utterance in (first, second):
        assert all(utterance.start_sample <= 16 * word.start_ms <= 16 * word.end_ms <= utterance.end_sample for word in utterance.words)


def test_the_segment_says_what_its_utterances_say(expected: dict[str, FinalText]) -> None:
    for final in expected.values():
        assert final.text == " ".join(each.text for each in final.utterances)
        assert final.words == tuple(word for each in final.utterances for word in each.words)


def test_a_short_pause_ends_nothing(expected: dict[str, FinalText]) -> None:
    assert len(expected["close"].utterances) == 1


def test_silence_makes_no_utterance(expected: dict[str, FinalText]) -> None:
    assert expected["none"].utterances == ()
    assert expected["none"].text == ""
    (late,) = expected["late"].utterances
    assert late.start_sample == 1_600 + 5 * SAMPLE_RATE_HZ, "five seconds without a word end an utterance that says nothing"


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_utterances_depend_on_nothing_but_the_segment(
    engine: ConformerEngine, audio: dict[str, np.ndarray], blocks: dict[str, list[Block]], expected: dict[str, FinalText], seed: int
) -> None:
    """In any company, in any order, with any number of blocks to a step."""
    choose = random.Random(seed)
    sessions = choose.sample(sorted(blocks), choose.randint(1, len(blocks)))
    begin(engine, *sessions)
    left = {session: list(blocks[session]) for session in sessions}
    while left:
        step: list[Block] = []
        for session in choose.sample(sorted(left), choose.randint(1, len(left))):
            count = choose.choice((1, 3, 20, 60))
            step += left[session][:count]
            left[session] = left[session][count:]
            if not left[session]:
                del left[session]
        engine.step(step)
    assert end(engine, audio, *sessions) == {session: expected[session] for session in sessions}


def test_all_stages_agree_on_the_utterances_of_a_call(engine: ConformerEngine, orders: list[np.ndarray]) -> None:
    """Without a detector, however the audio is cut into frames, and whatever restarts."""
    pieces = [part for order in orders for part in (order, silence(LONG_S))]
    pcm = np.concatenate((silence(0.5), *pieces, orders[0]))
    assert len(pcm) > 20 * SAMPLE_RATE_HZ, "more than one segment"
    party = Party("customer", "v", pcm, (), "pcm_s16le", SAMPLE_RATE_HZ)
    parties = [party, replace(party, pcm=pcm[8_000:])]
    settings_off = load_settings(engine="conformer", vad="off")
    found = []
    for way in WAYS:
        tally = _Tally()
        finals = asyncio.run(_go(way, parties, engine, settings_off, tally, 3))
        assert not tally.differing
        found.append({key: canonical(final) for key, final in finals.items()})
    assert found[0] == found[1]
    of_first = [final for (session, _), final in sorted(found[0].items()) if session == "call-0"]
    assert len(of_first) >= len(orders)
    assert len({final[0] for final in of_first}) == len(of_first), "each has a number of its own"
    assert all(one[2] <= other[1] for one, other in itertools.pairwise(of_first)), "one after the other"
