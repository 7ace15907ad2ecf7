"""``asr config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ops.cli import app
from streams.settings import Settings

_SECRET = "do-not-show-this"  # noqa: S105


def _config(**env: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["config", "--json", "-"], env=env)
    assert result.exit_code == 0, result.output
    assert _SECRET not in result.output
    return {entry["variable"]: entry for entry in json.loads(result.stdout)}


def test_every_setting_is_listed_with_a_description() -> None:
    entries = _config()
    assert set(entries) == {f"ASR_{name.upper()}" for name in Settings.model_fields}
    assert all(entry["description"] for entry in entries.values())


def test_source_is_named_and_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(Settings.model_config, "env_file", ".env")
    (tmp_path / ".env").write_text("ASR_PARTITIONS=8\nASR_NAMESPACE=file\n")
    entries = _config(ASR_PARTITIONS="12")
    assert (entries["ASR_PARTITIONS"]["value"], entries["ASR_PARTITIONS"]["source"]) == (12, "environment")
    assert (entries["ASR_NAMESPACE"]["value"], entries["ASR_NAMESPACE"]["source"]) == ("file", ".env")
    assert entries["ASR_MODEL"]["source"] == "default"


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json", "-"]])
def test_secrets_stay_hidden(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments, env={"ASR_SASL_PASSWORD": _SECRET})
    assert result.exit_code == 0
    assert _SECRET not in result.output
    assert "****" in result.output


def test_password_in_a_url_stays_hidden() -> None:
    shown = _config(ASR_SCHEMA_REGISTRY_URL=f"https://asr:{_SECRET}@registry.example:8081/path")["ASR_SCHEMA_REGISTRY_URL"]["value"]
    assert shown == "https://asr:**********@registry.example:8081/path"


def test_table_has_every_variable() -> None:
    result = CliRunner().invoke(app, ["config"], env={"COLUMNS": "120"})
    assert all(f"ASR_{name.upper()}" in result.output for name in Settings.model_fields)
