"""The spool's format: what was written is read back in order, whatever a crash or a bad disk has done to the end or the middle of it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connectors.recorder import spool as module
from connectors.recorder.spool import Entry, Log, Manifest, Position, Spool, SpoolError, SpoolFullError, leftovers

MANIFEST = Manifest(cluster_id="c", namespace="asr", bootstrap_servers="127.0.0.1:9092")
PLENTY = 2**30
SMALL_SEGMENT = 200

Written = tuple[int, bytes, bytes]
RECORDS = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=20), st.binary(max_size=80)), max_size=25)
MANY_RECORDS = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=20), st.binary(max_size=80)), min_size=1, max_size=25)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEGMENT_BYTES", SMALL_SEGMENT)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(parent: Path, records: list[Written]) -> Path:
    """Write records as a recorder that then vanishes; return its folder."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    with Spool(folder, PLENTY, MANIFEST) as spool:
        log = spool.log(3)
        for record in records:
            log.append(*record)
    return folder


def read(folder: Path) -> tuple[list[Written], int]:
    """Return what a later recorder finds, and how many bytes of it are damaged."""
    with Spool(folder, PLENTY) as spool:
        log = spool.log(3)
        return [(entry.kind, entry.key, entry.value) for entry in entries(log)], log.damaged_bytes


def entries(log: Log) -> Iterator[Entry]:
    while (entry := log.peek()) is not None:
        assert log.peek() == entry
        log.advance()
        yield entry


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


@quick
@given(records=RECORDS)
def test_what_was_written_is_read_in_order(folder: Path, records: list[Written]) -> None:
    assert read(written(folder, records)) == (records, 0)


@quick
@given(records=MANY_RECORDS, data=st.data())
def test_a_torn_end_costs_what_was_torn_alone(folder: Path, records: list[Written], data: st.DataObject) -> None:
    spool = written(folder, records)
    last = segments(spool)[-1]
    size = last.stat().st_size
    left = data.draw(st.integers(0, size - 1))
    os.truncate(last, left)
    with Spool(spool, PLENTY) as opened:
        log = opened.log(3)
        found = [(entry.kind, entry.key, entry.value) for entry in entries(log)]
        damaged = log.damaged_bytes
    assert found == records[: len(found)]
    # Exactly what is no whole record is counted: each has 11 bytes around key and value, each segment begins with 10.
    on_disk = sum(path.stat().st_size for path in segments(spool)) if spool.exists() else left
    begun = sum(path.stat().st_size >= 10 for path in segments(spool))
    assert damaged == on_disk - 10 * begun - sum(11 + len(key) + len(value) for _, key, value in found)


@quick
@given(records=MANY_RECORDS, zeros=st.integers(1, 500))
def test_zeros_after_a_power_failure_are_no_records(folder: Path, records: list[Written], zeros: int) -> None:
    spool = written(folder, records)
    with segments(spool)[-1].open("ab") as last:
        last.write(bytes(zeros))
    assert read(spool) == (records, zeros)


@quick
@given(records=MANY_RECORDS, data=st.data())
def test_no_damaged_record_passes_for_one(folder: Path, records: list[Written], data: st.DataObject) -> None:
    spool = written(folder, records)
    file = data.draw(st.sampled_from(segments(spool)))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    found, damaged = read(spool)
    assert damaged > 0
    remaining = iter(records)
    assert all(record in remaining for record in found), "what is read is what was written, in that order"
    assert len(found) < len(records)


@quick
@given(records=MANY_RECORDS, data=st.data())
def test_a_restart_takes_up_where_it_was(folder: Path, records: list[Written], data: st.DataObject) -> None:
    spool_folder = written(folder, records)
    taken = data.draw(st.integers(0, len(records)))
    with Spool(spool_folder, PLENTY) as spool:
        log = spool.log(3)
        for _, entry in zip(range(taken), entries(log), strict=False):
            log.acknowledge(entry.end)
    assert read(spool_folder) == (records[taken:], 0)


@quick
@given(records=MANY_RECORDS, limit=st.integers(0, 2_000), reserve=st.integers(0, 300))
def test_it_never_grows_beyond_its_limit(folder: Path, records: list[Written], limit: int, reserve: int) -> None:
    kept = []
    with Spool(Path(tempfile.mkdtemp(dir=folder)), limit, MANIFEST) as spool:
        log = spool.log(3)
        for record in records:
            try:
                log.append(*record, reserve_bytes=reserve)
            except SpoolFullError:
                continue
            kept.append(record)
        on_disk = sum(path.stat().st_size for path in segments(spool.folder))
        assert on_disk == spool.size_bytes <= max(0, limit - reserve)
        assert [(entry.kind, entry.key, entry.value) for entry in entries(log)] == kept


