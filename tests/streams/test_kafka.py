"""Settings into clients, and Kafka's errors into ours."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion
from pydantic import SecretStr

from ops.broker import EmbeddedBroker
from streams.kafka import (
    AccessError,
    ClusterError,
    MissingTopicError,
    UnreachableError,
    admin_client,
    asked,
    broker_credentials,
    broker_url,
    client_config,
    end_offsets,
    idempotent_producer_config,
    partitions_of,
    plain_consumer,
    ssl_context,
    translated,
)
from streams.settings import Settings, load_settings
from streams.topic_admin import create_topics
from streams.topics import AUDIO, HOTWORDS, TRANSCRIPTS

_USER, _PASSWORD = "asr", "open sesame"
_ADMIN, _ADMIN_PASSWORD = "admin", "admin-secret"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, "-keyout", "key.pem", "-out", "cert.pem")
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


def test_plain_brokers_need_no_credentials() -> None:
    settings = load_settings(bootstrap_servers="a:1,b:2")
    config = client_config(settings)
    assert (config["bootstrap.servers"], config["security.protocol"]) == ("a:1,b:2", "PLAINTEXT")
    assert not [name for name in config if name.startswith(("sasl.", "ssl."))]
    assert broker_credentials(settings) is None
    assert broker_url(settings) == "kafka://a:1;kafka://b:2"


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_sasl_reaches_both_kinds_of_client(protocol: str, mechanism: str) -> None:
    settings = load_settings(security_protocol=protocol, sasl_mechanism=mechanism, sasl_username=_USER, sasl_password=_PASSWORD)
    config = client_config(settings)
    assert (config["security.protocol"], config["sasl.mechanism"]) == (protocol, mechanism)
    assert (config["sasl.username"], config["sasl.password"]) == (_USER, _PASSWORD)
    credentials = broker_credentials(settings)
    assert (credentials.protocol.value, credentials.mechanism.value) == (protocol, mechanism)
    assert (credentials.username, credentials.password) == (_USER, _PASSWORD)
    assert (credentials.ssl_context is not None) == protocol.endswith("SSL")
    assert _PASSWORD not in repr(credentials)


def test_tls_files_reach_both_kinds_of_client(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    settings = load_settings(security_protocol="SSL", ssl_ca_file=cert, ssl_cert_file=cert, ssl_key_file=key)
    config = client_config(settings)
    assert config["ssl.ca.location"] == config["ssl.certificate.location"] == str(cert)
    assert config["ssl.key.location"] == str(key)
    context = broker_credentials(settings).context
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1
    AdminClient(config)


def test_tls_without_a_file_trusts_the_systems_authorities() -> None:
    settings = load_settings(security_protocol="SSL")
    context = ssl_context(settings)
    assert context is not None
    assert context.check_hostname
    assert "ssl.ca.location" not in client_config(settings)


def test_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("not a certificate")
    with pytest.raises(AccessError, match="ASR_SSL_CA_FILE"):
        ssl_context(load_settings(security_protocol="SSL", ssl_ca_file=tmp_path / "ca.pem"))


def test_key_of_another_certificate_is_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    subprocess.run(["openssl", "genrsa", "-out", tmp_path / "other.pem", "2048"], check=True, capture_output=True)
    settings = load_settings(security_protocol="SSL", ssl_cert_file=certificate[0], ssl_key_file=tmp_path / "other.pem")
    with pytest.raises(AccessError, match="belong together"):
        ssl_context(settings)


def test_producer_loses_and_repeats_nothing() -> None:
    config = idempotent_producer_config(load_settings())
    assert (config["acks"], config["enable.idempotence"], config["linger.ms"]) == ("all", True, 0)
    Producer(config)


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        (KafkaError._ALL_BROKERS_DOWN, UnreachableError, "`asr broker`"),
        (KafkaError._TIMED_OUT, UnreachableError, "ASR_BOOTSTRAP_SERVERS"),
        (KafkaError._AUTHENTICATION, AccessError, "ASR_SASL_PASSWORD"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessError, "ASR_SASL_USERNAME"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, MissingTopicError, "`asr topics create`"),
    ],
)
def test_errors_say_where_and_what_to_do(code: int, kind: type[ClusterError], remedy: str) -> None:
    error = translated(KafkaError(code, "as Kafka says"), load_settings(bootstrap_servers="here:1"), "do this")
    assert type(error) is kind
    assert remedy in str(error)
    assert "here:1" in str(error)
    assert "as Kafka says" in str(error)


def test_other_errors_are_passed_on_with_what_was_asked() -> None:
    error = translated(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR, "3 > 1"), load_settings(), "create the topics")
    assert type(error) is ClusterError
    assert "asked to create the topics, fails: 3 > 1" in str(error)


def test_lost_broker_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    consumer = Consumer(client_config(load_settings(bootstrap_servers="127.0.0.1:1")) | {"group.id": "none"})
    with caplog.at_level(logging.WARNING):
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            consumer.poll(0.1)
        for _ in range(5):
            consumer.poll(0.1)
    consumer.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages))
    assert messages
    assert all(message.startswith("Kafka: ") for message in messages)


def _produce(settings: Settings, values: list[bytes], partition: int = 0) -> None:
    producer = Producer(idempotent_producer_config(settings))
    for value in values:
        producer.produce(TRANSCRIPTS.full_name(settings), value, key=value, partition=partition)
    assert producer.flush(20) == 0


def _read(consumer: Consumer, count: int) -> list[bytes]:
    values: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(values) < count and time.monotonic() < deadline:
        record = consumer.poll(0.5)
        if record is not None:
            assert record.error() is None
            values.append(record.value())
    consumer.close()
    return values


@pytest.mark.broker
def test_reader_takes_every_partition_from_the_beginning_and_joins_no_group(settings: Settings) -> None:
    create_topics(settings, [TRANSCRIPTS])
    for partition in range(settings.partitions):
        _produce(settings, [b"%d" % partition], partition)
    assert sorted(_read(plain_consumer(settings, [TRANSCRIPTS]), 4)) == [b"0", b"1", b"2", b"3"]
    groups = admin_client(settings).list_consumer_groups().result().valid
    assert settings.namespace not in {group.group_id.partition(".")[0] for group in groups}


@pytest.mark.broker
def test_reader_from_the_end_misses_nothing_that_comes_after_the_call(settings: Settings) -> None:
    create_topics(settings, [TRANSCRIPTS])
    _produce(settings, [b"before"])
    consumer = plain_consumer(settings, [TRANSCRIPTS], "end")
    _produce(settings, [b"after"])
    assert _read(consumer, 1) == [b"after"]


@pytest.mark.broker
def test_reader_starts_at_a_time_or_at_an_offset(settings: Settings) -> None:
    create_topics(settings, [TRANSCRIPTS])
    _produce(settings, [b"early"])
    time.sleep(0.01)
    between_ms = time.time_ns() // 1_000_000
    _produce(settings, [b"late", b"later"])
    assert _read(plain_consumer(settings, [TRANSCRIPTS], between_ms), 2) == [b"late", b"later"]
    assert _read(plain_consumer(settings, [TopicPartition(TRANSCRIPTS.full_name(settings), 0, 2)]), 1) == [b"later"]
    future_ms = between_ms + 3_600_000
    consumer = plain_consumer(settings, [TRANSCRIPTS], future_ms)
    _produce(settings, [b"latest"])
    assert _read(consumer, 1) == [b"latest"]


@pytest.mark.broker
def test_end_is_one_past_the_last_record(settings: Settings) -> None:
    create_topics(settings, [TRANSCRIPTS])
    _produce(settings, [b"a", b"b"], partition=1)
    ends = end_offsets(settings, partitions_of(settings, [TRANSCRIPTS]))
    assert [ends[TRANSCRIPTS.full_name(settings), partition] for partition in range(4)] == [0, 2, 0, 0]


@pytest.mark.broker
def test_largest_hotword_list_goes_through(settings: Settings) -> None:
    create_topics(settings, [HOTWORDS])
    failures: list[object] = []
    producer = Producer(idempotent_producer_config(settings))
    large = bytes(1_500_000)
    producer.produce(
        HOTWORDS.full_name(settings), large, key=b"orders", on_delivery=lambda error, _record: failures.append(error) if error else None
    )
    assert producer.flush(20) == 0
    assert failures == []
    assert _read(plain_consumer(settings, [HOTWORDS]), 1) == [large]


@pytest.mark.broker
def test_missing_topic_is_named(settings: Settings) -> None:
    with pytest.raises(MissingTopicError, match=rf"{AUDIO.full_name(settings)}.*asr topics create"):
        plain_consumer(settings, [AUDIO])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[Settings]:
    """A broker that asks for TLS and a password, and the settings of a user it knows by PLAIN and by SCRAM."""
    cert, key = certificate
    folder = tmp_path_factory.mktemp("guarded")
    keystore = folder / "server.pem"
    keystore.write_text(key.read_text() + cert.read_text())
    login = f'username="{_ADMIN}" password="{_ADMIN_PASSWORD}"'
    users = f'user_{_ADMIN}="{_ADMIN_PASSWORD}" user_{_USER}="{_PASSWORD}"'
    overrides = {
        "listener.security.protocol.map": "CLIENT:SASL_SSL,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.client.plain.sasl.jaas.config": f"org.apache.kafka.common.security.plain.PlainLoginModule required {login} {users};",
        "listener.name.client.scram-sha-256.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
        "listener.name.client.scram-sha-512.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(cert),
    }
    admin = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": _ADMIN,
        "sasl.password": _ADMIN_PASSWORD,
        "ssl.ca.location": str(cert),
    }
    with EmbeddedBroker(folder / "data", overrides=overrides, client_config=admin) as broker:
        client = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **admin})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            upsertion = UserScramCredentialUpsertion(_USER, ScramCredentialInfo(mechanism, 4096), _PASSWORD.encode())
            client.alter_user_scram_credentials([upsertion])[_USER].result()
        yield load_settings(
            bootstrap_servers=broker.bootstrap_servers,
            security_protocol="SASL_SSL",
            sasl_username=_USER,
            sasl_password=_PASSWORD,
            ssl_ca_file=cert,
            partitions=1,
        )


async def _faust_can_ask(settings: Settings) -> bool:
    """Connect as Faust's transport does, with the credentials that Faust would be given."""
    from aiokafka.client import AIOKafkaClient
    from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth

    client = AIOKafkaClient(bootstrap_servers=settings.bootstrap_servers, **credentials_to_aiokafka_auth(broker_credentials(settings)))
    try:
        await asyncio.wait_for(client.bootstrap(), 10)
        return len(client.cluster.brokers()) == 1
    finally:
        await client.close()


@pytest.mark.broker
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_password_over_tls_lets_both_kinds_of_client_in(guarded: Settings, mechanism: str) -> None:
    settings = guarded.model_copy(update={"sasl_mechanism": mechanism})
    assert len(asked(settings, "list brokers", lambda client: client.list_topics(timeout=10)).brokers) == 1
    assert asyncio.run(_faust_can_ask(settings))


@pytest.mark.broker
def test_wrong_password_is_told_apart_from_an_absent_broker(guarded: Settings) -> None:
    settings = guarded.model_copy(update={"sasl_password": SecretStr("wrong")})
    with pytest.raises(AccessError, match=r"refuses access.*ASR_SASL_PASSWORD"):
        partitions_of(settings, [AUDIO])


@pytest.mark.broker
def test_certificate_that_nobody_vouches_for_is_refused(guarded: Settings) -> None:
    settings = guarded.model_copy(update={"ssl_ca_file": None})
    with pytest.raises(AccessError, match=r"refuses access.*ASR_SSL_CA_FILE"):
        partitions_of(settings, [AUDIO])
