"""What a partition's owner does with each record, apart from Kafka."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import AudioFrame, FlowRecord, Heartbeat, SessionStart, Timeout, VersionChange
from streams.checkpoint import Snapshot
from streams.core import SessionState
from streams.tenure import Order, Placement, Tenure


def start(session_id: str = "s", epoch: int = 1) -> SessionStart:
    return SessionStart(
        channel_id="c",
        session_id=session_id,
        conversation_id="k",
        epoch=epoch,
        position_samples=0,
        encoding="pcm_s16le",
        sample_rate_hz=16_000,
    )


def frame(ordinal: int, epoch: int = 1, session_id: str = "s") -> AudioFrame:
    return AudioFrame(
        channel_id="c",
        session_id=session_id,
        conversation_id="k",
        epoch=epoch,
        ordinal=ordinal,
        position_samples=ordinal * 3_200,
        encoding="pcm_s16le",
        sample_rate_hz=16_000,
        payload=b"",
    )


def timeout(session_id: str = "s") -> Timeout:
    return Timeout(channel_id="c", session_id=session_id, conversation_id="k", position_samples=0, silent_ms=1)


class Reading:
    """Feeds a tenure one record after another, at contiguous offsets."""

    def __init__(self, tenure: Tenure) -> None:
        self.tenure = tenure
        self.taken: list[FlowRecord] = []

    def __call__(self, record: FlowRecord) -> Placement:
        offset = self.tenure.frontier.next_offset
        assert self.tenure.order(offset) is Order.NEXT
        placement = self.tenure.place(offset, record)
        if placement is Placement.TAKE:
            self.tenure.frontier.begin(offset)
            self.tenure.frontier.release(offset)
            self.taken.append(record)
        else:
            self.tenure.frontier.skip(offset)
        return placement


def test_records_are_taken_once_and_a_fenced_writer_is_not_heard() -> None:
    read = Reading(Tenure(0, Snapshot(epoch=1), 0))
    assert read(start()) is Placement.TAKE
    assert read(frame(1)) is Placement.TAKE
    assert read(frame(1)) is Placement.REPEAT
    assert read(frame(1, epoch=2)) is Placement.REPEAT, "the new owner of the stage before repeats what was under way"
    assert read(frame(2, epoch=1)) is Placement.ZOMBIE, "and from then on the old one is not heard, even with news"
    assert read(frame(2, epoch=2)) is Placement.TAKE


@given(st.data())
def test_any_mixture_of_owners_gives_each_record_once_in_order(data: st.DataObject) -> None:
    """Each owner writes on from a point at or before where the one before it stopped; old owners write among the new ones' records."""
    records = [start(), *(frame(ordinal) for ordinal in range(1, 20))]
    written: list[FlowRecord] = []
    reached, zombie_from = 0, 0
    for epoch in range(1, 5):
        begin = data.draw(st.integers(0, reached), label="the owner begins at")
        end = len(records) if epoch == 4 else data.draw(st.integers(begin, len(records)), label="and stops at")
        for ordinal in range(begin, end):
            written.append(type(records[ordinal])(**{**fields(records[ordinal]), "epoch": epoch}))
            if epoch > 1 and data.draw(st.booleans(), label="a zombie writes in between"):
                late = min(zombie_from + data.draw(st.integers(0, 3)), len(records) - 1)
                written.append(type(records[late])(**{**fields(records[late]), "epoch": epoch - 1}))
        reached, zombie_from = max(reached, end), end
    read = Reading(Tenure(0, Snapshot(epoch=1), 0))
    for record in written:
        read(record)
    assert [record.ordinal for record in read.taken] == list(range(20))


