"""The reader's rules, whatever the order in which the topics are read, whatever comes twice or from a fenced writer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import Queue
from typing import Any, Self

import msgspec
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions
from hypothesis import given
from hypothesis import strategies as st

from connectors.results import LatencyWindow, Received, Results, ResultsConsumer, SessionView, Spans, latency_ms, quantile
from schemas.codec import default_codec
from schemas.records import Coverage, Partial, Session, SessionRecord, Stamps, Transcript, Word
from streams.kafka import MissingTopicError, UnreachableError, admin_client
from streams.settings import Settings, load_settings
from streams.topics import PARTIALS, SESSIONS, TRANSCRIPTS

FRAME_SAMPLES = 3_200
SEGMENT_SAMPLES = 16_000
NOW_US = 1_760_000_000_000_000


def partial(segment: int, step: int, *, epoch: int = 1, session: str = "s1", text: str | None = None) -> Partial:
    start = segment * SEGMENT_SAMPLES
    return Partial(
        channel_id="7",
        session_id=session,
        conversation_id="c1",
        epoch=epoch,
        position_samples=start,
        segment=segment,
        text=f"segment {segment} so far {step}" if text is None else text,
        end_sample=start + step * FRAME_SAMPLES,
        stamps=Stamps(captured_us=NOW_US - 400_000),
    )


def transcript(segment: int, kind: str = "final", *, epoch: int = 1, session: str = "s1", text: str | None = None) -> Transcript:
    start = segment * SEGMENT_SAMPLES
    said = "" if kind == "cancelled" else text or f"segment {segment} {kind}"
    return Transcript(
        channel_id="7",
        session_id=session,
        conversation_id="c1",
        epoch=epoch,
        position_samples=start,
        segment=segment,
        kind=kind,  # type: ignore[arg-type]
        end_sample=start + SEGMENT_SAMPLES,
        text=said,
        raw_text=said,
        words=(Word(text="segment", start_ms=0, end_ms=200, confidence=0.5),),
        confidence=0.9,
        model_digest="m",
        covered_to_sample=start + SEGMENT_SAMPLES,
    )


def session_state(position: int, state: str = "open", *, epoch: int = 1, session: str = "s1", finals: int = 0) -> Session:
    return Session(
        channel_id="7",
        session_id=session,
        conversation_id="c1",
        epoch=epoch,
        position_samples=position,
        state=state,  # type: ignore[arg-type]
        started_us=NOW_US - 60_000_000,
        party="customer",
        covered_to_sample=position,
        decoded_to_sample=position,
        segments=finals,
        finals=finals,
        cancelled=0,
        words=0,
        gaps=0,
        gap_samples=0,
    )


def coverage(frame: int, *, epoch: int = 1, stage: str = "inference", latency_us: int = 120_000) -> Coverage:
    return Coverage(
        channel_id="7",
        session_id="s1",
        conversation_id="c1",
        epoch=epoch,
        position_samples=frame * FRAME_SAMPLES,
        end_sample=(frame + 1) * FRAME_SAMPLES,
        decoded_to_sample=(frame + 1) * FRAME_SAMPLES,
        stage=stage,  # type: ignore[arg-type]
        stamps=Stamps(captured_us=NOW_US - latency_us),
    )


def read(*records: SessionRecord) -> tuple[Results, SessionView]:
    results = Results()
    for record in records:
        results.apply(record, NOW_US)
    return results, results.sessions["s1"]


def shown(view: SessionView) -> tuple[object, ...]:
    """What a person sees of a session."""
    return (
        view.state,
        view.party,
        [(one.segment, one.transcript.text, one.refined and one.refined.text) for one in view.finals()],
        [(one.segment, one.text, one.end_sample) for one in view.open_partials()],
        list(view.frames),
        view.frames_answered,
    )


# --- one rule, one test


def test_a_final_closes_its_partial_and_a_late_partial_does_not_come_back() -> None:
    results, view = read(partial(0, 1), partial(0, 2), transcript(0), partial(0, 3))
    assert [one.transcript.text for one in view.finals()] == ["segment 0 final"]
    assert view.open_partials() == []
    assert results.repeats == 1


def test_partials_do_not_run_backwards_within_an_epoch_but_restart_with_a_new_owner() -> None:
    _, view = read(partial(0, 3), partial(0, 2))
    assert view.partials[0].end_sample == 3 * FRAME_SAMPLES
    _, view = read(partial(0, 3), partial(0, 2, epoch=2))
    assert view.partials[0].end_sample == 2 * FRAME_SAMPLES


def test_an_unchanged_partial_is_no_change() -> None:
    results = Results()
    assert results.apply(partial(0, 1, text="hello"), NOW_US) is not None
    assert results.apply(partial(0, 2, text="hello"), NOW_US) is None


def test_the_next_segment_may_begin_before_the_final_of_the_last() -> None:
    _, view = read(partial(0, 4), partial(1, 1))
    assert [one.segment for one in view.open_partials()] == [0, 1]


def test_a_differing_final_is_counted_and_reported_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    results, view = read(transcript(0, text="one"))
    change = results.apply(transcript(0, text="two", epoch=2), NOW_US)
    assert change is not None and change.kind == "conflict"
    assert results.conflicts == 1
    assert view.segments[0].transcript.text == "one"
    assert "first version stands" in caplog.text


def test_confidence_and_stamps_stand_outside_a_finals_identity() -> None:
    again = msgspec.structs.replace(transcript(0, epoch=2), confidence=0.1, stamps=Stamps(captured_us=1))
    results, view = read(transcript(0), again)
    assert (results.conflicts, results.repeats) == (0, 1)
    assert view.segments[0].transcript.confidence == 0.9


def test_a_cancelled_segment_vanishes_and_stays_away() -> None:
    results, view = read(partial(0, 1), transcript(0, "cancelled"), partial(0, 2), transcript(0, "cancelled"))
    assert view.finals() == [] and view.open_partials() == []
    assert (results.conflicts, results.repeats) == (0, 2)


def test_a_final_of_a_cancelled_segment_is_a_conflict() -> None:
    results, view = read(transcript(0, "cancelled"), transcript(0))
    assert results.conflicts == 1 and view.finals() == []


def test_a_second_pass_stands_beside_the_final() -> None:
    _, view = read(transcript(0), transcript(0, "refined"))
    (segment,) = view.finals()
    assert segment.transcript.text == "segment 0 final"
    assert segment.refined is not None and segment.refined.text == "segment 0 refined"


def test_the_copy_that_compaction_kept_of_a_fenced_writer_is_still_a_final() -> None:
    """The owner of epoch 2 wrote segment 1; then a zombie wrote segment 0 again, and compaction dropped the earlier copy of it."""
    _, view = read(transcript(1, epoch=2), transcript(0, epoch=1))
    assert [one.segment for one in view.finals()] == [0, 1]


def test_a_zombies_partials_states_and_answers_are_fenced() -> None:
    results, view = read(
        partial(0, 2, epoch=2),
        partial(0, 9, epoch=1, text="from before"),
        session_state(100, epoch=2),
        session_state(900, "closed", epoch=1),
        coverage(0, epoch=2),
        coverage(1, epoch=1),
    )
    assert results.fenced == 3
    assert view.partials[0].text == "segment 0 so far 2"
    assert view.state == "open"
    assert view.frames_answered == 1


def test_each_writing_stage_has_its_own_epochs() -> None:
    results, view = read(coverage(0, epoch=5, stage="vad"), coverage(1, epoch=2, stage="inference"))
    assert (results.fenced, view.frames_answered) == (0, 2)


def test_a_closed_session_stays_closed() -> None:
    _, view = read(session_state(500, "closed"), session_state(900, "open", epoch=2))
    assert view.state == "closed"


def test_frames_are_answered_once() -> None:
    _, view = read(coverage(0), coverage(1), coverage(1, epoch=2), coverage(3, epoch=2))
    assert (view.frames_answered, view.frames_repeated) == (3, 1)
    assert list(view.frames) == [(0, 2 * FRAME_SAMPLES), (3 * FRAME_SAMPLES, 4 * FRAME_SAMPLES)]


def test_latency_is_from_capture_to_arrival() -> None:
    _, view = read(coverage(0, latency_us=120_000), coverage(1, latency_us=80_000), partial(0, 1))
    assert view.latency.values_ms(NOW_US) == [80.0, 120.0]
    assert view.text_latency_ms == 400.0


def test_a_conversation_holds_its_sessions_and_their_turns_in_the_order_said() -> None:
    results = Results()
    for record in (
        session_state(0, session="s2"),
        session_state(0),
        transcript(1),
        transcript(0, session="s2"),
        transcript(2, session="s2"),
    ):
        results.apply(record, NOW_US)
    call = results.conversation("c1")
    assert call is not None
    assert [one.session_id for one in call.sessions] == ["s1", "s2"]
    assert [(turn.session.session_id, turn.segment.segment) for turn in call.turns()] == [("s2", 0), ("s1", 1), ("s2", 2)]
    assert results.conversation("c2") is None


# --- every order gives the same view


def _disturbed(draw: st.DrawFn, log: list[SessionRecord], *, zombie_epoch: int) -> list[SessionRecord]:
    """Return one topic's log with repeats of what was written before, and a zombie's copies anywhere."""
    disturbed: list[SessionRecord] = []
    for at, record in enumerate(log):
        disturbed.append(record)
        if draw(st.booleans()):
            disturbed.append(record)
        if draw(st.booleans()):
            disturbed.append(msgspec.structs.replace(log[draw(st.integers(0, at))], epoch=zombie_epoch))
    return disturbed


def _merged(draw: st.DrawFn, logs: list[list[SessionRecord]]) -> list[SessionRecord]:
    """Return the logs read in some interleaving that keeps each one's order."""
    turns = draw(st.permutations([at for at, log in enumerate(logs) for _ in log]))
    pending = [iter(log) for log in logs]
    return [next(pending[turn]) for turn in turns]


