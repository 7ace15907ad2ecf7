import json

from typer.testing import CliRunner

from ops.evaluate.command import evaluate
from ops.evaluate.vad.cost import PARTS


def test_each_part_has_its_cost(tmp_path):
    written = tmp_path / "cost.json"
    done = CliRunner().invoke(evaluate, ["cost", "--steps", "10", "--json", str(written)], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(written.read_text())
    assert list(found["parts"]) == [*PARTS, "all"]
    assert found["channels"] == 50
    assert all(0 < each["p50_ms"] <= each["p95_ms"] for each in found["parts"].values())
    assert found["parts"]["all"]["p50_ms"] >= max(found["parts"][part]["p50_ms"] for part in PARTS)
