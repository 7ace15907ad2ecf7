"""What the recorder puts on a real Kafka, read back raw, and what it says about it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from connectors.recorder.framing import WireFormat
from connectors.recorder.media import MediaError, MemorySource, open_media
from connectors.recorder.recorder import Recorder
from schemas.codec import default_codec
from schemas.records import AudioFrame, FlowRecord, Heartbeat, SessionEnd, SessionStart
from streams.errors import UserError
from streams.kafka import end_offsets, partitions_of, plain_consumer
from streams.settings import Settings, load_settings
from streams.topic_admin import create_topics
from streams.topics import AUDIO

MULAW = WireFormat("mulaw", 8_000)
CODES = bytes(range(256)) * 17  # 2.7 frames of 200 ms
S_US = 1_000_000
WAIT_S = 20


@pytest.fixture
def kafka(settings: Settings) -> Settings:
    create_topics(settings, [AUDIO])
    return settings


def read_back(settings: Settings) -> dict[int, list[FlowRecord]]:
    """Return all records on the topic by partition, in order."""
    ends = end_offsets(settings, partitions_of(settings, [AUDIO]))
    left = sum(ends.values())
    found: dict[int, list[FlowRecord]] = {}
    consumer = plain_consumer(settings, [AUDIO])
    try:
        deadline = time.monotonic() + WAIT_S
        while left and time.monotonic() < deadline:
            message = consumer.poll(0.1)
            if message is not None:
                assert message.error() is None
                record = default_codec().decode(message.value())
                assert isinstance(record, FlowRecord)
                assert message.key() == record.channel_id.encode()
                found.setdefault(message.partition(), []).append(record)
                left -= 1
    finally:
        consumer.close()
    assert left == 0
    return found


def frames(records: list[FlowRecord]) -> list[AudioFrame]:
    return [record for record in records if isinstance(record, AudioFrame)]


@pytest.mark.broker
def test_a_mulaw_file_arrives_byte_for_byte(kafka: Settings, audio) -> None:
    (source,) = open_media(audio.mulaw("call.wav", CODES))
    seen = []
    with Recorder(kafka, realtime=False) as recorder:
        playback = recorder.play(source, "7", conversation_id="c1", party="agent", language="en", direction="inbound", on_frame=seen.append)
        report = playback.result(WAIT_S)

    (partition,) = read_back(kafka).items()
    number, records = partition
    assert number == report.partition == 7 % kafka.partitions
    assert [record.ordinal for record in records] == list(range(len(records)))
    assert {(record.session_id, record.conversation_id, record.epoch) for record in records} == {(report.session_id, "c1", 0)}
    assert [type(record) for record in records] == [SessionStart, AudioFrame, AudioFrame, AudioFrame, SessionEnd]

    start, end = records[0], records[-1]
    assert isinstance(start, SessionStart)
    assert isinstance(end, SessionEnd)
    assert (start.encoding, start.sample_rate_hz, start.source) == ("mulaw", 8_000, "call.wav")
    assert (start.party, start.language, start.direction) == ("agent", "en", "inbound")
    assert (end.position_samples, end.reason) == (2 * len(CODES), "hangup")

    sent = frames(records)
    assert b"".join(frame.payload for frame in sent) == CODES
    assert [frame.position_samples for frame in sent] == [0, 3_200, 6_400]
    assert {(frame.encoding, frame.sample_rate_hz) for frame in sent} == {("mulaw", 8_000)}
    assert [(span.start_sample, span.captured_us, span.enqueued_us) for span in report.spans] == [
        (frame.position_samples, frame.stamps.captured_us, frame.stamps.enqueued_us) for frame in sent
    ]
    assert list(report.spans) == seen
    assert report.spans[-1].end_sample == report.samples == 2 * len(CODES)
    assert (report.frames_sent, report.frames_delivered, report.frames_lost, report.reason) == (3, 3, 0, "hangup")
    assert (report.failures, report.notes) == ((), ())


@pytest.mark.broker
def test_in_real_time_stamps_follow_the_audio(kafka: Settings, audio) -> None:
    samples = audio.tone(0.5)
    # The session began 6 s ago: all of it is due, and so is a heartbeat.
    began_us = time.time_ns() // 1_000 - 6 * S_US
    with Recorder(kafka, frame_ms=100) as recorder:
        report = recorder.play(MemorySource(samples), "line", partition=2, start_us=began_us).result(WAIT_S)
        assert len(recorder.lateness_ms()) == 5

    records = read_back(kafka)[2]
    assert [type(record) for record in records] == [SessionStart, Heartbeat, *[AudioFrame] * 5, SessionEnd]
    assert [record.ordinal for record in records] == list(range(8))
    assert records[0].stamps.captured_us == report.started_us == began_us
    sent = frames(records)
    assert [frame.stamps.captured_us - began_us for frame in sent] == [100_000, 200_000, 300_000, 400_000, 500_000]
    assert all(frame.stamps.enqueued_us >= frame.stamps.captured_us for frame in sent)
    assert b"".join(frame.payload for frame in sent) == samples.tobytes()


@pytest.mark.broker
def test_no_frame_is_sent_before_it_is_captured(kafka: Settings, audio) -> None:
    with Recorder(kafka, frame_ms=20, gather=False) as recorder:
        start_us = time.time_ns() // 1_000 + 50_000
        playbacks = [recorder.play(MemorySource(audio.tone(0.2)), str(channel), start_us=start_us) for channel in range(20)]
        reports = [playback.result(WAIT_S) for playback in playbacks]
    for report in reports:
        assert [span.captured_us for span in report.spans] == [start_us + 20_000 * number for number in range(1, 11)]
        assert all(span.enqueued_us >= span.captured_us for span in report.spans)
    by_session: dict[str, list[int]] = {}
    for records in read_back(kafka).values():
        for record in records:
            by_session.setdefault(record.session_id, []).append(record.ordinal)
    assert by_session == {report.session_id: list(range(12)) for report in reports}


@pytest.mark.broker
async def test_a_loop_goes_on_until_it_is_stopped(kafka: Settings) -> None:
    with Recorder(kafka, realtime=False) as recorder:
        playback = recorder.play(MemorySource(CODES, wire=MULAW), "3", loop=True)
        while playback.position_ms < 2_000:
            time.sleep(0.01)  # noqa: ASYNC251 - the recorder has a thread of its own
        playback.stop("timeout")
        report = await playback

    records = read_back(kafka)[3]
    heard = b"".join(frame.payload for frame in frames(records))
    assert heard == (CODES * (len(heard) // len(CODES) + 1))[: len(heard)]
    assert 2 * len(heard) == report.samples == records[-1].position_samples
    # Whole frames all the way: the seam of the loop makes no short one.
    assert {len(frame.payload) for frame in frames(records)} == {1_600}
    assert report.reason == "timeout"


@pytest.mark.broker
def test_leaving_hangs_up(kafka: Settings, audio) -> None:
    with Recorder(kafka) as recorder:
        playing = recorder.play(MemorySource(audio.tone(60)), "1", start_us=time.time_ns() // 1_000 - S_US)
        waiting = recorder.play(MemorySource(audio.tone(60)), "2", start_us=time.time_ns() // 1_000 + 3_600 * S_US)
        while playing.position_ms < 1_000:
            time.sleep(0.01)

    assert playing.done()
    assert (playing.report().reason, playing.report().frames_lost) == ("hangup", 0)
    assert waiting.result(0).frames_sent == 0
    found = read_back(kafka)
    # What never began leaves nothing behind.
    assert set(found) == {1}
    end = found[1][-1]
    assert isinstance(end, SessionEnd)
    assert (end.reason, end.position_samples) == ("hangup", playing.report().samples)


class Breaking(MemorySource):
    """Audio, then what a failing disk says."""

    def chunks(self) -> Iterator[bytes]:
        yield from super().chunks()
        raise MediaError("call.wav: input/output error")


@pytest.mark.broker
def test_a_source_that_breaks_off_ends_its_session_alone(kafka: Settings, audio) -> None:
    with Recorder(kafka, realtime=False) as recorder:
        broken = recorder.play(Breaking(audio.tone(0.5)), "1")
        sound = recorder.play(MemorySource(audio.tone(0.5)), "2")
        report = broken.result(WAIT_S)
        assert sound.result(WAIT_S).reason == "hangup"
    assert (report.reason, report.failures) == ("failed", ("call.wav: input/output error",))
    records = read_back(kafka)[1]
    # Also the rest that made no whole frame is there.
    assert [type(record) for record in records] == [SessionStart, AudioFrame, AudioFrame, AudioFrame, SessionEnd]
    assert records[-1].position_samples == 8_000
    assert isinstance(records[-1], SessionEnd)
    assert records[-1].reason == "failed"


@pytest.mark.broker
def test_a_fault_of_the_caller_reaches_the_caller_alone(kafka: Settings, audio) -> None:
    def faulty(_span: object) -> None:
        raise ZeroDivisionError

    with Recorder(kafka, realtime=False) as recorder:
        hit = recorder.play(MemorySource(audio.tone(0.5)), "1", on_frame=faulty)
        sound = recorder.play(MemorySource(audio.tone(0.5)), "2")
        with pytest.raises(ZeroDivisionError):
            hit.result(WAIT_S)
        assert sound.result(WAIT_S).frames_delivered == 3
    assert hit.report().reason == "failed"


@pytest.mark.broker
def test_a_full_queue_holds_the_source_back_and_loses_nothing(kafka: Settings) -> None:
    rng = np.random.default_rng(0)
    samples = rng.integers(-9_000, 9_000, 16_000 * 60).astype(np.int16)
    with Recorder(kafka, realtime=False) as recorder:
        # A queue of ten frames stands for an hour of audio against the real one.
        recorder._delivery._producer._producer = _small_queue(kafka)
        report = recorder.play(MemorySource(samples), "1").result(WAIT_S)
    assert (report.frames_sent, report.frames_delivered) == (300, 300)
    assert b"".join(frame.payload for frame in frames(read_back(kafka)[1])) == samples.tobytes()


def _small_queue(settings: Settings):
    from confluent_kafka import Producer

    from streams.kafka import idempotent_producer_config

    return Producer(idempotent_producer_config(settings) | {"queue.buffering.max.messages": 10})


def _nobody() -> Settings:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return load_settings(bootstrap_servers=f"127.0.0.1:{taken.getsockname()[1]}")


def test_what_no_broker_took_is_counted_with_cause_and_remedy(audio) -> None:
    recorder = Recorder(_nobody(), realtime=False)
    recorder._thread.start()  # as if the broker had gone away after the start
    playback = recorder.play(MemorySource(audio.tone(1)), "1")
    while playback.report().frames_sent < 5:
        time.sleep(0.01)
    recorder.close(timeout_s=0.1)
    report = playback.result(0)
    assert (report.frames_sent, report.frames_delivered, report.frames_lost) == (5, 0, 5)
    assert report.failures == (
        "It was stopped before the broker had taken everything. Let it run on, or see why the broker is slow. (7 times)",
    )


def test_no_broker_is_said_at_the_start() -> None:
    with pytest.raises(UserError, match="asr broker"), Recorder(_nobody()):
        pass


@pytest.mark.broker
def test_missing_topics_are_said_at_the_start(settings: Settings) -> None:
    with pytest.raises(UserError, match="asr topics create"), Recorder(settings):
        pass


@pytest.mark.broker
def test_fewer_partitions_than_configured_are_said_at_the_start(kafka: Settings) -> None:
    more = kafka.model_copy(update={"partitions": kafka.partitions + 1})
    with pytest.raises(UserError, match=f"ASR_PARTITIONS={kafka.partitions}"), Recorder(more):
        pass


@pytest.mark.broker
def test_a_partition_that_does_not_exist_is_refused(kafka: Settings, audio) -> None:
    with Recorder(kafka) as recorder, pytest.raises(UserError, match="Choose 0 to 3"):
        recorder.play(MemorySource(audio.tone(1)), "1", partition=4)
