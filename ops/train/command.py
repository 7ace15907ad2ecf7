"""The command line of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

__all__ = ["main", "prepare"]

app = typer.Typer(help="Train the bundled models.", no_args_is_help=True)

#: Where the engine looks for it in a model's folder.
_NGRAM = "lm.arpa"

AudioDir = Annotated[
    Path,
    typer.Option("--audio-dir", exists=True, file_okay=False, help="Folder of the recordings: orders/, fsdd/, telephone/, noise/, music/."),
]
DataDir = Annotated[Path, typer.Option("--data-dir", help="Where prepared clips are kept.")]


@app.callback()
def _recipe() -> None:
    """Keep ``prepare`` a command of its own."""


@app.command()
def prepare(
    audio_dir: AudioDir,
    data_dir: DataDir = Path("var/train/clips"),
    synthetic: Annotated[int, typer.Option(help="How many synthetic phrases to speak.")] = 6000,
    held_out: Annotated[list[str], typer.Option(help="Digit speakers never trained on.")] = ["lucas", "yweweler"],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the synthetic phrases and voices.")] = 1,
) -> None:
    """Read the recordings, speak synthetic phrases, align all of them in time, and write them as shards. Shards that are there are kept."""
    from rich.progress import track

    from ops.train import clips
    from ops.train.voices import check_engines

    shard_clips = 500
    data_dir.mkdir(parents=True, exist_ok=True)
    recorded = data_dir / "recorded.npz"
    if not recorded.exists():
        clips.write_shard(recorded, track(list(clips.recorded_clips(audio_dir, held_out)), "recordings"))
    for split in ("dev", "test"):
        path = data_dir.parent / f"{split}.npz"
        if not path.exists():
            clips.write_shard(path, clips.order_clips(audio_dir, split))
    if synthetic:
        check_engines()
    for number in track(range(-(-synthetic // shard_clips)), "synthetic speech"):
        path = data_dir / f"synthetic-{seed}-{number:03d}.npz"
        if not path.exists():
            clips.write_shard(path, clips.synthetic_clips(shard_clips, seed * 1000 + number))


@app.command()
def asr(
    audio_dir: AudioDir,
    data_dir: DataDir = Path("var/train/clips"),
    run_dir: Annotated[Path, typer.Option(help="Where this run keeps its checkpoint, log, plot and best model.")] = Path("var/train/run"),
    updates: Annotated[
        int, typer.Option(help="How many updates the whole run makes; the learning rate falls over the last three in ten.")
    ] = 10_000,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    synthetic_share: Annotated[float, typer.Option(help="Share of the examples that are synthetic speech.", min=0, max=1)] = 0.35,
    seed: Annotated[int, typer.Option(help="Seed of weights and examples.")] = 1,
    digit_speaker: Annotated[str, typer.Option(help="The digit speaker of the development set, held out by prepare.")] = "yweweler",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    workers: Annotated[int, typer.Option(help="Processes that mix examples.")] = 1,
) -> None:
    """Train the streaming recogniser; goes on where an earlier run in the same folder stopped."""
    import torch

    from ops.train.trainer import Recipe, Trainer

    torch.set_num_threads(threads)
    recipe = Recipe(updates=updates, learning_rate=learning_rate, synthetic_share=synthetic_share, seed=seed)
    trainer = Trainer(recipe, run_dir, data_dir, audio_dir, digit_speaker, workers)
    while not trainer.finished:
        typer.echo(msgspec.json.encode(trainer.run_epoch()).decode())


@app.command()
def ngram(
    data_dir: DataDir = Path("var/train/clips"),
    output: Annotated[Path, typer.Option(help="Where to write the n-gram.")] = Path("var/train/run") / _NGRAM,
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
    run_dir: Annotated[Path, typer.Option(help="The run's folder.")] = Path("var/train/run"),
    checkpoint: Annotated[bool, typer.Option(help="Take the checkpoint along, so that the run can go on elsewhere.")] = False,
) -> None:
    """Copy a run's best model, n-gram, log and plot to where they are kept."""
    import shutil

    history = model_dir / "training"
    history.mkdir(parents=True, exist_ok=True)
    for path in (run_dir / "best").iterdir():
        shutil.copy(path, model_dir)
    if (ngram_file := run_dir / _NGRAM).exists():
        shutil.copy(ngram_file, model_dir)
    for name in ("log.jsonl", "curves.png", "bpe.model", *(["checkpoint.pt"] if checkpoint else [])):
        shutil.copy(run_dir / name, history)


@app.command()
def evaluate(
    audio_dir: AudioDir,
    model: Annotated[Path, typer.Option("--model", exists=True, file_okay=False, help="WeNet model directory.")] = Path(
        "var/train/run/best"
    ),
    data_dir: DataDir = Path("var/train/clips"),
    arpa: Annotated[Path | None, typer.Option(help="The domain's n-gram; without it, only what needs none is measured.")] = None,
    weight: Annotated[float, typer.Option(help="How much the n-gram says.")] = 0.5,
    word_bonus: Annotated[float, typer.Option(help="Natural log added for each word.")] = 0.5,
    test: Annotated[bool, typer.Option("--test", help="Judge on the test sets instead of the development sets.")] = False,
    digit_speaker: Annotated[str, typer.Option(help="Development digit speaker.")] = "yweweler",
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
    app()
