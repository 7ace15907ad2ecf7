"""The command line of the recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from streams.errors import UserError

if TYPE_CHECKING:
    from ops.train.trainer import Recipe

__all__ = ["app", "main"]

app = typer.Typer(help="Train the bundled models.", no_args_is_help=True, pretty_exceptions_enable=False)

#: Where the engine looks for it in a model's folder.
_NGRAM: Final = "lm.arpa"
#: What a run leaves in its folder for those who want to see how it went.
_HISTORY: Final = ("log.jsonl", "curves.png")
#: The folder of the second run, in the first one's.
_SECOND_RUN: Final = "numbers"
_SHARD_CLIPS: Final = 500
_NUMBER_SHARD_CLIPS: Final = 100
#: The digit speakers that training never hears: of the test set, and of the development set.
_HELD_OUT: Final = ["lucas", "yweweler"]
_DIGIT_SPEAKER: Final = "yweweler"
_EXIT_USER_ERROR: Final = 2
#: What shells report for Ctrl-C.
_EXIT_INTERRUPTED: Final = 130

AudioDir = Annotated[
    Path,
    typer.Option("--audio-dir", exists=True, file_okay=False, help="Folder of the recordings: orders/, fsdd/, telephone/, noise/, music/."),
]
DataDir = Annotated[Path, typer.Option("--data-dir", help="Where prepared clips are kept.")]
RunDir = Annotated[Path, typer.Option("--run-dir", help="Where a run keeps its checkpoint, log, plot and best model.")]
Synthetic = Annotated[int, typer.Option(help="How many synthetic phrases to speak.", min=0)]
Numbers = Annotated[int, typer.Option(help="How many numbers the better synthetic voices read out: those that are installed.", min=0)]
SyntheticShare = Annotated[float, typer.Option(help="Share of the examples that are synthetic speech.", min=0, max=1)]
NumberShare = Annotated[float, typer.Option(help="Share of numbers among the recorded examples.", min=0, max=1)]
DigitSpeaker = Annotated[str, typer.Option(help="The digit speaker of the development set, held out by prepare.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, examples and synthetic voices.")]
Threads = Annotated[int, typer.Option(help="CPU threads.", min=1)]
Workers = Annotated[int, typer.Option(help="Processes that mix examples; 0: the one that learns does.", min=0)]

_DATA_DIR: Final = Path("var/train/clips")
_RUN_DIR: Final = Path("var/train/run")


@app.command("all")
def everything(
    audio_dir: AudioDir,
    data_dir: DataDir = _DATA_DIR,
    run_dir: RunDir = _RUN_DIR,
    model_dir: Annotated[Path, typer.Option(help="Where the finished model goes.")] = Path("var/train/model"),
    updates: Annotated[int, typer.Option(help="Updates of the first run, from nothing.", min=1)] = 10_000,
    number_updates: Annotated[int, typer.Option(help="Updates of the second run, mostly of numbers.", min=0)] = 3_000,
    synthetic: Synthetic = 6_000,
    numbers: Numbers = 1_500,
    seed: Seed = 1,
    threads: Threads = 2,
    workers: Workers = 1,
) -> None:
    """Make the model from nothing: clips, a first run, a second one on numbers, the n-gram, and all of it in one folder.

    May be stopped anywhere; the same command goes on from there.
    """
    prepare(audio_dir, data_dir, synthetic=synthetic, numbers=numbers, seed=seed)
    asr(audio_dir, data_dir, run_dir, updates=updates, seed=seed, threads=threads, workers=workers)
    best = run_dir
    if number_updates:
        best = run_dir / _SECOND_RUN
        more_numbers(audio_dir, data_dir, best, begin=run_dir / "best", updates=number_updates, seed=seed, threads=threads, workers=workers)
    ngram(data_dir, best / _NGRAM)
    export(model_dir, best)
    typer.echo(f"The model is in {model_dir}. Measure it: ASR_MODEL_DIR={model_dir} asr eval wer --audio-dir {audio_dir}")


@app.command()
def prepare(
    audio_dir: AudioDir,
    data_dir: DataDir = _DATA_DIR,
    synthetic: Synthetic = 6_000,
    numbers: Numbers = 1_500,
    held_out: Annotated[list[str], typer.Option(help="Digit speakers never trained on.")] = _HELD_OUT,
    seed: Seed = 1,
) -> None:
    """Read the recordings, speak synthetic phrases, align all of them in time, and write them as shards. Shards that are there are kept."""
    from rich.progress import track

    from ops.train import clips
    from ops.train.voices import BASIC_ENGINES, NUMBER_ENGINES, check_engines, installed

    _check_recordings(audio_dir)
    if synthetic:
        check_engines(list(BASIC_ENGINES))
    data_dir.mkdir(parents=True, exist_ok=True)
    recorded = data_dir / "recorded.npz"
    if not recorded.exists():
        count, found = clips.recorded_clips(audio_dir, held_out)
        clips.write_shard(recorded, track(found, "recordings", total=count))
    for split in ("dev", "test"):
        path = data_dir.parent / f"{split}.npz"
        if not path.exists():
            clips.write_shard(path, clips.order_clips(audio_dir, split))
    for number in track(range(-(-synthetic // _SHARD_CLIPS)), "synthetic speech"):
        path = data_dir / f"synthetic-{seed}-{number:03d}.npz"
        if not path.exists():
            clips.write_shard(path, clips.synthetic_clips(min(synthetic, _SHARD_CLIPS), seed * 1000 + number))
    engines = {name: share for name, share in NUMBER_ENGINES.items() if installed(name)}
    if numbers and (missing := NUMBER_ENGINES.keys() - engines):
        typer.echo(f"Not installed, and so without their voices: {', '.join(sorted(missing))}.")
    if not engines:
        return
    for number in track(range(-(-numbers // _NUMBER_SHARD_CLIPS)), "numbers"):
        path = data_dir / f"numbers-{seed}-{number:03d}.npz"
        if not path.exists():
            clips.write_shard(path, clips.number_clips(min(numbers, _NUMBER_SHARD_CLIPS), seed * 2000 + number, engines))


@app.command()
def asr(
    audio_dir: AudioDir,
    data_dir: DataDir = _DATA_DIR,
    run_dir: RunDir = _RUN_DIR,
    updates: Annotated[
        int, typer.Option(help="How many updates the whole run makes; the learning rate falls over the last three in ten.", min=1)
    ] = 10_000,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    synthetic_share: SyntheticShare = 0.35,
    number_share: NumberShare = 0.48,
    seed: Seed = 1,
    digit_speaker: DigitSpeaker = _DIGIT_SPEAKER,
    threads: Threads = 2,
    workers: Workers = 1,
) -> None:
    """Train the streaming recogniser from nothing; goes on where an earlier run in the same folder stopped."""
    from ops.train.trainer import Recipe

    recipe = Recipe(
        updates=updates, learning_rate=learning_rate, synthetic_share=synthetic_share, number_share=number_share, seed=seed
    )  # fmt: skip
    _train(recipe, audio_dir, data_dir, run_dir, digit_speaker, threads, workers)


@app.command()
def more_numbers(
    audio_dir: AudioDir,
    data_dir: DataDir = _DATA_DIR,
    run_dir: RunDir = _RUN_DIR / _SECOND_RUN,
    begin: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Model directory whose weights to begin with.")] = _RUN_DIR
    / "best",
    updates: Annotated[int, typer.Option(help="How many updates the whole run makes.", min=1)] = 3_000,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate, from which it falls to nothing.")] = 6e-4,
    synthetic_share: SyntheticShare = 0.35,
    number_share: NumberShare = 0.66,
    seed: Seed = 1,
    digit_speaker: DigitSpeaker = _DIGIT_SPEAKER,
    threads: Threads = 2,
    workers: Workers = 1,
) -> None:
    """Go on with the weights of a model, the bundled one for example, mostly on numbers; stops and goes on like any run."""
    from ops.train.trainer import second_recipe

    recipe = second_recipe(
        updates=updates, learning_rate=learning_rate, synthetic_share=synthetic_share, number_share=number_share, seed=seed
    )  # fmt: skip
    _train(recipe, audio_dir, data_dir, run_dir, digit_speaker, threads, workers, begin)


def _train(
    recipe: Recipe,
    audio_dir: Path,
    data_dir: Path,
    run_dir: Path,
    digit_speaker: str,
    threads: int,
    workers: int,
    begin: Path | None = None,
) -> None:
    import torch

    from ops.train.trainer import Trainer

    if not (data_dir / "recorded.npz").exists():
        raise UserError(f"{data_dir} has no prepared clips", "Make them with: python -m ops.train prepare --audio-dir …")
    torch.set_num_threads(threads)
    trainer = Trainer(recipe, run_dir, data_dir, audio_dir, digit_speaker, workers, begin)
    try:
        while not trainer.finished:
            typer.echo(msgspec.json.encode(trainer.run_epoch()).decode())
    except KeyboardInterrupt:
        trainer.save_checkpoint()
        typer.echo(f"Stopped after {trainer.update} of {recipe.updates} updates; the same command goes on from here.", err=True)
        raise typer.Exit(_EXIT_INTERRUPTED) from None


def _check_recordings(audio_dir: Path) -> None:
    for needed in ("orders/transcripts.tsv", "fsdd/recordings", "MANIFEST.tsv"):
        if not (audio_dir / needed).exists():
            raise UserError(f"{audio_dir} has no {needed}", "The model card and ops/train/vad/sources.tsv say where recordings come from.")


@app.command()
def ngram(
    data_dir: DataDir = _DATA_DIR,
    output: Annotated[Path, typer.Option(help="Where to write the n-gram.")] = _RUN_DIR / _NGRAM,
    order: Annotated[int, typer.Option(help="Longest run of words.")] = 3,
) -> None:
    """Estimate the domain's n-gram from the training transcripts and generated phrases, as an ARPA file."""
    from ops.train.clips import read_shard
    from ops.train.ngram import domain_sentences, train_ngram, write_arpa

    transcripts = [clip.text for clip in read_shard(data_dir / "recorded.npz") if clip.source == "order"]
    write_arpa(output, train_ngram(domain_sentences(transcripts), order))


