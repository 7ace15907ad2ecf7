"""The records of a session: numbered without gaps, at exact positions, on one partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connectors.recorder.framing import PCM_16K, frames_of
from connectors.recorder.session import SessionInfo, SessionRecords, new_id, partition_of
from schemas.codec import default_codec
from schemas.records import AudioFrame, Heartbeat, SessionEnd, SessionStart, Stamps


def test_a_session_from_start_to_end() -> None:
    info = SessionInfo("7", new_id(), new_id(), 7, PCM_16K, source="a.wav", party="agent", language="en", direction="inbound")
    records = SessionRecords(info)
    frames = list(frames_of([bytes(6_400 + 100)], PCM_16K, 200))
    made = [
        records.start(captured_us=10, enqueued_us=11),
        records.frame(frames[0], captured_us=20, enqueued_us=21),
        records.heartbeat(now_us=22),
        records.frame(frames[1], captured_us=30, enqueued_us=31),
        records.end("hangup", now_us=32),
    ]

    assert [type(record) for record in made] == [SessionStart, AudioFrame, Heartbeat, AudioFrame, SessionEnd]
    assert [record.ordinal for record in made] == [0, 1, 2, 3, 4]
    assert [record.position_samples for record in made] == [0, 0, 3_200, 3_200, 3_250]
    assert {(record.channel_id, record.session_id, record.conversation_id, record.epoch) for record in made} == {
        ("7", info.session_id, info.conversation_id, 0)
    }
    start, frame = made[0], made[1]
    assert isinstance(start, SessionStart)
    assert (start.party, start.language, start.direction, start.source) == ("agent", "en", "inbound", "a.wav")
    assert (start.encoding, start.sample_rate_hz) == ("pcm_s16le", 16_000)
    assert frame.stamps == Stamps(captured_us=20, enqueued_us=21)
    assert [default_codec().decode(default_codec().encode(record)) for record in made] == made


def test_ids_are_16_hexadecimal_digits_and_differ() -> None:
    ids = {new_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in ids)


@given(channel=st.integers(0, 10**12), partitions=st.integers(1, 1_000))
def test_numbered_channels_are_dealt_out_in_turn(channel: int, partitions: int) -> None:
    assert partition_of(str(channel), partitions) == channel % partitions


@given(channel=st.text(), partitions=st.integers(1, 1_000))
def test_every_channel_has_a_partition(channel: str, partitions: int) -> None:
    assert 0 <= partition_of(channel, partitions) < partitions


def test_named_channels_stay_where_they_always_were() -> None:
    # CRC-32 of the names; a change would move calls between partitions across versions.
    assert [partition_of(name, 64) for name in ("desk-1", "desk-2", "分机")] == [52, 14, 48]