def fields(record: FlowRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_a_hole_is_read_again_and_gone_over_only_if_it_is_still_there() -> None:
    tenure = Tenure(0, Snapshot(epoch=1), 5)
    assert tenure.order(5) is Order.NEXT
    tenure.frontier.skip(5)
    assert tenure.order(8) is Order.HOLE
    assert tenure.order(9) is Order.WAIT, "it was on its way when the flow was sought back"
    assert tenure.order(5) is Order.SEEN
    assert tenure.order(6) is Order.NEXT, "the skipped ones come after all"
    tenure.frontier.skip(6)
    for _ in range(3):
        assert tenure.order(9) is Order.HOLE, "what was lost once may be lost twice"
        assert tenure.order(10) is Order.WAIT
    assert tenure.order(9) is Order.GONE, "reading again led to the same each time: 7 and 8 are no data"
    tenure.frontier.begin(9)
    assert tenure.order(10) is Order.NEXT


def test_what_was_sent_late_is_numbered_the_same_by_whoever_takes_over() -> None:
    """A core whose state lies behind what it has emitted: the replay begins with the number of the first record after that state."""
    tenure = Tenure(0, Snapshot(epoch=1), 0)
    read = Reading(tenure)
    for record in (start(), frame(1), frame(2), frame(3)):
        read(record)
    standing = tenure.sessions["s"]
    assert [standing.number(offset) for offset in (0, 1, 1, 2, 3)] == [0, 1, 2, 3, 4]
    snapshot = tenure.snapshot(4, lambda _: SessionState(2, 2, b""))
    (session,) = snapshot.sessions
    assert session.track.next_ordinal == 3, "the input at 2 led to 3 before, and is to do so again"
    with pytest.raises(RuntimeError, match="came after those"):
        standing.number(2)


def test_a_session_that_was_never_started_is_a_stranger_and_an_ended_one_is_done() -> None:
    tenure = Tenure(0, Snapshot(epoch=1), 0)
    read = Reading(tenure)
    assert read(frame(3, session_id="x")) is Placement.STRANGER
    assert read(timeout("x")) is Placement.DONE, "a timeout for nobody needs no alarm"
    read(start())
    snapshot = tenure.snapshot(tenure.frontier.next_offset, lambda _: None)
    assert snapshot.sessions == ()
    assert read(frame(1)) is Placement.DONE
    again = Tenure(0, snapshot, snapshot.commit_offset)
    assert Reading(again)(start()) is Placement.DONE, "a zombie's repeat must not open it again, whoever owns it now"


def test_audio_that_comes_after_its_session_was_given_up_is_told_apart_from_repeats() -> None:
    """Its recorder lived, and was cut off for too long: who reads on must not pass over what it kept."""
    tenure = Tenure(0, Snapshot(epoch=1), 0, numbered_by_recorder=True)
    read = Reading(tenure)
    for record in (start(epoch=0), frame(1, epoch=0), timeout()):
        read(record)
    snapshot = tenure.snapshot(tenure.frontier.next_offset, lambda _: None)
    assert read(frame(2, epoch=0)) is Placement.LATE
    assert read(timeout()) is Placement.DONE
    again = Reading(Tenure(0, snapshot, snapshot.commit_offset, numbered_by_recorder=True))
    assert again(frame(2, epoch=0)) is Placement.LATE, "whoever owns it now"
    assert again(start(epoch=0)) is Placement.DONE


def test_timeouts_stand_outside_the_recorders_numbering() -> None:
    read = Reading(Tenure(0, Snapshot(epoch=1), 0, numbered_by_recorder=True))
    read(start(epoch=0))
    read(frame(1, epoch=0))
    assert read(timeout()) is Placement.TAKE
    assert read(frame(2, epoch=0)) is Placement.TAKE
    assert read(frame(2, epoch=0)) is Placement.REPEAT


def test_only_the_recorder_may_leave_out_ordinals() -> None:
    for numbered_by_recorder, missing in ((False, 3), (True, 0)):
        tenure = Tenure(0, Snapshot(epoch=1), 0, numbered_by_recorder=numbered_by_recorder)
        Reading(tenure)(start())
        assert tenure.missing_before(frame(4)) == missing
        assert tenure.missing_before(frame(1)) == 0


@given(st.integers(0, 15), st.integers(0, 15), st.integers(0, 15))
def test_a_restart_warms_up_then_takes_exactly_what_followed_the_snapshot(a: int, b: int, c: int) -> None:
    """Read from ≤ snapshot ≤ taken: whatever the three positions, each input after the snapshot is taken once more."""
    read_from, from_offset, reached = sorted((a, b, c))
    records = [start(), *(frame(ordinal) for ordinal in range(1, 16))]
    tenure = Tenure(0, Snapshot(epoch=1), 0)
    read = Reading(tenure)
    for record in records[: reached + 1]:
        read(record)
    tenure.sessions["s"].next_ordinal = 7
    snapshot = tenure.snapshot(reached + 1, lambda _: SessionState(read_from, from_offset, b""))
    restarted = Reading(Tenure(0, snapshot, snapshot.commit_offset))
    assert snapshot.commit_offset == read_from
    placements = [restarted(record) for record in records[read_from:]]
    assert placements == [Placement.WARM] * (from_offset - read_from) + [Placement.TAKE] * (16 - from_offset)
    assert restarted.tenure.sessions["s"].next_ordinal == 7


def test_silent_sessions_are_those_that_were_heard_once() -> None:
    tenure = Tenure(0, Snapshot(epoch=1), 0)
    read = Reading(tenure)
    read(start())
    beat = Heartbeat(channel_id="c", session_id="s", conversation_id="k", epoch=1, ordinal=1, position_samples=0)
    read(beat)
    assert list(tenure.silent_since(0.0)) == []
    assert [standing.latest for standing in tenure.silent_since(float("inf"))] == [beat]


def change(version: str, session_id: str = "s") -> VersionChange:
    return VersionChange(
        channel_id="c", session_id=session_id, conversation_id="k", position_samples=0, kind="hotwords", name="h", version=version
    )


def test_a_version_change_stands_outside_the_recorders_numbering() -> None:
    read = Reading(Tenure(0, Snapshot(epoch=1), 0, numbered_by_recorder=True))
    assert read(change("v1")) is Placement.DONE, "before its session it means nothing"
    assert read(start()) is Placement.TAKE
    standing = read.tenure.sessions["s"]
    assert standing.hotword_version == ""
    assert read(frame(1)) is Placement.TAKE
    heard_s, latest = standing.seen_s, standing.latest
    assert read(change("v1")) is Placement.TAKE
    assert (standing.hotword_version, standing.seen_s, standing.latest) == ("v1", heard_s, latest), "it is no sign of life"
    assert read(frame(1)) is Placement.REPEAT
    assert read(frame(2)) is Placement.TAKE


def test_after_a_takeover_the_hotwords_of_a_session_are_not_known() -> None:
    before = Reading(Tenure(0, Snapshot(epoch=1), 0, numbered_by_recorder=True))
    before(start())
    before(change("v1"))
    snapshot = before.tenure.snapshot(2, lambda _: SessionState(1, 2, b""))
    after = Tenure(0, snapshot, 1, numbered_by_recorder=True)
    assert after.sessions["s"].hotword_version is None
    assert after.place(1, change("v1")) is Placement.WARM
    assert after.sessions["s"].hotword_version == "v1"


def test_who_takes_over_a_session_that_has_gone_quiet_knows_it_by_name() -> None:
    """Else nobody would ever propose that it has ended: the state alone does not tell its channel."""
    before = Reading(Tenure(0, Snapshot(epoch=1), 0, numbered_by_recorder=True))
    before(start())
    beat = Heartbeat(channel_id="c", session_id="s", conversation_id="k", ordinal=1, epoch=1, position_samples=0)
    before(beat)
    for _ in range(2):
        snapshot = before.tenure.snapshot(2, lambda _: SessionState(2, 2, b""))
        assert snapshot.commit_offset == 1
        after = Reading(Tenure(0, snapshot, snapshot.commit_offset, numbered_by_recorder=True))
        before = Reading(Tenure(0, after.tenure.snapshot(2, lambda _: SessionState(2, 2, b"")), 1, numbered_by_recorder=True))
        assert before(beat) is Placement.DONE, "the core has it: it is for the name's sake alone"
        assert [standing.latest for standing in before.tenure.silent_since(float("inf"))] == [beat]
