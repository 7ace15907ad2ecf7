"""Beam search against WeNet's results and against plain Python, in any batch and any steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.lm import NgramLm
from agents.inference.decoding.prefix_beam import BeamOptions, GreedySearch, NBest, PrefixBeamSearch, token_times_ms
from agents.inference.decoding.units import UnitTable
from schemas.records import Hotword

WAVS = ("aishell", "librispeech")
SEEDS = st.integers(0, 2**32 - 1)


def posteriors(seed: int, frames: int, units: int, sharpness: float) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(frames, units))
    logits[:, 0] += sharpness * rng.random(frames)
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def one_shot(log_probs: NDArray[np.float32], options: BeamOptions | None = None, hotwords: Hotwords | None = None, lm: Any = None) -> NBest:
    search = PrefixBeamSearch(1, log_probs.shape[1], options, lm)
    search.open([0], hotwords)
    search.step([0], log_probs[None])
    return search.finish([0])[0]


def characters(count: int) -> UnitTable:
    return UnitTable(["<blank>", *(chr(0x4E00 + index) for index in range(1, count))])


def same(one: NBest, other: NBest) -> bool:
    """Whether two results are the same to the bit."""
    return len(one.hypotheses) == len(other.hypotheses) and all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.frames, b.frames)
        and np.array_equal(a.token_confidences, b.token_confidences)
        and (a.ctc_score, a.hotword_score, a.lm_score) == (b.ctc_score, b.hotword_score, b.lm_score)
        for a, b in zip(one.hypotheses, other.hypotheses, strict=True)
    )


@pytest.mark.parametrize("wav", WAVS)
def test_n_best_tokens_scores_and_times_are_wenets(vectors: Any, wav: str) -> None:
    result = one_shot(vectors.arrays[wav])
    expected = vectors.search["results"][wav]["ctc_prefix_beam_search"]["nbest"]
    assert [one.tokens.tolist() for one in result.hypotheses] == [one["tokens"] for one in expected]
    assert [one.frames.tolist() for one in result.hypotheses] == [one["times"] for one in expected]
    assert [one.score for one in result.hypotheses] == pytest.approx([one["score"] for one in expected], abs=1e-9)
    units = UnitTable.read(vectors.units_path)
    assert [units.text(one.tokens) for one in result.hypotheses] == [one["text"].replace("▁", " ").strip() for one in expected]


@pytest.mark.parametrize("wav", WAVS)
def test_greedy_search_is_wenets(vectors: Any, wav: str) -> None:
    log_probs = vectors.arrays[wav]
    search = GreedySearch(3)
    search.open([2])
    for start in range(0, len(log_probs), 7):
        search.step([2], log_probs[None, start : start + 7])
    (found,) = search.finish([2])
    expected = vectors.search["results"][wav]["ctc_greedy_search"]
    assert found.tokens.tolist() == expected["tokens"]
    assert found.frames.tolist() == expected["peak_frames"]
    assert found.ctc_score == pytest.approx(np.log(found.token_confidences).sum(), rel=1e-5)


@given(SEEDS, st.integers(1, 16), st.integers(2, 9), st.sampled_from([0.3, 1.5, 4.0]), st.integers(2, 7))
@settings(deadline=None)
def test_the_search_is_that_of_plain_python(plain: Any, seed: int, frames: int, units: int, sharpness: float, beam: int) -> None:
    log_probs = posteriors(seed, frames, units, sharpness)
    result = one_shot(log_probs, BeamOptions(beam=beam))
    expected = plain.search(log_probs, beam)
    assert [tuple(one.tokens.tolist()) for one in result.hypotheses] == [prefix for prefix, _, _ in expected]
    assert [tuple(one.frames.tolist()) for one in result.hypotheses] == [times for _, _, times in expected]
    assert [one.score for one in result.hypotheses] == pytest.approx([score for _, score, _ in expected], abs=1e-9)


ARPA_WORDS = {("<s>",): (-99.0, -0.2), ("</s>",): (-1.2, 0.0), ("<unk>",): (-2.5, 0.0)}


@given(SEEDS, st.integers(1, 12), st.sampled_from([6, 90]), st.sampled_from([1.5, 4.0]), st.sampled_from([0, 4, 200]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_hotwords_and_language_model_are_weighed_in_as_in_plain_python(
    plain: Any, tmp_path_factory: pytest.TempPathFactory, seed: int, frames: int, size: int, sharpness: float, phrases: int, with_lm: bool
) -> None:
    rng = np.random.default_rng(seed)
    units = characters(size)
    listed: dict[tuple[int, ...], float] = {}
    for _ in range(phrases):
        listed[tuple(rng.integers(1, size, rng.integers(1, 4)).tolist())] = float(rng.choice([-1.0, 0.5, 1.0, 2.5]))
    hotwords = Hotwords.compile([Hotword(phrase=units.text(tokens), boost=boost) for tokens, boost in listed.items()], units)
    lm, plain_lm = None, plain.Lm({}, 0.0, 0.0, 0.0)
    if with_lm:
        known = [units.units[unit] for unit in rng.choice(np.arange(1, size), size // 2, replace=False)]
        grams = ARPA_WORDS | {(word,): (-float(rng.uniform(0.5, 3)), -float(rng.uniform(0, 1))) for word in known}
        grams |= {("<s>", known[0]): (-0.3, 0.0), (known[0], known[1]): (-0.1, 0.0), (known[1], known[0]): (-0.2, 0.0)}
        plain_lm = plain.Lm(grams, 0.7, 0.4, -3.0)
        path = tmp_path_factory.mktemp("lm") / "bigram.arpa"
        path.write_text(arpa(grams), encoding="utf-8")
        lm = NgramLm.read(path, units, weight=0.7, word_bonus=0.4, oov_penalty=-3.0)
    log_probs = posteriors(seed, frames, size, sharpness)
    options = BeamOptions(beam=5)
    result = one_shot(log_probs, options, hotwords, lm)

    def words(prefix: tuple[int, ...]) -> list[str]:
        return [units.units[unit] for unit in prefix]

    def bonus(prefix: tuple[int, ...]) -> float:
        return sum(plain.hotwords(prefix, listed)) + (plain_lm.words(words(prefix)) if with_lm else 0.0)

    def final(prefix: tuple[int, ...]) -> float:
        return plain.hotwords(prefix, listed)[0] + (plain_lm.sentence(words(prefix)) if with_lm else 0.0)

    expected = plain.search(log_probs, 5, bonus=bonus, final=final)
    assert [one.score for one in result.hypotheses] == pytest.approx([score for _, score, _ in expected], abs=1e-6)
    # Equal scores may stand either way round.
    assert {tuple(one.tokens.tolist()) for one in result.hypotheses} == {prefix for prefix, _, _ in expected}
    for one in result.hypotheses:
        assert one.hotword_score == pytest.approx(plain.hotwords(tuple(one.tokens.tolist()), listed)[0], abs=1e-9)


def arpa(grams: dict[tuple[str, ...], tuple[float, float]]) -> str:
    orders = sorted({len(words) for words in grams})
    lines = ["\\data\\", *(f"ngram {order}={sum(len(words) == order for words in grams)}" for order in orders)]
    for order in orders:
        lines.append(f"\\{order}-grams:")
        lines += [f"{p!r}\t{' '.join(words)}\t{backoff!r}" for words, (p, backoff) in grams.items() if len(words) == order]
    return "\n".join([*lines, "\\end\\", ""])


@given(SEEDS, st.lists(st.integers(1, 30), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_result_depends_on_nothing_else_in_the_batch_and_on_no_cut(seed: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(seed)
    units = characters(12)
    lists = [
        None,
        Hotwords.compile([Hotword(phrase=units.text([1, 2, 3]), boost=2.0)], units),
        Hotwords.compile([Hotword(phrase=units.text([4, 5]), boost=1.0), Hotword(phrase=units.text([5, 6, 7]), boost=3.0)], units),
    ]
    segments = [posteriors(seed + index, length, 12, 2.0) for index, length in enumerate(lengths)]
    options = BeamOptions(beam=4, max_frames=30, blank_skip=0.9)
    search = PrefixBeamSearch(9, 12, options)
    slots = rng.permutation(9)[: len(segments)].tolist()
    for index, slot in enumerate(slots):
        search.open([slot], lists[index % 3])
    taken = [0] * len(segments)
    texts: list[list[bool]] = [[] for _ in segments]
    while any(count < length for count, length in zip(taken, lengths, strict=True)):
        chosen = rng.permutation(len(segments))[: rng.integers(1, len(segments) + 1)].tolist()
        counts = [int(rng.integers(0, min(7, lengths[index] - taken[index]) + 1)) for index in chosen]
        # What stands after a row's length must not matter.
        batch = np.full((len(chosen), 7, 12), np.nan, np.float32)
        for row, (index, count) in enumerate(zip(chosen, counts, strict=True)):
            batch[row, :count] = segments[index][taken[index] : taken[index] + count]
        has_text = search.step([slots[index] for index in chosen], batch, counts)
        for row, (index, count) in enumerate(zip(chosen, counts, strict=True)):
            texts[index] += has_text[row, :count].tolist()
            assert not has_text[row, count:].any()
            taken[index] += count
    for index, slot in enumerate(slots):
        (result,) = search.finish([slot])
        alone = one_shot(segments[index], options, lists[index % 3])
        assert same(result, alone)
        assert (result.frames, result.skipped_frames) == (alone.frames, alone.skipped_frames) == (lengths[index], result.skipped_frames)
        whole = PrefixBeamSearch(1, 12, options)
        whole.open([0], lists[index % 3])
        assert texts[index] == whole.step([0], segments[index][None])[0].tolist()


def test_partials_are_the_best_prefix_and_what_is_stable_stays(vectors: Any) -> None:
    log_probs = vectors.arrays["librispeech"]
    search = PrefixBeamSearch(1, log_probs.shape[1])
    search.open([0])
    stable: list[int] = []
    for start in range(0, len(log_probs), 5):
        has_text = search.step([0], log_probs[None, start : start + 5])
        (partial,) = search.partials([0])
        (result,) = search.finish([0])
        assert partial.tokens.tolist() == result.best.tokens.tolist()
        assert has_text[0, -1] == bool(len(partial.tokens))
        assert partial.tokens[: partial.stable].tolist()[: len(stable)] == stable
        assert all(one.tokens[: partial.stable].tolist() == partial.tokens[: partial.stable].tolist() for one in result.hypotheses)
        stable = partial.tokens[: partial.stable].tolist()
    # Not all is open until the end: that is what the partial is for.
    assert len(stable) > len(result.best.tokens) // 2
    expected = vectors.search["results"]["librispeech"]["ctc_prefix_beam_search"]["nbest"][0]
    assert stable == expected["tokens"][: len(stable)]


def test_best_tokens_may_come_selected(vectors: Any) -> None:
    log_probs = vectors.arrays["aishell"][None]
    ids = np.argsort(-log_probs, axis=2, kind="stable")[..., :10]
    search = PrefixBeamSearch(2, log_probs.shape[2], BeamOptions(blank_skip=0.999))
    search.open([0, 1])
    search.step([0], log_probs)
    search.step_top([1], np.take_along_axis(log_probs, ids, axis=2), ids)
    whole, selected = search.finish([0, 1])
    assert same(whole, selected)
    assert whole.skipped_frames == selected.skipped_frames > 0


@given(SEEDS, st.integers(1, 6), st.floats(0.2, 0.9))
@settings(max_examples=60, deadline=None)
def test_skipping_leaves_out_no_more_probability_than_it_says(seed: int, frames: int, threshold: float) -> None:
    log_probs = posteriors(seed, frames, 3, 2.0)
    exact: dict[tuple[int, ...], float] = {}
    for alignment in itertools.product(range(3), repeat=frames):
        prefix = tuple(unit for unit, _ in itertools.groupby(alignment) if unit)
        exact[prefix] = exact.get(prefix, 0.0) + math.exp(sum(float(log_probs[frame, unit]) for frame, unit in enumerate(alignment)))
    # A beam that holds every prefix there is, so that nothing else is left out.
    result = one_shot(log_probs, BeamOptions(beam=len(exact) + 1, blank_skip=threshold))
    assert result.skipped_frames == (log_probs[:, 0] >= math.log(threshold)).sum()
    left_out = 1.0
    for one in result.hypotheses:
        probability = math.exp(one.ctc_score)
        assert probability <= exact[tuple(one.tokens.tolist())] + 1e-7
        left_out -= probability
    assert left_out <= result.skipped_mass + 1e-6
    assert result.skipped_mass <= result.skipped_frames * (1 - threshold) + 1e-6


@pytest.mark.parametrize("wav", WAVS)
def test_skipping_sure_blanks_changes_no_hypothesis_of_wenets(vectors: Any, wav: str) -> None:
    log_probs = vectors.arrays[wav]
    exact = one_shot(log_probs)
    result = one_shot(log_probs, BeamOptions(blank_skip=0.9999))
    assert [one.tokens.tolist() for one in result.hypotheses] == [one.tokens.tolist() for one in exact.hypotheses]
    assert [one.frames.tolist() for one in result.hypotheses] == [one.frames.tolist() for one in exact.hypotheses]
    assert [one.score for one in result.hypotheses] == pytest.approx([one.score for one in exact.hypotheses], abs=1e-3)
    assert exact.skipped_frames == 0


def test_doubled_tokens_survive_skipping() -> None:
    log_probs = np.log(np.array([[0.01, 0.98, 0.01], [0.9998, 0.0001, 0.0001], [0.01, 0.98, 0.01]], np.float32))
    result = one_shot(log_probs, BeamOptions(blank_skip=0.999))
    assert result.skipped_frames == 1
    assert result.best.tokens.tolist() == [1, 1]


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_exchanged_hotwords_act_as_if_they_had_always_been(seed: int) -> None:
    units = characters(8)
    old = Hotwords.compile([Hotword(phrase=units.text([1, 2]), boost=3.0)], units)
    new = Hotwords.compile([Hotword(phrase=units.text([3, 4, 5]), boost=2.0)], units)
    log_probs = posteriors(seed, 20, 8, 1.0)
    search = PrefixBeamSearch(3, 8, BeamOptions(beam=4))
    search.open([0, 1, 2], old)
    search.step([0, 1, 2], np.stack([log_probs[:11]] * 3))
    search.swap([1], new)
    search.swap([2], None)
    assert [search.hotwords(slot) for slot in range(3)] == [old, new, None]
    search.step([0, 1, 2], np.stack([log_probs[11:]] * 3))
    for result, hotwords in zip(search.finish([0, 1, 2]), [old, new, None], strict=True):
        assert same(result, one_shot(log_probs, BeamOptions(beam=4), hotwords))


def test_a_hotword_makes_a_near_miss_come_out_right_and_no_tail_is_left_in_the_score() -> None:
    units = UnitTable(["<blank>", "a", "b", "c"])
    # "ac" is likelier than "ab"; the last frames may begin another "ab".
    probabilities = np.array([[0.01, 0.97, 0.01, 0.01], [0.02, 0.01, 0.37, 0.6], [0.4, 0.58, 0.01, 0.01]], np.float32)
    log_probs = np.log(probabilities)
    hotwords = Hotwords.compile([Hotword(phrase="ab", boost=3.0)], units)
    assert units.text(one_shot(log_probs).best.tokens).startswith("ac")
    result = one_shot(log_probs, hotwords=hotwords)
    assert units.text(result.best.tokens) == "aba"
    scores = {units.text(one.tokens): one for one in result.hypotheses}
    plain = {units.text(one.tokens): one for one in one_shot(log_probs).hypotheses}
    assert scores["aba"].score == pytest.approx(plain["aba"].score + 6.0)
    assert scores["ac"].score == pytest.approx(plain["ac"].score)
    assert [one.score for one in result.hypotheses] == sorted((one.score for one in result.hypotheses), reverse=True)


def test_confidences_are_probabilities_and_a_token_is_as_sure_as_its_surest_frame() -> None:
    log_probs = np.log(np.array([[0.1, 0.8, 0.1], [0.05, 0.9, 0.05], [0.9, 0.05, 0.05], [0.2, 0.1, 0.7]], np.float32))
    best = one_shot(log_probs).best
    assert best.tokens.tolist() == [1, 2]
    assert best.frames.tolist() == [1, 3]
    assert best.token_confidences.tolist() == pytest.approx([0.9, 0.7])
    assert best.confidence == pytest.approx(math.exp(best.ctc_score / 3))


def test_the_longest_segment_of_the_least_sure_model_fits() -> None:
    log_probs = np.stack([posteriors(seed, 500, 60, 0.05) for seed in range(2)])
    search = PrefixBeamSearch(2, 60)
    search.open([0, 1])
    search.step([0, 1], log_probs)
    for result in search.finish([0, 1]):
        assert result.frames == 500
        assert len(result.hypotheses) == 10
        assert all((np.diff(one.frames) > 0).all() for one in result.hypotheses)
    with pytest.raises(ValueError, match="slot 1 would hold 501 frames of at most 500"):
        search.step([1], log_probs[:1, :1])


def test_mistakes_are_named() -> None:
    search = PrefixBeamSearch(4, 8).compile()
    frame = posteriors(0, 1, 8, 1.0)[None]
    with pytest.raises(ValueError, match="slot 2 is not open"):
        search.step([2], frame)
    search.open([0, 2])
    with pytest.raises(ValueError, match="slots must be different"):
        search.step([0, 0], np.concatenate([frame, frame]))
    with pytest.raises(ValueError, match="slots count from 0 to 3"):
        search.open([4])
    with pytest.raises(ValueError, match=r"shape \(1, frames, 8\), not \(1, 1, 7\)"):
        search.step([0], frame[..., 1:])
    with pytest.raises(ValueError, match="lengths must be 1 numbers from 0 to 1"):
        search.step([0], frame, [2])
    for nothing in (np.full_like(frame, np.nan), np.full_like(frame, -np.inf), frame + 5):
        with pytest.raises(ValueError, match="slot 0 was given a frame that holds no log-probabilities"):
            search.step([0], nothing)
    with pytest.raises(ValueError, match="compiled for 9 units, not 8"):
        search.open([1], Hotwords.none(9))
    with pytest.raises(ValueError, match="token ids must be below 8"):
        search.step_top([0], np.full((1, 1, 10), -1.0), np.full((1, 1, 10), 8))
    with pytest.raises(ValueError, match=r"shape \(1, frames, 10\)"):
        search.step_top([0], np.full((1, 1, 3), -1.0), np.full((1, 1, 3), 1))
    search.close([2, 3])
    with pytest.raises(ValueError, match="slot 2 is not open"):
        search.finish([2])
    with pytest.raises(ValueError, match="the blank is unit 9"):
        PrefixBeamSearch(1, 8, BeamOptions(blank=9))
    with pytest.raises(ValueError, match="beam must be at least 2"):
        BeamOptions(beam=1)


def test_a_segment_without_frames_says_nothing() -> None:
    search = PrefixBeamSearch(1, 8)
    search.open([0])
    (result,) = search.finish([0])
    assert (result.best.tokens.tolist(), result.best.score, result.best.confidence, result.frames) == ([], 0.0, 1.0, 0)
    assert search.partials([0])[0].tokens.tolist() == []
    assert search.step([], np.empty((0, 5, 8), np.float32)).shape == (0, 5)
    assert search.finish([]) == []


@pytest.mark.parametrize(
    ("frames", "starts", "ends"),
    [
        ([], [], []),
        ([0], [0], [0]),
        ([2], [0], [80]),
        ([3, 4, 10], [20, 120, 300], [120, 160, 400]),
        # 80 ms apart meet on the frame between; 120 ms apart do not meet.
        ([10, 12, 15], [300, 440, 500], [440, 480, 600]),
    ],
)
def test_token_times(frames: list[int], starts: list[int], ends: list[int]) -> None:
    found = token_times_ms(frames, 40, 1_000)
    assert (found[0].tolist(), found[1].tolist()) == ([1_000 + start for start in starts], [1_000 + end for end in ends])
