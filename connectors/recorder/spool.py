"""Records on disk while the broker is away: first in, first out, for each partition, whatever happens to the process that wrote them.

A spool is a folder of one recorder, which holds a lock on it. A record that was written survives the recorder's death (``kill -9``) at
once, and a power failure after the next :meth:`Spool.sync`. Each partition has a *log* of its own in it: segment files of records, and how
far they have been acknowledged by the broker. Acknowledged segments are removed.

A segment is :data:`_MAGIC` and records. A record is its length, a checksum and::

    kind (1 byte) | length of the key (2 bytes) | key | value

The checksum covers the length too, so that neither zeros nor the beginning of a record pass for one. A record that was torn off by a crash
ends its segment; one that was damaged later is passed over, and both are counted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple, Self

import msgspec

from streams.errors import UserError

__all__ = ["Entry", "Log", "Manifest", "Position", "Spool", "SpoolError", "SpoolFullError", "leftovers"]

_log = logging.getLogger(__name__)

#: The format's name and version; a file that begins otherwise is left alone.
_MAGIC: Final = b"asr-spool\x01"
_HEADER: Final = struct.Struct("<II")
_PREFIX: Final = struct.Struct("<BH")
_CURSOR: Final = struct.Struct("<QQI")
#: 30 s of one channel of 16 kHz PCM; room is given back in pieces of this size.
_SEGMENT_BYTES: Final = 2**20
#: No record is longer: 500 ms of PCM are 16 kB.
_MAX_RECORD_BYTES: Final = 2**24
_SEGMENT_NAME: Final = re.compile(r"(\d+)-(\d{10})\.log")
_MANIFEST: Final = "manifest.json"
_LOCK: Final = "lock"


class SpoolError(UserError):
    """The spool cannot be used."""


class SpoolFullError(RuntimeError):
    """There is no room for a record; nothing of it was written."""


class Position(NamedTuple):
    """A place in a log: a segment's number and the bytes before it there."""

    segment: int
    offset: int


