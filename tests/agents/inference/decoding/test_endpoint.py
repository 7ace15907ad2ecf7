"""Endpoint rules at their boundaries, and in any steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.inference.decoding.endpoint import RULES, Endpoint, EndpointRule


def log_probs(*parts: tuple[int, float]) -> np.ndarray:
    """Frames and the probability of their blank."""
    return np.log(np.concatenate([np.full(frames, probability) for frames, probability in parts]))[None]


def first_end(blank: np.ndarray, has_text: bool | np.ndarray, step: int = 5) -> tuple[int, int]:
    """The frame and the rule of the first endpoint, fed in steps; (0, 0) if there is none."""
    endpoint = Endpoint(1)
    text = np.broadcast_to(np.asarray(has_text), blank.shape)
    for start in range(0, blank.shape[1], step):
        found = endpoint.step([0], blank[:, start : start + step], text[:, start : start + step])
        if found.rules[0]:
            return start + int(found.frames[0]), int(found.rules[0])
    return 0, 0


@pytest.mark.parametrize(
    ("blank", "has_text", "expected"),
    [
        # Rule 1: 5 s are 125 frames.
        (log_probs((130, 0.9)), False, (125, 1)),
        (log_probs((124, 0.9), (5, 0.1)), False, (0, 0)),
        # Rule 2: 1 s is 25 frames, and it needs text.
        (log_probs((10, 0.1), (30, 0.9)), True, (35, 2)),
        (log_probs((10, 0.1), (24, 0.9), (6, 0.1)), True, (0, 0)),
        (log_probs((10, 0.1), (60, 0.9)), False, (0, 0)),
        # Looked at after whole blocks only: silence of 25 frames from frame 3 is seen at 30.
        (log_probs((3, 0.1), (30, 0.9)), True, (30, 2)),
        # One frame that is not silent begins anew.
        (log_probs((20, 0.9), (1, 0.1), (29, 0.9)), True, (50, 2)),
        # Rule 3: 20 s are 500 frames.
        (log_probs((510, 0.1)), True, (500, 3)),
        (log_probs((499, 0.1)), True, (0, 0)),
        # 0.8 itself is not silent.
        (log_probs((130, 0.8)), True, (0, 0)),
        (log_probs((130, 0.801)), True, (25, 2)),
        # Of several rules the first is named.
        (log_probs((375, 0.1), (125, 0.9)), False, (500, 1)),
    ],
)
def test_rules_at_their_boundaries(blank: np.ndarray, has_text: bool, expected: tuple[int, int]) -> None:
    assert first_end(blank, has_text) == expected
    assert first_end(blank, has_text, step=blank.shape[1]) == expected


def test_text_counts_from_when_it_is_there() -> None:
    blank = log_probs((50, 0.9))
    assert first_end(blank, np.arange(50)[None] >= 32) == (35, 2)


def test_sessions_are_apart_and_begin_anew_when_opened() -> None:
    endpoint = Endpoint(4)
    text = np.ones((2, 20), bool)
    silent, spoken = log_probs((20, 0.9)), log_probs((20, 0.1))
    assert endpoint.step([3, 1], np.concatenate([silent, spoken]), text).rules.tolist() == [0, 0]
    found = endpoint.step([3, 1], np.concatenate([silent, silent]), text)
    assert (found.frames.tolist(), found.rules.tolist()) == ([5, 0], [2, 0])
    endpoint.open([3])
    found = endpoint.step([1, 3], np.concatenate([silent, silent]), text)
    assert (found.frames.tolist(), found.rules.tolist()) == ([5, 0], [2, 0])
    assert endpoint.step([3], np.empty((1, 0)), np.empty((1, 0), bool)).rules.tolist() == [0]


def test_rules_of_ones_own() -> None:
    endpoint = Endpoint(1, frame_ms=20, block_frames=1, rules=(EndpointRule(False, 50, 100),), blank_threshold=0.5)
    found = endpoint.step([0], log_probs((9, 0.6)), np.zeros((1, 9), bool))
    assert (found.frames[0], found.rules[0]) == (5, 1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_steps_do_not_matter_and_the_rules_are_those_of_a_loop(seed: int, sessions: int) -> None:
    rng = np.random.default_rng(seed)
    frames = 150
    # Long runs, or nothing would ever end.
    spoken = np.cumsum(rng.random((sessions, frames)) < 0.04, axis=1) % 2 == 1
    blank = np.where(spoken, np.log(0.5), np.log(0.95))
    text = np.cumsum(spoken, axis=1) > 3
    rules = (EndpointRule(False, 1_600, 0), EndpointRule(True, 400, 0), EndpointRule(False, 0, 4_000))
    expected = []
    for session in range(sessions):
        silent, found = 0, (0, 0)
        for frame in range(frames):
            silent = silent + 1 if blank[session, frame] > np.log(0.8) else 0
            holds = [
                (text[session, frame] or not r.needs_text) and silent * 40 >= r.silence_ms and (frame + 1) * 40 >= r.length_ms
                for r in rules
            ]
            if (frame + 1) % 5 == 0 and any(holds) and not found[0]:
                found = (frame + 1, holds.index(True) + 1)
        expected.append(found)

    endpoint = Endpoint(sessions, rules=rules)
    taken = np.zeros(sessions, int)
    ends = [(0, 0)] * sessions
    while (taken < frames).any():
        chosen = rng.permutation(sessions)[: rng.integers(1, sessions + 1)]
        counts = np.minimum(rng.integers(0, 30, len(chosen)), frames - taken[chosen])
        batch, has_text = np.zeros((len(chosen), 30)), np.ones((len(chosen), 30), bool)
        for row, (session, count) in enumerate(zip(chosen, counts, strict=True)):
            batch[row, :count] = blank[session, taken[session] : taken[session] + count]
            has_text[row, :count] = text[session, taken[session] : taken[session] + count]
        found = endpoint.step(chosen, batch, has_text, counts)
        for session, frame, rule in zip(chosen, found.frames, found.rules, strict=True):
            if rule and not ends[session][0]:
                ends[session] = (int(taken[session] + frame), int(rule))
        taken[chosen] += counts
    assert ends == expected


def test_the_defaults_are_wenets() -> None:
    assert [(rule.needs_text, rule.silence_ms, rule.length_ms) for rule in RULES] == [
        (False, 5_000, 0),
        (True, 1_000, 0),
        (False, 0, 20_000),
    ]
