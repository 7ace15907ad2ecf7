"""Says what became of known audio, from the topics alone: an oracle that shares no code with the pipeline.

Nothing here imports ``streams``, ``agents``, ``connectors`` or ``schemas``: records are read raw from offset 0 with confluent-kafka, and
decoded with fastavro and the ``.avsc`` files. What was sent is known from the players' journals and from the audio itself. So a fault that
the pipeline and its own tests share (a wrong rule of repair, a loss that is filled up) cannot hide here.

What must hold:

* every frame that was sent is on ``asr.audio`` unchanged, and is covered by an answer that a reader accepts, with exactly its span;
* every final of a session, in every version that was ever written, is the one of the undisturbed run of the same audio; none is missing,
  and there is none that it lacks;
* no gap was filled with silence, nothing was rejected, and every session was closed.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import fastavro
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from fastavro.schema import fingerprint, to_parsing_canonical_form

__all__ = ["CHECKED_TOPICS", "Call", "Canonical", "Decoder", "RawRecord", "SentSession", "Verdict", "judge", "read_journal", "read_raw"]

#: Topics that the verdict is of, without the namespace.
CHECKED_TOPICS: Final = ("audio", "speech", "coverage", "transcripts", "sessions", "rejected")

_SAMPLE_RATE_HZ: Final = 16_000
_BYTES_PER_SAMPLE: Final = {"pcm_s16le": 2, "mulaw": 1, "alaw": 1}
_MARKER: Final = b"\xc3\x01"
_FINGERPRINT_BYTES: Final = 8
_READ_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 1.0
_RETRY_S: Final = 0.1
#: Findings of each kind that are told in full.
_TOLD: Final = 10

Canonical = tuple[Any, ...]


class RawRecord(NamedTuple):
    """A record as it lies on a topic. ``topic`` is without the namespace, ``kind`` the schema's name; empty if it cannot be decoded."""

    topic: str
    partition: int
    offset: int
    kind: str
    fields: Mapping[str, Any]


class Decoder:
    """Decodes Avro's single-object encoding with the schemas of a folder.

    Args:
        folder: holds the ``.avsc`` files.
    """

    def __init__(self, folder: Path) -> None:
        self._schemas: dict[bytes, tuple[str, Any]] = {}
        for file in sorted(folder.glob("*.avsc")):
            schema = fastavro.parse_schema(json.loads(file.read_text(encoding="utf-8")), named_schemas={})
            mark = bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))
            self._schemas[mark] = (file.stem, schema)

    def decode(self, value: bytes | None) -> tuple[str, Mapping[str, Any]]:
        """Return the schema's name and the fields; ("", {}) where the value is none of them."""
        start = len(_MARKER) + _FINGERPRINT_BYTES
        if not value or not value.startswith(_MARKER) or value[len(_MARKER) : start] not in self._schemas:
            return "", {}
        name, schema = self._schemas[value[len(_MARKER) : start]]
        try:
            fields: Any = fastavro.schemaless_reader(io.BytesIO(value[start:]), schema, None)
        except Exception:  # noqa: BLE001 fastavro raises whatever damaged bytes lead it to
            return "", {}
        return name, fields


