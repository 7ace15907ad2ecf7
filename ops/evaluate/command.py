"""``asr eval``: how good the parts are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from streams.errors import UserError
from streams.output import table_console
from streams.settings import load_settings

__all__ = ["evaluate"]

evaluate = typer.Typer(help="Measure how good the parts are, on sets that anybody can rebuild.", no_args_is_help=True)

_TIMELINES: Final = 6

Split = Literal["dev", "test"]


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
    engines: Annotated[
        str | None, typer.Option("--engine", help="Whose word errors: whisper, conformer, or both, comma-separated. [default: ASR_ENGINE]")
    ] = None,
    split: Annotated[
        Literal["held_out", "development"],
        typer.Option("--split", help="Whose speakers and noises; thresholds are chosen on those of development."),
    ] = "held_out",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here; - for standard output.")] = None,
) -> None:
    """Compare detectors of speech on calls in noise: ours, its halves, and others.

    Speakers, noises and music are ones that training never heard. Every detector works with the same segmenter, with ASR_VAD_* in force.
    """
    from ops.evaluate.vad.run import Evaluation

    if not audio_dir.is_dir():
        raise UserError(f"There is no folder {audio_dir}", "Name the one that holds the recordings with --audio-dir or ASR_EVAL_AUDIO_DIR.")
    try:
        snrs_db = [int(each) for each in snrs.split(",")]
    except ValueError:
        raise UserError(f"--snrs takes whole decibels, not {snrs!r}", "For instance: --snrs -5,0,20.") from None
    names = [name.strip() for name in detectors.split(",")]
    settings = load_settings()
    recognisers = [name.strip() for name in (engines or settings.engine).split(",")] if words or engines else []
    evaluation = Evaluation(audio_dir, names, snrs_db, settings, split=split, engines=recognisers)
    evaluation.run()
    output_dir.mkdir(parents=True, exist_ok=True)
    evaluation.draw(output_dir, _TIMELINES)
    evaluation.report(json_file)


@evaluate.command()
def cost(
    steps: Annotated[int, typer.Option("--steps", min=10, help="Steps of 200 ms to measure.")] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here; - for standard output.")] = None,
) -> None:
    """Measure what preprocessing costs: processor time for 50 channels and 200 ms of audio, with ASR_VAD_* in force.

    Let nothing else run meanwhile.
    """
    from ops.evaluate.vad.cost import report

    report(load_settings(), steps, json_file)


@evaluate.command()
def wer(
    audio_dir: Annotated[
        Path,
        typer.Option("--audio-dir", envvar="ASR_EVAL_AUDIO_DIR", help="Folder of the recordings: orders/, fsdd/, noise/."),
    ] = Path("var/audio"),
    engines: Annotated[
        str,
        typer.Option(
            "--engine",
            help="What recognises, comma-separated: conformer, conformer-without-ngram, whisper.  [default: the configured engine]",
        ),
    ] = "",
    sets: Annotated[str, typer.Option("--sets", help="orders, digits.")] = "orders,digits",
    conditions: Annotated[
        str, typer.Option("--conditions", help="clean, mulaw, noise20, noise10, noise5: what is done to the audio.")
    ] = "clean,mulaw,noise20,noise10,noise5",
    split: Annotated[Split, typer.Option("--split", help="Whose voices: those of the test, or those of development.")] = "test",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Utterances of each set.  [default: all]", show_default=False)] = None,
    confusions: Annotated[int, typer.Option("--confusions", min=0, help="How many confusions to name for each set.")] = 8,
    hotwords: Annotated[
        Path | None,
        typer.Option(
            "--hotwords",
            exists=True,
            dir_okay=False,
            help="Phrases to favour, as asr hotwords push takes them: each conformer is measured with and without.",
        ),
    ] = None,
    contexts: Annotated[bool, typer.Option("--contexts", help="Also compare how much the model hears of the past and the future.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here; - for standard output.")] = None,
) -> None:
    """Count wrong words: recordings of voices that training never heard, through the whole system, as live calls go.

    Every recogniser gets a system of its own, with its own broker; nothing is taken around it. Texts are compared after Whisper's
    normalisation of English, digit by digit.
    """
    # Not for --help.
    from rich.console import Console

    from ops.evaluate.wer.run import WordEvaluation
    from ops.hotwords_command import read_phrases

    if not audio_dir.is_dir():
        raise UserError(f"There is no folder {audio_dir}", "Name the one that holds the recordings with --audio-dir or ASR_EVAL_AUDIO_DIR.")
    to_stdout = str(json_file) == "-"
    settings = load_settings()
    phrases = () if hotwords is None else read_phrases(hotwords)
    people = Console(stderr=True, highlight=False)
    evaluation = WordEvaluation(
        audio_dir, settings, split=split, sets=_names(sets), conditions=_names(conditions), console=people, limit=limit
    )
    for engine in _names(engines) or [settings.engine]:
        name, _, without = engine.partition("-without-")
        overrides = {"engine": name} | ({"lm_weight": 0.0} if without else {})
        evaluation.run(engine, overrides)
        if phrases and name == "conformer":
            evaluation.run(f"{engine}, hotwords", overrides, phrases)
    if contexts:
        evaluation.compare_contexts()
    if not to_stdout:
        evaluation.print(table_console(highlight=False), confusions)
    if to_stdout:
        typer.echo(evaluation.as_json(), nl=False)
    elif json_file is not None:
        json_file.write_bytes(evaluation.as_json())


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]
