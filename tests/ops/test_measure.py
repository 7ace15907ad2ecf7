from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.measure import Measurement, SpokenWord, latency_of, word_errors
from schemas.records import SAMPLE_RATE_HZ, Coverage, Partial, Session, StageName, Stamps, Transcript

FRAME = 3_200
#: When the first sample of every session below is captured.
BEGIN_US = 1_700_000_000_000_000


def captured_us(sample: int) -> int:
    return BEGIN_US + sample * 1_000_000 // SAMPLE_RATE_HZ


def coverage(frame: int, *, stage: StageName = "vad", epoch: int = 1, vad_us: int = 0, session: str = "s") -> Coverage:
    end = (frame + 1) * FRAME
    return Coverage(
        channel_id="1",
        session_id=session,
        conversation_id="c",
        epoch=epoch,
        position_samples=frame * FRAME,
        stamps=Stamps(captured_us=captured_us(end), enqueued_us=captured_us(end) + 2_000, vad_us=vad_us and captured_us(end) + vad_us),
        end_sample=end,
        decoded_to_sample=end,
        stage=stage,
    )


def answer(measured: Measurement, record: Coverage, after_ms: float = 50) -> None:
    measured.take(record, record.stamps.captured_us + round(after_ms * 1_000))


def partial(text: str, end_sample: int, segment: int = 0, start_sample: int = 0) -> Partial:
    return Partial(
        channel_id="1",
        session_id="s",
        conversation_id="c",
        position_samples=start_sample,
        segment=segment,
        text=text,
        end_sample=end_sample,
    )


def final(text: str, end_sample: int, segment: int = 0, start_sample: int = 0) -> Transcript:
    return Transcript(
        channel_id="1",
        session_id="s",
        conversation_id="c",
        position_samples=start_sample,
        segment=segment,
        kind="final",
        end_sample=end_sample,
        text=text,
        raw_text=text,
        confidence=1.0,
        engine="whisper",
        model_digest="d1",
        covered_to_sample=end_sample,
    )


def session(state: str) -> Session:
    return Session(
        channel_id="1",
        session_id="s",
        conversation_id="c",
        position_samples=0,
        state=state,  # type: ignore[arg-type]
        started_us=BEGIN_US,
        covered_to_sample=0,
        decoded_to_sample=0,
        segments=0,
        finals=0,
        cancelled=0,
        words=0,
        gaps=0,
        gap_samples=0,
    )


def started(frames: int, words: tuple[SpokenWord, ...] = ()) -> Measurement:
    measured = Measurement()
    measured.expect("s", "1", words)
    for frame in range(frames):
        measured.sent("s", frame * FRAME, (frame + 1) * FRAME)
    return measured


