"""The comparison from end to end: build the set, let each detector judge it, add up, draw, tell."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from agents.vad.segmenter import Rules
from ops.evaluate.vad.candidates import Candidate, Verdict, candidate, cost_of
from ops.evaluate.vad.measure import Figures, Segment, Tally, segments_of
from ops.evaluate.vad.plots import roc, timeline
from ops.evaluate.vad.testset import TestScene, build, write_manifest
from ops.evaluate.vad.words import Recogniser
from ops.train.vad.sources import Split
from streams.output import table_console
from streams.settings import Settings

__all__ = ["Evaluation"]

#: So many scenes are judged in one call: enough for batches, little enough for memory (a scene's spectra take 3 MB).
_BATCH: Final = 32
_GOLDEN: Final = 0.618034


class Evaluation:
    """One comparison.

    Args:
        audio_dir: where the recordings are.
        names: the detectors.
        snrs_db: ratios of speech to noise.
        settings: the configuration.
        split: whose speakers and noises.
        engines: which recognisers' word errors are counted too.

    Raises:
        UserError: a detector or a recording is missing.
    """

    def __init__(
        self,
        audio_dir: Path,
        names: Sequence[str],
        snrs_db: Sequence[int],
        settings: Settings,
        *,
        split: Split = "held_out",
        engines: Sequence[str] = (),
    ) -> None:
        self._audio_dir, self._snrs_db, self._settings, self._split = audio_dir, snrs_db, settings, split
        self._recognisers: Final = [Recogniser(audio_dir, settings, engine, split) for engine in engines]
        self._candidates: Final[list[Candidate]] = [candidate(name, settings) for name in names]
        self._console: Final = Console(stderr=True)
        self.scenes: list[TestScene] = []
        self.verdicts: dict[str, list[Verdict]] = {}
        self.segments: dict[str, list[list[Segment]]] = {}
        #: By detector, then by part of the set: ``all``, how the noise was made, its kind, the ratio.
        self.figures: dict[str, dict[str, Figures]] = {}
        #: The share of words that are wrong with the true boundaries, by set and recogniser.
        self.reference_word_errors: dict[str, float] = {}

    def run(self) -> None:
        """Do the work."""
        self._console.print("building the set")
        self.scenes = build(self._audio_dir, self._snrs_db, self._split)
        rules = Rules.of(self._settings)
        for recogniser in self._recognisers:
            self._console.print(f"recognising words within the true boundaries: {recogniser.engine}")
            self.reference_word_errors |= recogniser.of_reference()
        for each in self._candidates:
            batches = range(0, len(self.scenes), _BATCH)
            verdicts: list[Verdict] = []
            for begin in track(batches, each.name, console=self._console, transient=True):
                verdicts += each.judge([scene.samples for scene in self.scenes[begin : begin + _BATCH]])
            self.verdicts[each.name], self.segments[each.name] = verdicts, []
            tallies: dict[str, Tally] = defaultdict(Tally)
            for scene, verdict in zip(self.scenes, verdicts, strict=True):
                found, cancelled = segments_of(verdict.speech, rules, len(scene.samples))
                self.segments[each.name].append(found)
                for part in _parts(scene):
                    tallies[part].add(scene, found, cancelled)
            cost = cost_of(each, self.scenes[0].samples)
            errors = {place: rate for recogniser in self._recognisers for place, rate in recogniser.of(each).items()}
            self.figures[each.name] = {
                part: tally.figures(cost, errors) if part == "all" else tally.figures() for part, tally in tallies.items()
            }

    def draw(self, folder: Path, timelines: int) -> None:
        """Write ``roc.png``, some timelines, and ``scenes.tsv``, which names what each scene is made of."""
        write_manifest(self.scenes, folder / "scenes.tsv")
        roc(self.scenes, self.verdicts, folder / "roc.png")
        with_speech = [number for number, scene in enumerate(self.scenes) if scene.placed]
        # Golden steps: neither the same noise again and again, which comes at even ones, nor its neighbours.
        chosen = {with_speech[int(len(with_speech) * (step * _GOLDEN % 1))] for step in range(timelines if with_speech else 0)}
        for number in sorted(chosen):
            verdicts = {name: given[number] for name, given in self.verdicts.items()}
            spans = {name: [(segment.start, segment.end) for segment in found[number]] for name, found in self.segments.items()}
            timeline(self.scenes[number], verdicts, spans, folder / f"timeline-{number:03d}.png")
        self._console.print(f"plots and the list of scenes are in {folder}")

    def report(self, json_file: Path | None) -> None:
        """Print the figures, and write them as JSON if asked."""
        if json_file is not None:
            written = msgspec.json.format(msgspec.json.encode(self._as_json()), indent=2)
            if str(json_file) == "-":
                sys.stdout.write(written.decode() + "\n")
                return
            json_file.write_bytes(written + b"\n")
        console = table_console()
        parts = {part: None for figures in self.figures.values() for part in figures}
        for title, chosen in (("All", ["all"]), ("By part", [part for part in parts if part != "all"])):
            table = Table(title=title, title_justify="left")
            for column in ("set", "detector", "false triggers", "noise time", "merge accuracy", "speech kept", "onset P50/P95 ms"):
                table.add_column(column, justify="left" if column in ("set", "detector") else "right")
            for column in ("end P50/P95 ms", "segments", "cancelled", "regions", "CPU ms/ch·s"):
                table.add_column(column, justify="right")
            for part in chosen:
                for name, figures in self.figures.items():
                    table.add_row(part, name, *_row(figures[part]))
            console.print(table)
        if self.reference_word_errors:
            console.print(self._words_table())

    def _words_table(self) -> Table:
        table = Table(title="Word errors downstream, and how many more than with the true boundaries", title_justify="left")
        table.add_column("boundaries")
        for place in self.reference_word_errors:
            table.add_column(place, justify="right")
        table.add_row("true", *(f"{rate:.1%}" for rate in self.reference_word_errors.values()))
        for name, parts in self.figures.items():
            errors = parts["all"].word_errors or {}
            more = {place: errors[place] - rate for place, rate in self.reference_word_errors.items()}
            table.add_row(name, *(f"{errors[place]:.1%} ({each:+.1%})" for place, each in more.items()))
        return table

    def _as_json(self) -> dict[str, Any]:
        return {
            "scenes": len(self.scenes),
            "seconds": round(sum(scene.seconds for scene in self.scenes), 2),
            "split": self._split,
            "reference_word_errors": self.reference_word_errors,
            "settings": {name: getattr(self._settings, name) for name in type(self._settings).model_fields if name.startswith("vad")},
            "detectors": {
                name: {**msgspec.to_builtins(parts["all"]), "parts": {part: parts[part] for part in parts if part != "all"}}
                for name, parts in self.figures.items()
            },
        }


def _parts(scene: TestScene) -> tuple[str, ...]:
    if scene.snr_db is None:
        return "all", scene.part, f"{scene.noise} alone", "noise alone"
    return "all", scene.part, scene.noise, f"{scene.snr_db} dB"


def _row(figures: Figures) -> list[str]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    def errors(p50: float | None, p95: float | None) -> str:
        return "" if p50 is None or p95 is None else f"{p50:+.0f} / {p95:.0f}"

    return [
        share(figures.false_trigger_rate),
        share(figures.noise_time_triggered),
        share(figures.segment_merge_accuracy),
        share(figures.speech_kept),
        errors(figures.onset_error_ms.p50, figures.onset_error_ms.p95),
        errors(figures.end_error_ms.p50, figures.end_error_ms.p95),
        str(figures.segments),
        str(figures.cancelled),
        str(figures.regions),
        "" if figures.cpu_ms_per_channel_second is None else f"{figures.cpu_ms_per_channel_second:.3f}",
    ]
