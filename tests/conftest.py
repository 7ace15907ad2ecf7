"""What all tests share: a real Kafka, and settings that keep each test's topics and groups apart."""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import docker
import pytest
from confluent_kafka.admin import AdminClient
from docker.errors import DockerException

from ops.broker import EmbeddedBroker
from streams.settings import Settings, load_settings

#: Enough for records of different channels to be apart, few enough to be made in an instant.
PARTITIONS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests, the few of the whole system: where several processes share the work, none ends alone with one."""
    whole_system = Path(__file__).parent / "system"
    items.sort(key=lambda item: not item.path.is_relative_to(whole_system))


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_works() -> None:
    """Let the processes under test be interrupted, also where the tests run in the background and inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_configuration_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see neither the ``ASR_*`` variables nor the ``.env`` of whoever runs them."""
    for name in list(os.environ):
        if name.startswith("ASR_") and not name.startswith("ASR_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setitem(Settings.model_config, "env_file", None)


#: Whose loggers a test has to leave as it found them.
_LOGGERS = ("streams", "agents", "connectors", "ops", "schemas", "aiokafka", "faust", "mode")


def _levels() -> dict[str, tuple[int, bool, bool]]:
    loggers = {name: logger for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)}
    return {
        name: (logger.level, logger.disabled, logger.propagate)
        for name, logger in loggers.items()
        if name.split(".", 1)[0] in _LOGGERS and (logger.level, logger.disabled, logger.propagate) != (logging.NOTSET, False, True)
    }


@pytest.fixture(autouse=True)
def _loggers_stay_as_they_are() -> Iterator[None]:
    """What one test silences, another would listen to in vain."""
    before = _levels()
    yield
    assert _levels() == before


def _container_broker(stack: ExitStack) -> str | None:
    """Start Kafka in a container and return its bootstrap servers, or None where no Docker engine answers."""
    try:
        docker.from_env(timeout=2).ping()
    except (DockerException, OSError):
        return None
    from testcontainers.community.kafka import KafkaContainer

    container = KafkaContainer().with_kraft()
    container.with_env("KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS", "0")
    container.with_env("KAFKA_GROUP_MIN_SESSION_TIMEOUT_MS", "500")
    container.with_env("KAFKA_OFFSET_METADATA_MAX_BYTES", "32767")
    container.with_env("KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS", "4")
    container.with_env("KAFKA_AUTO_CREATE_TOPICS_ENABLE", "false")
    stack.enter_context(container)
    servers: str = container.get_bootstrap_server()
    return servers


@pytest.fixture(scope="session")
def bootstrap_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Kafka: the one that ASR_TEST_BOOTSTRAP_SERVERS names, else one in a container, else the embedded one."""
    given = os.environ.get("ASR_TEST_BOOTSTRAP_SERVERS")
    with ExitStack() as stack:
        servers = given or _container_broker(stack)
        if servers is None:
            servers = stack.enter_context(EmbeddedBroker(tmp_path_factory.mktemp("kafka"))).bootstrap_servers
        yield servers


@pytest.fixture
def settings(bootstrap_servers: str, tmp_path: Path) -> Iterator[Settings]:
    """Settings with a namespace of their own on the real Kafka; its topics are removed afterwards."""
    own = load_settings(
        bootstrap_servers=bootstrap_servers,
        namespace=f"test-{uuid.uuid4().hex[:12]}",
        partitions=PARTITIONS,
        data_dir=tmp_path / "data",
    )
    yield own
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    mine = [name for name in admin.list_topics(timeout=10).topics if name.startswith(f"{own.namespace}.")]
    if mine:
        for deleted in admin.delete_topics(mine).values():
            deleted.result()
