"""The checker finds what is planted: records are written raw to a real broker, right ones and wrong ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from ops.chaos.checker import CHECKED_TOPICS, Call, Decoder, SentSession, Verdict, delivered_samples, judge, read_journal, read_raw
from schemas import AudioFrame, Coverage, Gap, Rejected, Session, SessionRecord, Stamps, Transcript, Word, default_codec
from streams import topics
from streams.settings import Settings
from streams.stage import record_key
from streams.topic_admin import ensure_topics
from streams.topics import Topic

SCHEMAS = Path(__file__).parents[3] / "schemas"
FRAME = 3_200
FRAMES = 10
CALL = Call("call", "pcm_s16le", 16_000, bytes(range(256)) * (FRAME * FRAMES * 2 // 256))
TOPIC_OF: dict[type, Topic] = {
    AudioFrame: topics.AUDIO,
    Coverage: topics.COVERAGE,
    Gap: topics.SPEECH,
    Transcript: topics.TRANSCRIPTS,
    Session: topics.SESSIONS,
}


class Records:
    """What a right run of two sessions leaves on the topics, one undisturbed and one disturbed, for tests to spoil."""

    def __init__(self) -> None:
        self.sent = {name: self._sent(name) for name in ("undisturbed", "disturbed")}
        self.lying: list[SessionRecord] = [record for name in self.sent for record in self._of(name)]

    @staticmethod
    def _sent(name: str) -> SentSession:
        frames = [(number * FRAME, (number + 1) * FRAME, 1_000_000 + number * 200_000) for number in range(FRAMES)]
        return SentSession(name, "1", 1, "call", name, f"player-{name}", 1_000_000, frames, True)

    def _of(self, name: str) -> Iterator[SessionRecord]:
        ids: dict[str, Any] = {"channel_id": "1", "session_id": name, "conversation_id": "c"}
        for number in range(FRAMES):
            start, end = number * FRAME, (number + 1) * FRAME
            yield AudioFrame(
                **ids,
                position_samples=start,
                ordinal=number + 1,
                encoding="pcm_s16le",
                sample_rate_hz=16_000,
                payload=CALL.slice(start, end),
            )
            yield Coverage(**ids, epoch=1, position_samples=start, end_sample=end, decoded_to_sample=end, stage="inference")
        for segment in range(2):
            yield self.final(name, segment)
        end = FRAMES * FRAME
        counts = {"segments": 2, "finals": 2, "cancelled": 0, "words": 4, "gaps": 0, "gap_samples": 0}
        reached = {"position_samples": end, "covered_to_sample": end, "decoded_to_sample": end}
        yield Session(**ids, epoch=1, state="closed", started_us=1, **reached, **counts)

    @staticmethod
    def final(name: str, segment: int, text: str = "hello there", epoch: int = 1) -> Transcript:
        start = segment * FRAME * 5
        return Transcript(
            channel_id="1",
            session_id=name,
            conversation_id="c",
            epoch=epoch,
            position_samples=start,
            stamps=Stamps(captured_us=5 if name == "disturbed" else 4),
            segment=segment,
            kind="final",
            end_sample=start + FRAME * 5,
            text=text,
            raw_text=text,
            words=tuple(Word(text=word, start_ms=0, end_ms=9, confidence=0.5) for word in text.split()),
            confidence=0.5,
            covered_to_sample=start,
        )

    def remove(self, kind: type, number: int, session: str = "disturbed") -> SessionRecord:
        """Take away the record of a kind with a number from a session."""
        mine = [each for each in self.lying if isinstance(each, kind) and each.session_id == session]
        self.lying.remove(mine[number])
        return mine[number]


@pytest.fixture
def records() -> Records:
    return Records()


def check(settings: Settings, records: Records, **how: object) -> Verdict:
    """Write the records raw, read them back raw, and judge."""
    ensure_topics(settings)
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})

    def delivered(error: object, _message: object) -> None:
        assert error is None

    for record in records.lying:
        topic = TOPIC_OF.get(type(record), topics.REJECTED)
        partition = 0 if topic is topics.REJECTED else 1
        key = None if topic is topics.REJECTED else record_key(record)
        producer.produce(topic.full_name(settings), default_codec().encode(record), key, partition=partition, on_delivery=delivered)
    assert producer.flush(10) == 0
    read = read_raw(settings.bootstrap_servers, settings.namespace, CHECKED_TOPICS, Decoder(SCHEMAS))
    return judge(records.sent, {"call": CALL}, read, **how)  # type: ignore[arg-type]


@pytest.mark.broker
class TestPlanted:
    def test_a_right_run_has_no_fault(self, settings: Settings, records: Records) -> None:
        verdict = check(settings, records)
        assert (verdict.faults, verdict.findings) == ({}, [])
        assert (verdict.sessions, verdict.frames_sent, verdict.finals) == (2, 2 * FRAMES, 2)

    def test_repeats_of_a_later_owner_are_no_fault(self, settings: Settings, records: Records) -> None:
        records.lying += [records.final("disturbed", 0, epoch=2)]
        verdict = check(settings, records)
        assert (verdict.faults, verdict.finals_repeated) == ({}, 1)

    def test_a_lost_answer(self, settings: Settings, records: Records) -> None:
        records.remove(Coverage, 4)
        verdict = check(settings, records)
        assert verdict.faults == {"frames_lost": 1}
        assert f"from ({4 * FRAME}, {5 * FRAME}) on" in verdict.findings[0]

    def test_an_answer_of_an_owner_that_had_been_replaced_counts_for_nothing(self, settings: Settings, records: Records) -> None:
        answer = records.remove(Coverage, 9)
        last = records.remove(Coverage, 8)
        records.lying += [msgspec.structs.replace(last, epoch=2), answer]
        verdict = check(settings, records)
        assert verdict.faults == {"frames_lost": 1}
        assert verdict.answers_fenced == 1

    def test_an_answer_to_a_part_of_a_frame(self, settings: Settings, records: Records) -> None:
        answer = records.remove(Coverage, 3)
        records.lying += [msgspec.structs.replace(answer, end_sample=4 * FRAME - 1)]  # type: ignore[call-arg]
        assert check(settings, records).faults == {"frames_lost": 1, "frames_unknown": 1}

    def test_a_frame_that_never_arrived(self, settings: Settings, records: Records) -> None:
        records.remove(AudioFrame, 3)
        assert check(settings, records).faults == {"frames_lost": 1}

    def test_audio_that_was_changed(self, settings: Settings, records: Records) -> None:
        frame = records.remove(AudioFrame, 3)
        assert isinstance(frame, AudioFrame)
        records.lying += [msgspec.structs.replace(frame, payload=bytes(len(frame.payload)))]
        assert check(settings, records).faults == {"audio_changed": 1}

    def test_a_lost_final(self, settings: Settings, records: Records) -> None:
        records.remove(Transcript, 1)
        verdict = check(settings, records)
        assert verdict.faults == {"finals_changed": 1}
        assert "is missing" in verdict.findings[0]

    @pytest.mark.parametrize(
        "change",
        [
            {"text": "hello then"},
            {"end_sample": 1},
            {"model_digest": "other"},
            {"words": (Word(text="hello", start_ms=1, end_ms=9, confidence=1),)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_changed_final(self, settings: Settings, records: Records, change: dict[str, object]) -> None:
        final = records.remove(Transcript, 1)
        records.lying += [msgspec.structs.replace(final, **change)]
        verdict = check(settings, records)
        assert verdict.faults == {"finals_changed": 1}

    def test_a_second_version_even_where_it_is_overwritten(self, settings: Settings, records: Records) -> None:
        # After compaction nothing of it would be left.
        records.lying.insert(0, records.final("disturbed", 0, "hello where"))
        assert check(settings, records).faults == {"finals_changed": 1, "finals_in_two_versions": 1}

    def test_a_final_that_is_cancelled_too(self, settings: Settings, records: Records) -> None:
        records.lying += [msgspec.structs.replace(records.final("disturbed", 1), kind="cancelled")]
        assert check(settings, records).faults == {"finals_changed": 1, "finals_in_two_versions": 1}

    def test_a_final_written_twice_by_one_owner(self, settings: Settings, records: Records) -> None:
        records.lying += [records.final("disturbed", 1)]
        assert check(settings, records).faults == {"finals_duplicated": 1}

    def test_which_a_producer_may_do_when_a_broker_died(self, settings: Settings, records: Records) -> None:
        records.lying += [records.final("disturbed", 1)]
        assert check(settings, records, brokers_disturbed=True).faults == {}

    def test_the_same_words_once_more_as_another_segment(self, settings: Settings, records: Records) -> None:
        records.lying += [records.final("disturbed", 2)]
        verdict = check(settings, records)
        assert verdict.faults == {"finals_changed": 1}
        assert "should not be there" in verdict.findings[0]

    def test_a_gap_that_was_filled(self, settings: Settings, records: Records) -> None:
        gap = Gap(channel_id="1", session_id="disturbed", conversation_id="c", epoch=1, position_samples=0, missing_samples=FRAME)
        records.lying += [gap]
        assert check(settings, records).faults == {"gaps_filled": 1}

    def test_a_session_that_was_never_closed(self, settings: Settings, records: Records) -> None:
        records.remove(Session, 0)
        assert check(settings, records).faults == {"sessions_not_closed": 1}

    def test_a_rejected_record(self, settings: Settings, records: Records) -> None:
        records.lying += [Rejected(topic="asr.audio", partition=1, offset=3, stage="vad", reason="it is damaged", at_us=1)]  # type: ignore[list-item]
        verdict = check(settings, records)
        assert verdict.faults == {"rejected": 1}
        assert "it is damaged" in verdict.findings[0]


class TestKilledPlayer:
    """What a killed recorder held in memory is excused; a hole before what arrived is not."""

    def cut(self, records: Records, frames: int) -> None:
        """Let the disturbed session break off: so many frames arrived, and one more was handed over."""
        for number in reversed(range(frames, FRAMES)):
            records.remove(AudioFrame, number)
            records.remove(Coverage, number)
        sent = records.sent["disturbed"]
        records.sent["disturbed"] = replace(sent, frames=sent.frames[: frames + 1], ended=False)

    @pytest.mark.broker
    def test_its_tail_is_compared_with_as_much_of_the_audio(self, settings: Settings, records: Records) -> None:
        self.cut(records, 5)
        records.remove(Transcript, 1)
        cut = replace(records.sent["disturbed"], session_id="cut", run="cut", player="player-cut", ended=True)
        records.sent["cut"] = replace(cut, frames=cut.frames[:5])
        again = [msgspec.structs.replace(each, session_id="cut") for each in records.lying if each.session_id == "disturbed"]
        records.lying += again
        verdict = check(settings, records, killed_players=frozenset({"player-disturbed"}))
        assert (verdict.faults, verdict.frames_held) == ({}, 1)

    @pytest.mark.broker
    def test_without_such_a_run_nothing_is_taken_for_granted(self, settings: Settings, records: Records) -> None:
        self.cut(records, 5)
        records.remove(Transcript, 1)
        faults = check(settings, records, killed_players=frozenset({"player-disturbed"})).faults
        assert faults == {"finals_changed": 1}

    @pytest.mark.broker
    def test_a_hole_is_a_loss(self, settings: Settings, records: Records) -> None:
        sent = records.sent["disturbed"]
        records.sent["disturbed"] = replace(sent, ended=False)
        records.remove(AudioFrame, 3)
        records.remove(Coverage, 3)
        assert check(settings, records, killed_players=frozenset({"player-disturbed"})).faults == {"frames_lost": 1}

    @pytest.mark.broker
    def test_of_a_player_that_lived_all_must_arrive(self, settings: Settings, records: Records) -> None:
        self.cut(records, 5)
        faults = check(settings, records).faults
        assert faults["frames_lost"] == 1

    @pytest.mark.broker
    def test_how_much_arrived_is_told(self, settings: Settings, records: Records) -> None:
        self.cut(records, 5)
        check(settings, records)
        read = read_raw(settings.bootstrap_servers, settings.namespace, ["audio"], Decoder(SCHEMAS))
        assert delivered_samples(records.sent, read) == {"undisturbed": FRAMES * FRAME, "disturbed": 5 * FRAME}


def test_a_journal_whose_last_line_is_cut_off_is_read(tmp_path: Path) -> None:
    begin = (
        '{"what": "begin", "session_id": "s", "channel_id": "1", "partition": 1, "call": "c", "run": "r", "player": "p", "started_us": 5}'
    )
    frame = '{"what": "frame", "session_id": "s", "start": 0, "end": 3200, "captured_us": 7}'
    (tmp_path / "j").write_text("\n".join([begin, frame, frame[:30]]))
    assert read_journal([tmp_path / "j"]) == {"s": SentSession("s", "1", 1, "c", "r", "p", 5, [(0, 3200, 7)], False)}


def test_it_shares_no_code_with_the_pipeline() -> None:
    probe = (
        "import sys, ops.chaos.checker, ops.chaos.takeover, ops.chaos.tap\n"
        "shared = {name.partition('.')[0] for name in sys.modules} & {'streams', 'agents', 'connectors', 'schemas', 'faust'}\n"
        "own = {name for name in sys.modules if name.startswith('ops.')} - {'ops.chaos'}\n"
        "print(sorted(shared), sorted(own))"
    )
    printed = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[] ['ops.chaos.checker', 'ops.chaos.takeover', 'ops.chaos.tap']"


def test_records_of_no_schema_are_told_apart() -> None:
    decoder = Decoder(SCHEMAS)
    assert decoder.decode(None) == decoder.decode(b"\xc3\x01rubbish-and-more") == decoder.decode(b"{}") == ("", {})
    name, fields = decoder.decode(default_codec().encode(Records.final("s", 0)))
    assert (name, fields["text"]) == ("Transcript", "hello there")
