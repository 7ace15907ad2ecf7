"""``asr transcribe``: audio files into text, through the same pipeline as live calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import typer

from schemas.records import SAMPLE_RATE_HZ, Word
from streams.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from connectors.recorder.media import FileSource
    from connectors.results import SessionView
    from ops.passage import Play
    from streams.settings import Settings

__all__ = ["ChannelText", "Format", "Segment", "cues", "render", "transcribe"]

_EXIT_UNREADABLE: Final = 2
_ENGINE: Final = "whisper"
#: What fits on a screen and can be read in the time.
_CUE_CHARS: Final = 84
_CUE_MS: Final = 6_000
_MS_PER_S: Final = 1_000
#: Files can wait: longer pauses within a segment give the recogniser more to go by than live calls allow. On a sonnet read aloud, tiny.en
#: had 20 % of the words wrong with the 300 ms of live calls, and 12 % with this.
_CLOSING_MS: Final = 800


class Format(StrEnum):
    """What the text is written as."""

    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of speech. Times count from the file's start.

    Attributes:
        start_ms: where it begins.
        end_ms: where it ends.
        text: what was said.
        confidence: between 0 and 1.
        words: its words with their times.
    """

    start_ms: int
    end_ms: int
    text: str
    confidence: float
    words: tuple[Word, ...] = ()


class ChannelText(msgspec.Struct, frozen=True, kw_only=True):
    """What was said on one channel of a file. These names are the keys of the JSON, and stay as they are.

    Attributes:
        file: the file, as it was named.
        channel: which of its channels, from 0; a file whose channels are equal has one.
        label: ``left`` and ``right`` for two channels, ``channel N`` for more; empty for one.
        text: everything that was said.
        segments: the same in pieces, in order.
    """

    file: str
    channel: int
    label: str
    text: str
    segments: tuple[Segment, ...]


class Cue(NamedTuple):
    """A subtitle."""

    start_ms: int
    end_ms: int
    label: str
    text: str


def transcribe(
    files: Annotated[list[Path], typer.Argument(help="Audio files of any kind: WAV, MP3, FLAC, Opus, G.711, video…", show_default=False)],
    format_: Annotated[Format, typer.Option("--format", "-f", help="What to write.")] = Format.TEXT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write it: a file, or a folder for one file each.  [default: standard output]"),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="What recognises speech: whisper knows every word, conformer those of its model. [ASR_ENGINE]  [default: whisper]",
            show_default=False,
        ),
    ] = None,
    language: Annotated[str, typer.Option(help="What is spoken, such as en or zh; else the model's own language, or detected.")] = "",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the JSON here as well; - for standard output.", show_default=False, allow_dash=True),
    ] = None,
) -> None:
    """Turn audio files into text, as fast as this machine can.

    The files go through the same stages as live calls: those of a running system (ASR_BOOTSTRAP_SERVERS) if there is one, else an
    embedded one that is started for this command. The two channels of a stereo file are two parties, kept apart and labelled; if they
    hold the same, they are taken once.

    The exit code is 2 if one of the files could not be read; the others are transcribed all the same.
    """
    # Not for --help.
    from rich.console import Console

    from streams.settings import load_settings

    people = Console(stderr=True, highlight=False, soft_wrap=True)
    json_to_stdout = str(json_file) == "-"
    if json_to_stdout and output is None and format_ is not Format.JSON:
        # Two kinds of output in one stream would be neither.
        format_, json_file = Format.JSON, None
    wishes: dict[str, Any] = {} if engine is None else {"engine": engine}
    settings = load_settings(**wishes)
    if "engine" not in settings.model_fields_set:
        # Files hold anything; calls are what a system is set up for.
        wishes["engine"] = _ENGINE
    if "vad_closing_ms" not in settings.model_fields_set:
        wishes["vad_closing_ms"] = _CLOSING_MS
    sources, refused = _open_all(files)
    for reason in refused:
        people.print(f"asr: {reason}", style="red", markup=False)
    if sources:
        _check_output(format_, output, json_file, len({source.path for source in sources}))
        texts = _transcribed(sources, settings, wishes, people, language=language, engine_wished=engine)
        _write(texts, format_, output)
        if json_file is not None:
            _put(render(texts, Format.JSON), None if json_to_stdout else json_file)
    if refused:
        raise typer.Exit(_EXIT_UNREADABLE)


