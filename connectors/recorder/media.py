"""Audio as sources: files of any kind that FFmpeg reads, and samples in memory.

A source is one mono channel as it goes on the wire. 8 kHz G.711 stays the coded bytes of the file; everything else becomes 16 kHz PCM16.
Files are streamed, never held. Damage is skipped and noted, what is there is played, and where nothing is there a :class:`MediaError`
says why.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final, Protocol

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from numpy.typing import NDArray

from connectors.recorder.framing import PCM_16K, WireFormat
from schemas.records import SAMPLE_RATE_HZ, Encoding
from streams.errors import UserError

__all__ = ["FileSource", "MediaError", "MemorySource", "Source", "open_media", "same_in_all_channels"]

_G711_RATE_HZ: Final = 8_000
_G711_CODECS: Final[dict[str, Encoding]] = {"pcm_mulaw": "mulaw", "pcm_alaw": "alaw"}
#: G.711 without any header, as telephone systems store it.
_G711_SUFFIXES: Final[dict[str, Encoding]] = {".ul": "mulaw", ".ulaw": "mulaw", ".mulaw": "mulaw", ".al": "alaw", ".alaw": "alaw"}
_WAV_MARKS: Final = (b"RIFF", b"RIFX", b"RF64")
_MARK_BYTES: Final = 4
_CHUNK_HEAD_BYTES: Final = 8  # a name and a length
_RIFF_HEADER_BYTES: Final = 12  # RIFF, a length, WAVE
_READ_BYTES: Final = 8_000
#: What a header may say. Below, a second would grow into minutes; above is no audio converter.
_MIN_RATE_HZ: Final = 4_000
_MAX_RATE_HZ: Final = 768_000
_MAX_CHANNELS: Final = 8
_US_PER_MS: Final = 1_000

# Channels are one and the same if nowhere in the file any of them holds something of its own, so that taking one of them loses no word.
# Each second is looked at apart, else a short answer would drown in a long call. In a second, a channel has something of its own if their
# difference is
#  * above -12 dB of the loudest (a quarter in amplitude). Speech on one channel alone makes that 0 dB, and 65 ms of it beside a second of
#    equally loud common sound still make -12 dB. One signal that was stored as stereo stays below: measured -15 dB at worst where it was
#    coded with loss, -21 dB in a recording mastered for stereo;
#  * and above -50 dBFS: the noise of converters and tapes, which no two channels share, is below. Even quiet telephone speech is at -36.
_SAME_WINDOW_SAMPLES: Final = SAMPLE_RATE_HZ
_SAME_RATIO: Final = 10 ** (-12 / 20)
_SAME_FLOOR: Final = 10 ** (-50 / 20) * 32_768

_Blocks = Iterator[NDArray[np.int16]]


class MediaError(UserError):
    """A file cannot be played; the message is one line and names the file, the cause, and where there is one the remedy."""


class Source(Protocol):
    """One mono channel of audio."""

    @property
    def name(self) -> str:
        """Where the audio comes from, for people."""

    @property
    def wire(self) -> WireFormat:
        """How :meth:`chunks` are coded."""

    @property
    def duration_ms(self) -> int | None:
        """About how long it is, as far as that can be told beforehand."""

    @property
    def notes(self) -> Sequence[str]:
        """What was wrong with the audio read so far, for people."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the coded audio from its start, in pieces of any length; each call starts anew.

        Raises:
            MediaError: it cannot be read any more.
        """


class MemorySource:
    """Audio held in memory.

    Args:
        audio: PCM16 samples, shape ``(n,)``, dtype int16, at 16 kHz; or coded bytes in the format of ``wire``.
        name: where it comes from, for people.
        wire: how the bytes are coded; not needed for samples.
    """

    notes: Sequence[str] = ()

    def __init__(self, audio: NDArray[np.int16] | bytes, name: str = "memory", wire: WireFormat = PCM_16K) -> None:
        if isinstance(audio, np.ndarray):
            if audio.dtype != np.int16 or audio.ndim != 1 or wire != PCM_16K:
                raise TypeError(f"samples in memory are one-dimensional int16 at 16 kHz, not {audio.ndim}-dimensional {audio.dtype}")
            audio = audio.astype("<i2", copy=False).tobytes()
        self.name = name
        self.wire = wire
        self._payload = audio

    @property
    def duration_ms(self) -> int:
        """How long it is."""
        return len(self._payload) // self.wire.bytes_per_sample * 1_000 // self.wire.sample_rate_hz

    def chunks(self) -> Iterator[bytes]:
        """Yield the audio."""
        for start in range(0, len(self._payload), _READ_BYTES):
            yield self._payload[start : start + _READ_BYTES]


class FileSource:
    """One channel of a file; made by :func:`open_media`.

    Attributes:
        path: the file.
        channel: which of its channels, from 0.
        channels: how many of its channels are played.
    """

    def __init__(self, path: Path, wire: WireFormat, *, channel: int, channels: int, duration_ms: int | None, headerless: bool) -> None:
        self.path = path
        self.wire = wire
        self.channel = channel
        self.channels = channels
        self.duration_ms = duration_ms
        self.notes: list[str] = []
        self._headerless = headerless

    @property
    def name(self) -> str:
        """The file's name, and which channel where it has several."""
        if self.channels == 1:
            return self.path.name
        side = ("left", "right")[self.channel] if self.channels == 2 else f"channel {self.channel + 1}"
        return f"{self.path.name} ({side})"

    def chunks(self) -> Iterator[bytes]:
        """Yield the coded audio of this channel; see :meth:`Source.chunks`."""
        self.notes.clear()
        if self._headerless:
            yield from _file_bytes(self.path)
        elif self.wire.encoding != "pcm_s16le":
            for codes in _g711(self.path, self.notes):
                yield codes[self.channel].tobytes()
        else:
            for samples in _pcm(self.path, self.notes):
                yield samples[self.channel].astype("<i2", copy=False).tobytes()


