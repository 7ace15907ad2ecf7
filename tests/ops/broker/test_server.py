"""The embedded broker: a real Kafka that starts, survives, refuses and dies as it should."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from ops.broker import BrokerError, EmbeddedBroker, server
from ops.broker.server import free_port, render_properties
from streams.kafka import idempotent_producer_config, plain_consumer
from streams.settings import Settings, load_settings

pytestmark = pytest.mark.broker

_TOPIC = "kept"


def _settings(broker: EmbeddedBroker) -> Settings:
    return load_settings(bootstrap_servers=broker.bootstrap_servers)


def _create_topic(broker: EmbeddedBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(_TOPIC, num_partitions=1)])[_TOPIC].result()


def _produce(broker: EmbeddedBroker, value: bytes) -> None:
    """Write one record, and return when it is acknowledged as the topic asks."""
    failures: list[object] = []
    producer = Producer(idempotent_producer_config(_settings(broker)))
    producer.produce(_TOPIC, value, on_delivery=lambda error, _record: failures.append(error) if error else None)
    assert producer.flush(30) == 0
    assert failures == []


def _values(broker: EmbeddedBroker, count: int) -> list[bytes]:
    consumer = plain_consumer(_settings(broker), [TopicPartition(_TOPIC, 0)])
    values: list[bytes] = []
    deadline = time.monotonic() + 30
    while len(values) < count and time.monotonic() < deadline:
        record = consumer.poll(1)
        if record is not None and record.error() is None:
            values.append(record.value())
    consumer.close()
    return values


def test_template_is_complete_and_each_key_stands_in_it_once() -> None:
    template = (resources.files("ops.broker") / "server.properties").read_text()
    keys = [line.partition("=")[0] for line in template.splitlines() if line and not line.startswith("#")]
    assert len(keys) == len(set(keys))
    assert {"process.roles", "node.id", "listeners", "log.dirs", "offset.metadata.max.bytes", "auto.create.topics.enable"} <= set(keys)


def _properties(text: str) -> dict[str, str]:
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def test_production_and_the_embedded_broker_have_the_same_file_but_for_what_it_says_depends_on_the_place(tmp_path: Path) -> None:
    template = (resources.files("ops.broker") / "server.properties").read_text()
    broker = EmbeddedBroker(tmp_path, nodes=3)
    nodes = broker._lay_out(lambda node_id, port, folder: server.Node(node_id, "127.0.0.1", port, folder, [], ThreadPoolExecutor(1), ()))
    documented = _properties(template)
    head = template.partition("# ---")[0]
    for node in nodes:
        running = _properties(node.config_file.read_text())
        replaced = {key for key, value in running.items() if documented[key] != value}
        named = {key for key in replaced if key in head}
        replication = [key for key in documented if key in replaced - named]
        assert "/".join(running[key] for key in replication) in head, "the head of the file names other replication settings"
        assert named <= {"node.id", "controller.quorum.voters", "listeners", "advertised.listeners", "log.dirs"}


def test_properties_are_replaced_in_place_and_comments_kept() -> None:
    rendered = render_properties("# a=1\na=1\n\nb=2\n", {"a": "3", "c": "4"})
    assert rendered.splitlines() == ["# a=1", "a=3", "", "b=2", "", "# --- Set by the caller ---", "c=4"]


def test_one_node_keeps_its_data_and_its_identity_and_guards_both(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        identity = broker.cluster_id
        _create_topic(broker)
        _produce(broker, b"before")
        with pytest.raises(BrokerError, match="Another broker uses"):
            EmbeddedBroker(tmp_path).start()
        with pytest.raises(BrokerError, match=f"cannot listen on 127.0.0.1:{broker.nodes[0].port}"):
            EmbeddedBroker(tmp_path / "other", port=broker.nodes[0].port).start()
        _produce(broker, b"still there")
    assert [node.is_running for node in broker.nodes] == [False]

    with EmbeddedBroker(tmp_path) as again:
        assert again.cluster_id == identity
        assert _values(again, 2) == [b"before", b"still there"]
        again.nodes[0].kill()
        with pytest.raises(BrokerError, match=r"(?s)node 1 ended \(exit code -9\).*kafka\.log.*INFO"):
            again.check()

    (tmp_path / "cluster.json").write_text(json.dumps({"cluster_id": "AAAAAAAAAAAAAAAAAAAAAA", "nodes": 1}))
    with pytest.raises(BrokerError, match="holds the data of another cluster"):
        EmbeddedBroker(tmp_path).start()
    (tmp_path / "cluster.json").write_text("{}")
    with pytest.raises(BrokerError, match="is damaged"):
        EmbeddedBroker(tmp_path).start()


def test_three_nodes_go_on_without_one_that_was_killed(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path, nodes=3) as cluster:
        _create_topic(cluster)
        _produce(cluster, b"on three")
        cluster.nodes[0].kill()
        _produce(cluster, b"on two")
        cluster.nodes[0].start()
        cluster.wait_ready()
        _produce(cluster, b"on three again")
        assert _values(cluster, 3) == [b"on three", b"on two", b"on three again"]
    with pytest.raises(BrokerError, match=r"holds a cluster of 3 nodes, not 1.*--nodes 3"):
        EmbeddedBroker(tmp_path, nodes=1).start()


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, threading, time\n"
        "from ops.broker import EmbeddedBroker\n"
        "broker = EmbeddedBroker(pathlib.Path(sys.argv[1]))\n"
        # Started by a thread that ends: the broker must live as long as the process all the same.
        "starter = threading.Thread(target=broker.start)\n"
        "starter.start(); starter.join(); time.sleep(0.5)\n"
        "broker.check()\n"
        "print(broker.nodes[0].process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        java = int(parent.stdout.readline())
        os.kill(java, 0)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{java}/cmdline").exists() and Path(f"/proc/{java}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{java}/cmdline").exists() or not Path(f"/proc/{java}/cmdline").read_bytes()
    with EmbeddedBroker(tmp_path) as again:
        assert again.nodes[0].is_running


def test_setting_that_kafka_refuses_is_shown_as_java_said_it(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"(?s)could not be prepared.*Invalid value -3 for configuration num\.network\.threads"):
        EmbeddedBroker(tmp_path, overrides={"num.network.threads": "-3"}).start()


@pytest.mark.parametrize("nodes", [0, 2, 5])
def test_other_numbers_of_nodes_are_refused(nodes: int, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="Choose 1 or 3"):
        EmbeddedBroker(tmp_path, nodes=nodes)


def test_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(BrokerError, match=r"holds something other than a broker's data \(thesis.txt\)"):
        EmbeddedBroker(tmp_path).start()
    assert {path.name for path in tmp_path.iterdir()} <= {"thesis.txt", "lock"}


def test_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match=r"cannot keep its data in .*Choose another --data-dir"):
        EmbeddedBroker(tmp_path / "file" / "data").start()


def test_full_disk_is_said_before_kafka_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MIN_FREE_BYTES", 2**60)
    with pytest.raises(BrokerError, match=r"MiB free.*Make room"):
        EmbeddedBroker(tmp_path).start()
    monkeypatch.undo()
    assert (tmp_path / "lock").exists()


def test_free_port_is_free() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