class TestFrames:
    def test_each_frame_answered_once(self) -> None:
        measured = started(3)
        for frame in range(3):
            answer(measured, coverage(frame), after_ms=40 + 10 * frame)
        report = measured.report()
        assert (report.frames_sent, report.frames_answered, report.frames_lost, report.frames_duplicated) == (3, 3, 0, 0)
        assert report.frame_latency_ms.p50 == 50
        assert report.frame_latency_ms.max == 60
        assert report.frames_within_300_ms == 1.0
        assert report.seconds == 0.6

    def test_an_unanswered_frame_is_lost(self) -> None:
        measured = started(3)
        answer(measured, coverage(0))
        answer(measured, coverage(2))
        assert measured.report().frames_lost == 1

    def test_what_was_lost_is_told_as_stretches(self) -> None:
        measured = started(6)
        answer(measured, coverage(0))
        answer(measured, coverage(3))
        assert [(span.start_sample, span.end_sample) for span in measured.lost()] == [(FRAME, 3 * FRAME), (4 * FRAME, 6 * FRAME)]
        assert {(span.channel_id, span.session_id) for span in measured.lost()} == {("1", "s")}

    def test_nothing_answered_is_all_lost(self) -> None:
        report = started(2).report()
        assert (report.frames_lost, report.frame_latency_ms.p50, report.frames_within_300_ms) == (2, None, None)

    def test_the_same_owner_again_is_a_duplicate(self) -> None:
        measured = started(1)
        answer(measured, coverage(0), after_ms=50)
        answer(measured, coverage(0), after_ms=900)
        report = measured.report()
        assert (report.frames_answered, report.frames_duplicated, report.frames_replayed) == (1, 1, 0)
        assert report.frame_latency_ms.max == 50, "the first answer counts"

    def test_two_stages_for_one_frame_are_a_duplicate(self) -> None:
        measured = started(1)
        answer(measured, coverage(0, stage="vad", epoch=4))
        answer(measured, coverage(0, stage="inference", epoch=1))
        report = measured.report()
        assert (report.frames_duplicated, report.frames_replayed, report.answers_fenced) == (1, 0, 0)

    def test_a_later_owner_again_is_a_replay(self) -> None:
        measured = started(2)
        answer(measured, coverage(0, epoch=1))
        answer(measured, coverage(0, epoch=2))
        answer(measured, coverage(1, epoch=2))
        report = measured.report()
        assert (report.frames_answered, report.frames_duplicated, report.frames_replayed) == (2, 0, 1)

    def test_an_overtaken_owner_answers_nothing(self) -> None:
        measured = started(2)
        answer(measured, coverage(0, epoch=2))
        answer(measured, coverage(1, epoch=1))
        report = measured.report()
        assert (report.frames_answered, report.frames_lost, report.answers_fenced) == (1, 1, 1)

    def test_each_stage_has_its_own_owners(self) -> None:
        measured = started(2)
        answer(measured, coverage(0, stage="vad", epoch=7))
        answer(measured, coverage(1, stage="inference", epoch=1))
        assert measured.report().frames_lost == 0

    def test_an_answer_to_another_span_answers_nothing(self) -> None:
        measured = started(1)
        answer(measured, coverage(5))
        report = measured.report()
        assert (report.frames_lost, report.frames_unknown) == (1, 1)

    def test_sessions_not_announced_are_not_measured(self) -> None:
        measured = started(1)
        answer(measured, coverage(0, session="of somebody else"))
        report = measured.report()
        assert (report.sessions, report.frames_unknown, report.frames_lost) == (1, 0, 1)

    def test_hops_add_up_and_skip_stages_that_silence_never_meets(self) -> None:
        measured = started(1)
        answer(measured, coverage(0, vad_us=12_000), after_ms=20)
        hops = measured.report().hop_latency_ms
        assert {name: hop.p50 for name, hop in hops.items()} == {"recorder": 2, "vad": 10, "features": None, "inference": None, "reader": 8}

    @given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["vad", "inference"]), st.integers(1, 3)), max_size=60))
    def test_agrees_with_the_rules_taken_literally(self, answers: list[tuple[int, StageName, int]]) -> None:
        measured = started(8)
        highest: dict[str, int] = {}
        kept: list[tuple[int, str, int]] = []
        for frame, stage, epoch in answers:
            answer(measured, coverage(frame, stage=stage, epoch=epoch))
            highest[stage] = max(highest.get(stage, 0), epoch)
            if epoch == highest[stage]:
                kept.append((frame, stage, epoch))
        duplicated = replayed = 0
        for n, (frame, stage, epoch) in enumerate(kept):
            earlier = [other for other in kept[:n] if other[0] == frame]
            if (frame, stage, epoch) in earlier:
                duplicated += 1
            elif any(other[1] == stage for other in earlier):
                replayed += 1
            elif earlier:
                duplicated += 1
        report = measured.report()
        assert report.frames_answered == len({frame for frame, _, _ in kept if frame < 8})
        assert (report.frames_duplicated, report.frames_replayed) == (duplicated, replayed)
        assert report.answers_fenced == len(answers) - len(kept)


def at(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE_HZ)


