"""Makes the audio files that the recorder's tests play."""

from __future__ import annotations

import struct
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

PCM = 1


class AudioFiles:
    """Writes audio files into a folder. Numbers of WAV's codings: 1 PCM, 3 float, 6 A-law, 7 mu-law."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def tone(seconds: float, rate_hz: int = 16_000, tone_hz: float = 440.0, level: float = 0.3) -> NDArray[np.int16]:
        samples = np.sin(2 * np.pi * tone_hz * np.arange(round(seconds * rate_hz)) / rate_hz)
        return np.round(samples * level * 32_767).astype(np.int16)

    def wav(
        self,
        name: str,
        data: bytes,
        *,
        coding: int = PCM,
        channels: int = 1,
        rate_hz: int = 16_000,
        bits: int = 16,
        data_size: int | None = None,
        fmt_size: int = 16,
        block_align: int | None = None,
    ) -> Path:
        """Write a WAV file; what its header says can be any lie."""
        size = len(data) if data_size is None else data_size
        align = channels * bits // 8 if block_align is None else block_align
        form = struct.pack("<HHIIHH", coding, channels, rate_hz, (rate_hz * align) & 0xFFFF_FFFF, align, bits)
        chunks = b"WAVEfmt " + struct.pack("<I", fmt_size) + form + b"data" + struct.pack("<I", size)
        path = self.folder / name
        path.write_bytes(b"RIFF" + struct.pack("<I", (len(chunks) + size) & 0xFFFF_FFFF) + chunks + data)
        return path

    def mulaw(self, name: str, codes: bytes, channels: int = 1) -> Path:
        """Write a G.711 file as telephone systems do."""
        return self.wav(name, codes, coding=7, channels=channels, rate_hz=8_000, bits=8)

    def encoded(self, name: str, samples: NDArray[np.int16], *, codec: str, rate_hz: int) -> Path:
        """Write samples, shape ``(channels, n)``, with one of FFmpeg's encoders; the container goes by the name."""
        layout = {1: "mono", 2: "stereo"}[len(samples)]
        with av.open(str(self.folder / name), "w") as container:
            stream = container.add_stream(codec, rate=rate_hz, layout=layout)
            frame = av.AudioFrame.from_ndarray(samples.T.reshape(1, -1).copy(), format="s16", layout=layout)
            frame.sample_rate, frame.pts = rate_hz, 0
            for packet in (*stream.encode(frame), *stream.encode(None)):
                container.mux(packet)
        return self.folder / name

    def raw(self, name: str, data: bytes) -> Path:
        """Write any bytes."""
        path = self.folder / name
        path.write_bytes(data)
        return path


@pytest.fixture
def audio(tmp_path: Path) -> AudioFiles:
    return AudioFiles(tmp_path)
