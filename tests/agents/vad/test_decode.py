import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.vad.decode import bytes_per_sample, decode, to_int16


@pytest.mark.parametrize(("encoding", "codec"), [("mulaw", "pcm_mulaw"), ("alaw", "pcm_alaw")])
def test_every_byte_of_g711_means_what_ffmpeg_says(encoding, codec):
    every_byte = bytes(range(256))
    context = av.CodecContext.create(codec, "r")
    context.sample_rate = 8_000
    context.layout = "mono"
    (frame,) = context.decode(av.Packet(every_byte))
    assert np.array_equal(to_int16(decode(every_byte, encoding)), frame.to_ndarray()[0])


@given(st.binary(max_size=64))
def test_pcm_comes_back_as_it_was(payload):
    whole = payload[: len(payload) // 2 * 2]
    samples = decode(payload, "pcm_s16le")
    assert samples.dtype == np.float32
    assert to_int16(samples).astype("<i2").tobytes() == whole


def test_loud_samples_are_clipped():
    assert to_int16(np.array([1.5, -1.5, 1.0], np.float32)).tolist() == [32_767, -32_768, 32_767]


def test_bytes_per_sample():
    assert (bytes_per_sample("mulaw"), bytes_per_sample("alaw"), bytes_per_sample("pcm_s16le")) == (1, 1, 2)
