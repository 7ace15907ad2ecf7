"""The engine in its process, found by the settings: killed in the middle it says the same, hotwords included."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from agents.inference.conformer.engine import conformer_engine
from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.units import UnitTable
from agents.inference.engine import Block, Engine, Finish, Opening, SegmentKey
from agents.inference.models import ModelError
from agents.inference.process import EngineProcess, engine_spec
from schemas.records import Hotword
from streams.settings import Settings, SettingsError, load_settings

WENET = Path(__file__).parents[3] / "data" / "wenet"
MODEL = WENET / "models" / "u2pp"
FRAMES = 20


@pytest.fixture(scope="module")
def blocks() -> dict[str, list[Block]]:
    with np.load(WENET / "fbank.npz") as arrays:
        return {
            session: [
                Block(key=SegmentKey(session, 0), chunk=chunk, hops=FRAMES, features=arrays[session][start : start + FRAMES].tobytes())
                for chunk, start in enumerate(range(0, len(arrays[session]), FRAMES))
            ]
            for session in arrays
        }


@pytest.fixture(scope="module")
def hotwords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    units = UnitTable([line.rsplit(" ", 1)[0] for line in (MODEL / "units.txt").read_text(encoding="utf-8").splitlines()])
    folder = tmp_path_factory.mktemp("hotwords") / "v1"
    Hotwords.compile([Hotword(phrase="门会长", boost=9.0)], units).save(folder)
    return folder


def talk(engine: Engine, blocks: dict[str, list[Block]], hotwords: Path, kill: int = 0) -> tuple[list[str], list[object]]:
    """Stream both segments; return the last partials and the finals."""
    engine.hotwords("v1", str(hotwords))
    engine.open([Opening(key=SegmentKey(session, 0), start_sample=0) for session in blocks])
    partials = {}
    for number in range(max(map(len, blocks.values()))):
        step = [each[number] for each in blocks.values() if number < len(each)]
        partials |= {hypothesis.key: hypothesis.text for hypothesis in engine.step(step)}
        if number == 9 and kill:
            os.kill(kill, signal.SIGKILL)
    finals = engine.finish([Finish(key=SegmentKey(session, 0), end_sample=160_000, hotword_version="v1") for session in blocks])
    return [partials[SegmentKey(session, 0)] for session in blocks], list(finals)


def test_killed_it_says_the_same(blocks: dict[str, list[Block]], hotwords: Path, tmp_path: Path) -> None:
    settings = Settings(engine="conformer", model_dir=MODEL, precision="fp32", engine_workers=2, itn=False, cache_dir=tmp_path)
    expected = talk(conformer_engine(str(MODEL), precision="fp32", numbers=False), blocks, hotwords)
    engine = EngineProcess(engine_spec(settings))
    engine.start()
    try:
        assert (engine.name, engine.finals_lanes, engine.blocks_at_once) == ("conformer", 2, 25)
        found = talk(engine, blocks, hotwords, kill=engine.pid)
        assert engine.restarts == 1
    finally:
        engine.stop()
    assert found == expected
    assert any("门会长" in text for text in found[0])


def test_hotwords_that_are_not_there_stop_nobody(blocks: dict[str, list[Block]], tmp_path: Path) -> None:
    engine = EngineProcess(engine_spec(Settings(engine="conformer", model_dir=MODEL, itn=False)))
    engine.start()
    try:
        _, (final, _) = talk(engine, blocks, tmp_path / "gone")
        assert engine.restarts == 0
    finally:
        engine.stop()
    assert "v1" in final.error  # type: ignore[attr-defined]
    assert final.raw_text  # type: ignore[attr-defined]


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"train\.yaml, final\.pt, units\.txt missing"):
        engine_spec(Settings(engine="conformer", model_dir=tmp_path))
    with pytest.raises(ModelError, match="holds no WeNet model"):
        engine_spec(Settings(engine="conformer", model="tiny.en"))
    assert Settings(engine="conformer").features == "fbank"
    with pytest.raises(SettingsError, match="ASR_FEATURE_KIND"):
        load_settings(engine="conformer", feature_kind="mfcc")
