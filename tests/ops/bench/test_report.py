from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.report import Table, conditions_line, distribution, document, fill, read_document, write_document
from streams.errors import UserError


def test_markdown_aligns_figures_to_the_right() -> None:
    table = Table("Times in ms", ("way", "P50", "P95"), (("alone", "3.1", "-"), ("in company", "<5", "12 %")))
    assert table.markdown().splitlines() == [
        "Times in ms:",
        "",
        "| way | P50 | P95 |",
        "| --- | ---: | ---: |",
        "| alone | 3.1 | - |",
        "| in company | <5 | 12 % |",
    ]


def test_a_distribution_says_of_how_many() -> None:
    assert distribution([1.0, 2.0, 3.0]) == {"p50": 2.0, "p95": 2.9, "p99": 3.0, "max": 3.0, "count": 3}
    assert distribution([]) == {"p50": None, "p95": None, "p99": None, "max": None, "count": 0}


def test_a_document_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = document("engine", {"threads": 2}, {"steps": []})
    write_document(found, tmp_path / "engine.json")
    assert read_document(tmp_path / "engine.json") == found
    assert f"{found['surroundings']['cores']} cores" in conditions_line(found)
    assert found["surroundings"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("content", "says"), [("{", "is not JSON"), ("[]", "holds no benchmark"), ('{"benchmark": "x"}', "holds no benchmark")]
)
def test_what_is_no_document_is_refused(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(UserError, match=says):
        read_document(file)


def test_a_page_keeps_what_is_around_the_marks() -> None:
    page = "# a\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nrest <!-- bench:y --><!-- /bench:y -->"
    once = fill(page, "x", "new")
    assert once == page.replace("old", "new")
    assert fill(once, "x", "new") == once
    with pytest.raises(UserError, match="no place for z"):
        fill(page, "z", "new")