def _open_all(files: Sequence[Path]) -> tuple[list[FileSource], list[str]]:
    """Return the channels of all files, and why others cannot be read, a line each."""
    from connectors.recorder.media import MediaError, open_media

    sources: list[FileSource] = []
    refused: list[str] = []
    for file in dict.fromkeys(files):
        try:
            sources += open_media(file)
        except MediaError as reason:
            refused.append(" ".join(str(reason).split()))
    return sources, refused


def _transcribed(
    sources: Sequence[FileSource],
    settings: Settings,
    overrides: Mapping[str, Any],
    people: Console,
    *,
    language: str,
    engine_wished: str | None,
) -> list[ChannelText]:
    """Take the sources through the pipeline and return their texts in the same order."""
    from ops.passage import Passage
    from ops.processes import System

    with contextlib.ExitStack() as stack:
        with people.status("Starting") as status:
            system = stack.enter_context(
                System(settings, "transcribe", overrides=overrides, join=True, on_progress=lambda what: status.update(what))
            )
            if engine_wished is not None:
                system.require_engine(engine_wished)
            passage = stack.enter_context(Passage(system))
        began_s = time.monotonic()
        with _progress(sources, people) as show:
            views = passage.take(_plays(sources, language), show)
        took_s = time.monotonic() - began_s
        audio_s = passage.audio_ms / _MS_PER_S
    for source in sources:
        for note in source.notes:
            people.print(f"{source.name}: {note}", style="yellow", markup=False)
    people.print(f"{audio_s:.1f} s of audio took {took_s:.1f} s, {audio_s / took_s:.1f} times as fast as real time", style="dim")
    return [_text_of(source, view) for source, view in zip(sources, views, strict=True)]


def _plays(sources: Sequence[FileSource], language: str) -> list[Play]:
    """Return a session for each source; the channels of a file belong to one call."""
    from connectors.recorder.session import new_id
    from ops.passage import Play

    calls: dict[Path, str] = {}
    return [
        Play(
            source,
            source.path.stem,
            conversation_id=calls.setdefault(source.path, new_id()),
            party=_label(source),
            language=language,
        )
        for source in sources
    ]


