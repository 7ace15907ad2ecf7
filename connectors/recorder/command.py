"""``asr record``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer
from rich.console import Console

from connectors.recorder.framing import DEFAULT_FRAME_MS, MAX_FRAME_MS, MIN_FRAME_MS
from streams.errors import UserError
from streams.output import JsonOption, write_json

if TYPE_CHECKING:
    from connectors.recorder.media import FileSource
    from connectors.recorder.recorder import Playback, Recorder, SessionReport

__all__ = ["record"]

_EXIT_LOST: Final = 1
_LOOK_EVERY_S: Final = 0.1
_MS_PER_S: Final = 1_000
#: All begin together, after the last of them is ready; making one ready takes a few ms.
_HEAD_START_US: Final = 10_000


class _Direction(StrEnum):
    unknown = "unknown"
    inbound = "inbound"
    outbound = "outbound"


def record(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Audio of any kind, at any rate; G.711 without header by .ulaw or .alaw.")
    ],
    channel: Annotated[
        str, typer.Option(metavar="ID", help="Channel of the first file; further ones count up. A name gets .2, .3, ... added.")
    ] = "1",
    realtime: Annotated[bool, typer.Option("--realtime/--fast", help="At the pace of the audio, or as fast as Kafka takes it.")] = True,
    loop: Annotated[bool, typer.Option("--loop", help="Begin again at the end, in the same session, until Ctrl-C.")] = False,
    conversation: Annotated[
        str, typer.Option(metavar="ID", help="Call that all files belong to.  [default: a new one for each file]", show_default=False)
    ] = "",
    party: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Who speaks, such as agent or customer; once for all, or once for each channel of a file."),
    ] = None,
    language: Annotated[str, typer.Option(metavar="TAG", help="Language, such as en or zh-CN.", show_default=False)] = "",
    direction: Annotated[_Direction, typer.Option(help="Who called.")] = _Direction.unknown,
    frame_ms: Annotated[
        int,
        typer.Option(
            min=MIN_FRAME_MS,
            max=MAX_FRAME_MS,
            help="Audio per frame. 100 to 200 keep the latency promise; shorter ones are gathered to 100 and more.",
        ),
    ] = DEFAULT_FRAME_MS,
    partition: Annotated[
        int | None, typer.Option(min=0, help="Partition of all channels.  [default: by channel]", show_default=False)
    ] = None,
    metrics_port: Annotated[int, typer.Option(min=0, max=65_535, help="Port for Prometheus metrics; 0: none.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Send audio files as live calls, all at the same time, each channel a session of its own.

    A stereo file is one call: its channels are the parties, unless both
    hold the same. 8 kHz G.711 is sent as it is, all else as 16 kHz PCM16.
    Ctrl-C hangs up: the sessions end in order, and what was sent arrives.

    [bold]asr record call.wav --party agent --party customer[/bold]
    a stereo recording as one call

    [bold]asr record a.mp3 b.flac --channel 7 --fast[/bold]
    two calls, on channels 7 and 8, as fast as possible

    In real time, audio that no broker takes within 2 s (ASR_SPOOL_AFTER_MS)
    goes to disk (ASR_SPOOL_DIR), up to 2 GiB (ASR_SPOOL_MAX_BYTES), and is
    sent in order when a broker is back; by the next asr record, if this one
    is killed or stopped. Where there is no room, the newest audio is
    dropped, with an alarm in the log and a gap in the call. Calls are closed
    when nothing came of them for ASR_SESSION_LOST_MS: an outage of this
    machine's connection alone may last so long.

    The JSON holds channels, frames_sent, frames_delivered, frames_lost,
    frames_kept (on disk for the next asr record), audio_ms, wall_ms, frame_lateness_ms (p50, p95, p99, max: how long after
    its due time a frame was sent) and sessions: for each its ids, format,
    counts, notes and failures. The exit code is 1 if audio was lost or is
    still on disk, and 2 if a file cannot be played.
    """
    # Not for --help.
    from connectors.recorder.recorder import Recorder
    from connectors.recorder.session import new_id
    from streams.settings import load_settings

    console = Console(stderr=json_file == Path("-"), highlight=False)
    opened = _open_all(files)
    parties = _parties(opened, party or [])
    channel_count = sum(map(len, opened))
    channel_ids = _channel_ids(channel, channel_count)
    begun_s = time.monotonic()
    playing: list[Playback] = []
    settings = load_settings()
    _serve_metrics(metrics_port)
    with Recorder(settings, realtime=realtime, frame_ms=frame_ms, keep_spans=False, spool=realtime) as recorder:
        start_us = time.time_ns() // 1_000 + _HEAD_START_US * channel_count
        for sources, speakers in zip(opened, parties, strict=True):
            conversation_id = conversation or new_id()
            for source, speaker in zip(sources, speakers, strict=True):
                playback = recorder.play(
                    source,
                    next(channel_ids),
                    conversation_id=conversation_id,
                    party=speaker,
                    language=language,
                    direction=direction.value,
                    partition=partition,
                    loop=loop,
                    start_us=start_us,
                )
                playing.append(playback)
        try:
            _watch(playing, console, loop=loop)
        except KeyboardInterrupt:
            console.print("Hanging up.")
    reports = [playback.report() for playback in playing]
    if not console.is_terminal:
        _print_ends(reports, console)
    summary = _summary(reports, recorder, wall_ms=int((time.monotonic() - begun_s) * _MS_PER_S))
    console.print(
        f"Channels: {summary['channels']}. Frames: {summary['frames_sent']} sent, {summary['frames_delivered']} delivered, "
        f"{summary['frames_lost']} lost."
        + f" {summary['frames_kept']} on disk: the next asr record sends them."
        * bool(summary["frames_kept"])
    )
    for report in reports:
        for line in (*report.notes, *report.failures):
            console.print(f"channel {report.channel_id}, {report.source}: {line}", style="yellow", markup=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, summary)
    if summary["frames_lost"] or summary["frames_kept"] or any(report.reason == "failed" for report in reports):
        raise typer.Exit(_EXIT_LOST)


