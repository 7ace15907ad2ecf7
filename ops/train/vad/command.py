"""The command line of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

__all__ = ["main", "recipe"]

_SHARDS: Final = 5
_HARD_SHARDS: Final = 3
_EPOCHS: Final = 18
#: Recordings whose labels are drawn.
_PLOTTED: Final = 12


def recipe(
    audio_dir: Annotated[
        Path,
        typer.Option("--audio-dir", exists=True, file_okay=False, help="Folder of the recordings that ops/train/vad/sources.tsv lists."),
    ],
    work_dir: Annotated[Path, typer.Option("--work-dir", help="Where examples and checkpoints are kept.")] = Path("var/train/vad"),
    output: Annotated[Path, typer.Option("--output", help="The model to write.")] = Path("agents/vad/tiny/tiny_vad.onnx"),
    shards: Annotated[int, typer.Option(min=1, help="How many shards of 400 scenes of 16 s to train on.")] = _SHARDS,
    hard_shards: Annotated[
        int, typer.Option(min=0, help="And on how many of hard scenes: louder noise, more often music and babble.")
    ] = _HARD_SHARDS,
    music_dir: Annotated[
        Path | None,
        typer.Option("--music-dir", exists=True, file_okay=False, help="Folder of more music without voices, for the hard scenes."),
    ] = None,
    label_plots: Annotated[
        Path | None,
        typer.Option("--label-plots", help="Only draw the labels of a sample of the recordings, as a PNG to be checked by eye."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often to go through them.")] = _EPOCHS,
) -> None:
    """Train TinyVAD and write it as ONNX. What is there already is kept: run it again and it goes on where it stopped."""
    from rich.console import Console

    console = Console(stderr=True)
    if label_plots is not None:
        _draw_labels(audio_dir, label_plots)
        console.print(f"wrote {label_plots}")
        return

    import torch

    from ops.train.vad.export import export
    from ops.train.vad.trainer import prepare, train

    torch.set_num_threads(1)  # the network is too small to share out
    prepare(audio_dir, work_dir, shards, hard_shards, console.print, music_dir)
    export(train(work_dir, shards, hard_shards, epochs, console.print), output)
    console.print(f"wrote {output}, {output.stat().st_size:,} bytes")


def _draw_labels(audio_dir: Path, path: Path) -> None:
    from ops.train.vad.plots import draw_labels
    from ops.train.vad.sources import of_kind, recordings

    found = of_kind(recordings(audio_dir, "train"), "speech", "digits")
    draw_labels(found[:: max(1, len(found) // _PLOTTED)][:_PLOTTED], path)


def main() -> None:
    """Run it."""
    typer.run(recipe)
