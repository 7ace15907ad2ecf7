"""Snapshots and frontiers, apart from Kafka."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.checkpoint import SNAPSHOT_VERSION, Frontier, SessionSnapshot, Snapshot, SnapshotError, Track

offsets = st.integers(min_value=0, max_value=2**40)
tracks = st.builds(Track, offsets, st.integers(min_value=-1, max_value=2**40), offsets)
sessions = st.builds(SessionSnapshot, st.text(min_size=1, max_size=16), offsets, offsets, tracks, st.binary(max_size=200))
snapshots = st.builds(Snapshot, offsets, offsets, st.lists(sessions, max_size=4).map(tuple), st.lists(offsets, max_size=16).map(tuple))


@given(snapshots)
def test_snapshot_comes_back_as_it_was(snapshot: Snapshot) -> None:
    assert Snapshot.unpack(snapshot.pack(32_767)) == snapshot


@given(snapshots)
def test_commit_offset_is_the_lowest_that_must_be_read(snapshot: Snapshot) -> None:
    needed = [snapshot.emit_from_offset, *(session.read_from_offset for session in snapshot.sessions)]
    assert snapshot.commit_offset in needed
    assert all(snapshot.commit_offset <= offset for offset in needed)


def test_snapshot_that_does_not_fit_names_the_broker_setting_and_the_partitions() -> None:
    large = Snapshot(1, 5, (SessionSnapshot("s", 1, 2, Track(), bytes(4_000)),))
    with pytest.raises(SnapshotError, match=r"offset\.metadata\.max\.bytes.*ASR_PARTITIONS"):
        large.pack(4_096)


def test_snapshot_fills_the_allowance_to_the_byte() -> None:
    snapshot = Snapshot(1, 5, (SessionSnapshot("s", 1, 2, Track(), bytes(1_000)),))
    needed_bytes = len(snapshot.pack(32_767))
    assert len(snapshot.pack(needed_bytes)) == needed_bytes
    with pytest.raises(SnapshotError):
        snapshot.pack(needed_bytes - 1)


@pytest.mark.parametrize("version", [0, SNAPSHOT_VERSION + 1, 255])
def test_snapshot_of_another_version_is_refused_by_name(version: int) -> None:
    other = base64.b64encode(bytes([version]) + b"whatever").decode()
    with pytest.raises(SnapshotError, match=f"version {version}.*reads version {SNAPSHOT_VERSION}"):
        Snapshot.unpack(other)


@given(st.binary(max_size=50))
def test_damaged_snapshot_is_refused_never_guessed_at(body: bytes) -> None:
    metadata = base64.b64encode(bytes([SNAPSHOT_VERSION]) + body).decode()
    try:
        snapshot = Snapshot.unpack(metadata)
    except SnapshotError:
        return
    assert isinstance(snapshot, Snapshot)


@pytest.mark.parametrize("foreign", ["{}", "not base64!", '{"count": 3}'])
def test_metadata_of_another_program_is_refused(foreign: str) -> None:
    with pytest.raises(SnapshotError, match="no snapshot"):
        Snapshot.unpack(foreign)


@given(st.data())
def test_frontier_never_passes_an_open_input_and_reaches_the_end(data: st.DataObject) -> None:
    """Inputs settle in any order, with any number of outputs; the frontier is always the lowest open one."""
    frontier = Frontier(100)
    left: dict[int, int] = {}
    for offset in range(100, 120):
        if data.draw(st.booleans()):
            frontier.skip(offset)
            continue
        frontier.begin(offset)
        outputs = data.draw(st.integers(min_value=0, max_value=3))
        for _ in range(outputs):
            frontier.hold(offset)
        left[offset] = outputs + 1
    while left:
        assert frontier.settled_to == min(left)
        offset = data.draw(st.sampled_from(sorted(left)))
        frontier.release(offset)
        left[offset] -= 1
        if not left[offset]:
            del left[offset]
    assert frontier.settled_to == frontier.next_offset == 120
    assert frontier.open_inputs == 0


@pytest.mark.parametrize("held", [[0], [0, 1, 2], [2], [10], [10, 11]])
def test_held_inputs_are_never_jumped(held: list[int]) -> None:
    """The cases in which acknowledging out of order made the consumer library commit past held events."""
    start = held[0] // 10 * 10
    frontier = Frontier(start)
    for offset in range(start, start + 10):
        frontier.begin(offset)
    for offset in range(start, start + 10):
        if offset not in held:
            frontier.release(offset)
    assert frontier.settled_to == held[0]


def test_an_open_input_holds_up_a_state_unless_its_session_begins_again_before_it() -> None:
    frontier = Frontier(10)
    for offset, session_id in ((10, "open"), (11, "other"), (12, "open"), (13, "other")):
        frontier.begin(offset, session_id)
    track = Track()
    state = Snapshot(1, 14, (SessionSnapshot("open", 10, 10, track, b""), SessionSnapshot("other", 14, 14, track, b"")))
    frontier.release(10)
    assert frontier.committable(state) is None, "an answer to the other session is on its way"
    frontier.release(11)
    frontier.release(13)
    assert frontier.committable(state) == msgspec.structs.replace(state, emit_from_offset=12)
    assert frontier.committable(msgspec.structs.replace(state, sessions=())) is None, "the session's end is on its way"
    frontier.release(12)
    assert frontier.committable(state) is state
    assert state.read_to_offset == 14