def open_media(path: Path) -> tuple[FileSource, ...]:
    """Return the channels of a file, after making sure that it holds audio.

    The channels of a stereo file are those of one call, unless they hold the same: then the first one stands for all.

    Raises:
        MediaError: there is nothing to play.
    """
    size_bytes, mark = _look_at(path)
    encoding = _G711_SUFFIXES.get(path.suffix.lower())
    if encoding is not None and mark not in _WAV_MARKS:
        wire = WireFormat(encoding, _G711_RATE_HZ)
        return (FileSource(path, wire, channel=0, channels=1, duration_ms=size_bytes * 1_000 // _G711_RATE_HZ, headerless=True),)
    with _opened(path) as (container, stream):
        codec = stream.codec_context
        channels = codec.layout.nb_channels
        encoding = _G711_CODECS.get(codec.name) if codec.sample_rate == _G711_RATE_HZ else None
        wire = WireFormat(encoding, _G711_RATE_HZ) if encoding else PCM_16K
        duration_ms = container.duration // _US_PER_MS if container.duration and container.duration > 0 else None
    notes: list[str] = []
    blocks = _pcm(path, notes)
    first = next((block for block in blocks if block.size), None)
    if first is None:
        raise MediaError(f"{path}: holds no audio" + "".join(f"; {note}" for note in notes))
    if channels > 1 and same_in_all_channels(chain([first], blocks)):
        channels = 1
    return tuple(
        FileSource(path, wire, channel=channel, channels=channels, duration_ms=duration_ms, headerless=False) for channel in range(channels)
    )


def same_in_all_channels(blocks: _Blocks) -> bool:
    """Tell whether no channel holds anything of its own, reading only as far as the first that does.

    Args:
        blocks: the audio, shape ``(channels, n)`` with any n, int16 at 16 kHz.
    """
    window = np.empty((0, 0), np.float32)
    for block in blocks:
        samples = block.astype(np.float32)
        window = np.concatenate([window, samples], axis=1) if window.size else samples
        while window.shape[1] >= 2 * _SAME_WINDOW_SAMPLES:
            head, window = np.split(window, [_SAME_WINDOW_SAMPLES], axis=1)
            if not _same(head):
                return False
    # One to two seconds are left, or all there is. The end overlaps what came before rather than being judged by a few samples.
    return _same(window[:, :_SAME_WINDOW_SAMPLES]) and _same(window[:, -_SAME_WINDOW_SAMPLES:])


def _same(window: NDArray[np.float32]) -> bool:
    if not window.size:
        return True
    loudest = _rms(window).max()
    difference = _rms(window[1:] - window[0]).max()
    return bool(difference <= max(_SAME_RATIO * loudest, _SAME_FLOOR))


def _rms(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    rms: NDArray[np.float32] = np.sqrt(np.mean(np.square(samples), axis=1))
    return rms


def _look_at(path: Path) -> tuple[int, bytes]:
    """Return a file's size and its first four bytes."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise MediaError(f"{path}: is a folder", "Name the files in it.")
        if not stat.S_ISREG(status.st_mode):
            raise MediaError(f"{path}: is no regular file", "Copy the audio into a file first.")
        with path.open("rb") as file:
            mark = file.read(_MARK_BYTES)
    except OSError as failure:
        raise MediaError(f"{path}: {_why(failure)}") from failure
    if not mark:
        raise MediaError(f"{path}: is empty")
    return status.st_size, mark


def _why(failure: Exception) -> str:
    """Return the system's own words for a failure, without number or path."""
    number = getattr(failure, "errno", None)
    words = getattr(failure, "strerror", None) or (os.strerror(number) if number else str(failure))
    return words[:1].lower() + words[1:]


def _file_bytes(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                yield chunk
    except OSError as failure:
        raise MediaError(f"{path}: {_why(failure)}") from failure


def _length_lies(path: Path) -> bool:
    """Tell whether a WAV file goes on where its header says that the audio ends, and not with another chunk.

    That is how a recorder leaves a file that was interrupted after it had last brought the header up to date.
    """
    with path.open("rb") as file:
        if file.read(_MARK_BYTES) != b"RIFF":
            return False
        size_bytes = path.stat().st_size
        position = _RIFF_HEADER_BYTES
        name = b""
        while position <= size_bytes - _CHUNK_HEAD_BYTES:
            file.seek(position)
            head = file.read(_CHUNK_HEAD_BYTES)
            after_audio, name, length = name == b"data", head[:_MARK_BYTES], int.from_bytes(head[_MARK_BYTES:], "little")
            is_chunk = name.isascii() and name.decode("ascii").isprintable() and position + length <= size_bytes
            if after_audio or not is_chunk:
                return after_audio and not is_chunk
            position += _CHUNK_HEAD_BYTES + length + length % 2  # chunks are padded to an even length
        return False


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, AudioStream]]:
    """Open a file, with its audio stream, which has a decoder and a believable rate and number of channels."""
    try:
        # Playlists may name addresses: nothing but this machine's files is opened. An absolute path is never taken for an address itself.
        options = {"protocol_whitelist": "file"} | ({"ignore_length": "1"} if _length_lies(path) else {})
        container = av.open(str(path.absolute()), options=options)
    except (av.FFmpegError, OSError, ValueError) as failure:
        if isinstance(failure, av.InvalidDataError) and path.suffix.lower() == ".wav":
            if _look_at(path)[1] in _WAV_MARKS:
                raise MediaError(f"{path}: its WAV header is damaged, or no audio follows it") from failure
            raise MediaError(f"{path}: has no WAV header, nor that of any other kind of audio") from failure
        raise MediaError(f"{path}: is no audio that can be read: {_why(failure)}") from failure
    with container:
        stream = next(iter(container.streams.audio), None)
        if stream is None:
            raise MediaError(f"{path}: holds no audio, only {', '.join(sorted({other.type for other in container.streams})) or 'nothing'}")
        codec: AudioCodecContext | None = stream.codec_context
        if codec is None:
            raise MediaError(f"{path}: is coded in a way that is not known here, or its header is damaged")
        if not _MIN_RATE_HZ <= codec.sample_rate <= _MAX_RATE_HZ:
            raise MediaError(f"{path}: its header says {codec.sample_rate} Hz, which is no rate of audio")
        if not 1 <= codec.layout.nb_channels <= _MAX_CHANNELS:
            raise MediaError(f"{path}: its header says {codec.layout.nb_channels} channels; 1 to {_MAX_CHANNELS} can be played")
        yield container, stream


def _g711(path: Path, notes: list[str]) -> Iterator[NDArray[np.uint8]]:
    """Yield a file's own G.711 codes, shape ``(channels, n)``."""
    with _opened(path) as (container, stream):
        channels = stream.codec_context.layout.nb_channels
        odd = b""
        for packet in _packets(container, stream, notes):
            codes = odd + bytes(packet)
            whole = len(codes) - len(codes) % channels
            odd = codes[whole:]
            yield np.frombuffer(codes, np.uint8, whole).reshape(-1, channels).T


def _pcm(path: Path, notes: list[str]) -> _Blocks:
    """Yield a file's audio, shape ``(channels, n)``, int16 at 16 kHz."""
    with _opened(path) as (container, stream):
        channels = stream.codec_context.layout.nb_channels
        try:
            # Some streams change their rate or channels on the way; what comes out stays as it began.
            layout = None
            for _, alike in groupby(_decoded(container, stream, notes), _kind):
                resampler = None
                for frame in alike:
                    layout = layout or frame.layout
                    resampler = resampler or av.AudioResampler("s16", layout, SAMPLE_RATE_HZ)
                    yield from _arrays(resampler.resample(frame), channels)
                yield from _arrays(resampler.resample(None) if resampler else [], channels)
        except (av.FFmpegError, ValueError) as damage:
            notes.append(f"what follows cannot be converted: {_why(damage)}")


def _kind(frame: AudioFrame) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _arrays(frames: Sequence[AudioFrame | None], channels: int) -> _Blocks:
    # Interleaved on purpose: PyAV's to_ndarray reads wild memory for planar frames of eight channels and more.
    for frame in frames:
        if frame is not None:
            interleaved: NDArray[Any] = frame.to_ndarray()
            yield interleaved.reshape(-1, channels).T


def _packets(container: InputContainer, stream: AudioStream, notes: list[str]) -> Iterator[Packet[AudioStream]]:
    """Yield a stream's packets up to its end or to where the container is damaged; the last one is empty and flushes the decoder."""
    try:
        yield from container.demux(stream)
    except (av.FFmpegError, OSError) as damage:
        notes.append(f"what follows cannot be read: {_why(damage)}")


def _decoded(container: InputContainer, stream: AudioStream, notes: list[str]) -> Iterator[AudioFrame]:
    """Yield a stream's frames, without those that are damaged."""
    damaged_packets = 0
    not_numbers = 0
    for packet in _packets(container, stream, notes):
        try:
            frames = packet.decode()
        except av.FFmpegError:
            damaged_packets += 1
            continue
        for frame in frames:
            clean, replaced = _finite(frame)
            not_numbers += replaced
            yield clean
    if damaged_packets:
        notes.append(f"damaged packets skipped: {damaged_packets}")
    if not_numbers:
        notes.append(f"samples that were no numbers and became silence: {not_numbers}")


def _finite(frame: AudioFrame) -> tuple[AudioFrame, int]:
    """Return a frame whose samples are numbers, and how many were not. Only uncompressed floats, which are interleaved, can hold others."""
    if frame.format.name not in ("flt", "dbl"):
        return frame, 0
    samples = frame.to_ndarray()
    wrong = ~np.isfinite(samples)
    replaced = int(np.count_nonzero(wrong))
    if not replaced:
        return frame, 0
    clean = av.AudioFrame.from_ndarray(np.where(wrong, 0, samples), format=frame.format.name, layout=frame.layout)
    clean.sample_rate = frame.sample_rate
    clean.pts = frame.pts
    clean.time_base = frame.time_base
    return clean, replaced