class TestWords:
    WORDS = (SpokenWord("I'd", at(0.4)), SpokenWord("like", at(0.7)), SpokenWord("twelve", at(1.1)), SpokenWord("lattes.", at(1.6)))

    def read(self, *texts: tuple[float, Partial | Transcript]) -> Measurement:
        measured = started(10, self.WORDS)
        for frame in range(10):
            answer(measured, coverage(frame))
        for seconds, record in texts:
            measured.take(record, captured_us(at(seconds)))
        return measured

    def test_from_the_words_end_to_the_first_text_that_holds_it(self) -> None:
        report = self.read(
            (1.0, partial("I would like", at(0.8))), (1.5, partial("I'd like 12", at(1.4))), (2.5, final("I'd like 12 lattes", at(1.9)))
        ).report()
        # I, would: 600; like: 300; 12: 400; lattes: 900
        assert report.word_latency_ms.max == 900
        assert report.word_latency_ms.p50 == 600
        assert (report.words_spoken, report.words_timed) == (5, 5)
        assert report.wer == 0.0

    def test_a_word_that_goes_and_comes_back_counts_from_its_first_time(self) -> None:
        report = self.read((1.0, partial("like", at(0.8))), (1.2, partial("bike", at(1.0))), (1.4, partial("like", at(1.2)))).report()
        assert (report.words_timed, report.word_latency_ms.max) == (1, 300)

    def test_words_never_written_are_not_timed(self) -> None:
        report = self.read((2.5, final("like", at(1.9)))).report()
        assert (report.words_timed, report.words_spoken) == (1, 5)
        assert report.wer == pytest.approx(4 / 5)

    def test_a_text_cannot_hold_words_spoken_after_it(self) -> None:
        report = self.read((0.5, partial("I would like twelve lattes", at(0.4)))).report()
        assert report.words_timed == 3, "a word may be written up to 300 ms ahead of its end, not more"

    def test_words_of_another_segment_are_not_meant(self) -> None:
        report = self.read((2.0, partial("like", at(1.9), segment=1, start_sample=at(0.9)))).report()
        assert report.words_timed == 0

    def test_only_words_that_were_sent_count(self) -> None:
        measured = started(4, self.WORDS)  # 0.8 s
        for frame in range(4):
            answer(measured, coverage(frame))
        measured.take(final("I'd like", at(0.8)), captured_us(at(1.0)))
        report = measured.report()
        assert (report.wer, report.words_spoken) == (0.0, 3)

    def test_finals_in_the_order_of_their_audio_and_the_first_version_stands(self) -> None:
        measured = self.read(
            (2.5, final("12 lattes", at(1.9), segment=1, start_sample=at(0.8))),
            (2.6, final("I'd like", at(0.8))),
            (2.7, final("I'd love", at(0.8))),
        )
        report = measured.report()
        assert (report.wer, report.finals, report.finals_conflicting) == (0.0, 2, 1)
        assert (report.engine, report.model_digest) == ("whisper", "d1")


class TestWordErrors:
    def test_numbers_case_and_punctuation_do_not_count(self) -> None:
        assert word_errors(["twelve ounces, please"], ["12 Ounces please!"]).rate == 0

    def test_pooled_over_texts(self) -> None:
        errors = word_errors(["a small latte", "please"], ["a small latte", "thank you"])
        assert (errors.reference_words, errors.errors) == (4, 2)

    def test_digits_apart(self) -> None:
        said, written = ["my number is four two seven one"], ["My number is 4 2 7 2."]
        assert word_errors(said, written).rate == 1.0
        apart = word_errors(said, written, digits_apart=True)
        assert (apart.reference_words, apart.errors) == (7, 1)

    def test_without_reference_there_is_no_rate(self) -> None:
        assert word_errors([], []).rate is None
        assert word_errors([""], ["thank you"]).rate is None
        assert word_errors([""], ["thank you"]).errors == 2


def test_unsettled_until_closed_and_all_answered() -> None:
    measured = started(2)
    answer(measured, coverage(0))
    measured.take(session("closed"), BEGIN_US)
    assert measured.unsettled() == ["s"]
    answer(measured, coverage(1))
    assert measured.unsettled() == []
    assert measured.report().sessions_closed == 1


def test_latency_of_nothing_is_nothing() -> None:
    assert latency_of([]).p99 is None
    assert latency_of(np.arange(1, 101)).p95 == pytest.approx(95.0, abs=0.1)


def test_the_json_keys_are_stable() -> None:
    written = json.loads(started(1).report().to_json())
    assert {
        "channels",
        "frames_sent",
        "frames_answered",
        "frames_lost",
        "frames_duplicated",
        "frame_latency_ms",
        "word_latency_ms",
        "wer",
        "seconds",
        "engine",
        "processor",
        "cores",
    } <= written.keys()
    assert written["frame_latency_ms"].keys() == written["word_latency_ms"].keys() == {"p50", "p95", "p99", "max"}
    assert written["processor"]
    assert written["cores"] >= 1


def test_an_empty_run_has_a_report() -> None:
    report = Measurement().report()
    assert (report.channels, report.frames_sent, report.wer) == (0, 0, None)