@app.command()
def export(
    model_dir: Annotated[Path, typer.Argument(help="Where the model goes.")],
    run_dir: Annotated[Path, typer.Option(help="The run's folder.")] = _RUN_DIR,
    checkpoint: Annotated[bool, typer.Option(help="Take the checkpoint along, so that the run can go on elsewhere.")] = False,
) -> None:
    """Copy a run's best model, n-gram, log and plot to where they are kept; of a second run, the first one's log and plot too."""
    import shutil

    if not (run_dir / "best").is_dir():
        raise UserError(f"{run_dir} has no model yet", "It has one after its first epoch.")
    history = model_dir / "training"
    history.mkdir(parents=True, exist_ok=True)
    for path in (run_dir / "best").iterdir():
        shutil.copy(path, model_dir)
    if (ngram_file := run_dir / _NGRAM).exists():
        shutil.copy(ngram_file, model_dir)
    for name in (*_HISTORY, "bpe.model", *(["checkpoint.pt"] if checkpoint else [])):
        shutil.copy(run_dir / name, history)
    if run_dir.name == _SECOND_RUN and (run_dir.parent / _HISTORY[0]).exists():
        for name in _HISTORY:
            shutil.copy(run_dir.parent / name, history / f"first-{name}")


@app.command()
def evaluate(
    audio_dir: AudioDir,
    model: Annotated[Path, typer.Option("--model", exists=True, file_okay=False, help="WeNet model directory.")] = Path(
        "var/train/run/best"
    ),
    data_dir: DataDir = _DATA_DIR,
    arpa: Annotated[Path | None, typer.Option(help="The domain's n-gram; without it, only what needs none is measured.")] = None,
    weight: Annotated[float, typer.Option(help="How much the n-gram says.")] = 0.5,
    word_bonus: Annotated[float, typer.Option(help="Natural log added for each word.")] = 0.5,
    test: Annotated[bool, typer.Option("--test", help="Judge on the test sets instead of the development sets.")] = False,
    digit_speaker: DigitSpeaker = _DIGIT_SPEAKER,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the table here too.")] = None,
) -> None:
    """Measure word errors of a model: greedy, beam search, with the n-gram, rescored; in blocks and with full context."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from agents.inference.conformer.loader import load_model
    from ops.train.evaluate import judge, named_sets
    from ops.train.ngram import read_arpa
    from ops.train.search import Fusion
    from ops.train.tokens import Tokens

    torch.set_num_threads(2)
    loaded = load_model(model)
    fusion = Fusion(read_arpa(arpa), weight, word_bonus) if arpa else None
    rows = judge(
        loaded.model, Tokens(model / "bpe.model"), named_sets(data_dir.parent, audio_dir, "test" if test else "dev", digit_speaker), fusion
    )
    table = Table("set", "context", "decoding", "word errors, %", "sub", "del", "ins")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("set", "context", "decoding", "wer", "substitutions", "deletions", "insertions")))
    Console().print(table)
    if json_path:
        json_path.write_bytes(msgspec.json.encode(rows))


def main() -> None:
    """Run the command line."""
    try:
        app()
    except UserError as mistake:
        typer.echo(f"ops.train: {mistake}", err=True)
        sys.exit(_EXIT_USER_ERROR)
