"""``asr hotwords``: what a list's file may hold. The rest is tested with a worker, in ``tests/system/test_hotwords.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.cli import app
from ops.hotwords_command import read_phrases
from streams.errors import UserError


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "list.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_a_phrase_on_each_line_with_a_boost_if_it_has_one(tmp_path: Path) -> None:
    text = "\ufeff# drinks\n flat white \r\n\ncortado\t7.5\n门会长\t-2\n"
    phrases = [(each.phrase, each.boost) for each in read_phrases(written(tmp_path, text), 3.0)]
    assert phrases == [("flat white", 3.0), ("cortado", 7.5), ("门会长", -2.0)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("one\ntwo\tmuch\n", "line 2: 'much' is no boost"),
        ("one\tnan\n", "line 1: 'nan' is no boost"),
        ("one\t101\n", "line 1: '101' is no boost"),
        (b"one\n\xff\xfe\n", "line 2: it is no UTF-8"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, text: str | bytes, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_phrases(written(tmp_path, text), 3.0)


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_list_is_not_pushed(tmp_path: Path, text: str) -> None:
    result = CliRunner().invoke(app, ["hotwords", "push", str(written(tmp_path, text))])
    assert result.exit_code == 2
    assert "There is no phrase in" in result.stderr
    assert "asr hotwords clear" in result.stderr


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["hotwords", "push", str(tmp_path / "none.txt")])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr
