"""The whisper engine on real speech, with real models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jiwer
import numpy as np
import pytest
from whisper_normalizer.english import EnglishTextNormalizer

from agents.inference.engine import Block, Engine, FinalText, Finish, Opening, SegmentKey
from agents.inference.frames import EngineSpec
from agents.inference.models import resolve
from agents.inference.process import EngineProcess
from agents.inference.whisper import WhisperEngine

GOFORWARD = "go forward ten meters"
SORROW = (
    "it was the first great sorrow of his life it was not so much the loss of the cotton itself "
    "but the fantasy the hopes the dreams built around it"
)
BROKERS = "广州市房地产中介协会分析"
START_SAMPLE = 48_000
PARTIAL_PATIENCE_S = 60


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WhisperEngine]:
    model = resolve("tiny.en", tmp_path_factory.mktemp("cache"))
    engine = WhisperEngine(str(model.folder), model_digest=model.digest, partial_interval_ms=100)
    yield engine
    engine.stop()


def key(name: str) -> SegmentKey:
    return SegmentKey(name, 0)


def blocks(name: str, samples: np.ndarray, hops: int = 20) -> list[Block]:
    size = 160 * hops
    pieces = [samples[start : start + size + 240] for start in range(0, len(samples), size)]
    return [Block(key=key(name), chunk=number, hops=hops, pcm=piece.tobytes()) for number, piece in enumerate(pieces)]


def final(engine: Engine, name: str, samples: np.ndarray, hops: int = 20, language: str = "") -> FinalText:
    engine.open([Opening(key=key(name), start_sample=START_SAMPLE, language=language)])
    for block in blocks(name, samples, hops):
        engine.step([block])
    (found,) = engine.finish([Finish(key=key(name), end_sample=START_SAMPLE + len(samples))])
    engine.close([key(name)])
    return found


def word_errors(reference: str, text: str) -> float:
    normalize = EnglishTextNormalizer()
    return float(jiwer.wer(normalize(reference), normalize(text)))


@pytest.mark.parametrize(("name", "reference"), [("en/goforward.wav", GOFORWARD), ("en/librispeech_1995-1837-0001.wav", SORROW)])
def test_finals_of_real_speech(engine: WhisperEngine, call: SimpleNamespace, name: str, reference: str) -> None:
    samples = call.speech(name)
    found = final(engine, name, samples)
    assert word_errors(reference, found.text) <= 0.1
    assert found.text == found.raw_text.strip()
    assert 0.5 < found.confidence <= 1.0
    assert found.language == "en"
    assert " ".join(word.text for word in found.words) == found.text
    times = [time_ms for word in found.words for time_ms in (word.start_ms, word.end_ms)]
    assert times == sorted(times)
    assert times[0] >= START_SAMPLE // 16
    assert times[-1] <= (START_SAMPLE + len(samples)) // 16


def test_words_are_where_they_were_said(engine: WhisperEngine, call: SimpleNamespace) -> None:
    """Behind a second of silence every word comes a second later."""
    samples = call.speech("en/goforward.wav")
    plain = final(engine, "plain", samples)
    late = final(engine, "late", np.concatenate([np.zeros(16_000, np.int16), samples]))
    assert [word.text for word in late.words] == [word.text for word in plain.words]
    assert all(abs(after.end_ms - before.end_ms - 1_000) <= 150 for before, after in zip(plain.words, late.words, strict=True))


def test_a_final_depends_on_its_audio_alone(engine: WhisperEngine, call: SimpleNamespace) -> None:
    """Whatever the blocks, whatever else is decoded at the same time."""
    samples = call.speech("en/goforward.wav")
    alone = final(engine, "alone", samples)
    with ThreadPoolExecutor(4) as pool:
        crowd = [pool.submit(final, engine, f"crowd-{hops}", samples, hops) for hops in (7, 20, 33, 100)]
        same = [one.result() for one in crowd]
    assert all((each.raw_text, each.words, each.confidence) == (alone.raw_text, alone.words, alone.confidence) for each in same)


def test_partials_grow_into_the_final(engine: WhisperEngine, call: SimpleNamespace) -> None:
    samples = call.speech("en/librispeech_1995-1837-0001.wav")
    engine.open([Opening(key=key("live"), start_sample=START_SAMPLE)])
    partials = []
    for block in blocks("live", samples):
        partials += engine.step([block])
        time.sleep(0.01)
    deadline_s = time.monotonic() + PARTIAL_PATIENCE_S
    while time.monotonic() < deadline_s and (not partials or partials[-1].end_sample < START_SAMPLE + len(samples) - 16_000):
        partials += engine.step([])
        time.sleep(0.01)
    engine.close([key("live")])
    assert word_errors(SORROW, partials[-1].text) <= 0.2
    assert all(partial.text.startswith(partial.stable_text) for partial in partials)
    assert all(START_SAMPLE < partial.end_sample <= START_SAMPLE + len(samples) for partial in partials)
    ends = [partial.end_sample for partial in partials]
    assert ends == sorted(ends)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(0, np.int16),
        np.zeros(160, np.int16),
        np.zeros(32_000, np.int16),
        np.random.default_rng(1).normal(0, 300, 48_000).astype(np.int16),
        (8_000 * np.sin(2 * np.pi * 425 * np.arange(24_000) / 16_000)).astype(np.int16),
    ],
    ids=["nothing", "one hop", "silence", "noise", "dial tone"],
)
def test_nobody_speaks(engine: WhisperEngine, samples: np.ndarray) -> None:
    found = final(engine, "nobody", samples)
    assert (found.text, found.words) == ("", ())


def test_a_segment_longer_than_a_window_is_decoded_whole(engine: WhisperEngine, call: SimpleNamespace) -> None:
    samples = call.speech("en/librispeech_1995-1837-0001.wav")
    found = final(engine, "long", np.concatenate([samples, np.zeros(8_000, np.int16)] * 4))
    assert word_errors(" ".join([SORROW] * 4), found.text) <= 0.1
    times = [word.start_ms for word in found.words]
    assert times == sorted(times)
    assert times[-1] > START_SAMPLE // 16 + 34_000


def test_the_same_in_a_process_of_its_own(engine: WhisperEngine, call: SimpleNamespace) -> None:
    model = resolve("tiny.en", Path("/nonexistent"))
    spec = EngineSpec(factory="agents.inference.whisper:WhisperEngine", options={"folder": str(model.folder), "partial_interval_ms": 0})
    process = EngineProcess(spec)
    process.start()
    try:
        assert (process.name, process.model_digest) == ("whisper", engine.model_digest)
        samples = call.speech("en/goforward.wav")
        assert final(process, "s", samples) == final(engine, "s", samples)
    finally:
        process.stop()


def test_chinese(call: SimpleNamespace, tmp_path: Path) -> None:
    engine = WhisperEngine(str(resolve("base", tmp_path).folder), partial_interval_ms=0)
    samples = call.speech("zh/aishell1_BAC009S0724W0121.wav")
    told = final(engine, "told", samples, language="zh-CN")
    assert jiwer.cer(BROKERS, told.text) <= 0.25
    assert "".join(word.text for word in told.words) == told.raw_text
    detected = final(engine, "detected", samples)
    assert (detected.language, detected.text) == ("zh", told.text)
    taiwanese = final(engine, "taiwanese", samples, language="zh-TW")
    assert taiwanese.text == told.raw_text
    engine.stop()
