from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agents.inference.conformer.engine import ConformerEngine, ConformerOptions
from ops.bench import finals
from ops.bench.finals import ALL_WAYS, WAYS, canonical, compare_finals, session_records
from ops.bench.report import Document
from ops.demo.calls import Party, assemble
from schemas.records import AudioFrame, SessionEnd, SessionStart, Transcript
from streams.errors import UserError
from streams.settings import load_settings

MODEL = Path(__file__).parents[2] / "data" / "wenet" / "models" / "u2pp"


@pytest.fixture(scope="module")
def parties() -> list[Party]:
    rng = np.random.default_rng(5)
    return [*assemble(1, 5.0, telephone=True, rng=rng).parties, *assemble(1, 4.0, telephone=False, rng=rng).parties]


@pytest.mark.parametrize("frames_ms", [(200,), (20, 60, 500)])
def test_a_session_holds_all_audio_in_order(parties: list[Party], frames_ms: tuple[int, ...]) -> None:
    for party in parties:
        start, *frames, end = session_records("s", party, frames_ms, np.random.default_rng(0))
        assert isinstance(start, SessionStart)
        assert isinstance(end, SessionEnd)
        position = 0
        for frame in frames:
            assert isinstance(frame, AudioFrame)
            assert frame.position_samples == position
            position += len(frame.payload) * 16_000 // frame.sample_rate_hz // (2 if frame.encoding == "pcm_s16le" else 1)
        assert end.position_samples == position == len(party.pcm)
        assert b"".join(frame.payload for frame in frames) == party.payload()


def test_finals_are_the_same_every_way(parties: list[Party]) -> None:
    engine = ConformerEngine(MODEL, ConformerOptions(device="cpu", finals_lanes=2, numbers=False))
    settings = load_settings(engine="conformer", model_dir=MODEL)
    found = {}
    for way in (*WAYS, ALL_WAYS[-2]):
        tally = finals._Tally()
        found[way.name] = asyncio.run(finals._go(way, parties, engine, settings, tally, 1))
        assert not tally.differing
        assert tally.sizes
    reference = {key: canonical(final) for key, final in found[WAYS[0].name].items()}
    assert len(reference) >= 2
    assert any(final[4] for final in reference.values())
    for of_way in found.values():
        assert {key: canonical(final) for key, final in of_way.items()} == reference


def test_what_differs_is_called_by_its_name() -> None:
    final = Transcript(
        channel_id="1",
        session_id="s",
        conversation_id="c",
        position_samples=0,
        segment=0,
        kind="final",
        end_sample=16_000,
        text="Flat white.",
        raw_text="flat white",
        confidence=0.9,
        covered_to_sample=16_000,
    )
    other_key = {("s", 0): final}
    cases = {
        "boundaries": {"end_sample": 16_160},
        "text": {"raw_text": "flat white please"},
        "words or writing": {"text": "flat white"},
    }
    for what, change in cases.items():
        tally = finals._Tally()
        finals._compare(other_key, {("s", 0): msgspec.structs.replace(final, **change)}, tally)
        assert tally.differing == {what: 1}
        assert len(tally.examples) == 1
    tally = finals._Tally()
    finals._compare(other_key, {("s", 1): final}, tally)
    assert tally.differing == {"missing": 1, "extra": 1}
    tally = finals._Tally()
    finals._compare(other_key, {("s", 0): msgspec.structs.replace(final, confidence=0.8)}, tally)
    assert (dict(tally.differing), tally.confidences_differing) == ({}, 1)


def test_a_run_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, parties: list[Party]) -> None:
    monkeypatch.setattr(finals, "_wave", lambda _channels, _rng: parties)
    hours = sum(len(party.pcm) for party in parties) / 16_000 / 3_600
    kept: list[Document] = []
    told: list[float] = []

    def compare(waves: float, begun: Document | None = None, **conditions: int) -> Document:
        ways = WAYS[:2]
        return compare_finals(
            waves * hours,
            **{"channels": 2, **conditions},
            model_dir=MODEL,
            ways=ways,
            begun=begun,
            tell=lambda done, _line: told.append(done / hours),
            keep=kept.append,
        )

    begun = msgspec.json.decode(msgspec.json.encode(compare(0.9)))
    assert (begun["results"]["waves"], len(kept)) == (1, 1)
    assert told == pytest.approx([1, 2])
    whole = compare(1.9, begun)
    assert (whole["results"]["waves"], len(kept)) == (2, 2)
    assert told == pytest.approx([1, 2, 3, 4])
    assert whole["results"]["hours"] == pytest.approx(2 * hours, abs=1e-5)
    for before, after in zip(begun["results"]["ways"], whole["results"]["ways"], strict=True):
        assert after["finals"] == 2 * before["finals"] > 0
        assert after["words"] == 2 * before["words"]
        assert after["steps"]
        assert not after["differing"]
        assert after["took_s"] > before["took_s"]
    assert compare(1.9, whole)["results"] == whole["results"], "there is nothing left to do"
    with pytest.raises(UserError, match="other finals"):
        compare(1.9, begun, channels=3)
