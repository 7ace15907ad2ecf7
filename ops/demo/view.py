"""What the demo shows in the terminal: a live table of the channels, and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table
from rich.text import Text

from connectors.results import SessionView, quantile
from ops.measure import Latency, LostSpan, Report
from schemas.records import SAMPLE_RATE_HZ, Transcript

__all__ = ["ChannelView", "channel_table", "final_line", "lost_lines", "summary_lines"]

#: Two lines of a usual terminal's text column.
_TEXT_CHARS: Final = 110
_SPARE_SHARE: Final = 0.95


@dataclass(frozen=True, slots=True)
class ChannelView:
    """A channel and what is known of its newest session.

    Attributes:
        channel_id: the channel.
        party: who speaks.
        session: what came back of it; None as long as nothing did.
    """

    channel_id: str
    party: str
    session: SessionView | None

    @property
    def state(self) -> str:
        """What happens on the channel."""
        if self.session is None:
            return "ringing"
        if self.session.state == "closed":
            return "hung up"
        return "speaking" if self.session.partials else "listening"


def channel_table(channels: Sequence[ChannelView], now_us: int, title: str) -> Table:
    """Return the live table; times are Unix times in microseconds."""
    table = Table(title=title, title_justify="left", expand=True, pad_edge=False, box=None)
    for heading, justify in (("Channel", "right"), ("Party", "left"), ("State", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("Text", ratio=1)
    table.add_column("P50 ms", justify="right", no_wrap=True)
    table.add_column("P95 ms", justify="right", no_wrap=True)
    for channel in channels:
        latencies = channel.session.latency.values_ms(now_us) if channel.session else []
        p50, p95 = (f"{quantile(latencies, share):.0f}" if latencies else "" for share in (0.5, _SPARE_SHARE))
        table.add_row(channel.channel_id, channel.party, channel.state, _newest_text(channel.session), p50, p95)
    return table


def _newest_text(session: SessionView | None) -> Text:
    """Return the end of what was said: finals as they are, what may still change dim."""
    if session is None:
        return Text()
    said = " ".join(view.transcript.text for view in session.finals()[-2:])
    saying = " ".join(partial.text for partial in session.open_partials())
    text = Text(said)
    text.append(f"{' ' if said and saying else ''}{saying}", style="dim")
    if len(text) > _TEXT_CHARS:
        text = Text("…") + text[-_TEXT_CHARS:]
    return text


def final_line(session: SessionView, final: Transcript) -> str:
    """Return a final as a line of its own, with when it was said."""
    minutes, seconds = divmod(final.position_samples // SAMPLE_RATE_HZ, 60)
    return f"{minutes:02d}:{seconds:02d}  channel {session.channel_id} {session.party}: {final.text}"


def summary_lines(report: Report) -> list[str]:
    """Return the summary for people."""
    spoken = f"{report.words_spoken} words"
    played = f"{report.channels} channels, {report.sessions} sessions, {report.seconds:.0f} s of audio"
    engine = f"{report.engine} on " if report.engine else ""
    frames = {"sent": report.frames_sent, "answered": report.frames_answered, "lost": report.frames_lost}
    frames |= {"duplicated": report.frames_duplicated} | ({"replayed": report.frames_replayed} if report.frames_replayed else {})
    wrong = "nothing was said" if report.wer is None else f"{report.wer:.1%} of {spoken}, against the known transcripts"
    return [
        f"{played}; {engine}{report.cores} cores, {report.processor}",
        f"Frames         {', '.join(f'{what} {count}' for what, count in frames.items())}",
        f"Frame latency  {_latency(report.frame_latency_ms)}  (from a frame's last sample until its answer)",
        f"Word latency   {_latency(report.word_latency_ms)}  (from a word's end until a text holds it; {report.words_timed} of {spoken})",
        f"Word errors    {wrong}",
    ]


def lost_lines(lost: Sequence[LostSpan], most: int = 10) -> list[str]:
    """Return a line for each stretch of audio that was lost, so that logs can be looked at there."""
    lines = [
        f"Lost: channel {span.channel_id}, session {span.session_id}, "
        f"{span.start_sample / SAMPLE_RATE_HZ:.1f} s to {span.end_sample / SAMPLE_RATE_HZ:.1f} s"
        for span in lost[:most]
    ]
    return [*lines, f"and {len(lost) - most} more stretches"] if len(lost) > most else lines


def _latency(latency: Latency) -> str:
    values = (("P50", latency.p50), ("P95", latency.p95), ("P99", latency.p99), ("max", latency.max))
    if latency.max is None:
        return "not measured"
    return ", ".join(f"{name} {value:.0f}" for name, value in values if value is not None) + " ms"