def read_raw(bootstrap_servers: str, namespace: str, topics: Sequence[str], decoder: Decoder) -> Iterator[RawRecord]:
    """Yield every record of topics from offset 0 up to what was there when it began, each partition in its order.

    Raises:
        TimeoutError: the brokers did not give it all.
        RuntimeError: a topic begins after offset 0: what was deleted cannot be judged.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"{namespace}.checker",
            "enable.auto.commit": False,
            "log_level": 0,
            "error_cb": lambda _error: None,
            "fetch.message.max.bytes": 8 * 2**20,
        }
    )
    try:
        ends: dict[tuple[str, int], int] = {}
        for topic in topics:
            name = f"{namespace}.{topic}"
            for number in consumer.list_topics(name, timeout=_READ_TIMEOUT_S).topics[name].partitions:
                first, end = _watermarks(consumer, TopicPartition(name, number))
                if first:
                    raise RuntimeError(f"{name}-{number} begins at offset {first}: what was before it cannot be judged any more")
                if end:
                    ends[name, number] = end
        consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING) for name, number in ends])
        deadline_s = time.monotonic() + _READ_TIMEOUT_S
        while ends:
            message = consumer.poll(_POLL_S)
            if message is None or message.error():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"nothing came of {', '.join(f'{name}-{number}' for name, number in ends)}")
                continue
            deadline_s = time.monotonic() + _READ_TIMEOUT_S
            at, offset = (str(message.topic()), int(message.partition() or 0)), int(message.offset() or 0)
            if at not in ends or offset >= ends[at]:
                ends.pop(at, None)
                continue
            kind, fields = decoder.decode(message.value())
            yield RawRecord(at[0].removeprefix(f"{namespace}."), at[1], offset, kind, fields)
            if offset + 1 >= ends[at]:
                del ends[at]
    finally:
        consumer.close()


def _watermarks(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """Return the first offset of a partition and the one after its last, also while its leader is being found."""
    deadline_s = time.monotonic() + _READ_TIMEOUT_S
    while True:
        try:
            first, end = consumer.get_watermark_offsets(partition, timeout=_POLL_S)
        except KafkaException:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return int(first), int(end)


# ---------------------------------------------------------------------- what was sent


@dataclass(frozen=True, slots=True)
class Call:
    """Known audio.

    Attributes:
        name: of the call.
        encoding: on the wire, as in AudioFrame.avsc.
        sample_rate_hz: on the wire.
        payload: all of it, as it goes on the wire.
    """

    name: str
    encoding: str
    sample_rate_hz: int
    payload: bytes

    def slice(self, start_sample: int, end_sample: int) -> bytes:
        """Return the audio between two positions, in 16 kHz samples."""
        width = _BYTES_PER_SAMPLE[self.encoding] * self.sample_rate_hz
        return self.payload[start_sample * width // _SAMPLE_RATE_HZ : end_sample * width // _SAMPLE_RATE_HZ]


@dataclass(slots=True)
class SentSession:
    """What a player says of a session that it played.

    Attributes:
        session_id: the session.
        channel_id: its channel.
        partition: where its records are.
        call: name of its audio.
        run: ``undisturbed``, ``disturbed``, or ``cut``: undisturbed again, with as much of the audio as a killed recorder had sent.
        player: which process played it.
        started_us: when its first sample was captured.
        frames: (start, end, captured_us) of each frame handed to Kafka.
        ended: whether the player lived to the end of it.
    """

    session_id: str
    channel_id: str
    partition: int
    call: str
    run: str
    player: str
    started_us: int
    frames: list[tuple[int, int, int]] = field(default_factory=list)
    ended: bool = False


def read_journal(files: Iterable[Path]) -> dict[str, SentSession]:
    """Return the sessions of players' journals. A line that a killed player did not finish is left out."""
    sessions: dict[str, SentSession] = {}
    for file in files:
        for line in file.read_bytes().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            match entry.pop("what"):
                case "begin":
                    sessions[entry["session_id"]] = SentSession(**entry)
                case "frame":
                    sessions[entry["session_id"]].frames.append((entry["start"], entry["end"], entry["captured_us"]))
                case "end":
                    sessions[entry["session_id"]].ended = True
    return sessions


# ---------------------------------------------------------------------- the verdict


@dataclass(slots=True)
class Verdict:
    """What was found. The fields of ``MUST_BE_ZERO`` are faults.

    Attributes:
        sessions: sessions judged.
        frames_sent: frames that players handed to Kafka and that had to arrive, and those that did.
        frames_lost: frames that were to arrive and did not, or that no accepted answer covers.
        frames_held: frames that a killed recorder had handed over and still held; no design removes that.
        frames_unknown: answers for spans that nobody sent.
        audio_changed: frames on the topic that differ from the audio.
        finals: finals of the disturbed run, each counted once.
        finals_changed: finals that differ from the undisturbed run's, are missing, or are too many.
        finals_in_two_versions: segments of which more than one version was ever written.
        finals_repeated: finals written again, the same, by a later owner; readers drop them.
        finals_duplicated: finals written again, the same, by the same owner.
        answers_fenced: answers of owners that had been replaced.
        gaps_filled: gaps that were filled with silence.
        rejected: records refused.
        undecodable: records on the checked topics that are none of the schemas.
        sessions_not_closed: sessions whose end was never written.
        findings: the first of them in words.
    """

    MUST_BE_ZERO = (
        "frames_lost",
        "frames_unknown",
        "audio_changed",
        "finals_changed",
        "finals_in_two_versions",
        "finals_duplicated",
        "gaps_filled",
        "rejected",
        "undecodable",
        "sessions_not_closed",
    )

    sessions: int = 0
    frames_sent: int = 0
    frames_lost: int = 0
    frames_held: int = 0
    frames_unknown: int = 0
    audio_changed: int = 0
    finals: int = 0
    finals_changed: int = 0
    finals_in_two_versions: int = 0
    finals_repeated: int = 0
    finals_duplicated: int = 0
    answers_fenced: int = 0
    gaps_filled: int = 0
    rejected: int = 0
    undecodable: int = 0
    sessions_not_closed: int = 0
    findings: list[str] = field(default_factory=list)
    _told: Counter[str] = field(default_factory=Counter, repr=False)

    def tell(self, what: str, finding: str, count: int = 1) -> None:
        """Count a finding, and keep the first ones of its kind in words."""
        setattr(self, what, getattr(self, what) + count)
        self._told[what] += 1
        if self._told[what] <= _TOLD:
            self.findings.append(finding)

    @property
    def faults(self) -> dict[str, int]:
        """What should be zero and is not."""
        return {name: count for name in self.MUST_BE_ZERO if (count := getattr(self, name))}


