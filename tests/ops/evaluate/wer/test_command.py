"""A folder of two recordings through a real system; the instant engine writes what nobody said, so no text is right."""

import json
import shutil
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.evaluate.command import evaluate
from streams.errors import UserError

CALLS = Path(__file__).parents[4] / "ops" / "demo" / "calls"


@pytest.fixture
def audio_dir(tmp_path):
    folder = tmp_path / "audio" / "orders" / "test"
    folder.mkdir(parents=True)
    rows = ["file\tsplit\tspeaker\tseconds\ttranscript"]
    for name in ("order_s46_4bf32777.flac", "order_s01_0075d273.flac"):
        shutil.copy(CALLS / name, folder)
        rows.append(f"test/{name}\ttest\ts\t1\tgive me a latte")
    (folder.parent / "transcripts.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return tmp_path / "audio"


@pytest.mark.broker
@pytest.mark.timeout(300)
def test_all_words_are_counted_in_every_condition(bootstrap_servers, audio_dir, tmp_path, monkeypatch):
    for name, value in {"BOOTSTRAP_SERVERS": bootstrap_servers, "NAMESPACE": f"test-{uuid.uuid4().hex[:12]}", "PARTITIONS": "4"}.items():
        monkeypatch.setenv(f"ASR_{name}", value)
    monkeypatch.setenv("ASR_DATA_DIR", str(tmp_path / "data"))
    arguments = [
        "wer",
        "--audio-dir",
        str(audio_dir),
        "--engine",
        "instant",
        "--sets",
        "orders",
        "--conditions",
        "clean,mulaw",
        "--json",
        "-",
    ]
    done = CliRunner().invoke(evaluate, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(done.stdout)["rows"]
    assert [(row["set"], row["condition"], row["recogniser"]) for row in rows] == [
        ("orders", "clean", "instant"),
        ("orders", "mulaw", "instant"),
    ]
    assert all(row["score"]["words"] == 8 for row in rows)
    assert all(row["score"]["utterances_wrong"] == row["score"]["utterances"] == 2 for row in rows)
    written = {confusion["written"] for row in rows for confusion in row["score"]["confusions"]}
    assert "blocks" in written  # the engine's own text came back from the system


def test_a_folder_that_is_not_there_is_told():
    with pytest.raises(UserError, match="There is no folder"):
        CliRunner().invoke(evaluate, ["wer", "--audio-dir", "/nowhere/at/all"], catch_exceptions=False)
