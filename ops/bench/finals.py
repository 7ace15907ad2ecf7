"""Are finals the same whatever happened around them? Hours of calls, again and again, in other company, other frames, after restarts.

Each call goes through voice activity detection, features and the engine in every *way* below, and every final of it is compared with the
first way's: text, raw text, words with their times, positions, model. What differs is counted by what differs first: the segment's
boundaries, or its text. Confidence stands outside what is promised, and is counted apart.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ops.bench.models import model_directory
from ops.bench.report import Document, Table, document, figure
from schemas.records import SAMPLE_RATE_HZ, AudioFrame, FlowRecord, SessionEnd, SessionStart, Stamps, Transcript
from streams.core import SessionKey
from streams.errors import UserError

if TYPE_CHECKING:
    from agents.inference.engine import Engine
    from ops.demo.calls import Party
    from streams.settings import Settings

__all__ = ["ALL_WAYS", "WAYS", "Way", "canonical", "compare_finals", "session_records", "tables"]

_CALL_SECONDS: Final = (25.0, 60.0)
_GAIN_DB: Final = (-12.0, 6.0)
_FRAME_MS: Final = 200
_US_PER_S: Final = 1_000_000
_STARTED_US: Final = 1_700_000_000 * _US_PER_S
#: Examples that are kept of what differs.
_EXAMPLES: Final = 10
_RESTARTS: Final = 2
#: Of a recording, frames that come at once: 5 s.
_BACKLOG_FRAMES: Final = 25


@dataclass(frozen=True, slots=True)
class Way:
    """A way through the stages.

    Attributes:
        name: for people.
        together: sessions at the same time; 0: all of a wave.
        frames_ms: sizes of the recorder's frames, taken at random for each; one: always the same.
        uneven: sessions go on at random, several frames at once or none.
        paced: the engine steps what it has before more comes; else it has a backlog, and takes it many blocks at a time.
        partials: the engine finds partials meanwhile.
        restarts: the stages are stopped in the middle, and others go on from what they left.
    """

    name: str
    together: int = 0
    frames_ms: tuple[int, ...] = (_FRAME_MS,)
    uneven: bool = False
    paced: bool = True
    partials: bool = True
    restarts: bool = False


_SIZES_MS: Final = (20, 40, 60, 100, 160, 200, 260, 320, 500)

#: The first is what the others are compared with. All that finals could depend on, company, framing, load, partials and restarts, is in one
#: of them and not in the other.
WAYS: Final = (
    Way("alone, as a recording", together=1, paced=False, partials=False),
    Way("together, frames of 20 to 500 ms, restarts", frames_ms=_SIZES_MS, uneven=True, restarts=True),
)

#: Each thing by itself: takes several times as long.
ALL_WAYS: Final = (
    Way("together"),
    Way("alone", together=1),
    Way("together, frames of 20 to 500 ms", frames_ms=_SIZES_MS, uneven=True),
    Way("together, frames of 100 ms", frames_ms=(100,)),
    Way("as a backlog", paced=False),
    Way("with restarts", restarts=True, uneven=True),
)


@dataclass(slots=True)
class _Tally:
    """What a way brought."""

    finals: int = 0
    words: int = 0
    differing: Counter[str] = field(default_factory=Counter)
    confidences_differing: int = 0
    took_s: float = 0.0
    cpu_s: float = 0.0
    sizes: Counter[int] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)


def canonical(final: Transcript) -> tuple[Any, ...]:
    """Return what is promised of a final: all but confidence, stamps and epoch."""
    words = tuple((word.text, word.start_ms, word.end_ms) for word in final.words)
    place = (final.segment, final.position_samples, final.end_sample)
    return (*place, final.text, final.raw_text, words, final.language, final.engine, final.model_digest, final.hotword_version)


def compare_finals(
    hours: float,
    channels: int,
    *,
    model_dir: Path | None,
    ways: Sequence[Way] = WAYS,
    seed: int = 0,
    begun: Document | None = None,
    tell: Callable[[float, str], None] = lambda _hours, _line: None,
    keep: Callable[[Document], None] = lambda _document: None,
) -> Document:
    """Compare the finals of calls that go different ways.

    Args:
        hours: of audio, which every way takes whole.
        channels: sessions at the same time.
        model_dir: a WeNet model; None: the one that comes along, else a random one.
        ways: the first is what the others are compared with.
        seed: which calls.
        begun: what an earlier run left; its calls are not taken again.
        tell: hears how many hours of audio are done, of all ways together, and what was found.
        keep: is given the document after every wave of calls, so that nothing is lost if this is stopped.

    Raises:
        UserError: what the earlier run left was found under other conditions.
    """
    from agents.inference.conformer.engine import ConformerEngine, ConformerOptions
    from streams.settings import load_settings

    with tempfile.TemporaryDirectory(prefix="asr-bench-") as folder:
        model = model_directory(model_dir, Path(folder))
        engine = ConformerEngine(model, ConformerOptions(device="cpu", finals_lanes=2))
        settings = load_settings(engine="conformer", model_dir=model)
        conditions = {"hours_wanted": hours, "channels": channels, "seed": seed, "model_digest": engine.model_digest}
        tallies = {way.name: _Tally() for way in ways}
        audio_s, wave = (0.0, 0) if begun is None else _go_on(begun, conditions, tallies)
        found = _document(conditions, audio_s, wave, tallies)
        while audio_s < 3_600 * hours:
            parties = _wave(channels, np.random.default_rng((seed, wave)))
            wave_s = sum(len(party.pcm) for party in parties) / SAMPLE_RATE_HZ
            reference: Mapping[tuple[str, int], Transcript] = {}
            for number, way in enumerate(ways, 1):
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                finals = asyncio.run(_go(way, parties, engine, settings, tallies[way.name], seed + wave))
                tally = tallies[way.name]
                tally.took_s += time.perf_counter() - began_s
                tally.cpu_s += time.process_time() - began_cpu_s
                reference = reference or finals
                _compare(reference, finals, tally)
                done_s = audio_s * len(ways) + wave_s * number
                tell(done_s / 3_600, f"{way.name}: {sum(tally.differing.values())} of {tally.finals} finals differ")
            audio_s += wave_s
            wave += 1
            found = _document(conditions, audio_s, wave, tallies)
            keep(found)
    return found


def _go_on(begun: Document, conditions: Mapping[str, Any], tallies: Mapping[str, _Tally]) -> tuple[float, int]:
    """Take over what an earlier run found; return the seconds of audio and the waves of calls that it took."""
    results, before = begun["results"], begun["conditions"]
    told = {name: before.get(name) for name in conditions if name != "hours_wanted"}
    wanted = {name: value for name, value in conditions.items() if name != "hours_wanted"}
    if begun["benchmark"] != "finals" or told != wanted or [way["way"] for way in results["ways"]] != list(tallies):
        raise UserError("The earlier run compared other finals", "Go on with the same channels, seed, ways and model, or begin anew.")
    for way in results["ways"]:
        tally = tallies[way["way"]]
        tally.finals, tally.words, tally.took_s, tally.cpu_s = way["finals"], way["words"], way["took_s"], way["cpu_s"]
        tally.differing.update(way["differing"])
        tally.confidences_differing = way["confidences_differing"]
        tally.sizes.update({int(size): count for size, count in way["steps"].items()})
        tally.examples += way["examples"]
    return 3_600 * results["hours"], results["waves"]


def _document(conditions: Mapping[str, Any], audio_s: float, waves: int, tallies: Mapping[str, _Tally]) -> Document:
    ways = [
        {
            "way": name,
            "finals": tally.finals,
            "words": tally.words,
            "differing": dict(tally.differing),
            "confidences_differing": tally.confidences_differing,
            "took_s": round(tally.took_s, 1),
            "cpu_s": round(tally.cpu_s, 1),
            "steps": {str(size): count for size, count in sorted(tally.sizes.items())},
            "segments_per_step": round(sum(size * count for size, count in tally.sizes.items()) / max(1, sum(tally.sizes.values())), 2),
            "examples": tally.examples,
        }
        for name, tally in tallies.items()
    ]
    return document("finals", conditions, {"hours": round(audio_s / 3_600, 6), "waves": waves, "ways": ways})


def _compare(reference: Mapping[tuple[str, int], Transcript], finals: Mapping[tuple[str, int], Transcript], tally: _Tally) -> None:
    tally.finals += len(finals)
    tally.words += sum(len(final.words) for final in finals.values())
    for key in sorted(reference.keys() | finals.keys()):
        one, other = reference.get(key), finals.get(key)
        what = _difference(one, other)
        if what:
            tally.differing[what] += 1
            if len(tally.examples) < _EXAMPLES:
                tally.examples.append({"session": key[0], "segment": key[1], "what": what, "first": _shown(one), "here": _shown(other)})
        elif one is not None and other is not None:
            tally.confidences_differing += one.confidence != other.confidence


def _difference(one: Transcript | None, other: Transcript | None) -> str:
    """Return what differs first of two finals of the same segment; nothing if nothing does."""
    if one is None or other is None:
        return "missing" if other is None else "extra"
    if canonical(one) == canonical(other):
        return ""
    if (one.position_samples, one.end_sample) != (other.position_samples, other.end_sample):
        return "boundaries"
    return "text" if one.raw_text != other.raw_text else "words or writing"


def _shown(final: Transcript | None) -> Any:
    return None if final is None else [final.position_samples, final.end_sample, final.raw_text]


# ---------------------------------------------------------------------- calls


def _wave(channels: int, rng: np.random.Generator) -> list[Party]:
    """Return the parties of calls, each at a level of its own."""
    from ops.demo.calls import assemble, line_sizes

    parties = [
        party
        for number, size in enumerate(line_sizes(channels))
        for party in assemble(size, float(rng.uniform(*_CALL_SECONDS)), telephone=number % 2 == 0, rng=rng).parties
    ]
    return [_at_level(party, float(rng.uniform(*_GAIN_DB))) for party in parties]


def _at_level(party: Party, gain_db: float) -> Party:
    from dataclasses import replace

    scaled = np.clip(np.rint(party.pcm * 10 ** (gain_db / 20)), -32_768, 32_767).astype(np.int16)
    return replace(party, pcm=scaled)


def session_records(session_id: str, party: Party, frames_ms: Sequence[int], rng: np.random.Generator) -> Iterator[FlowRecord]:
    """Yield a session as its recorder would send it.

    Args:
        session_id: its name.
        party: who speaks, and how it goes on the wire.
        frames_ms: sizes that frames may have.
        rng: decides which.
    """
    ids: dict[str, Any] = {"channel_id": session_id, "session_id": session_id, "conversation_id": session_id}
    payload, rate_hz = party.payload(), party.sample_rate_hz
    bytes_per_ms = rate_hz // 1_000 * (2 if party.encoding == "pcm_s16le" else 1)
    begin = position = 0
    yield SessionStart(**ids, position_samples=0, encoding=party.encoding, sample_rate_hz=rate_hz, stamps=_stamps(0))
    while begin < len(payload):
        piece = payload[begin : begin + bytes_per_ms * int(rng.choice(frames_ms))]
        begin += len(piece)
        end = begin * SAMPLE_RATE_HZ // (1_000 * bytes_per_ms)
        yield AudioFrame(
            **ids, position_samples=position, encoding=party.encoding, sample_rate_hz=rate_hz, payload=piece, stamps=_stamps(end)
        )
        position = end
    yield SessionEnd(**ids, position_samples=position, reason="hangup", stamps=_stamps(position))


def _stamps(sample: int) -> Stamps:
    at_us = _STARTED_US + sample * _US_PER_S // SAMPLE_RATE_HZ
    return Stamps(captured_us=at_us, enqueued_us=at_us)


# ---------------------------------------------------------------------- ways


async def _go(
    way: Way, parties: Sequence[Party], engine: Engine, settings: Settings, tally: _Tally, seed: int
) -> dict[tuple[str, int], Transcript]:
    """Take calls one way; return their finals."""
    from ops.bench.pipeline import Pipeline

    rng = np.random.default_rng((seed, len(way.name)))
    pipeline = Pipeline(settings, engine, partials=way.partials)
    await pipeline.start()
    try:
        together = way.together or len(parties)
        for first in range(0, len(parties), together):
            some = parties[first : first + together]
            waiting = {
                SessionKey(number, f"call-{number}"): list(session_records(f"call-{number}", party, way.frames_ms, rng))
                for number, party in enumerate(some, first)
            }
            await _feed(way, pipeline, waiting, rng)
        await pipeline.settle()
    finally:
        await pipeline.stop()
    tally.sizes.update(pipeline.sizes)
    for one, other in pipeline.conflicts:
        if canonical(one) != canonical(other):
            tally.differing["said twice, differently"] += 1
    return pipeline.finals


async def _feed(way: Way, pipeline: Any, waiting: dict[SessionKey, list[FlowRecord]], rng: np.random.Generator) -> None:
    turn, longest = 0, max(map(len, waiting.values()))
    restarts: NDArray[np.int64] = rng.integers(longest // 5, longest, _RESTARTS) if way.restarts else np.zeros(0, np.int64)
    # Half a second at once where frames are small: in real time steps would not be smaller either.
    at_once = max(1, round(_FRAME_MS / float(np.mean(way.frames_ms)))) if way.paced else _BACKLOG_FRAMES
    while waiting:
        counts = {key: int(rng.integers(0, 2 * at_once + 1)) if way.uneven else at_once for key in waiting}
        await pipeline.feed({key: waiting[key][:count] for key, count in counts.items() if count}, paced=way.paced)
        waiting = {key: rest for key, records in waiting.items() if (rest := records[counts[key] :])}
        turn += 1
        if turn in restarts and waiting:
            await pipeline.restart()


def tables(found: Document) -> list[Table]:
    """Return what was compared as a table."""
    results = found["results"]
    rows = tuple(
        (
            way["way"],
            str(way["finals"]),
            str(way["words"]),
            figure(way["segments_per_step"], 1),
            figure(60 * results["hours"] / max(way["cpu_s"], 0.1), 1),
            str(sum(way["differing"].values())),
            ", ".join(f"{count} {what}" for what, count in way["differing"].items()) or "none",
            str(way["confidences_differing"]),
        )
        for way in results["ways"]
    )
    headings = ("way", "finals", "words", "segments per step", "hours per CPU minute", "finals that differ", "in what", "other confidence")
    return [Table(f"{results['hours']:.1f} hours of calls, each way through all stages", headings, rows)]