def canonical(fields: Mapping[str, Any]) -> Canonical:
    """Return the part of a Transcript that must be the same in every run: text, tokens, times, positions, versions."""
    words = tuple((word["text"], word["start_ms"], word["end_ms"]) for word in fields["words"])
    named = ("kind", "position_samples", "end_sample", "text", "raw_text", "language", "engine", "model_digest", "hotword_version")
    return (*(fields[name] for name in named), words)


class _Found:
    """What lies on the topics of one session."""

    def __init__(self) -> None:
        #: start → (end, payload digest) of the frames on the audio topic.
        self.audio: dict[int, tuple[int, bytes]] = {}
        self.covered: set[tuple[int, int]] = set()
        #: segment → canonical → epochs, in the order of writing.
        self.finals: dict[int, dict[Canonical, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.gaps = 0
        self.closed = False
        self._epochs: dict[str, int] = {}

    def accepts(self, stage: str, epoch: int) -> bool:
        """Keep the highest epoch that was seen of a stage; refuse lower ones, as every reader does."""
        highest = max(epoch, self._epochs.get(stage, epoch))
        self._epochs[stage] = highest
        return epoch == highest


def judge(
    sessions: Mapping[str, SentSession],
    calls: Mapping[str, Call],
    records: Iterable[RawRecord],
    *,
    killed_players: frozenset[str] = frozenset(),
    brokers_disturbed: bool = False,
    on_answer: Callable[[RawRecord], None] = lambda _record: None,
) -> Verdict:
    """Compare what lies on the topics with what was sent.

    Args:
        sessions: everything that was sent, by session; the undisturbed ones are the measure for the others.
        calls: the audio, by name.
        records: of :data:`CHECKED_TOPICS`.
        killed_players: players that were killed: what they held in memory did not arrive.
        brokers_disturbed: whether a broker was killed: a producer may then have repeated what it did not know to be written.
        on_answer: told of every answer that a reader accepts, in the order of each partition.
    """
    verdict = Verdict(sessions=len(sessions))
    found: dict[str, _Found] = {session_id: _Found() for session_id in sessions}
    for record in records:
        _take(verdict, found, record, on_answer)
    lengths = {session_id: max((end for end, _ in found[session_id].audio.values()), default=0) for session_id in sessions}
    expected: dict[tuple[str, int], dict[int, Canonical]] = {}
    for session_id, session in sessions.items():
        if session.run != "disturbed":
            finals = {segment: next(iter(versions)) for segment, versions in found[session_id].finals.items()}
            known = expected.setdefault((session.call, lengths[session_id]), finals)
            if known != finals:
                verdict.tell("finals_changed", f"{_name(session)}: two undisturbed runs differ")
    for session_id, session in sessions.items():
        mine = found[session_id]
        _judge_frames(verdict, session, calls[session.call], mine, player_killed=session.player in killed_players)
        _judge_versions(verdict, session, mine, brokers_disturbed=brokers_disturbed)
        if session.run == "disturbed":
            _judge_finals(verdict, session, mine, expected.get((session.call, lengths[session_id])), lengths[session_id])
        if mine.gaps:
            verdict.tell("gaps_filled", f"{_name(session)}: {mine.gaps} gaps were filled with silence", mine.gaps)
        if mine.audio and not mine.closed:
            verdict.tell("sessions_not_closed", f"{_name(session)}: never closed")
    return verdict


def delivered_samples(sessions: Mapping[str, SentSession], records: Iterable[RawRecord]) -> dict[str, int]:
    """Return how much audio of each session is on the audio topic, in 16 kHz samples."""
    lengths = dict.fromkeys(sessions, 0)
    for record in records:
        if record.kind == "AudioFrame" and record.fields["session_id"] in lengths:
            session_id = record.fields["session_id"]
            lengths[session_id] = max(lengths[session_id], _end_of(record.fields))
    return lengths


def _take(verdict: Verdict, found: Mapping[str, _Found], record: RawRecord, on_answer: Callable[[RawRecord], None]) -> None:
    if record.topic == "rejected":
        reason = record.fields.get("reason", "?")
        verdict.tell("rejected", f"offset {record.fields.get('offset')} of {record.fields.get('topic')} was rejected: {reason}")
        return
    if not record.kind:
        verdict.tell("undecodable", f"offset {record.offset} of {record.topic}-{record.partition} is none of the schemas")
        return
    mine = found.get(record.fields.get("session_id", ""))
    if mine is None:
        return
    fields = record.fields
    match record.topic, record.kind:
        case "audio", "AudioFrame":
            mine.audio.setdefault(fields["position_samples"], (_end_of(fields), _digest(fields["payload"])))
        case "speech", "Gap":
            mine.gaps += 1
        case "coverage", "Coverage":
            if mine.accepts(fields["stage"], fields["epoch"]):
                mine.covered.add((fields["position_samples"], fields["end_sample"]))
                on_answer(record)
            else:
                verdict.answers_fenced += 1
        case "transcripts", "Transcript":
            if fields["kind"] != "refined":
                mine.finals[fields["segment"]][canonical(fields)].append(fields["epoch"])
        case "sessions", "Session":
            mine.closed = mine.closed or fields["state"] == "closed"
            mine.gaps = max(mine.gaps, fields["gaps"])


def _judge_frames(verdict: Verdict, session: SentSession, call: Call, mine: _Found, *, player_killed: bool) -> None:
    sent = {(start, end) for start, end, _ in session.frames}
    arrived = {(start, end) for start, (end, _) in mine.audio.items()}
    missing = sent - arrived
    if player_killed and not session.ended:
        # Only its tail may be missing: a hole before what arrived is a loss.
        reached = max((end for _, end in arrived), default=0)
        held = {span for span in missing if span[0] >= reached}
        verdict.frames_held += len(held)
        sent, missing = sent - held, missing - held
        # The journal is written after the frame is handed over.
        sent |= {span for span in arrived - sent if span[0] == max((end for _, end in sent), default=0)}
    for start, (end, digest) in mine.audio.items():
        if digest != _digest(call.slice(start, end)):
            verdict.tell("audio_changed", f"{_name(session)}: the frame at sample {start} is not the audio that was played")
    verdict.frames_sent += len(sent)
    if missing:
        verdict.tell("frames_lost", f"{_name(session)}: {len(missing)} frames never arrived, from {min(missing)} on", len(missing))
    if uncovered := (sent - missing) - mine.covered:
        verdict.tell(
            "frames_lost", f"{_name(session)}: {len(uncovered)} frames were not answered, from {min(uncovered)} on", len(uncovered)
        )
    if unknown := (mine.covered | arrived) - sent:
        verdict.tell("frames_unknown", f"{_name(session)}: {len(unknown)} frames that nobody sent, from {min(unknown)} on", len(unknown))


def _judge_versions(verdict: Verdict, session: SentSession, mine: _Found, *, brokers_disturbed: bool) -> None:
    for segment, versions in mine.finals.items():
        if len(versions) > 1:
            shown = " and as ".join(map(_shown, versions))
            verdict.tell("finals_in_two_versions", f"{_name(session)}: segment {segment} was written as {shown}")
        for version, epochs in versions.items():
            verdict.finals_repeated += len(set(epochs)) - 1
            if not brokers_disturbed and len(epochs) > len(set(epochs)):
                times = len(epochs) - len(set(epochs))
                verdict.tell(
                    "finals_duplicated", f"{_name(session)}: segment {segment} {_shown(version)} was written twice by one owner", times
                )


def _judge_finals(
    verdict: Verdict, session: SentSession, mine: _Found, expected: Mapping[int, Canonical] | None, length_samples: int
) -> None:
    if expected is None:
        if length_samples:
            verdict.tell("finals_changed", f"{_name(session)}: there is no undisturbed run of {length_samples} samples to compare with")
        return
    verdict.finals += len(mine.finals)
    for segment in expected.keys() | mine.finals.keys():
        versions = mine.finals.get(segment, {})
        due = expected.get(segment)
        if due is None:
            verdict.tell("finals_changed", f"{_name(session)}: segment {segment} {_shown(next(iter(versions)))} should not be there")
        elif not versions:
            verdict.tell("finals_changed", f"{_name(session)}: segment {segment} {_shown(due)} is missing")
        elif changed := [version for version in versions if version != due]:
            verdict.tell("finals_changed", f"{_name(session)}: segment {segment} is {_shown(changed[0])} and should be {_shown(due)}")


def _name(session: SentSession) -> str:
    return f"channel {session.channel_id}, session {session.session_id} ({session.run}, {session.call})"


def _shown(version: Canonical) -> str:
    kind, start, end, text = version[:4]
    return f"[{start}..{end} {kind} {text!r}]"


def _end_of(fields: Mapping[str, Any]) -> int:
    samples = len(fields["payload"]) // _BYTES_PER_SAMPLE[fields["encoding"]]
    return int(fields["position_samples"] + samples * _SAMPLE_RATE_HZ // fields["sample_rate_hz"])


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