class AgainstAQueue(RuleBasedStateMachine):
    """Any sequence of appending, reading, acknowledging and restarting, against a list of what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.spool = Spool(self.folder, PLENTY, MANIFEST)
        self.log = self.spool.log(0)
        self.unread: list[Written] = []
        self.unacknowledged: list[tuple[Written, Position]] = []

    def teardown(self) -> None:
        self.spool.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(record=st.tuples(st.integers(0, 255), st.binary(max_size=9), st.binary(max_size=99)))
    def append(self, record: Written) -> None:
        self.log.append(*record)
        self.unread.append(record)

    @rule()
    def read(self) -> None:
        entry = self.log.peek()
        assert (entry is None) == (not self.unread)
        if entry is not None:
            self.log.advance()
            assert (entry.kind, entry.key, entry.value) == self.unread[0]
            self.unacknowledged.append((self.unread.pop(0), entry.end))

    @precondition(lambda self: self.unacknowledged)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.unacknowledged)))
        self.log.acknowledge(self.unacknowledged[count - 1][1])
        del self.unacknowledged[:count]

    @precondition(lambda self: not self.unread and not self.unacknowledged)
    @rule()
    def clear(self) -> None:
        self.log.clear()

    @rule()
    def restart(self) -> None:
        self.spool.close()
        self.spool = Spool(self.folder, PLENTY)
        self.log = self.spool.log(0)
        self.unread = [record for record, _ in self.unacknowledged] + self.unread
        self.unacknowledged = []

    @invariant()
    def the_size_is_known(self) -> None:
        assert self.spool.size_bytes == self.log.size_bytes == sum(path.stat().st_size for path in self.folder.glob("*.log"))

    @invariant()
    def what_is_acknowledged_is_gone(self) -> None:
        held = sum(map(len, [record[2] for record, _ in self.unacknowledged] + [record[2] for record in self.unread]))
        # Room is given back by whole segments: the one that is read, the one that is written.
        assert self.log.size_bytes <= 3 * held + 40 * (len(self.unread) + len(self.unacknowledged)) + 2 * (SMALL_SEGMENT + 130)


TestAgainstAQueue = AgainstAQueue.TestCase
TestAgainstAQueue.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_partitions_share_the_room_and_nothing_else(tmp_path: Path) -> None:
    with Spool.create(tmp_path, 120, MANIFEST) as spool:
        spool.log(1).append(1, b"k", b"one")
        spool.log(2).append(1, b"k", b"two")
        with pytest.raises(SpoolFullError, match="limit of 120 bytes"):
            spool.log(3).append(1, b"k", bytes(100))
        assert spool.numbers() == [1, 2]
        assert [entry.value for entry in entries(spool.log(2))] == [b"two"]
        spool.log(1).clear()
        spool.log(3).append(1, b"k", bytes(30))


def test_a_full_disk_leaves_whole_records_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, 100

    def write(file: int, data: bytes) -> int:
        nonlocal room
        count = min(room, len(data))
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room -= count
        return real(file, data[:count])

    with Spool.create(tmp_path, PLENTY, MANIFEST) as spool:
        log = spool.log(0)
        log.append(1, b"7", b"first")
        monkeypatch.setattr(os, "write", write)
        for _ in range(2):  # half of it fits; nothing fits
            with pytest.raises(SpoolFullError, match="No space left"):
                log.append(1, b"7", bytes(150))
        room = 1_000
        log.append(1, b"7", b"last")
        assert [entry.value for entry in entries(log)] == [b"first", b"last"]
        assert log.damaged_bytes == 0


def test_a_living_recorders_spool_is_left_alone_and_a_dead_ones_is_taken(tmp_path: Path) -> None:
    writer = """
import sys, time
from pathlib import Path
from connectors.recorder.spool import Manifest, Spool
spool = Spool.create(Path(sys.argv[1]), 10_000, Manifest(cluster_id="c", namespace="asr", bootstrap_servers="b"))
spool.log(5).append(1, b"7", b"said")
print("written", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", writer, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    ((folder, manifest),) = leftovers(tmp_path)
    assert manifest.bootstrap_servers == "b"
    with pytest.raises(SpoolError, match="another recorder"):
        Spool(folder, PLENTY)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Spool(folder, PLENTY) as spool:
        assert [entry.value for entry in entries(spool.log(5))] == [b"said"]
        spool.log(5).clear()
    assert list(leftovers(tmp_path)) == [], "an empty spool is removed"


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match="Set ASR_SPOOL_DIR"):
        Spool.create(tmp_path / "file", PLENTY, MANIFEST)


def test_a_file_of_another_format_is_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path, [(1, b"7", b"said")])
    segments(folder)[0].write_bytes(b"something else, of another release")
    assert read(folder) == ([], 34)
