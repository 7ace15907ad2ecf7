"""Frames are the input, cut; positions count 16 kHz samples exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.recorder.framing import PCM_16K, Framer, WireFormat, frames_of, record_ms
from streams.errors import UserError

MULAW = WireFormat("mulaw", 8_000)
WIRES = st.sampled_from([PCM_16K, MULAW, WireFormat("alaw", 8_000), WireFormat("pcm_s16le", 8_000)])


@given(wire=WIRES, frame_ms=st.integers(20, 500), chunks=st.lists(st.binary(max_size=5_000), max_size=30))
def test_frames_are_the_input_however_it_was_split(wire: WireFormat, frame_ms: int, chunks: list[bytes]) -> None:
    audio = b"".join(chunks)
    frames = list(frames_of(chunks, wire, frame_ms))

    whole = len(audio) - len(audio) % wire.bytes_per_sample
    assert b"".join(frame.payload for frame in frames) == audio[:whole]

    ends = [0, *(frame.end_sample for frame in frames)]
    assert [frame.start_sample for frame in frames] == ends[:-1]
    assert ends[-1] == whole // wire.bytes_per_sample * wire.positions_per_sample
    full = frame_ms * wire.sample_rate_hz // 1_000 * wire.positions_per_sample
    assert all(frame.end_sample - frame.start_sample == full for frame in frames[:-1])
    assert all(0 < frame.end_sample - frame.start_sample <= full for frame in frames[-1:])


@given(wire=WIRES, frame_ms=st.integers(20, 500), splits=st.lists(st.integers(0, 20_000), max_size=20))
def test_the_split_does_not_matter(wire: WireFormat, frame_ms: int, splits: list[int]) -> None:
    audio = bytes(range(250)) * 80
    cuts = [0, *sorted(splits), len(audio)]
    pieces = [audio[start:end] for start, end in pairwise(cuts)]
    assert list(frames_of(pieces, wire, frame_ms)) == list(frames_of([audio], wire, frame_ms))


def test_at_8_khz_a_sample_is_two_positions() -> None:
    first, last = frames_of([bytes(2_000)], MULAW, 200)
    assert (first.start_sample, first.end_sample, len(first.payload)) == (0, 3_200, 1_600)
    assert (last.start_sample, last.end_sample, len(last.payload)) == (3_200, 4_000, 400)


def test_a_frame_is_given_out_as_soon_as_it_is_complete() -> None:
    framer = Framer(PCM_16K, 20)
    assert list(framer.push(bytes(639))) == []
    assert [frame.end_sample for frame in framer.push(bytes(1))] == [320]
    assert list(framer.flush()) == []


def test_chunks_are_read_only_when_needed() -> None:
    read = []

    def chunks():
        for number in range(100):
            read.append(number)
            yield bytes(640)

    frames = frames_of(chunks(), PCM_16K, 40)
    next(frames)
    assert read == [0, 1]


def test_what_was_read_before_a_failure_is_framed() -> None:
    def chunks():
        yield bytes(700)
        raise OSError

    frames = frames_of(chunks(), PCM_16K, 20)
    assert [(frame.start_sample, frame.end_sample) for frame in (next(frames), next(frames))] == [(0, 320), (320, 350)]
    with pytest.raises(OSError):
        next(frames)


@pytest.mark.parametrize(("frame_ms", "expected_ms"), [(20, 100), (30, 120), (60, 120), (99, 198), (100, 100), (200, 200), (500, 500)])
def test_short_frames_are_gathered(frame_ms: int, expected_ms: int) -> None:
    assert record_ms(frame_ms) == expected_ms
    assert record_ms(frame_ms, gather=False) == frame_ms


@pytest.mark.parametrize("frame_ms", [0, 19, 501])
def test_other_frames_are_refused(frame_ms: int) -> None:
    with pytest.raises(UserError, match="20 to 500 ms"):
        record_ms(frame_ms)


def test_other_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="8000 or 16000"):
        WireFormat("pcm_s16le", 44_100)
