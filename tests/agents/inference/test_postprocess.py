"""Text as a person would write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.inference.postprocess import Writer, WritingOptions, Written, joined, readable


@pytest.mark.parametrize(
    ("raw", "language", "text"),
    [
        (" Go forward  10 meters.", "en", "Go forward 10 meters."),
        ("", "", ""),
        ("廣州市", "zh", "广州市"),
        ("廣州市", "zh-CN", "广州市"),
        ("廣州市", "zh-Hant-TW", "廣州市"),
        ("廣州市", "zh_HK", "廣州市"),
        ("広島", "ja", "広島"),
    ],
)
def test_readable(raw: str, language: str, text: str) -> None:
    assert readable(raw, language) == text


@pytest.mark.parametrize(
    ("units", "text"),
    [
        # What WeNet's own test of its post-processor expects, in lower case.
        ("震东好帅", "震东好帅"),
        (" 吴迪 也 好帅", "吴迪也好帅"),
        ("▁binbin▁is▁also▁handsome", "binbin is also handsome"),
        (" life is short i use wenet", "life is short i use wenet"),
        ("超哥▁is▁the▁most▁handsome", "超哥 is the most handsome"),
        (" 人生 苦短 i use wenet", "人生苦短i use wenet"),
        ("▁zhendong▁ist▁so▁schön", "zhendong ist so schön"),
        (" zhendong ist so schön", "zhendong ist so schön"),
        # And what a decoder gives beyond that.
        ("<unk>▁FLAT▁WHI<unk>TE</context>", "flat white"),
        ("▁▁a▁", "a"),
        ("", ""),
    ],
)
def test_units_are_joined(units: str, text: str) -> None:
    assert joined(units) == text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grammars")


@pytest.fixture(scope="module")
def writer(folder: Path) -> Writer:
    return Writer(cache_dir=folder)


def said(text: str, *pauses_ms: int) -> list[Written]:
    """Return words (Chinese: characters) of 200 ms each; ``|`` is the next of the pauses."""
    words, at, left = [], 0, list(pauses_ms)
    for each in text.split() if " " in text or text.isascii() else list(text):
        if each == "|":
            at += left.pop(0)
        else:
            words.append(Written(each, at, at + 200))
            at += 200
    return words


@pytest.mark.parametrize(
    ("words", "language", "text"),
    [
        (said("i want twenty three tickets | for tomorrow", 600), "en", "I want 23 tickets, for tomorrow."),
        (said("that is all | what is the time", 1_500), "en-US", "That is all. What is the time?"),
        (said("hello"), "", "Hello."),
        (said("i think i'm here"), "en", "I think I'm here."),
        (said("call eight zero zero five five five one two one two"), "en", "Call 800-555-1212."),
        (said("how about it"), "en", "How about it?"),
        (said("what a day"), "en", "What a day."),
        (said("have a nice day"), "en", "Have a nice day."),
        (said("do it now"), "en", "Do it now."),
        (said("is the line free"), "en", "Is the line free?"),
        (said("what's the weather like"), "en", "What's the weather like?"),
        (said("二零二二年一月十三号"), "zh", "2022/01/13。"),
        (said("你好|今天百分之三十的人来了吗", 700), "", "你好，今天30%的人来了吗？"),
        (said("can i have a | small latte with | oat milk", 800, 800), "en", "Can I have a small latte with oat milk?"),
        (said("can i have a | small latte | please", 3_000, 800), "en", "Can I have a small latte, please."),
        (said("no milk or | sugar", 1_500), "en", "No milk or sugar."),
        (said("what is it for | sugar", 1_500), "en", "What is it for? Sugar."),
        (said("can i have the"), "en", "Can I have the"),
        (said("da geht es an | und aus", 800), "de", "Da geht es an, und aus."),
        (said("ich habe zwei hunde"), "de", "Ich habe zwei hunde."),
        ([], "en", ""),
    ],
)
def test_words_are_written(writer: Writer, words: list[Written], language: str, text: str) -> None:
    assert writer.write(words, language) == text


def test_what_breaks_off_has_no_stop(writer: Writer) -> None:
    assert writer.write(said("and then | he", 600), "en", complete=False) == "And then, he"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (WritingOptions(numbers=False), "I have twenty one, and one."),
        (WritingOptions(punctuation=False), "I have 21 and one"),
        (WritingOptions(capitals=False), "i have 21, and one."),
        (WritingOptions(numbers=False, punctuation=False, capitals=False), "i have twenty one and one"),
    ],
)
def test_each_part_can_be_switched_off(folder: Path, options: WritingOptions, text: str) -> None:
    assert Writer(options, folder).write(said("i have twenty one | and one", 600), "en") == text


def test_what_the_grammar_cannot_read_stays(writer: Writer) -> None:
    assert writer.write(said('a " b \\ [c] {d'), "en") == 'A " b \\ [c] {d.'


def test_compiled_rules_are_kept(folder: Path, writer: Writer) -> None:
    writer.warm_up("en")
    (kept,) = (folder / "itn").iterdir()
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert len(before) == 2
    Writer(cache_dir=folder).warm_up("en")
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before


def test_rules_that_cannot_be_kept_are_used(tmp_path: Path) -> None:
    (tmp_path / "itn").write_text("a file where the folder should be")
    assert Writer(cache_dir=tmp_path).write(said("twenty one"), "en") == "21."
