"""The evaluation from end to end: recordings through the whole system, and the texts that come back against what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from numpy.typing import NDArray

from ops.evaluate.wer.scoring import Score, score
from ops.evaluate.wer.sets import Split, Utterance, held_out_noises, utterances
from ops.measure import cores, processor
from streams.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ops.passage import Passage
    from ops.processes import System
    from schemas.records import Hotword
    from streams.settings import Settings

__all__ = ["Row", "WordEvaluation"]

#: Calls at the same time: enough for full batches.
_AT_ONCE: Final = 32
_HOTWORDS_WAIT_S: Final = 30
#: Words are compared as they were recognised: what is written for people would be undone again.
_AS_RECOGNISED: Final[dict[str, Any]] = {"itn": False, "punctuation": False, "sentence_case": False}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of one recogniser on one set in one condition.

    Attributes:
        recogniser: the engine; for ``conformer`` also whether the n-gram has a say.
    """

    set: str
    condition: str
    recogniser: str
    score: Score


class WordEvaluation:
    """One evaluation.

    Args:
        audio_dir: the folder of the recordings.
        settings: the configuration.
        split: the speakers of development, or those of the test.
        sets: names of sets.
        conditions: what is done to the audio.
        console: where progress is shown.
        limit: utterances of each set; None: all.

    Raises:
        UserError: recordings are missing.
    """

    def __init__(
        self,
        audio_dir: Path,
        settings: Settings,
        *,
        split: Split,
        sets: Sequence[str],
        conditions: Sequence[str],
        console: Console,
        limit: int | None = None,
    ) -> None:
        self._settings, self._split, self._conditions, self._console = settings, split, list(conditions), console
        self._sets = {name: utterances(audio_dir, name, split)[:limit] for name in sets}
        self._noises: list[NDArray[np.float32]] = held_out_noises(audio_dir) if any(name.startswith("noise") for name in conditions) else []
        self.rows: list[Row] = []

    def run(self, recogniser: str, overrides: Mapping[str, Any], hotwords: Sequence[Hotword] = ()) -> None:
        """Take all sets in all conditions through a system of its own.

        Args:
            recogniser: what the rows call it.
            overrides: settings of the system.
            hotwords: phrases that are in force meanwhile.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from ops.passage import Passage
        from ops.processes import System

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            self._console.status(f"Starting {recogniser}") as status,
            System(
                self._settings, "eval", overrides={**_AS_RECOGNISED, **overrides}, on_progress=lambda what: status.update(what)
            ) as system,
            Passage(system) as passage,
        ):
            status.stop()
            if engine := overrides.get("engine"):
                system.require_engine(engine)
            if hotwords:
                _put_in_force(system, hotwords)
            with Progress(*columns, console=self._console, transient=True) as progress:
                for name, said in self._sets.items():
                    for condition in self._conditions:
                        task = progress.add_task(f"{recogniser}: {name}, {condition}", total=len(said))
                        written: list[str] = []
                        for first in range(0, len(said), _AT_ONCE):
                            written += self._written(passage, said[first : first + _AT_ONCE], condition)
                            progress.update(task, completed=len(written))
                        found = score([utterance.text for utterance in said], written)
                        self.rows.append(Row(set=name, condition=condition, recogniser=recogniser, score=found))

    def _written(self, passage: Passage, said: Sequence[Utterance], condition: str) -> list[str]:
        from ops.passage import Play

        plays = [Play(utterance.in_condition(condition, self._noises), Path(utterance.name).stem) for utterance in said]
        return [" ".join(segment.transcript.text for segment in view.finals()).strip() for view in passage.take(plays)]

    def compare_contexts(self) -> None:
        """Decode the clean sets with the model alone, hearing more and less; one row for the last partial, one for the final."""
        from agents.inference.conformer.engine import ConformerOptions
        from agents.inference.models import wenet_directory
        from ops.evaluate.wer.direct import CONTEXTS, decode

        settings = self._settings
        model_dir = wenet_directory(settings.model_dir)
        options = ConformerOptions(
            beam=settings.beam, lm_weight=settings.lm_weight, lm_word_bonus=settings.lm_word_bonus, ctc_weight=settings.ctc_weight,
            lm=str(settings.lm or ""), numbers=False, punctuation=False, capitals=False,
        )  # fmt: skip
        for context, (block_frames, left_blocks) in CONTEXTS.items():
            chosen = msgspec.structs.replace(options, block_frames=block_frames, left_blocks=left_blocks, final_block_frames=0)
            for name, said in self._sets.items():
                with self._console.status(f"{context}: {name}"):
                    partials, finals = decode(model_dir, chosen, [utterance.samples for utterance in said])
                texts = [utterance.text for utterance in said]
                for what, written in (("last partial, in blocks", partials), ("final, in one pass", finals)):
                    if not any(written):  # all is heard at once: there was no partial
                        continue
                    self.rows.append(Row(set=name, condition=f"alone, {context}", recogniser=what, score=score(texts, written)))

    def as_json(self) -> bytes:
        """Return everything that was measured."""
        found = {"split": self._split, "processor": processor(), "cores": cores(), "rows": self.rows}
        return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"

    def print(self, console: Console, confusions: int) -> None:
        """Print a table of the word errors, and the commonest confusions of each recogniser and set."""
        from rich.table import Table

        recognisers = list(dict.fromkeys(row.recogniser for row in self.rows))
        by_place = {(row.set, row.condition, row.recogniser): row.score for row in self.rows}
        table = Table(title=f"Word errors, {self._split} speakers", title_justify="left")
        for column in ("set", "condition", "words"):
            table.add_column(column)
        for recogniser in recognisers:
            table.add_column(recogniser, justify="right")
        for name in self._sets:
            for condition in dict.fromkeys(row.condition for row in self.rows):
                scores = [by_place.get((name, condition, recogniser)) for recogniser in recognisers]
                words = next((str(each.words) for each in scores if each is not None), "")
                table.add_row(name, condition, words, *("" if each is None else f"{each.wer:.1%}" for each in scores))
        console.print(table)
        for row in self.rows:
            if confusions and row.condition == self._conditions[0]:
                told = ", ".join(f"{each.said or '+'} → {each.written or '-'} ({each.count})" for each in row.score.confusions[:confusions])
                console.print(f"{row.set}, {row.condition}, {row.recogniser}: {told or 'no error'}", markup=False)


def _put_in_force(system: System, hotwords: Sequence[Hotword]) -> None:
    """Push a list, and wait until the workers use it.

    Raises:
        UserError: they do not.
    """
    from streams.pushing import push_hotwords
    from streams.registry import codec_for

    pushed = push_hotwords(system.settings, codec_for(system.settings.schema_registry_url), "evaluation", hotwords)
    assert system.workers is not None  # noqa: S101 - entered
    for _ in range(_HOTWORDS_WAIT_S):
        system.workers.listen(1.0)
        using = [status.hotword_version for status in system.workers.running() if "inference" in status.stages]
        if using and all(pushed.version in versions for versions in using):
            return
    raise UserError(f"The hotwords were not in force within {_HOTWORDS_WAIT_S} s", "Only the engine conformer uses hotwords.")
