from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from connectors.recorder.media import open_media
from connectors.results import Results, SessionView
from ops.cli import app
from ops.transcribe import ChannelText, Format, Segment, _check_output, _open_all, _text_of, _write, cues, render
from schemas.records import Transcript, Word
from streams.errors import UserError


def segment(text: str, start_ms: int = 0, word_ms: int = 400, *, timed: bool = True) -> Segment:
    words = text.split()
    spoken = tuple(
        Word(text=word, start_ms=start_ms + n * word_ms, end_ms=start_ms + (n + 1) * word_ms, confidence=0.9)
        for n, word in enumerate(words)
    )
    return Segment(
        start_ms=start_ms, end_ms=start_ms + len(words) * word_ms, text=text, confidence=0.9, words=spoken if timed else spoken[:-1]
    )


def channel(*segments: Segment, file: str = "a.wav", number: int = 0, label: str = "") -> ChannelText:
    return ChannelText(file=file, channel=number, label=label, text=" ".join(each.text for each in segments), segments=segments)


CALL = [
    channel(segment("Hello there.", 1_000), segment("Thank you.", 9_000), label="left", number=0),
    channel(segment("A latte please.", 4_000), label="right", number=1),
]


class TestText:
    def test_a_line_for_each_segment(self) -> None:
        assert render([channel(segment("One."), segment("Two.", 5_000))], Format.TEXT) == "One.\nTwo.\n"

    def test_parties_in_the_order_of_speaking(self) -> None:
        assert render(CALL, Format.TEXT) == "left: Hello there.\nright: A latte please.\nleft: Thank you.\n"

    def test_several_files_under_their_names(self) -> None:
        assert render([channel(segment("A")), channel(segment("B"), file="b.mp3")], Format.TEXT) == "a.wav:\nA\n\nb.mp3:\nB\n"

    def test_nothing_said(self) -> None:
        assert render([channel()], Format.TEXT) == ""


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (["你好。", "两杯拿铁。"], "你好。两杯拿铁。"),
        (["两杯拿铁", "OK", "thank you"], "两杯拿铁OK thank you"),
        (["Hello there.", "", "Thank you."], "Hello there. Thank you."),
        ([], ""),
    ],
)
def test_a_channels_text_is_written_as_its_language_is(said: list[str], whole: str) -> None:
    results = Results()
    ids = {"channel_id": "7", "session_id": "s", "conversation_id": "c"}
    for number, text in enumerate(said):
        results.apply(
            Transcript(
                **ids,
                position_samples=number * 16_000,
                segment=number,
                kind="final",
                end_sample=(number + 1) * 16_000,
                text=text,
                raw_text=text,
                confidence=0.9,
                covered_to_sample=(number + 1) * 16_000,
            ),
            arrived_us=0,
        )
    view = results.sessions.get("s") or SessionView("s", "7", "c")
    (source,) = open_media(Path(__file__).parents[1] / "data" / "zh" / "aishell1_BAC009S0724W0121.wav")
    assert _text_of(source, view).text == whole


class TestJson:
    def test_keys(self) -> None:
        written = json.loads(render(CALL, Format.JSON))
        assert [(each["file"], each["channel"], each["label"]) for each in written] == [("a.wav", 0, "left"), ("a.wav", 1, "right")]
        assert written[0]["text"] == "Hello there. Thank you."
        first = written[0]["segments"][0]
        assert first.keys() == {"start_ms", "end_ms", "text", "confidence", "words"}
        assert first["words"][0] == {"text": "Hello", "start_ms": 1_000, "end_ms": 1_400, "confidence": 0.9}


class TestSubtitles:
    def test_srt(self) -> None:
        assert render(CALL, Format.SRT).startswith(
            "1\n00:00:01,000 --> 00:00:01,800\nleft: Hello there.\n\n2\n00:00:04,000 --> 00:00:05,200\nright: A latte please.\n\n3\n"
        )

    def test_vtt(self) -> None:
        written = render([channel(segment("R&B <loud>", 3_723_004), label="left")], Format.VTT)
        assert written == "WEBVTT\n\n01:02:03.004 --> 01:02:03.804\n<v left>R&amp;B &lt;loud&gt;\n"

    def test_times_of_other_words_are_not_used(self) -> None:
        long = segment("word " * 60, timed=False)
        (cue,) = cues([channel(long)])
        assert (cue.start_ms, cue.end_ms) == (0, 24_000)

    @given(st.lists(st.text("abcdefghij", min_size=1, max_size=30), min_size=1, max_size=120), st.integers(20, 1_500))
    def test_long_segments_are_cut_between_words(self, words: list[str], word_ms: int) -> None:
        found = cues([channel(segment(" ".join(words), 500, word_ms))])
        assert " ".join(cue.text for cue in found).split() == words
        assert all(len(cue.text) <= 84 and cue.end_ms - cue.start_ms <= 6_000 for cue in found)
        assert [cue.start_ms for cue in found] == sorted(cue.start_ms for cue in found)
        assert all(one.end_ms <= other.start_ms for one, other in itertools.pairwise(found))


class TestOutput:
    def test_a_folder_gets_a_file_for_each(self, tmp_path: Path) -> None:
        texts = [channel(segment("A"), file="x/a.wav"), channel(segment("B"), file="y/a.wav"), channel(segment("C"), file="c.mp3")]
        _write(texts, Format.SRT, tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"a.srt", "a-1.srt", "c.srt"}
        assert "B" in (tmp_path / "a-1.srt").read_text()

    def test_one_file(self, tmp_path: Path) -> None:
        _write(CALL, Format.TEXT, tmp_path / "call.txt")
        assert (tmp_path / "call.txt").read_text().splitlines()[1] == "right: A latte please."

    def test_subtitles_of_several_files_need_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="existing folder"):
            _check_output(Format.VTT, tmp_path / "all.vtt", None, 2)
        _check_output(Format.VTT, tmp_path, None, 2)

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no folder"):
            _check_output(Format.TEXT, tmp_path / "no" / "x.txt", None, 1)
        with pytest.raises(UserError, match="--json"):
            _check_output(Format.TEXT, None, tmp_path / "no" / "x.json", 1)


#: Name, content: nothing in them can be heard.
HOLD_NO_AUDIO = {
    "empty.wav": b"",
    "header only.wav": b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80>\0\0\0}\0\0\x02\0\x10\0data\0\0\0\0",
    "cut header.wav": b"RIFF\x24\0\0\0WAVEfm",
    "text.mp3": b"This is no music.\n" * 20,
    "page.html": b"<html><body>404</body></html>",
}


class TestFilesWithoutAudio:
    @pytest.fixture(params=HOLD_NO_AUDIO)
    def silent_file(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        file = tmp_path / str(request.param)
        file.write_bytes(HOLD_NO_AUDIO[request.param])
        return file

    def test_one_line_each_and_exit_code_2(self, silent_file: Path) -> None:
        result = CliRunner().invoke(app, ["transcribe", str(silent_file)])
        assert result.exit_code == 2
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert str(silent_file) in line
        assert re.match(r"asr: .+: .+", line)

    def test_missing_files_and_folders(self, tmp_path: Path) -> None:
        sources, refused = _open_all([tmp_path / "none.wav", tmp_path, tmp_path / "none.wav"])
        assert sources == []
        assert len(refused) == 2


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["transcribe", "--help"])
    assert result.exit_code == 0
    assert "stereo" in result.stdout
