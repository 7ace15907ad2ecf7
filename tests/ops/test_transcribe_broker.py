"""Files through the whole system: real Kafka, real workers, the real recogniser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import av
import jiwer
import numpy as np
import pytest

from ops.demo.calls import Party, assemble, clips, read_clip
from ops.measure import word_errors
from ops.processes import System
from streams.settings import load_settings

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]

PARTITIONS = 4
MANDARIN = Path(__file__).parents[1] / "data" / "zh" / "aishell1_BAC009S0724W0121.wav"


@pytest.fixture(scope="module")
def running(bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A system that runs already; the environment in which commands find it."""
    overrides = {
        "bootstrap_servers": bootstrap_servers,
        "namespace": f"test-{uuid.uuid4().hex[:12]}",
        "partitions": PARTITIONS,
        "data_dir": tmp_path_factory.mktemp("data"),
        "engine": "whisper",
        "vad_closing_ms": 800,
    }
    with System(load_settings(**overrides), "test", overrides=overrides):
        yield {f"ASR_{name.upper()}": str(value) for name, value in overrides.items()}


def asr(*arguments: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from ops.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=180, check=False)


def write(file: Path, codec: str, rate_hz: int, channels: list[np.ndarray]) -> Path:
    """Write int16 channels as an audio file."""
    with av.open(str(file), "w") as container:
        layout = "mono" if len(channels) == 1 else "stereo"
        stream = container.add_stream(codec, rate=rate_hz, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.stack(channels, axis=1).reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate = rate_hz
        resampler = av.AudioResampler(stream.format, layout, rate_hz)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file


def transcript_of(file: str) -> str:
    return next(clip.transcript for clip in clips() if clip.file == file)


@pytest.fixture(scope="module")
def call() -> tuple[Party, ...]:
    return assemble(2, 16, telephone=True, rng=np.random.default_rng(4)).parties


def test_files_of_all_kinds_in_one_go(running: dict[str, str], tmp_path: Path, call: tuple[Party, ...]) -> None:
    speech = read_clip("jfk.flac")
    mono = write(tmp_path / "sentence.flac", "flac", 16_000, [read_clip("librispeech_1995-1837-0001.flac")])
    compressed = write(tmp_path / "order.mp3", "libmp3lame", 16_000, [read_clip("order_s46_4bf32777.flac")])
    equal = write(tmp_path / "equal.flac", "flac", 16_000, [speech, speech])
    parties = write(tmp_path / "call.wav", "pcm_mulaw", 8_000, [party.pcm[::2] for party in call])
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF\0\0\0\0WAVE")

    result = asr("transcribe", mono, compressed, equal, parties, broken, "--json", "-", env=running)

    assert result.returncode == 2, "one file could not be read"
    assert str(broken) in result.stderr
    assert "Traceback" not in result.stderr
    texts = json.loads(result.stdout)
    assert [(Path(text["file"]).name, text["channel"], text["label"]) for text in texts] == [
        ("sentence.flac", 0, ""),
        ("order.mp3", 0, ""),
        ("equal.flac", 0, ""),
        ("call.wav", 0, "left"),
        ("call.wav", 1, "right"),
    ]
    expected = [
        transcript_of("librispeech_1995-1837-0001.flac"),
        transcript_of("order_s46_4bf32777.flac"),
        transcript_of("jfk.flac"),
        *(party.transcript for party in call),
    ]
    for text, reference in zip(texts, expected, strict=True):
        rate = word_errors([reference], [text["text"]]).rate
        assert rate is not None
        assert rate <= 0.25, f"{text['file']} {text['label']}: {text['text']!r} for {reference!r}"
    for text in texts:
        starts = [segment["start_ms"] for segment in text["segments"]]
        assert starts == sorted(starts)
        assert text["text"] == " ".join(segment["text"] for segment in text["segments"])
        for segment in text["segments"]:
            assert segment["start_ms"] < segment["end_ms"]
            assert 0 <= segment["confidence"] <= 1
            assert segment["words"]
            assert all(
                segment["start_ms"] - 100 <= word["start_ms"] <= word["end_ms"] <= segment["end_ms"] + 100 for word in segment["words"]
            )


def test_text_for_people_with_parties_labelled(running: dict[str, str], tmp_path: Path, call: tuple[Party, ...]) -> None:
    parties = write(tmp_path / "call.wav", "pcm_mulaw", 8_000, [party.pcm[::2] for party in call])
    result = asr("transcribe", parties, env=running)
    assert result.returncode == 0, result.stderr
    labels = [line.partition(":")[0] for line in result.stdout.splitlines()]
    assert set(labels) == {"left", "right"}
    assert "times as fast as real time" in result.stderr


def test_another_engine_than_that_which_runs(running: dict[str, str], tmp_path: Path) -> None:
    file = write(tmp_path / "x.wav", "pcm_s16le", 16_000, [read_clip("order_s22_0a1cb083.flac")])
    result = asr("transcribe", file, "--engine", "instant", env=running)
    assert result.returncode == 2
    assert "use the engine whisper, not instant" in result.stderr


def test_chinese_with_the_multilingual_model(bootstrap_servers: str, tmp_path: Path) -> None:
    env = {
        "ASR_BOOTSTRAP_SERVERS": bootstrap_servers,
        "ASR_NAMESPACE": f"test-{uuid.uuid4().hex[:12]}",
        "ASR_PARTITIONS": str(PARTITIONS),
        "ASR_DATA_DIR": str(tmp_path),
        "ASR_MODEL": "base",
    }
    result = asr("transcribe", MANDARIN, "--language", "zh", "--json", "-", env=env)
    assert result.returncode == 0, result.stderr
    (text,) = json.loads(result.stdout)
    # Whisper base takes two of these twelve characters for others of the same sound.
    assert jiwer.cer("广州市房地产中介协会分析", text["text"].replace(" ", "").rstrip("。")) <= 2 / 12 + 0.01, text["text"]
