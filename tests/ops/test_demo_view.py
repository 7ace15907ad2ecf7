from __future__ import annotations

import io
import time

from rich.console import Console

from connectors.results import Results
from ops.demo.view import ChannelView, channel_table, final_line, lost_lines, summary_lines
from ops.measure import LostSpan, Measurement, SpokenWord
from schemas.records import Coverage, Partial, Session, Stamps, Transcript

NOW_US = time.time_ns() // 1_000
WHO = {"channel_id": "7", "session_id": "s", "conversation_id": "c"}


def transcript(text: str, segment: int) -> Transcript:
    return Transcript(
        **WHO,
        position_samples=segment * 16_000,
        segment=segment,
        kind="final",
        end_sample=(segment + 1) * 16_000,
        text=text,
        raw_text=text,
        confidence=1,
        covered_to_sample=0,
    )


def shown(results: Results) -> str:
    console = Console(file=io.StringIO(), width=160)
    views = [ChannelView("7", "agent", results.sessions.get("s")), ChannelView("8", "customer", None)]
    console.print(channel_table(views, NOW_US, "2 channels"))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_a_channel_that_speaks() -> None:
    results = Results()
    results.apply(transcript("Good morning.", 0), NOW_US)
    results.apply(Partial(**WHO, position_samples=16_000, segment=1, text="can I [have] a", end_sample=20_000), NOW_US)
    for n, ms in enumerate((40, 50, 60, 250)):
        stamps = Stamps(captured_us=NOW_US - ms * 1_000)
        answered = Coverage(**WHO, position_samples=n * 3_200, end_sample=(n + 1) * 3_200, decoded_to_sample=0, stage="vad", stamps=stamps)
        results.apply(answered, NOW_US)
    text = shown(results)
    (row,) = (line for line in text.splitlines() if "agent" in line)
    assert row.split()[:3] == ["7", "agent", "speaking"]
    assert "Good morning. can I [have] a" in row
    assert row.split()[-2:] == ["50", "250"]
    assert "ringing" in text


def test_states_and_long_texts() -> None:
    results = Results()
    results.apply(transcript("word " * 100 + "the end", 0), NOW_US)
    assert "listening" in shown(results)
    assert "the end" in shown(results)
    closed = Session(
        **WHO,
        position_samples=0,
        state="closed",
        started_us=NOW_US,
        covered_to_sample=0,
        decoded_to_sample=0,
        segments=1,
        finals=1,
        cancelled=0,
        words=1,
        gaps=0,
        gap_samples=0,
    )
    results.apply(closed, NOW_US)
    assert "hung up" in shown(results)


def test_a_final_as_a_line() -> None:
    results = Results()
    said = transcript("Hi [there].", 61)
    results.apply(said, NOW_US)
    assert final_line(results.sessions["s"], said) == "01:01  channel 7 : Hi [there]."


def test_the_summary_says_what_was_measured_and_what_was_not() -> None:
    measured = Measurement()
    measured.expect("s", "7", [SpokenWord("hi", 3_000)])
    measured.sent("s", 0, 3_200)
    lines = summary_lines(measured.report())
    assert any("sent 1, answered 0, lost 1, duplicated 0" in line for line in lines)
    assert sum("not measured" in line for line in lines) == 2
    assert "100.0% of 1 words" in lines[-1]
    assert "nothing was said" in summary_lines(Measurement().report())[-1]


def test_lost_audio_is_named_and_not_endless() -> None:
    spans = [LostSpan("7", "s", n * 32_000, n * 32_000 + 16_000) for n in range(12)]
    lines = lost_lines(spans)
    assert lines[1] == "Lost: channel 7, session s, 2.0 s to 3.0 s"
    assert lines[-1] == "and 2 more stretches"
    assert lost_lines([]) == []
