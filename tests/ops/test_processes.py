from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ops.processes import Children, ProcessDied, System, WorkerWatch, cause_of_death, environment, read_log_tail
from schemas.codec import default_codec
from schemas.records import WorkerStatus
from streams.errors import UserError
from streams.settings import Settings, load_settings
from streams.topic_admin import ensure_topics
from streams.topics import WORKERS


def wait_for(condition: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Ended, also where nobody has collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class TestChildren:
    def start(self, children: Children, tmp_path: Path, code: str, name: str = "vad worker") -> object:
        return children.start(name, [sys.executable, "-c", code], env=os.environ, log_file=tmp_path / "child.log")

    def test_a_death_is_told_with_its_real_cause(self, tmp_path: Path) -> None:
        children = Children()
        child = self.start(children, tmp_path, "import sys; print('starting'); raise ImportError('no module named denoise')")
        child.process.wait()  # type: ignore[attr-defined]
        with pytest.raises(ProcessDied) as death:
            children.check()
        assert death.value.cause == "The vad worker ended with exit code 1: ImportError: no module named denoise"
        assert "starting" in death.value.remedy
        assert str(tmp_path / "child.log") in death.value.remedy
        children.stop()

    def test_a_signal_is_named(self, tmp_path: Path) -> None:
        children = Children()
        child = self.start(children, tmp_path, "import time; time.sleep(60)")
        child.process.kill()  # type: ignore[attr-defined]
        child.process.wait()  # type: ignore[attr-defined]
        with pytest.raises(ProcessDied, match="The vad worker was ended by SIGKILL"):
            children.check()
        children.stop()

    def test_those_that_run_are_left_alone(self, tmp_path: Path) -> None:
        children = Children()
        self.start(children, tmp_path, "import time; time.sleep(60)")
        children.check()
        children.stop()

    def test_stopping_asks_first(self, tmp_path: Path) -> None:
        children = Children()
        code = (
            "import pathlib, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: (print('committed', flush=True), sys.exit()))\n"
            "print('ready', flush=True)\n"
            "time.sleep(60)"
        )
        self.start(children, tmp_path, code)
        wait_for(lambda: read_log_tail(tmp_path / "child.log"))
        children.stop()
        assert read_log_tail(tmp_path / "child.log") == ["ready", "committed"]

    def test_stopping_takes_what_it_started_along(self, tmp_path: Path) -> None:
        """A worker's engine is a process of its own; it must not stay behind, not even if the worker forgets it."""
        children = Children()
        code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
        self.start(children, tmp_path, code)
        wait_for(lambda: read_log_tail(tmp_path / "child.log"))
        grandchild = int(read_log_tail(tmp_path / "child.log")[0])
        children.stop()
        wait_for(lambda: is_gone(grandchild))

    def test_who_does_not_listen_is_killed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ops.processes._STOP_TIMEOUT_S", 0.3)
        children = Children()
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
        child = self.start(children, tmp_path, code)
        wait_for(lambda: read_log_tail(tmp_path / "child.log"))
        children.stop()
        assert child.process.returncode == -signal.SIGKILL  # type: ignore[attr-defined]

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel of other systems does not end children with their parent")
    def test_a_killed_parent_leaves_nobody_behind(self, tmp_path: Path) -> None:
        code = (
            "import os, pathlib, sys, time\n"
            "from ops.processes import Children\n"
            f"log = pathlib.Path({str(tmp_path / 'child.log')!r})\n"
            "child = Children().start('x', ['sleep', '60'], env=os.environ, log_file=log)\n"
            "print(child.process.pid, flush=True)\n"
            "time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert not is_gone(child)
            parent.kill()
        wait_for(lambda: is_gone(child))


def test_the_last_lines_of_a_log_without_its_blanks(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"one\n\ntwo \n\xff\n\n")
    assert read_log_tail(log, 2) == ["two", "\N{REPLACEMENT CHARACTER}"]
    assert read_log_tail(tmp_path / "none.log") == []


class TestCauseOfDeath:
    def test_the_last_exception(self) -> None:
        assert cause_of_death(
            ["ValueError: handled long ago", "more", "Traceback (most recent call last):", "  File x", "OSError: disk"]
        ) == ("OSError: disk")

    def test_not_what_happened_while_it_was_handled(self) -> None:
        log = ["ImportError: no torch", "During handling of the above exception, another exception occurred:", "AttributeError: stop"]
        assert cause_of_death(log) == "ImportError: no torch"

    def test_what_the_worker_calls_fatal_not_its_echoes(self) -> None:
        log = [
            "KeyError: survived",
            "[ERROR] [^Worker]: Error: EngineError('no model')",
            "Traceback (most recent call last):",
            "agents.inference.models.EngineError: no model",
            "[ERROR] [^Worker]: Error while stopping child: AttributeError",
            "AttributeError: stop",
        ]
        assert cause_of_death(log) == "agents.inference.models.EngineError: no model"

    def test_whatever_was_said_last(self) -> None:
        assert cause_of_death(["one", " Killed"]) == "Killed"
        assert cause_of_death([]) == ""


def test_settings_become_the_environment_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_ENGINE", "whisper")
    env = environment({"engine": "instant", "gateway_port": 0})
    assert (env["ASR_ENGINE"], env["ASR_GATEWAY_PORT"]) == ("instant", "0")
    assert env["PATH"] == os.environ["PATH"]


class TestSystem:
    def test_a_folder_that_cannot_be_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_text("a file")
        with pytest.raises(UserError, match="ASR_DATA_DIR"), System(load_settings(data_dir=tmp_path / "data"), "demo"):
            pass

    def test_what_killed_runs_left_is_removed(self, tmp_path: Path) -> None:
        left = tmp_path / "runs" / "demo-1-ab" / "kafka"
        left.mkdir(parents=True)
        (left / "lock").touch()
        system = System(load_settings(data_dir=tmp_path), "demo")
        system._make_folder()
        assert not left.exists()
        assert left.parent.exists(), "its logs may still be wanted"

    def test_the_page_is_shown_where_a_browser_finds_it(self) -> None:
        assert System(load_settings(gateway_host="0.0.0.0", gateway_port=81), "demo").gateway_url == "http://127.0.0.1:81/"  # noqa: S104
        assert System(load_settings(gateway_host="::1", gateway_port=81), "demo").gateway_url == "http://[::1]:81/"


def status(settings: Settings, worker: str, stage: str, **fields: object) -> WorkerStatus:
    now_us = time.time_ns() // 1_000
    about = {"worker_id": worker, "host": "h", "pid": 1, "stages": (stage,), "started_us": now_us, "at_us": now_us, "state": "running"}
    about |= {"partitions": 4, "sessions": 2, "lag_records": 7, "load": 0.5}
    return WorkerStatus(**(about | fields))  # type: ignore[arg-type]


@pytest.mark.broker
class TestWorkerWatch:
    def publish(self, settings: Settings, *statuses: WorkerStatus) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
        for each in statuses:
            producer.produce(WORKERS.full_name(settings), default_codec().encode(each), each.worker_id)
        producer.produce(WORKERS.full_name(settings), b"not ours", "x")
        assert producer.flush(10) == 0

    def test_those_at_work(self, settings: Settings) -> None:
        ensure_topics(settings, [WORKERS])
        watch = WorkerWatch(settings)
        now_us = time.time_ns() // 1_000
        self.publish(
            settings,
            status(settings, "a", "vad"),
            status(settings, "b", "features", state="starting"),
            status(settings, "c", "inference", engine="whisper"),
            status(settings, "d", "features", at_us=now_us - 60_000_000),
            status(settings, "e", "features", partitions=0),
        )
        watch.listen(1.0)
        assert {each.worker_id for each in watch.running()} == {"a", "c"}
        assert watch.stages() == {"vad", "inference"}
        assert "vad (a): 2 sessions, 7 records behind, load 50%" in watch.describe()
        assert "no worker runs features" in watch.describe()
        watch.close()

    def test_one_that_stops_is_not_counted_any_more(self, settings: Settings) -> None:
        ensure_topics(settings, [WORKERS])
        watch = WorkerWatch(settings)
        self.publish(settings, status(settings, "a", "vad"), status(settings, "a", "vad", state="stopping"))
        watch.listen(1.0)
        assert watch.running() == []
        watch.close()

    def test_another_engine_than_was_asked_for(self, settings: Settings) -> None:
        ensure_topics(settings, [WORKERS])
        system = System(settings, "demo")
        system.workers = WorkerWatch(settings)
        self.publish(settings, status(settings, "c", "inference", engine="whisper"))
        system.workers.listen(1.0)
        system.require_engine("whisper")
        with pytest.raises(UserError, match="use the engine whisper, not instant"):
            system.require_engine("instant")
        system.stop()