@contextlib.contextmanager
def _progress(sources: Sequence[FileSource], people: Console) -> Iterator[Callable[[Sequence[int]], None]]:
    """Yield what shows how far each channel is; in a terminal only."""
    if not people.is_terminal:
        yield lambda _done: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=people, transient=True) as progress:
        lengths = [(source.duration_ms or 0) * SAMPLE_RATE_HZ // _MS_PER_S for source in sources]
        tasks = [progress.add_task(source.name, total=length or None) for source, length in zip(sources, lengths, strict=True)]

        def show(done: Sequence[int]) -> None:
            for task, samples in zip(tasks, done, strict=True):
                progress.update(task, completed=samples)

        yield show


def _label(source: FileSource) -> str:
    if source.channels == 1:
        return ""
    return ("left", "right")[source.channel] if source.channels == 2 else f"channel {source.channel + 1}"


def _text_of(source: FileSource, view: SessionView) -> ChannelText:
    from agents.inference.postprocess import run_on
    from connectors.results import to_ms

    segments = tuple(
        Segment(
            start_ms=to_ms(final.position_samples),
            end_ms=to_ms(final.end_sample),
            text=final.text,
            confidence=final.confidence,
            words=final.words,
        )
        for final in (segment.transcript for segment in view.finals())
        if final.text
    )
    return ChannelText(
        file=str(source.path),
        channel=source.channel,
        label=_label(source),
        text=run_on(segment.text for segment in segments),
        segments=segments,
    )


def cues(texts: Sequence[ChannelText]) -> list[Cue]:
    """Return subtitles of what was said on the channels of one file, in order; long segments are cut between words."""
    found = [cue for text in texts for segment in text.segments for cue in _cut(segment, text.label)]
    return sorted(found, key=lambda cue: (cue.start_ms, cue.end_ms))


def _cut(segment: Segment, label: str) -> Iterator[Cue]:
    written = segment.text.split()
    if len(written) != len(segment.words):  # post-processing has joined words: their times are those of others
        yield Cue(segment.start_ms, segment.end_ms, label, segment.text)
        return
    held: list[str] = []
    start_ms = end_ms = segment.start_ms
    for text, word in zip(written, segment.words, strict=True):
        too_long = len(" ".join([*held, text])) > _CUE_CHARS or word.end_ms - start_ms > _CUE_MS
        if held and too_long:
            yield Cue(start_ms, end_ms, label, " ".join(held))
            held = []
        if not held:
            start_ms = word.start_ms
        held.append(text)
        end_ms = max(word.end_ms, start_ms + 1)
    if held:
        yield Cue(start_ms, end_ms, label, " ".join(held))


def render(texts: Sequence[ChannelText], format_: Format) -> str:
    """Return the texts of one or several files as they are written.

    Text: a line for each segment, in the order of speaking, with the party's label where a file has several channels and the file's name
    above it where there are several files.
    """
    if format_ is Format.JSON:
        return msgspec.json.format(msgspec.json.encode(list(texts)), indent=2).decode() + "\n"
    files = list(dict.fromkeys(text.file for text in texts))
    parts = [_render_file([text for text in texts if text.file == file], format_) for file in files]
    if format_ is Format.TEXT and len(files) > 1:
        parts = [f"{file}:\n{part}" for file, part in zip(files, parts, strict=True)]
    return "\n".join(parts)


def _render_file(texts: Sequence[ChannelText], format_: Format) -> str:
    if format_ is Format.TEXT:
        said = sorted((segment.start_ms, text.label, segment.text) for text in texts for segment in text.segments)
        return "".join(f"{label}: {line}\n" if label else f"{line}\n" for _, label, line in said)
    if format_ is Format.SRT:
        blocks = [
            f"{number}\n{_clock(cue.start_ms, ',')} --> {_clock(cue.end_ms, ',')}\n{f'{cue.label}: ' if cue.label else ''}{cue.text}\n"
            for number, cue in enumerate(cues(texts), 1)
        ]
        return "\n".join(blocks)
    blocks = [
        f"{_clock(cue.start_ms, '.')} --> {_clock(cue.end_ms, '.')}\n{f'<v {cue.label}>' if cue.label else ''}{_escaped(cue.text)}\n"
        for cue in cues(texts)
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _clock(ms: int, point: str) -> str:
    seconds, ms = divmod(ms, 1_000)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{point}{ms:03d}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _check_output(format_: Format, output: Path | None, json_file: Path | None, files: int) -> None:
    """Refuse what would come out useless, before any work is done."""
    if format_ in {Format.SRT, Format.VTT} and files > 1 and (output is None or not output.is_dir()):
        raise UserError(f"Subtitles of {files} files do not go into one", "Name an existing folder with --output.")
    for file, option in ((output, "--output"), (json_file, "--json")):
        if file is not None and not file.is_dir() and not file.absolute().parent.is_dir():
            raise UserError(f"There is no folder {file.absolute().parent}", f"Make it, or choose another {option}.")


def _write(texts: Sequence[ChannelText], format_: Format, output: Path | None) -> None:
    if output is None or not output.is_dir():
        _put(render(texts, format_), output)
        return
    suffix = "txt" if format_ is Format.TEXT else format_.value
    names: set[str] = set()
    for file in dict.fromkeys(text.file for text in texts):
        stem = Path(file).stem
        # Files of the same name from different folders, or with different endings, must not overwrite each other.
        name = next(name for number in range(len(texts) + 1) if (name := f"{stem}-{number}" if number else stem) not in names)
        names.add(name)
        _put(render([text for text in texts if text.file == file], format_), output / f"{name}.{suffix}")


def _put(text: str, file: Path | None) -> None:
    if file is None:
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as refused:
        raise UserError(f"{file} cannot be written ({refused.strerror})") from refused
