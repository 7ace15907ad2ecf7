import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agents.vad.detectors import Listener
from agents.vad.inspection import FLAGS, Notes
from agents.vad.segmenter import Standing
from agents.vad.snapshot import VERSION, Memory, SnapshotError, pack, unpack
from agents.vad.spectrum import BINS
from agents.vad.tiny.detector import TinyDetector
from agents.vad.traditional import Traditional

samples = st.integers(0, 2**62)
memories = st.builds(
    Memory,
    started=st.booleans(),
    expected=samples,
    audio_start=samples,
    last_captured_us=samples,
    last_appended_ms=samples,
    last_offset=st.integers(-1, 2**62),
    next_chunk=st.integers(0, 100),
    notes=st.builds(Notes, samples, samples, samples, st.integers(0, 255), st.lists(st.integers(0, 255), max_size=8).map(tuple)),
    standing=st.builds(Standing, segment=samples, open=st.booleans(), start=samples, rest=st.booleans(), cut=st.integers(-1, 2**62)),
    hotword_version=st.text(max_size=16),
    model_digest=st.text(max_size=16),
)
floats = st.floats(width=32, allow_nan=False)
vectors = hnp.arrays(np.float32, st.integers(0, 260), elements=floats)
opinions = hnp.arrays(np.bool_, st.integers(0, 12))
quiets = st.integers(0, 60_000)
listeners = st.none() | st.builds(
    Listener, samples, samples, opinions, samples, floats.map(np.float32), vectors, vectors, quiets, st.booleans()
)


@given(memories, listeners)
def test_a_snapshot_comes_back_to_the_bit(memory, listener):
    back, heard = unpack(pack(memory, listener))
    assert back == memory
    if listener is None or heard is None:
        assert heard is listener
        return
    assert (heard.next_hop, heard.next_heard, heard.next_window) == (listener.next_hop, listener.next_heard, listener.next_window)
    assert np.array_equal(heard.opinions, listener.opinions)
    assert (heard.since, heard.confirmed) == (listener.since, listener.confirmed)
    assert heard.probability.tobytes() == listener.probability.tobytes()
    assert heard.neural.tobytes() == listener.neural.tobytes()
    assert heard.traditional.tobytes() == listener.traditional.tobytes()


def test_two_snapshots_fit_into_a_partition():
    third = np.float32(1 / 3)
    opinions = np.ones(12, np.bool_)
    # What the network remembers of a noisy line.
    tiny, rng = TinyDetector(), np.random.default_rng(1)
    power = np.exp(rng.normal(-14, 3, (400, BINS))).astype(np.float32)
    _, (neural,) = tiny(power, np.array([400]), tiny.fresh()[np.newaxis])
    listener = Listener(2**40, 2**40, opinions, 2**40, third, neural, np.full(Traditional.state_size, third))
    many = 2**32 - 1  # samples of 74 hours
    memory = Memory(True, many, many, 2**51, 2**41, many, many, Standing(many, True, many, many, many, True, many, many))
    memory.notes = Notes(many, many, many, 255, (255,) * len(FLAGS))
    memory.hotword_version = memory.model_digest = 16 * "f"
    # 4,096 bytes of base64 hold 3,072.
    assert 2 * len(pack(memory, listener)) <= 3_072


@given(memories, st.data())
def test_a_damaged_snapshot_is_refused(memory, data):
    state = pack(memory, None)
    cut = data.draw(st.integers(1, len(state) - 1))
    with pytest.raises(SnapshotError, match="is damaged"):
        unpack(state[:cut])
    with pytest.raises(SnapshotError, match="is damaged"):
        unpack(state + b"\x00")


@pytest.mark.parametrize("state", [b"", bytes([VERSION + 1]), b"\x00abc"])
def test_another_version_is_refused_with_a_remedy(state):
    with pytest.raises(SnapshotError, match=f"this program reads {VERSION}. Run the version that wrote it"):
        unpack(state)


def test_a_snapshot_of_the_release_before_is_read():
    memory = Memory(started=True, expected=3_200, last_offset=7)
    fields = msgspec.msgpack.decode(pack(memory, None)[1:])
    fields[0] = fields[0][:9]  # the versions in force came with this release
    assert unpack(b"\x02" + msgspec.msgpack.encode(fields)) == (memory, None)