@st.composite
def readings(draw: st.DrawFn) -> tuple[list[SessionRecord], list[SessionRecord]]:
    """A call as it was written, topic after topic, by owners of epoch 2; and the same call disturbed and interleaved."""
    segments = draw(st.integers(1, 4))
    ends = [draw(st.sampled_from(["final", "cancelled", "open"])) for _ in range(segments)]
    steps = [draw(st.integers(1, 3)) for _ in range(segments)]
    partials: list[SessionRecord] = [partial(at, step, epoch=2) for at in range(segments) for step in range(1, steps[at] + 1)]
    transcripts: list[SessionRecord] = [transcript(at, end, epoch=2) for at, end in enumerate(ends) if end != "open"]
    transcripts += [transcript(at, "refined", epoch=2) for at, end in enumerate(ends) if end == "final" and draw(st.booleans())]
    states: list[SessionRecord] = [session_state(at * SEGMENT_SAMPLES, epoch=2, finals=at) for at in range(segments + 1)]
    answers: list[SessionRecord] = [coverage(at, epoch=2) for at in range(segments * 2)]
    undisturbed = [partials, transcripts, states, answers]
    disturbed = [_disturbed(draw, log, zombie_epoch=1) for log in undisturbed]
    return [record for log in undisturbed for record in log], _merged(draw, disturbed)


