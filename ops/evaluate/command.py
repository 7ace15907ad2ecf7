"""``asr eval``: how good the parts are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from streams.errors import UserError
from streams.settings import load_settings

__all__ = ["evaluate"]

evaluate = typer.Typer(help="Measure how good the parts are, on sets that anybody can rebuild.", no_args_is_help=True)

_TIMELINES: Final = 6


@evaluate.callback()
def _parts() -> None:
    """Keep ``vad`` a command of its own."""


@evaluate.command()
def vad(
    audio_dir: Annotated[
        Path,
        typer.Option(
            "--audio-dir", envvar="ASR_EVAL_AUDIO_DIR", help="Folder of the recordings that ops/train/vad/sources.tsv lists as held out."
        ),
    ] = Path("var/audio"),
    detectors: Annotated[
        str, typer.Option("--detectors", help="Which to compare, comma-separated.")
    ] = "fusion,tiny,traditional,silero,webrtc,energy",
    snrs: Annotated[str, typer.Option("--snrs", help="Ratios of speech to noise in dB, comma-separated.")] = "-5,0,5,10,15,20",
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Where plots and the list of scenes go.")] = Path("var/eval/vad"),
    words: Annotated[bool, typer.Option("--words", help="Also count word errors downstream; takes minutes.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here; - for standard output.")] = None,
) -> None:
    """Compare detectors of speech on calls in noise: ours, its halves, and others.

    Speakers and noises are ones that training never heard. Every detector works with the same segmenter, with ASR_VAD_* in force.
    """
    from ops.evaluate.vad.run import Evaluation

    if not audio_dir.is_dir():
        raise UserError(f"There is no folder {audio_dir}", "Name the one that holds the recordings with --audio-dir or ASR_EVAL_AUDIO_DIR.")
    try:
        snrs_db = [int(each) for each in snrs.split(",")]
    except ValueError:
        raise UserError(f"--snrs takes whole decibels, not {snrs!r}", "For instance: --snrs -5,0,20.") from None
    names = [name.strip() for name in detectors.split(",")]
    evaluation = Evaluation(audio_dir, names, snrs_db, load_settings(), words=words)
    evaluation.run()
    output_dir.mkdir(parents=True, exist_ok=True)
    evaluation.draw(output_dir, _TIMELINES)
    evaluation.report(json_file)
