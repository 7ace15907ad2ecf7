"""The engine on real audio: finals that depend on the segment alone, partials, hotwords, and what it does with bad input."""

from __future__ import annotations

import asyncio
import itertools
import random
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.features.fbank import Fbank
from agents.inference.batcher import Batcher
from agents.inference.conformer.engine import ConformerEngine, conformer_engine
from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.units import UnitTable
from agents.inference.engine import Block, EngineError, FinalText, Finish, Hypothesis, Opening, SegmentKey
from schemas.records import Hotword

DATA = Path(__file__).parents[3] / "data"
MODEL = DATA / "wenet" / "models" / "u2pp"
CHUNK_SAMPLES, LOOKAHEAD_SAMPLES, HOP_SAMPLES = 3_200, 240, 160
WAVS = ("en/goforward.wav", "en/librispeech_1995-1837-0001.wav", "zh/aishell1_BAC009S0724W0121.wav")


def samples(name: str) -> np.ndarray:
    with wave.open(str(DATA / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")


def blocks_of(audio: np.ndarray, session: str, fbank: Fbank) -> list[Block]:
    """Return a segment's blocks as the stages before the engine make them."""
    starts = range(0, len(audio), CHUNK_SAMPLES)
    features = fbank([audio[start : start + CHUNK_SAMPLES + LOOKAHEAD_SAMPLES].tobytes() for start in starts])
    return [
        Block(
            key=SegmentKey(session, 0),
            chunk=number,
            hops=-(-min(CHUNK_SAMPLES, len(audio) - start) // HOP_SAMPLES),
            features=each.astype("<f4").tobytes(),
        )
        for number, (start, each) in enumerate(zip(starts, features, strict=True))
    ]


@pytest.fixture(scope="module")
def segments() -> dict[str, list[Block]]:
    """Segments of real audio, from 0.3 to 8.7 s, by session."""
    fbank = Fbank()
    cuts = [(name, start, end) for name in WAVS for start, end in ((0, None), (8_000, 29_777), (16_000, 20_801), (4_000, 44_000))]
    return {
        f"call {number}": blocks_of(samples(name)[start:end], f"call {number}", fbank) for number, (name, start, end) in enumerate(cuts)
    }


@pytest.fixture(scope="module")
def engine() -> ConformerEngine:
    return conformer_engine(str(MODEL), slots=8, numbers=False)


def begin(engine: ConformerEngine, *sessions: str) -> None:
    engine.open([Opening(key=SegmentKey(session, 0), start_sample=0) for session in sessions])


def end(engine: ConformerEngine, *sessions: str, version: str = "") -> list[FinalText]:
    keys = [SegmentKey(session, 0) for session in sessions]
    finals = engine.finish([Finish(key=key, end_sample=160_000, hotword_version=version) for key in keys])
    engine.close(keys)
    return list(finals)


def alone(engine: ConformerEngine, session: str, blocks: Sequence[Block], version: str = "") -> tuple[FinalText, list[Hypothesis]]:
    """Stream a segment block by block with nobody else; return its final and its partials."""
    begin(engine, session)
    partials = [hypothesis for block in blocks for hypothesis in engine.step([block])]
    return end(engine, session, version=version)[0], partials


@pytest.fixture(scope="module")
def expected(engine: ConformerEngine, segments: dict[str, list[Block]]) -> dict[str, FinalText]:
    return {session: alone(engine, session, blocks)[0] for session, blocks in segments.items()}


def test_it_says_something(expected: dict[str, FinalText], segments: dict[str, list[Block]]) -> None:
    for session, final in expected.items():
        assert not final.error
        assert final.raw_text
        assert 0 <= final.confidence <= 1
        spoken_ms = 200 * len(segments[session])
        assert all(0 <= word.start_ms <= word.end_ms <= spoken_ms for word in final.words)
        assert [word.start_ms for word in final.words] == sorted(word.start_ms for word in final.words)
        assert "".join(word.text for word in final.words) == final.raw_text.replace(" ", "").lower()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), company=st.integers(1, 12), quiet=st.booleans())
def test_finals_depend_on_nothing_but_the_segment(
    engine: ConformerEngine, segments: dict[str, list[Block]], expected: dict[str, FinalText], seed: int, company: int, quiet: bool
) -> None:
    """In any company, in any order, with any number of blocks to a step, with partials or without."""
    choose = random.Random(seed)
    sessions = choose.sample(sorted(segments), company)
    begin(engine, *sessions)
    left = {session: list(segments[session]) for session in sessions}
    finals = {}
    while left:
        step = []
        for session in choose.sample(sorted(left), choose.randint(1, len(left))):
            count = choose.choice((1, 1, 1, 2, 7))
            step += left[session][:count]
            del left[session][:count]
        if quiet and choose.random() < 0.3:
            step = [msgspec.structs.replace(block, quiet=choose.random() < 0.5) for block in step]
        engine.step(step)
        done = [session for session in left if not left[session]]
        for session, final in zip(done, end(engine, *done), strict=True):
            finals[session] = final
            del left[session]
    assert finals == {session: expected[session] for session in sessions}


class Heard:
    """What comes of a batcher."""

    def __init__(self) -> None:
        self.partials: list[Hypothesis] = []
        self.taken: list[Block] = []
        self.finals: dict[str, FinalText] = {}

    def stepped(self, blocks: Sequence[Block], hypotheses: Sequence[Hypothesis]) -> None:
        self.taken += blocks
        self.partials += hypotheses

    def finished(self, finals: Sequence[FinalText]) -> None:
        self.finals |= {final.key.session_id: final for final in finals}

    def broke(self, failure: BaseException) -> None:
        raise failure


async def test_what_an_overloaded_worker_gives_up_is_partials_and_nothing_else(
    engine: ConformerEngine, segments: dict[str, list[Block]], expected: dict[str, FinalText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that sheds all that it may, and its replay that sheds nothing: every block is taken, in order, and the finals are the same."""
    monkeypatch.setattr(engine, "stop", lambda: None)  # others use it, too
    sessions = sorted(segments)[:6]
    runs = []
    for late_s in (-1.0, 1e9):
        monkeypatch.setattr("agents.inference.batcher._LATE_STEP_S", late_s)
        monkeypatch.setattr("agents.inference.batcher._SHED_EVERY_S", 0.0)
        monkeypatch.setattr("agents.inference.batcher._SHED_SHARE", 1.0)
        heard = Heard()
        batcher = Batcher(engine, heard)
        batcher.start()
        try:
            for session in sessions:
                batcher.open(Opening(key=SegmentKey(session, 0), start_sample=0))
            for number in range(max(map(len, segments.values()))):
                for session in sessions:
                    if number < len(segments[session]):
                        batcher.put(segments[session][number])
                async with asyncio.timeout(60):
                    while len(heard.taken) < sum(min(number + 1, len(segments[session])) for session in sessions):  # noqa: ASYNC110 an outsider
                        await asyncio.sleep(0.001)
            for session in sessions:
                batcher.finish(Finish(key=SegmentKey(session, 0), end_sample=160_000))
            async with asyncio.timeout(60):
                while len(heard.finals) < len(sessions):  # noqa: ASYNC110 an outsider
                    await asyncio.sleep(0.001)
        finally:
            await asyncio.to_thread(batcher.stop)
        runs.append(heard)
    shed, replay = runs
    assert not shed.partials
    assert replay.partials
    assert shed.finals == replay.finals == {session: expected[session] for session in sessions}
    for heard in runs:
        for session in sessions:
            assert [each.chunk for each in heard.taken if each.key.session_id == session] == list(range(len(segments[session])))


def test_another_engine_says_the_same(segments: dict[str, list[Block]], expected: dict[str, FinalText]) -> None:
    """A restart, with partials in another precision, and more segments than slots."""
    engine = conformer_engine(str(MODEL), slots=2, numbers=False, precision="int8")
    begin(engine, *segments)
    for session in reversed(segments):
        engine.step(segments[session])
    assert dict(zip(segments, end(engine, *segments), strict=True)) == expected


def test_partials_grow_and_are_sent_once(engine: ConformerEngine, segments: dict[str, list[Block]]) -> None:
    final, partials = alone(engine, "call 4", segments["call 4"])
    texts = [(partial.text, partial.stable_text) for partial in partials]
    assert len(texts) > 5
    assert all(one != other for one, other in itertools.pairwise(texts))
    assert all(text.startswith(stable) for text, stable in texts)
    assert all(later[1].startswith(sooner[1]) for sooner, later in itertools.pairwise(texts)), "stable text was taken back"
    assert final.raw_text


def test_partials_are_the_same_in_one_pass(engine: ConformerEngine, segments: dict[str, list[Block]]) -> None:
    blocks = segments["call 4"][:24]
    _, one_by_one = alone(engine, "call 4", blocks)
    begin(engine, "call 4")
    at_once = engine.step(blocks)
    end(engine, "call 4")
    assert [(each.text, each.stable_text) for each in at_once] == [(each.text, each.stable_text) for each in one_by_one[-1:]]
    assert at_once[0].end_sample == 24 * CHUNK_SAMPLES


@pytest.mark.parametrize("block_frames", [2, 8, 16])
def test_other_block_sizes(segments: dict[str, list[Block]], block_frames: int) -> None:
    engine = conformer_engine(str(MODEL), slots=2, block_frames=block_frames, left_blocks=4, numbers=False)
    final, partials = alone(engine, "call 4", segments["call 4"])
    begin(engine, "call 4")
    engine.step(segments["call 4"])
    assert end(engine, "call 4") == [final]
    assert partials


def test_hotwords_favour_what_they_say(engine: ConformerEngine, segments: dict[str, list[Block]], expected: dict[str, FinalText]) -> None:
    table = UnitTable([line.rsplit(" ", 1)[0] for line in (MODEL / "units.txt").read_text(encoding="utf-8").splitlines()])
    second = alone(engine, "call 8", segments["call 8"])[0].raw_text
    engine.use_hotwords("v1", Hotwords.compile([Hotword(phrase="门会长", boost=9.0)], table))
    plain, partials = alone(engine, "call 8", segments["call 8"])
    favoured, _ = alone(engine, "call 8", segments["call 8"], version="v1")
    assert plain.raw_text == second == expected["call 8"].raw_text, "a final listens to the version that it names alone"
    assert "门会长" in favoured.raw_text
    assert "门会长" not in plain.raw_text
    assert "门会长" in partials[-1].text, "partials listen to the list in force"
    unknown, _ = alone(engine, "call 8", segments["call 8"], version="v0")
    assert unknown.raw_text == plain.raw_text
    assert "v0" in unknown.error
    engine.use_hotwords("", Hotwords.none(len(table)))


def test_compiled_hotwords_come_from_files(engine: ConformerEngine, segments: dict[str, list[Block]], tmp_path: Path) -> None:
    table = UnitTable([line.rsplit(" ", 1)[0] for line in (MODEL / "units.txt").read_text(encoding="utf-8").splitlines()])
    Hotwords.compile([Hotword(phrase="门会长", boost=9.0)], table).save(tmp_path / "v2")
    begin(engine, "call 8")
    engine.step(segments["call 8"][:4])
    engine.hotwords("v2", str(tmp_path / "v2"))
    engine.step(segments["call 8"][4:])
    assert "门会长" in end(engine, "call 8", version="v2")[0].raw_text
    engine.use_hotwords("", Hotwords.none(len(table)))


def test_a_language_model_has_a_say(segments: dict[str, list[Block]], tmp_path: Path) -> None:
    words = ("门", "会", "长", "分", "大")
    arpa = tmp_path / "lm.arpa"
    unigrams = "".join(f"-0.7\t{word}\n" for word in (*words, "<s>", "</s>"))
    arpa.write_text(f"\\data\\\nngram 1=7\n\n\\1-grams:\n{unigrams}\n\\end\\\n", encoding="utf-8")
    options: dict[str, Any] = {"slots": 2, "numbers": False, "left_blocks": 8, "ctc_weight": 0.5}
    plain = conformer_engine(str(MODEL), **options)
    listening = conformer_engine(str(MODEL), **options, lm=str(arpa), lm_weight=3.0, lm_word_bonus=0.0)
    expected, _ = alone(plain, "call 8", segments["call 8"])
    final, partials = alone(listening, "call 8", segments["call 8"])
    assert final.raw_text != expected.raw_text
    share, before = (sum(word.text in words for word in said.words) / len(said.words) for said in (final, expected))
    assert share > before
    assert partials
    assert listening.model_digest != plain.model_digest, "it is part of the model"


def test_a_segment_without_audio(engine: ConformerEngine) -> None:
    begin(engine, "s")
    engine.step([Block(key=SegmentKey("s", 0), chunk=0, hops=1)])
    (final,) = end(engine, "s")
    assert (final.text, final.raw_text, final.words, final.confidence) == ("", "", (), 0.0)


@pytest.mark.parametrize(
    ("features", "why"), [(b"\0" * 13 * 4, "fbank"), (np.full(80, np.nan, "<f4").tobytes(), "not a number"), (b"\0" * 7, "fbank")]
)
def test_features_that_are_none(engine: ConformerEngine, features: bytes, why: str) -> None:
    begin(engine, "s")
    with pytest.raises(ValueError, match=why):
        engine.step([Block(key=SegmentKey("s", 0), chunk=0, hops=20, features=features)])
    engine.close([SegmentKey("s", 0), SegmentKey("nobody", 0)])


@pytest.mark.parametrize("which", ["precision", "final_precision"])
def test_a_precision_that_cannot_be_had(which: str) -> None:
    with pytest.raises(EngineError, match="fp16 cannot be had on cpu"):
        conformer_engine(str(MODEL), device="cpu", **{which: "fp16"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(EngineError, match="ASR_DEVICE"):
        conformer_engine(str(MODEL), device="cuda")