@given(readings())
def test_any_interleaving_with_repeats_and_zombies_gives_the_same_view(reading: tuple[list[SessionRecord], list[SessionRecord]]) -> None:
    undisturbed, disturbed = reading
    _, expected = read(*undisturbed)
    results, view = read(*disturbed)
    assert shown(view) == shown(expected)
    assert results.conflicts == 0


# --- the small parts


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12))))
def test_spans_hold_exactly_the_samples_added(pieces: list[tuple[int, int]]) -> None:
    spans, samples = Spans(), set[int]()
    for start, length in pieces:
        new = set(range(start, start + length)) - samples
        assert spans.add(start, start + length) == bool(new)
        samples |= new
    assert {sample for start, end in spans for sample in range(start, end)} == samples
    flat = [edge for span in spans for edge in span]
    assert flat == sorted(set(flat)), "spans are in order, none empty, none touching"


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_quantile_is_the_least_value_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    ordered = sorted(values)
    value = quantile(ordered, share)
    assert sum(one <= value for one in ordered) >= share * len(ordered)
    assert value == ordered[0] or sum(one < value for one in ordered) < share * len(ordered)


def test_a_latency_counts_for_the_span_of_its_window() -> None:
    window = LatencyWindow(span_us=1_000)
    window.add(0, 5.0)
    window.add(900, 3.0)
    assert window.values_ms(1_000) == [3.0, 5.0]
    assert window.values_ms(1_001) == [3.0]


def test_a_window_that_nobody_asks_keeps_no_more_than_its_span() -> None:
    """A session's latencies are asked for while somebody looks at it: one that nobody looks at must not pile them up."""
    window = LatencyWindow(span_us=1_000)
    for at_us in range(0, 100_000, 100):
        window.add(at_us, 1.0)
    assert len(window._values) == 11


def test_sessions_that_nothing_is_read_of_any_more_are_forgotten() -> None:
    results = Results()
    results.apply(session_state(0, session="closed"), NOW_US)
    results.apply(session_state(0, "closed", session="closed"), NOW_US + 10)
    results.apply(session_state(0, session="open"), NOW_US)
    results.forget_before(NOW_US + 10, NOW_US)
    assert set(results.sessions) == {"closed", "open"}
    results.forget_before(NOW_US + 11, NOW_US)
    assert set(results.sessions) == {"open"}
    results.forget_before(NOW_US + 11, NOW_US + 1)
    assert not results.sessions


