"""Files of every kind become samples or coded bytes; damaged ones what is left of them, or a reason."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from connectors.recorder.framing import PCM_16K, WireFormat
from connectors.recorder.media import MediaError, MemorySource, open_media, same_in_all_channels

MULAW_8K = WireFormat("mulaw", 8_000)
#: Every code of G.711, and more than one read of a file.
CODES = bytes(range(256)) * 100
NOBODY = 65_534


def samples_of(path: Path, channel: int = 0) -> NDArray[np.int16]:
    source = open_media(path)[channel]
    assert source.wire == PCM_16K
    return np.frombuffer(b"".join(source.chunks()), "<i2")


def bytes_of(path: Path, channel: int = 0) -> bytes:
    return b"".join(open_media(path)[channel].chunks())


def error_db(heard: NDArray[np.int16], expected: NDArray[np.int16], edge: int = 800) -> float:
    """Return the level of the difference against the expected signal, without the edges, which a filter may bend."""
    inner = slice(edge, min(len(heard), len(expected)) - edge)
    difference = heard[inner].astype(float) - expected[inner]
    return float(20 * np.log10(np.std(difference) / np.std(expected[inner].astype(float)) + 1e-12))


# What is there


def test_pcm_at_16_khz_stays_as_it_is(audio) -> None:
    samples = audio.tone(1.3)
    assert np.array_equal(samples_of(audio.wav("a.wav", samples.tobytes())), samples)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_other_rates_become_16_khz(audio, rate_hz: int) -> None:
    heard = samples_of(audio.wav("a.wav", audio.tone(2, rate_hz).tobytes(), rate_hz=rate_hz))
    assert len(heard) == 32_000
    assert error_db(heard, audio.tone(2)) < -50


def test_other_sample_formats_become_pcm16(audio) -> None:
    samples = audio.tone(1)
    in_24_bits = (samples.astype("<i4") << 8).view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    assert np.array_equal(samples_of(audio.wav("24.wav", in_24_bits, bits=24)), samples)
    as_floats = (samples / 32_768).astype("<f4").tobytes()
    assert np.array_equal(samples_of(audio.wav("float.wav", as_floats, coding=3, bits=32)), samples)


@pytest.mark.parametrize(
    ("name", "codec", "rate_hz", "below_db"),
    [
        ("a.flac", "flac", 44_100, -50),
        ("a.mp3", "libmp3lame", 44_100, -20),
        ("a.ogg", "libopus", 48_000, -20),
        ("a.mka", "flac", 48_000, -50),
    ],
)
def test_coded_files_sound_like_what_was_coded(audio, name: str, codec: str, rate_hz: int, below_db: float) -> None:
    path = audio.encoded(name, audio.tone(2, rate_hz)[np.newaxis], codec=codec, rate_hz=rate_hz)
    heard = samples_of(path)
    assert 32_000 <= len(heard) <= 32_000 + 1_600
    assert error_db(heard, audio.tone(2)) < below_db


def test_8_khz_g711_keeps_its_bytes(audio) -> None:
    for coding, encoding in ((7, "mulaw"), (6, "alaw")):
        path = audio.wav(f"{encoding}.wav", CODES, coding=coding, rate_hz=8_000, bits=8)
        (source,) = open_media(path)
        assert source.wire == WireFormat(encoding, 8_000)
        assert b"".join(source.chunks()) == CODES
        assert source.duration_ms == len(CODES) // 8


def test_stereo_g711_is_two_channels_of_the_same_bytes(audio) -> None:
    left, right = CODES, CODES[::-1]
    both = np.frombuffer(left + right, np.uint8).reshape(2, -1).T.tobytes()
    path = audio.mulaw("call.wav", both, channels=2)
    assert [source.name for source in open_media(path)] == ["call.wav (left)", "call.wav (right)"]
    assert [source.wire for source in open_media(path)] == [MULAW_8K, MULAW_8K]
    assert [bytes_of(path, 0), bytes_of(path, 1)] == [left, right]


@pytest.mark.parametrize(("suffix", "encoding"), [(".ul", "mulaw"), (".ULAW", "mulaw"), (".al", "alaw"), (".alaw", "alaw")])
def test_headerless_g711_goes_by_its_name(audio, suffix: str, encoding: str) -> None:
    (source,) = open_media(audio.raw("a" + suffix, CODES))
    assert source.wire == WireFormat(encoding, 8_000)
    assert b"".join(source.chunks()) == CODES


def test_a_wav_file_is_one_whatever_its_name(audio) -> None:
    path = audio.mulaw("a.wav", CODES)
    assert bytes_of(path.rename(path.with_suffix(".ulaw"))) == CODES


def test_g711_at_16_khz_is_decoded(audio) -> None:
    heard = samples_of(audio.wav("a.wav", CODES, coding=7, rate_hz=16_000, bits=8))
    # G.711: code 0 is the lowest value of mu-law, 128 the highest, 127 and 255 are zero.
    assert (heard[0], heard[128], heard[127], heard[255]) == (-32_124, 32_124, 0, 0)
    assert len(heard) == len(CODES)


def test_a_source_can_be_read_again(audio) -> None:
    (source,) = open_media(audio.mulaw("a.wav", CODES))
    assert b"".join(source.chunks()) == b"".join(source.chunks()) == CODES


def test_long_files_are_read_in_small_pieces(audio) -> None:
    path = audio.wav("long.wav", bytes(2 * 16_000 * 600))
    assert max(map(len, open_media(path)[0].chunks())) <= 65_536


def test_six_channels_are_six(audio) -> None:
    rng = np.random.default_rng(1)
    samples = rng.integers(-9_000, 9_000, (6, 16_000)).astype(np.int16)
    path = audio.wav("conference.wav", samples.T.tobytes(), channels=6)
    assert [source.name for source in open_media(path)][4:] == ["conference.wav (channel 5)", "conference.wav (channel 6)"]
    for channel in range(6):
        assert np.array_equal(samples_of(path, channel), samples[channel])


def test_memory(audio) -> None:
    samples = audio.tone(1.5)
    source = MemorySource(samples, "made")
    assert (source.name, source.duration_ms, source.wire) == ("made", 1_500, PCM_16K)
    assert b"".join(source.chunks()) == samples.tobytes()
    coded = MemorySource(CODES, wire=MULAW_8K)
    assert (b"".join(coded.chunks()), coded.duration_ms) == (CODES, len(CODES) // 8)


@pytest.mark.parametrize("wrong", [np.zeros(10, np.float32), np.zeros((2, 10), np.int16)])
def test_other_samples_in_memory_are_refused(wrong: NDArray[np.int16]) -> None:
    with pytest.raises(TypeError, match="one-dimensional int16"):
        MemorySource(wrong)


# One channel or two


def blocks(*channels: NDArray[np.number]) -> Iterator[NDArray[np.int16]]:
    both = np.clip(np.stack(channels), -32_768, 32_767).astype(np.int16)
    for start in range(0, both.shape[1], 1_152):
        yield both[:, start : start + 1_152]


def noise(seconds: float, level_db: float, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(0, 32_768 * 10 ** (level_db / 20), round(seconds * 16_000))


def test_stereo_that_holds_the_same_is_one_channel(audio) -> None:
    speech = noise(4, -20)
    assert same_in_all_channels(blocks(speech, speech))
    assert same_in_all_channels(blocks(speech, speech + noise(4, -35, 1)))  # coded with loss
    assert same_in_all_channels(blocks(noise(4, -55, 1), noise(4, -55, 2)))  # nothing but the noise of two converters
    assert same_in_all_channels(blocks(speech, speech, speech))
    path = audio.wav("mono.wav", np.repeat(audio.tone(2), 2).tobytes(), channels=2)
    (source,) = open_media(path)
    assert source.name == "mono.wav"
    assert np.array_equal(np.frombuffer(b"".join(source.chunks()), "<i2"), audio.tone(2))


@pytest.mark.parametrize("at_s", [0.0, 30.2, 59.8])
def test_one_short_answer_makes_two_channels(at_s: float) -> None:
    common = noise(60, -20)
    own = common.copy()
    start = int(at_s * 16_000)
    own[start : start + 1_600] += noise(0.1, -20, 1)
    assert not same_in_all_channels(blocks(common, own))
    assert not same_in_all_channels(blocks(common, common, own))


def test_a_quiet_answer_into_silence_makes_two_channels() -> None:
    caller, agent = noise(10, -70, 1), noise(10, -70, 2)
    agent[80_000:84_000] += noise(0.25, -36, 3)
    assert not same_in_all_channels(blocks(caller, agent))


def test_two_parties_are_two_channels(audio) -> None:
    first, second = audio.tone(2, tone_hz=300), audio.tone(2, tone_hz=440)
    first[16_000:], second[:16_000] = 0, 0
    path = audio.wav("call.wav", np.stack([first, second], axis=1).tobytes(), channels=2)
    assert np.array_equal(samples_of(path, 0), first)
    assert np.array_equal(samples_of(path, 1), second)


def test_less_than_a_second_is_judged_too() -> None:
    assert same_in_all_channels(blocks(noise(0.3, -20), noise(0.3, -20)))
    assert not same_in_all_channels(blocks(noise(0.3, -20), noise(0.3, -20, 1)))


# Damage: what is there is played


def test_a_header_that_lies_about_the_size_hides_nothing(audio) -> None:
    samples = audio.tone(1)
    for size in (0, 1_000, 10**9, 0xFFFF_FFFF):
        assert np.array_equal(samples_of(audio.wav("a.wav", samples.tobytes(), data_size=size)), samples), size


def test_chunks_after_the_audio_are_not_played(audio) -> None:
    samples = audio.tone(1)
    text = b"LIST" + (12).to_bytes(4, "little") + b"INFOISFT\x00\x00\x00\x00"
    path = audio.wav("a.wav", samples.tobytes() + text, data_size=2 * len(samples))
    assert np.array_equal(samples_of(path), samples)


def test_odd_bytes_at_the_end_are_left_out(audio) -> None:
    samples = audio.tone(1)
    assert np.array_equal(samples_of(audio.wav("a.wav", samples.tobytes() + b"x")), samples)
    assert bytes_of(audio.mulaw("b.wav", CODES + CODES[:1], channels=2)) == CODES[::2]


def test_a_wrong_block_length_is_seen_through(audio) -> None:
    samples = audio.tone(1)
    assert np.array_equal(samples_of(audio.wav("a.wav", samples.tobytes(), block_align=1)), samples)


@pytest.mark.parametrize(("name", "codec"), [("a.mp3", "libmp3lame"), ("a.flac", "flac"), ("a.ogg", "libopus")])
def test_half_a_file_is_half_the_audio(audio, name: str, codec: str) -> None:
    noisy = noise(12, -20).astype(np.int16)[np.newaxis]
    rate_hz = 48_000 if codec == "libopus" else 16_000
    path = audio.encoded(name, noisy, codec=codec, rate_hz=rate_hz)
    whole = samples_of(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    half = samples_of(path)
    assert 0.2 < len(half) / len(whole) < 0.8
    assert np.array_equal(half[: len(half) // 2], whole[: len(half) // 2])


def test_a_damaged_middle_is_skipped_and_noted(audio) -> None:
    path = audio.encoded("a.mp3", noise(4, -20).astype(np.int16)[np.newaxis], codec="libmp3lame", rate_hz=16_000)
    whole = bytearray(path.read_bytes())
    third = len(whole) // 3
    whole[third : 2 * third] = np.random.default_rng(2).bytes(third)
    path.write_bytes(whole)
    (source,) = open_media(path)
    heard = sum(map(len, source.chunks())) // 2
    assert 32_000 < heard < 64_000
    assert [re.sub(r"\d+", "N", note) for note in source.notes] == ["damaged packets skipped: N"]


def test_what_is_no_number_becomes_silence(audio) -> None:
    samples = audio.tone(1)
    floats = (samples / 32_768).astype("<f4")
    floats[100:200], floats[300], floats[400] = np.nan, np.inf, -np.inf
    (source,) = open_media(audio.wav("a.wav", floats.tobytes(), coding=3, bits=32))
    samples[100:200], samples[300], samples[400] = 0, 0, 0
    assert np.array_equal(np.frombuffer(b"".join(source.chunks()), "<i2"), samples)
    assert source.notes == ["samples that were no numbers and became silence: 102"]


def test_a_stream_may_change_its_rate_on_the_way(audio) -> None:
    first = audio.encoded("a.mp3", audio.tone(1, 16_000)[np.newaxis], codec="libmp3lame", rate_hz=16_000).read_bytes()
    second = audio.encoded("b.mp3", audio.tone(1, 44_100)[np.newaxis], codec="libmp3lame", rate_hz=44_100).read_bytes()
    heard = samples_of(audio.raw("both.mp3", first + second))
    assert abs(len(heard) - 32_000) < 3_200


# Damage: nothing is there


MALFORMED: dict[str, tuple[Callable[..., Path], str]] = {
    "empty": (lambda audio: audio.raw("a.wav", b""), "is empty"),
    "header alone": (lambda audio: audio.wav("a.wav", b""), "holds no audio"),
    "half a sample": (lambda audio: audio.wav("a.wav", b"x"), "holds no audio"),
    "four letters": (lambda audio: audio.raw("a.wav", b"RIFF"), "its WAV header is damaged"),
    "a format chunk of 1.7 GB": (lambda audio: audio.wav("a.wav", b"", fmt_size=0x6666_6666), "its WAV header is damaged"),
    "other chunk": (
        lambda audio: audio.raw("a.wav", audio.wav("b.wav", b"xx").read_bytes().replace(b"data", b"HURF")),
        "header is damaged",
    ),
    "text": (lambda audio: audio.raw("a.wav", b"this is no audio\n" * 99), "has no WAV header"),
    "samples without header": (lambda audio: audio.raw("a.wav", audio.tone(1).tobytes()), "has no WAV header"),
    "0 Hz": (lambda audio: audio.wav("a.wav", bytes(3_200), rate_hz=0), "its WAV header is damaged"),
    "1 Hz": (lambda audio: audio.wav("a.wav", bytes(3_200), rate_hz=1), "says 1 Hz, which is no rate of audio"),
    "4 GHz": (lambda audio: audio.wav("a.wav", bytes(3_200), rate_hz=0xFFFF_FFFF), "its WAV header is damaged"),
    "no channels": (lambda audio: audio.wav("a.wav", bytes(3_200), channels=0), "says 0 channels; 1 to 8 can be played"),
    "255 channels": (lambda audio: audio.wav("a.wav", bytes(3_200), channels=255), "says 255 channels; 1 to 8 can be played"),
    "9 channels": (lambda audio: audio.wav("a.wav", bytes(3_600), channels=9), "says 9 channels; 1 to 8 can be played"),
    "no bits": (lambda audio: audio.wav("a.wav", bytes(3_200), bits=0), "is coded in a way that is not known here"),
    "unknown coding": (lambda audio: audio.wav("a.wav", bytes(3_200), coding=0x1234), "is coded in a way that is not known here"),
    "start of an MP3": (lambda audio: audio.raw("a.mp3", b"ID3\x04\x00\x00\x00\x00\x00\x00"), "is no audio that can be read"),
    "noise": (lambda audio: audio.raw("a.mp3", np.random.default_rng(3).bytes(20_000)), "is no audio that can be read"),
    "playlist": (lambda audio: audio.raw("a.m3u8", b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.mp3\n"), "is no audio that can be read"),
    "subtitles": (lambda audio: audio.raw("a.srt", b"1\n00:00:00,000 --> 00:00:01,000\nhello\n\n" * 9), "holds no audio, only subtitle"),
    "folder": (lambda audio: audio.folder, "is a folder. Name the files in it"),
    "missing": (lambda audio: audio.folder / "none.wav", "no such file or directory"),
    "path through a file": (lambda audio: audio.raw("a.wav", b"x") / "b.wav", "not a directory"),
    "device": (lambda _audio: Path(os.devnull), "is no regular file"),
    "name too long": (lambda audio: audio.folder / ("a" * 300 + ".wav"), "file name too long"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_file_without_audio_gets_a_reason_of_one_line(audio, kind: str) -> None:
    make, reason = MALFORMED[kind]
    path = make(audio)
    with pytest.raises(MediaError, match=re.escape(reason)) as raised:
        open_media(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_film_without_sound_has_no_audio(audio) -> None:
    path = audio.folder / "film.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    with pytest.raises(MediaError, match="holds no audio, only video"):
        open_media(path)


def test_a_file_of_somebody_else_is_refused(audio) -> None:
    path = audio.wav("a.wav", audio.tone(1).tobytes())
    path.chmod(0)
    root = os.geteuid() == 0
    if root:  # whom no permission stops
        os.seteuid(NOBODY)
    try:
        with pytest.raises(MediaError, match="permission denied"):
            open_media(path)
    finally:
        if root:
            os.seteuid(0)


def test_a_file_that_vanishes_is_reported_while_it_is_played(audio) -> None:
    for path in (audio.mulaw("a.wav", CODES), audio.raw("a.ulaw", CODES)):
        (source,) = open_media(path)
        path.unlink()
        with pytest.raises(MediaError, match="no such file or directory"):
            list(source.chunks())


def test_a_name_is_never_an_address(audio, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = audio.tone(1)
    audio.wav("http:a.wav", samples.tobytes())
    monkeypatch.chdir(audio.folder)
    assert np.array_equal(samples_of(Path("http:a.wav")), samples)


@given(damage=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=8), cut=st.integers(0, 400))
def test_no_damage_to_a_header_is_more_than_a_reason(tmp_path_factory, damage: list[tuple[int, int]], cut: int) -> None:
    from_header = bytearray(
        b"RIFF\xb4\x01\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00\x80>\x00\x00\x00}\x00\x00\x02\x00\x10\x00data\x90\x01\x00\x00"
    )
    whole = from_header + bytes(range(200)) * 2
    for position, value in damage:
        whole[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.wav"
    path.write_bytes(whole[: len(whole) - cut])
    try:
        sources = open_media(path)
    except MediaError as reason:
        assert "\n" not in str(reason)
    else:
        for source in sources:
            assert sum(map(len, source.chunks())) > 0