class Entry(NamedTuple):
    """A record as it lies in a log.

    Attributes:
        kind: whatever its writer wants to know of it without decoding it, 0 to 255.
        key: the record's key.
        value: the record.
        end: the place after it.
    """

    kind: int
    key: bytes
    value: bytes
    end: Position


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where a spool's records belong.

    Attributes:
        cluster_id: the Kafka cluster.
        namespace: the system on it.
        bootstrap_servers: how it was reached.
    """

    cluster_id: str
    namespace: str
    bootstrap_servers: str


class Log:
    """One partition's records: appended at the end, read from the front, forgotten once they are acknowledged.

    Made by :meth:`Spool.log`.

    Attributes:
        damaged_bytes: what could not be read, torn ends included.
    """

    def __init__(self, spool: Spool, number: int) -> None:
        self.damaged_bytes = 0
        self._spool = spool
        self._number = number
        self._sizes = {segment: spool.path_of(number, segment).stat().st_size for segment in spool.segments_of(number)}
        # What is there was written by a process that may have died in the middle of a record: it is only read, and begun anew after it.
        self._next_segment = max(self._sizes, default=-1) + 1
        self._acknowledged = self._saved_cursor()
        self._read_from = self._acknowledged
        self._next: Entry | None = None
        self._writing: int | None = None
        self._reading: tuple[int, int] | None = None
        self._cursor_file: int | None = None
        for segment in [segment for segment in self._sizes if segment < self._acknowledged.segment]:
            self._remove(segment)

    @property
    def size_bytes(self) -> int:
        """What its files take."""
        return sum(self._sizes.values())

    def append(self, kind: int, key: bytes, value: bytes, *, reserve_bytes: int = 0) -> Position:
        """Write a record at the end; return the place after it.

        Args:
            kind: see :class:`Entry`.
            key: the record's key.
            value: the record.
            reserve_bytes: room to leave for other records.

        Raises:
            SpoolFullError: it would take the spool over its limit, or the disk has no room.
        """
        data = _framed(_PREFIX.pack(kind, len(key)) + key + value)
        begins = self._writing is None or self._sizes[self._next_segment - 1] >= _SEGMENT_BYTES
        if begins:
            data = _MAGIC + data
        self._spool.take(len(data), reserve_bytes)
        try:
            if begins:
                self._begin_segment()
            self._write(data)
        except OSError as refused:
            self._spool.give_back(len(data))
            raise SpoolFullError(f"{self._spool.folder} cannot be written to ({refused.strerror})") from refused
        segment = self._next_segment - 1
        return Position(segment, self._sizes[segment])

    def peek(self) -> Entry | None:
        """Return the next record, which stays the next one until :meth:`advance`; None at the end."""
        while self._next is None:
            segment, offset = self._read_from
            size = self._sizes.get(segment)
            if size is not None and offset < size:
                self._next = self._read_at(segment, max(offset, len(_MAGIC)), size)
                if self._next is None:
                    self._read_from = Position(segment, size)
            else:
                following = min((later for later in self._sizes if later > segment), default=None)
                if following is None:
                    return None
                self._read_from = Position(following, 0)
        return self._next

    def advance(self) -> None:
        """Go on to the record after the one that was peeked at."""
        if self._next is not None:
            self._read_from, self._next = self._next.end, None

    def skip(self) -> None:
        """Pass over everything that is there: whoever wrote it has it in memory."""
        self._next = None
        if self._sizes:
            last = max(self._sizes)
            self._read_from = Position(last, self._sizes[last])

    def acknowledge(self, end: Position) -> None:
        """Forget everything before a place: the broker has it."""
        self._acknowledged = max(self._acknowledged, end)
        for segment in [segment for segment in self._sizes if segment < end.segment]:
            self._remove(segment)
        self._save_cursor()

    def clear(self) -> None:
        """Remove everything, and be as new; numbers of segments go on."""
        self.close()
        for segment in list(self._sizes):
            self._remove(segment)
        self._spool.cursor_path(self._number).unlink(missing_ok=True)
        self._read_from = self._acknowledged = Position(self._next_segment, 0)
        self._next = None

    def sync(self) -> None:
        """Write what was appended through to the disk."""
        if self._writing is not None:
            os.fdatasync(self._writing)

    def close(self) -> None:
        """Close the files."""
        for file in (self._writing, self._reading[1] if self._reading else None, self._cursor_file):
            if file is not None:
                os.close(file)
        self._writing = self._reading = self._cursor_file = None

    # ------------------------------------------------------------------ writing

    def _begin_segment(self) -> None:
        path = self._spool.path_of(self._number, self._next_segment)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._writing is not None:
            os.fdatasync(self._writing)
            os.close(self._writing)
        self._writing = file
        self._sizes[self._next_segment] = 0
        self._next_segment += 1

    def _write(self, data: bytes) -> None:
        """Append bytes to the newest segment, whole or not at all."""
        assert self._writing is not None  # noqa: S101 - the segment was begun
        segment = self._next_segment - 1
        before = self._sizes[segment]
        try:
            _write_whole(self._writing, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._writing, before)
            if not before:
                # It lacks even its beginning: the next record begins another one.
                os.close(self._writing)
                self._writing = None
                self._remove(segment)
            raise
        self._sizes[segment] = before + len(data)

    def _remove(self, segment: int) -> None:
        if self._reading is not None and self._reading[0] == segment:
            os.close(self._reading[1])
            self._reading = None
        self._spool.path_of(self._number, segment).unlink(missing_ok=True)
        self._spool.give_back(self._sizes.pop(segment))

    # ------------------------------------------------------------------ reading

    def _read_at(self, segment: int, offset: int, size: int) -> Entry | None:
        """Return the first whole record of a segment from an offset on, or None if there is none any more."""
        file = self._file(segment)
        if offset == len(_MAGIC) and os.pread(file, len(_MAGIC), 0) != _MAGIC:
            self._damaged(segment, 0, size)
            return None
        passed = offset
        while passed < size:
            header = os.pread(file, _HEADER.size, passed)
            if len(header) < _HEADER.size:
                break
            length, checksum = _HEADER.unpack(header)
            end = passed + _HEADER.size + length
            if not _PREFIX.size <= length <= _MAX_RECORD_BYTES or end > size:
                break  # torn off, or its length is damaged: where the next one begins cannot be told
            body = os.pread(file, length, passed + _HEADER.size)
            if _checksum(length, body) == checksum:
                kind, key_length = _PREFIX.unpack_from(body)
                value_at = _PREFIX.size + key_length
                return Entry(kind, body[_PREFIX.size : value_at], body[value_at:], Position(segment, end))
            self._damaged(segment, passed, end)
            passed = end
        if passed < size:
            self._damaged(segment, passed, size)
        return None

    def _damaged(self, segment: int, start: int, end: int) -> None:
        self.damaged_bytes += end - start
        _log.warning("%s: bytes %d to %d are no record and left out", self._spool.path_of(self._number, segment), start, end)

    def _file(self, segment: int) -> int:
        if self._reading is None or self._reading[0] != segment:
            if self._reading is not None:
                os.close(self._reading[1])
            self._reading = segment, os.open(self._spool.path_of(self._number, segment), os.O_RDONLY | os.O_CLOEXEC)
        return self._reading[1]

    # ------------------------------------------------------------------ the cursor

    def _saved_cursor(self) -> Position:
        """Return how far it was acknowledged; from its beginning if that cannot be told: readers drop what they have."""
        oldest = Position(min(self._sizes, default=0), 0)
        try:
            segment, offset, checksum = _CURSOR.unpack(self._spool.cursor_path(self._number).read_bytes())
        except (OSError, struct.error):
            return oldest
        whole = checksum == zlib.crc32(_CURSOR.pack(segment, offset, 0)[:-4])
        return max(oldest, Position(segment, offset)) if whole else oldest

    def _save_cursor(self) -> None:
        if self._cursor_file is None:
            self._cursor_file = os.open(self._spool.cursor_path(self._number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        place = _CURSOR.pack(*self._acknowledged, 0)[:-4]
        with contextlib.suppress(OSError):  # a cursor that is behind costs repeats, nothing else
            os.pwrite(self._cursor_file, place + struct.pack("<I", zlib.crc32(place)), 0)


class Spool:
    """A recorder's folder of logs, bounded in all. It belongs to whoever holds its lock, and to nobody once that process is gone.

    Args:
        folder: its folder; made if it is missing.
        max_bytes: the most that all logs may take together.
        manifest: where the records belong; unset: as the folder says.

    Raises:
        SpoolError: the folder cannot be used, or belongs to a process that lives.
    """

    def __init__(self, folder: Path, max_bytes: int, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._logs: dict[int, Log] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (folder / _LOCK).open("a")
        except OSError as refused:
            raise SpoolError(
                f"The spool {folder} cannot be used ({refused.strerror})", "Set ASR_SPOOL_DIR to a folder of yours."
            ) from refused
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if manifest is not None:
                (folder / _MANIFEST).write_bytes(msgspec.json.encode(manifest))
        except OSError as held:
            self._lock.close()
            raise SpoolError(f"The spool {folder} belongs to another recorder") from held
        self.size_bytes = sum(path.stat().st_size for path in folder.glob("*.log"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @classmethod
    def create(cls, parent: Path, max_bytes: int, manifest: Manifest) -> Spool:
        """Make a new one in a folder of spools."""
        return cls(parent / f"{os.getpid()}-{secrets.token_hex(4)}", max_bytes, manifest)

    def log(self, number: int) -> Log:
        """Return a partition's log."""
        if number not in self._logs:
            self._logs[number] = Log(self, number)
        return self._logs[number]

    def numbers(self) -> list[int]:
        """Return the partitions that have anything on disk."""
        return sorted({number for number, _ in self._segments()})

    def sync(self) -> None:
        """Write everything through to the disk, against a power failure."""
        for log in self._logs.values():
            log.sync()

    def close(self) -> None:
        """Let go of it: what is in it stays for the next recorder, an empty one is removed."""
        for log in self._logs.values():
            log.close()
        if not self.numbers():
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    # ------------------------------------------------------------------ for its logs

    def take(self, count: int, reserve_bytes: int) -> None:
        """Take room for bytes, and leave a reserve.

        Raises:
            SpoolFullError: there is not enough.
        """
        if self.size_bytes + count > self.max_bytes - reserve_bytes:
            raise SpoolFullError(f"it has reached its limit of {self.max_bytes} bytes")
        self.size_bytes += count

    def give_back(self, count: int) -> None:
        """Give back room that was taken."""
        self.size_bytes -= count

    def path_of(self, number: int, segment: int) -> Path:
        """Return a segment's file."""
        return self.folder / f"{number}-{segment:010d}.log"

    def cursor_path(self, number: int) -> Path:
        """Return the file that says how far a log was acknowledged."""
        return self.folder / f"{number}.acknowledged"

    def segments_of(self, number: int) -> list[int]:
        """Return the numbers of a log's segments that are there."""
        return sorted(segment for owner, segment in self._segments() if owner == number)

    def _segments(self) -> Iterator[tuple[int, int]]:
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if named := _SEGMENT_NAME.fullmatch(path.name):
                yield int(named[1]), int(named[2])


def leftovers(parent: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the spools in a folder whose manifest can be read, living recorders' included."""
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            yield folder, msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)


def _write_whole(file: int, data: bytes) -> None:
    if os.write(file, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _framed(body: bytes) -> bytes:
    return _HEADER.pack(len(body), _checksum(len(body), body)) + body


def _checksum(length: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(length.to_bytes(4, "little")))