def test_latency_needs_a_capture_stamp_and_is_never_negative() -> None:
    assert latency_ms(0, NOW_US) is None
    assert latency_ms(NOW_US + 5, NOW_US) == 0.0


# --- the reader, on a real Kafka


class Reading:
    """A consumer and what it delivered, as a stream of records with a mark where it had caught up."""

    CAUGHT_UP = "caught up"

    def __init__(self, settings: Settings, **options: Any) -> None:
        self.seen: Queue[Any] = Queue()

        def deliver(batch: Sequence[Received]) -> None:
            for received in batch:
                self.seen.put(received)

        self.consumer = ResultsConsumer(settings, deliver, caught_up=lambda: self.seen.put(self.CAUGHT_UP), failed=self.seen.put, **options)

    def __enter__(self) -> Self:
        self.consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.stop()

    def next(self) -> Any:
        return self.seen.get(timeout=20)

    def until_caught_up(self) -> list[Received]:
        return list(iter(self.next, self.CAUGHT_UP))


def texts(received: Sequence[Received]) -> set[str]:
    return {one.record.text for one in received if isinstance(one.record, (Partial, Transcript))}


@pytest.mark.broker
def test_what_is_there_comes_first_then_what_happens(settings: Settings, publish: Any, party: Any) -> None:
    one, other = party("1"), party("2")
    publish(one.state(), other.state(), one.ended(0, "before"), other.partial(0, "so far"), one.frame(0))
    with Reading(settings) as reading:
        before = reading.until_caught_up()
        assert len(before) == 5 and texts(before) == {"before", "so far"}
        publish(other.ended(0, "after"))
        after = reading.next()
        assert after.record.text == "after"
    assert all(abs(received.arrived_us - time.time_ns() // 1_000) < 60_000_000 for received in [*before, after])


@pytest.mark.broker
def test_each_topic_is_read_from_its_own_place(settings: Settings, publish: Any, party: Any) -> None:
    caller = party()
    publish(caller.state(), caller.ended(0, "history"), caller.partial(1, "history"))
    with Reading(settings, since_ms={SESSIONS: None, TRANSCRIPTS: 0, PARTIALS: 0}) as reading:
        assert [type(received.record) for received in reading.until_caught_up()] == [Session]
        publish(caller.ended(1, "now"))
        assert reading.next().record.text == "now"


@pytest.mark.broker
def test_a_value_that_is_no_record_is_passed_over(settings: Settings, publish: Any, party: Any, caplog: pytest.LogCaptureFixture) -> None:
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    producer.produce(TRANSCRIPTS.full_name(settings), b"no record", b"key", 1)
    producer.produce(TRANSCRIPTS.full_name(settings), None, b"key", 1)
    producer.flush(10)
    publish(party("1").ended(0, "good"))
    with Reading(settings) as reading:
        assert texts(reading.until_caught_up()) == {"good"}
        assert reading.consumer.damaged == 1
    assert "offset 0" in caplog.text


@pytest.mark.broker
def test_a_missing_topic_is_named_with_the_remedy(settings: Settings) -> None:
    with pytest.raises(MissingTopicError, match=rf"{settings.namespace}\.sessions.*asr topics create"):
        Reading(settings).consumer.start()


def test_an_absent_cluster_is_named_with_the_remedy() -> None:
    with pytest.raises(UnreachableError, match="asr broker"):
        Reading(load_settings(bootstrap_servers="127.0.0.1:1")).consumer.start()


@pytest.mark.broker
def test_partitions_that_are_added_are_read_from_their_beginning(
    settings: Settings, publish: Any, party: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.results._REFRESH_S", 0.2)
    publish(party().state())
    with Reading(settings, since_ms={TRANSCRIPTS: 0}) as reading:
        reading.until_caught_up()
        name, grown = TRANSCRIPTS.full_name(settings), settings.partitions + 1
        admin = admin_client(settings)
        admin.create_partitions([NewPartitions(name, grown)])[name].result()
        producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
        producer.produce(name, default_codec().encode(party("9").ended(0, "new")), b"key", grown - 1)
        producer.flush(10)
        assert reading.next().record.text == "new"


@pytest.mark.broker
def test_a_reader_that_fails_says_so(settings: Settings, publish: Any, party: Any) -> None:
    publish(party().state())
    failures: Queue[Exception] = Queue()

    def deliver(_: Sequence[Received]) -> None:
        raise RuntimeError("nowhere to put it")

    consumer = ResultsConsumer(settings, deliver, failed=failures.put)
    consumer.start()
    assert str(failures.get(timeout=20)) == "nowhere to put it"
    consumer.stop()