def _serve_metrics(port: int) -> None:
    if not port:
        return
    from prometheus_client import start_http_server

    try:
        start_http_server(port)
    except OSError as taken:
        raise UserError(f"Metrics cannot be served on port {port} ({taken.strerror})", "Choose another --metrics-port.") from taken


def _open_all(files: Sequence[Path]) -> list[tuple[FileSource, ...]]:
    """Return the channels of every file, or say of every bad one what is wrong with it: nothing is sent then."""
    from connectors.recorder.media import MediaError, open_media

    opened, wrong = [], []
    for path in files:
        try:
            opened.append(open_media(path))
        except MediaError as reason:
            wrong.append(str(reason))
    if wrong:
        raise UserError("\n".join(wrong))
    return opened


def _parties(opened: Sequence[tuple[FileSource, ...]], parties: Sequence[str]) -> list[list[str]]:
    """Return who speaks on each channel of each file."""
    speakers = []
    for sources in opened:
        if len(parties) > 1 and len(parties) != len(sources):
            raise UserError(
                f"{sources[0].path} has {len(sources)} channel{'s' * (len(sources) > 1)}, but there are {len(parties)} parties",
                "Give --party once for all channels, or once for each channel of a file.",
            )
        speakers.append(list(parties) if len(parties) == len(sources) else list(parties or [""]) * len(sources))
    return speakers


def _channel_ids(first: str, channels: int) -> Iterator[str]:
    """Yield the ids of all channels: 7, 8, 9 or desk, desk.2, desk.3."""
    if first.isascii() and first.isdigit():
        return map(str, range(int(first), int(first) + channels))
    return iter([first, *(f"{first}.{number}" for number in range(2, channels + 1))])


def _watch(playing: Sequence[Playback], console: Console, *, loop: bool) -> None:
    """Show how far each channel is, until all have ended."""
    if not console.is_terminal:
        for playback in playing:
            info = playback.info
            console.print(
                f"channel {info.channel_id}: {info.source}, {info.wire}, session {info.session_id}, partition {info.partition}",
                soft_wrap=True,
            )
        while not all(playback.done() for playback in playing):
            time.sleep(_LOOK_EVERY_S)
        return

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("[bold]{task.fields[channel]}"),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
        refresh_per_second=1 / _LOOK_EVERY_S,
    ) as progress:
        tasks = [
            progress.add_task(
                f"{playback.info.source}  {playback.info.wire}",
                total=None if loop else playback.source.duration_ms,
                channel=playback.info.channel_id,
                state="",
            )
            for playback in playing
        ]
        while True:
            ended = True
            for task, playback in zip(tasks, playing, strict=True):
                done = playback.done()
                ended = ended and done
                sent_ms = playback.position_ms
                progress.update(task, completed=sent_ms, state=f"{sent_ms / _MS_PER_S:.1f} s sent" + ", ended" * done)
                if done:
                    progress.update(task, total=sent_ms)
                    progress.stop_task(task)
            if ended:
                return
            time.sleep(_LOOK_EVERY_S)


def _print_ends(reports: Sequence[SessionReport], console: Console) -> None:
    for report in reports:
        console.print(
            f"channel {report.channel_id}: {report.reason or 'open'} after {report.audio_ms / _MS_PER_S:.1f} s, "
            f"{report.frames_sent} frames sent, {report.frames_lost} lost",
            soft_wrap=True,
        )


def _summary(reports: Sequence[SessionReport], recorder: Recorder, *, wall_ms: int) -> dict[str, Any]:
    import numpy as np

    late_ms = recorder.lateness_ms()
    lateness = np.percentile(late_ms, [50, 95, 99, 100]).round(3).tolist() if late_ms else [None] * 4
    return {
        "channels": len(reports),
        "frames_sent": sum(report.frames_sent for report in reports),
        "frames_delivered": sum(report.frames_delivered for report in reports),
        "frames_lost": sum(report.frames_lost for report in reports),
        "frames_kept": sum(report.frames_kept for report in reports),
        "audio_ms": sum(report.audio_ms for report in reports),
        "wall_ms": wall_ms,
        "frame_lateness_ms": dict(zip(("p50", "p95", "p99", "max"), lateness, strict=True)),
        "sessions": [
            {name: value for name, value in msgspec.to_builtins(report).items() if name != "spans"} | {"audio_ms": report.audio_ms}
            for report in reports
        ],
    }
