from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from ops.bench.sampling import ENVIRONMENT, NATIVE, OTHER, part_of
from ops.bench.system import sampled_between


def part_within(*files: str) -> str:
    """Return the part of a stack of calls, the last file innermost."""
    call: Callable[[], str] = lambda: part_of(sys._getframe(1), {})  # noqa: E731 its caller is meant
    for file in reversed(files):
        names: dict[str, Callable[[], str]] = {"inner": call}
        exec(compile("def outer():\n    return inner()", f"/somewhere/{file}", "exec"), names)  # noqa: S102 code of another file
        call = names["outer"]
    return call()


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (("faust/stream.py", "streams/stage.py"), OTHER),
        (("agents/vad/core.py", "agents/vad/session.py", "agents/vad/denoise.py"), "denoising"),
        (("agents/vad/core.py", "onnxruntime/session.py"), "detection"),
        (("agents/inference/serve.py", "agents/inference/conformer/engine.py", "agents/inference/conformer/streaming.py"), "encoder"),
        (("agents/inference/conformer/engine.py", "agents/inference/decoding/prefix_beam.py"), "search"),
        (("agents/inference/conformer/finals.py", "agents/inference/conformer/streaming.py", "torch/nn.py"), "finals"),
        (("agents/inference/conformer/finals.py", "agents/inference/decoding/prefix_beam.py"), "finals"),
        (("agents/inference/conformer/engine.py", "agents/inference/postprocess.py"), "writing"),
        (("agents/inference/serve.py", "socket.py"), "batching and passing"),
    ],
)
def test_the_innermost_part_has_it(files: tuple[str, ...], part: str) -> None:
    assert part_within(*files) == part


def test_every_second_of_a_process_is_given_to_a_part(tmp_path: Path) -> None:
    hook = str(resources.files("ops.bench") / "sampler")
    burn = "import time\nwhile time.process_time() < 1.0: sum(range(1000))\ntime.sleep(2.5)\nprint(time.process_time())"
    environment = {**os.environ, "PYTHONPATH": hook, ENVIRONMENT: str(tmp_path), "ASR_STAGE": "vad"}
    said = subprocess.run([sys.executable, "-c", burn], env=environment, capture_output=True, text=True, check=True)
    (file,) = tmp_path.glob("vad-*.jsonl")
    used_s = json.loads(file.read_text().splitlines()[-1])["used_s"]
    # What the sampler itself took is left out.
    assert 0.5 * float(said.stdout) < sum(used_s.values()) <= float(said.stdout)


def test_a_process_without_a_stage_is_left_alone(tmp_path: Path) -> None:
    hook = str(resources.files("ops.bench") / "sampler")
    environment = {name: value for name, value in os.environ.items() if name != "ASR_STAGE"}
    environment |= {"PYTHONPATH": hook, ENVIRONMENT: str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import threading; assert threading.active_count() == 1"], env=environment, check=True)
    assert not list(tmp_path.iterdir())


def test_what_lies_between_two_moments_is_counted(tmp_path: Path) -> None:
    def write(name: str, *lines: tuple[float, dict[str, float]]) -> None:
        text = "".join(json.dumps({"at_s": at_s, "used_s": used_s}) + "\n" for at_s, used_s in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)

    write(
        "vad-1",
        (9.0, {"denoising": 5.0}),
        (10.0, {"denoising": 6.0}),
        (15.0, {"denoising": 7.0, NATIVE: 1.0}),
        (20.0, {"denoising": 8.0, NATIVE: 2.0}),
    )
    write("engine-2", (10.5, {"encoder": 1.0, OTHER: 0.0}), (19.5, {"encoder": 10.0, OTHER: 0.9}))
    write("features-3", (12.0, {"features": 1.0}))
    found = sampled_between(tmp_path, 10.0, 20.0)
    assert found == pytest.approx({"denoising": 2.0, "detection": 2.0, "encoder": 10.0, "batching and passing": 1.0})
