"""How this system talks to Kafka: the settings turned into clients, for confluent-kafka and for Faust, and Kafka's errors into ours.

Faust's own consumer reads the audio path; everything else (results, commands, control) uses confluent-kafka through this module.
"""

# ruff: noqa: SLF001 - confluent-kafka's names for errors of the client's own begin with an underscore

from __future__ import annotations

import logging
import math
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from streams.errors import UserError
from streams.settings import Settings
from streams.topics import Topic

__all__ = [
    "AccessError",
    "ClusterError",
    "MissingTopicError",
    "UnreachableError",
    "admin_client",
    "aiokafka_client_config",
    "aiokafka_producer_config",
    "asked",
    "broker_credentials",
    "broker_url",
    "client_config",
    "end_offsets",
    "idempotent_producer_config",
    "partitions_of",
    "plain_consumer",
    "read_to_end",
    "ssl_context",
    "start_offsets",
    "translated",
]

_Answer = TypeVar("_Answer")

log = logging.getLogger(__name__)

#: The largest record: 50,000 hotwords with their boosts take about 1.5 MB.
MAX_RECORD_BYTES: Final = 8 * 2**20
#: How long leaders that were just chosen, or are being chosen, are waited for.
_NO_LEADER_S: Final = 30.0
_NO_LEADER_WAIT_S: Final = 0.1
#: How long reading to the end waits at once, and for a cluster that has more to send.
_READ_POLL_S: Final = 0.5
_READ_SILENT_S: Final = 30.0
#: A commanded question to the cluster; a person is waiting.
_ADMIN_TIMEOUT_S: Final = 5.0
#: How long a fetch waits for the first byte; a record that arrives in between is returned at once. (Waiting for more bytes is no saving:
#: the broker then goes through all partitions of the fetch at each record that it appends to one of them.)
_FETCH_WAIT_MS: Final = 100
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 500
#: How often what a broker refused, and who leads a partition now, is asked again: a new leader is there 1-2 s after the old one died.
_RETRY_MS: Final = 50
_RETRY_MAX_MS: Final = 200
_REPORT_EVERY_S: Final = 30.0
_REQUEST_TIMEOUT_MS: Final = 5_000
#: A record that is not on the broker after this long has failed; a broker that restarts is back in 3-10 s.
_DELIVERY_TIMEOUT_MS: Final = 30_000
#: A stage's outputs of one step are many small records for different partitions: this long they gather into one request.
_STAGE_LINGER_MS: Final = 2
#: What a producer may hold while the broker is away: 30 s of 50 channels of 16 kHz PCM are 48 MB.
_PRODUCER_BUFFER_KIB: Final = 64 * 1_024


class ClusterError(UserError):
    """Kafka refuses or fails what was asked of it."""


class UnreachableError(ClusterError):
    """No broker answers."""


class AccessError(ClusterError):
    """The brokers do not let us in, or not do this."""


class MissingTopicError(ClusterError):
    """A topic does not exist."""


_UNREACHABLE: Final = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.BROKER_NOT_AVAILABLE,
    }
)
_NO_ACCESS: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
#: The last one is what librdkafka says where no partition has a leader.
_NO_LEADER_YET: Final = frozenset({KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError._NOENT})
_NO_TOPIC: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})


def translated(error: KafkaError | KafkaException, settings: Settings, doing: str = "") -> ClusterError:
    """Return Kafka's error as one that says what to do.

    Args:
        error: as confluent-kafka reports it.
        settings: where the brokers are.
        doing: what was attempted, such as "create asr.audio"; may be empty.
    """
    kafka_error: KafkaError = error.args[0] if isinstance(error, KafkaException) else error
    code, said = kafka_error.code(), kafka_error.str()
    where = f"Kafka at {settings.bootstrap_servers}"
    task = f", asked to {doing}," if doing else ""
    if code in _UNREACHABLE:
        return UnreachableError(
            f"No {where} answers ({said})", "Start one with `asr broker`, or set ASR_BOOTSTRAP_SERVERS to one that runs."
        )
    if code in _NO_ACCESS:
        return AccessError(
            f"{where}{task} refuses access ({said})",
            "Check ASR_SECURITY_PROTOCOL, ASR_SASL_MECHANISM, ASR_SASL_USERNAME, ASR_SASL_PASSWORD and ASR_SSL_CA_FILE.",
        )
    if code in _NO_TOPIC:
        return MissingTopicError(f"{where}{task} lacks a topic ({said})", "Create the topics with `asr topics create`.")
    return ClusterError(f"{where}{task} fails: {said}")


class _ErrorLog:
    """Logs what a client reports, each kind of error at most every 30 s: clients find brokers again without help."""

    def __init__(self) -> None:
        self._said_at_s: dict[int, float] = {}

    def __call__(self, error: KafkaError) -> None:
        now_s = time.monotonic()
        if now_s - self._said_at_s.get(error.code(), -math.inf) >= _REPORT_EVERY_S:
            self._said_at_s[error.code()] = now_s
            log.warning("Kafka: %s", error.str())


def client_config(settings: Settings) -> dict[str, Any]:
    """Return what every confluent-kafka client of this system is configured with."""
    config: dict[str, Any] = {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": settings.namespace,
        "security.protocol": settings.security_protocol,
        "reconnect.backoff.ms": _RECONNECT_MS,
        "reconnect.backoff.max.ms": _RECONNECT_MAX_MS,
        "retry.backoff.ms": _RETRY_MS,
        "retry.backoff.max.ms": _RETRY_MAX_MS,
        "socket.nagle.disable": True,
        "socket.keepalive.enable": True,
        # librdkafka prints a line at every attempt to reconnect.
        "log_level": 0,
        "error_cb": _ErrorLog(),
    }
    if settings.security_protocol.startswith("SASL"):
        config |= {
            "sasl.mechanism": settings.sasl_mechanism,
            "sasl.username": settings.sasl_username,
            "sasl.password": settings.sasl_password.get_secret_value(),
        }
    if settings.security_protocol.endswith("SSL"):
        files = {
            "ssl.ca.location": settings.ssl_ca_file,
            "ssl.certificate.location": settings.ssl_cert_file,
            "ssl.key.location": settings.ssl_key_file,
        }
        config |= {name: str(path) for name, path in files.items() if path is not None}
    return config


def idempotent_producer_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of a producer that sends at once, loses nothing and repeats nothing."""
    return client_config(settings) | {
        "acks": "all",
        "enable.idempotence": True,
        "linger.ms": 0,
        "request.timeout.ms": _REQUEST_TIMEOUT_MS,
        "delivery.timeout.ms": _DELIVERY_TIMEOUT_MS,
        "message.max.bytes": MAX_RECORD_BYTES,
        "queue.buffering.max.kbytes": _PRODUCER_BUFFER_KIB,
        # Where no partition is given: the one that Java's clients would choose.
        "partitioner": "murmur2_random",
    }


def aiokafka_client_config(settings: Settings) -> dict[str, Any]:
    """Return what every aiokafka client of this system is configured with."""
    config: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap_servers,
        "client_id": settings.namespace,
        "security_protocol": settings.security_protocol,
        "ssl_context": ssl_context(settings),
        "request_timeout_ms": _REQUEST_TIMEOUT_MS,
        "retry_backoff_ms": _RECONNECT_MS,
    }
    if settings.security_protocol.startswith("SASL"):
        config |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.sasl_username,
            "sasl_plain_password": settings.sasl_password.get_secret_value(),
        }
    return config


def aiokafka_producer_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of an aiokafka producer that sends at once; :class:`streams.outbox.Outbox` says how long it tries."""
    return aiokafka_client_config(settings) | {"linger_ms": _STAGE_LINGER_MS, "max_request_size": MAX_RECORD_BYTES}


def ssl_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context for Faust, or None where the brokers are talked to in the clear.

    Raises:
        AccessError: a certificate or key cannot be used.
    """
    if not settings.security_protocol.endswith("SSL"):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ssl_ca_file)
        if settings.ssl_cert_file is not None:
            context.load_cert_chain(settings.ssl_cert_file, settings.ssl_key_file)
    except (ssl.SSLError, OSError) as wrong:
        raise AccessError(
            f"A TLS certificate or key cannot be used ({wrong})",
            "ASR_SSL_CA_FILE, ASR_SSL_CERT_FILE and ASR_SSL_KEY_FILE must be PEM files that belong together.",
        ) from wrong
    return context


def broker_url(settings: Settings) -> str:
    """Return the brokers as Faust's ``broker`` setting."""
    servers = (server.strip() for server in settings.bootstrap_servers.split(","))
    return ";".join(f"kafka://{server}" for server in servers if server)


def broker_credentials(settings: Settings) -> Any:
    """Return Faust's ``broker_credentials``: SASL, TLS, or None."""
    import faust  # half a second that commands without Faust need not wait for

    context = ssl_context(settings)
    if settings.security_protocol.startswith("SASL"):
        return faust.SASLCredentials(
            username=settings.sasl_username,
            password=settings.sasl_password.get_secret_value(),
            mechanism=settings.sasl_mechanism,
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context is not None else None


def admin_client(settings: Settings) -> AdminClient:
    """Return a client for topics, offsets and groups. It connects when it is used."""
    return AdminClient(client_config(settings))


def asked(settings: Settings, doing: str, question: Callable[[AdminClient], _Answer]) -> _Answer:
    """Ask the cluster, and return its answer.

    Args:
        settings: where the brokers are.
        doing: what is asked for, such as "list its topics", for the error.
        question: uses the client and returns the answer; Kafka's errors may pass through.

    Raises:
        ClusterError: it does not answer, or does not do it.
    """
    seen: list[KafkaError] = []
    client = AdminClient(client_config(settings) | {"error_cb": seen.append})
    try:
        return question(client)
    except KafkaException as failure:
        # A wrong password ends as a timeout; why is told apart from it.
        client.poll(0)
        refused = next((error for error in seen if error.code() in _NO_ACCESS), None)
        raise translated(refused or failure, settings, doing) from failure


def partitions_of(settings: Settings, topics: Iterable[Topic], timeout_s: float = _ADMIN_TIMEOUT_S) -> list[TopicPartition]:
    """Return all partitions that the topics have on the cluster.

    Raises:
        MissingTopicError: a topic does not exist.
        ClusterError: the cluster does not answer.
    """
    names = [topic.full_name(settings) for topic in topics]
    metadata = asked(settings, "list its topics", lambda client: client.list_topics(timeout=timeout_s))
    missing = [name for name in names if name not in metadata.topics]
    if missing:
        raise MissingTopicError(
            f"Kafka at {settings.bootstrap_servers} has no topic {', '.join(missing)}", "Create the topics with `asr topics create`."
        )
    return [TopicPartition(name, number) for name in names for number in sorted(metadata.topics[name].partitions)]


def end_offsets(
    settings: Settings, partitions: Sequence[TopicPartition], timeout_s: float = _ADMIN_TIMEOUT_S
) -> dict[tuple[str, int], int]:
    """Return, by (topic, partition), the offset that the next record will get.

    Raises:
        ClusterError: the cluster does not answer.
    """
    return _offsets(settings, partitions, OffsetSpec.latest(), timeout_s)  # type: ignore[no-untyped-call]


def _offsets(settings: Settings, partitions: Sequence[TopicPartition], spec: OffsetSpec, timeout_s: float) -> dict[tuple[str, int], int]:
    wanted = {TopicPartition(partition.topic, partition.partition): spec for partition in partitions}
    if not wanted:
        return {}

    def question(client: AdminClient) -> dict[tuple[str, int], int]:
        deadline_s = time.monotonic() + _NO_LEADER_S
        while True:
            answers = client.list_offsets(wanted, request_timeout=timeout_s)
            try:
                return {(partition.topic, partition.partition): answer.result().offset for partition, answer in answers.items()}
            except KafkaException as failure:
                # A leader that has just been chosen does not know it at once.
                if failure.args[0].code() not in _NO_LEADER_YET or time.monotonic() > deadline_s:
                    raise
            time.sleep(_NO_LEADER_WAIT_S)

    return asked(settings, "tell its offsets", question)


def start_offsets(
    settings: Settings, partitions: Sequence[TopicPartition], start: Literal["beginning", "end"] | int
) -> dict[tuple[str, int], int]:
    """Return, by (topic, partition), where reading begins.

    Args:
        settings: where the brokers are.
        partitions: the partitions.
        start: what is oldest, what comes after this call, or what was appended from a Unix time in ms on.

    Raises:
        ClusterError: the cluster does not answer.
    """
    if start == "beginning":
        return {(partition.topic, partition.partition): OFFSET_BEGINNING for partition in partitions}
    # "The end" as the brokers see it now: librdkafka's own OFFSET_END is looked up later, and what came in between would be missed.
    end = end_offsets(settings, partitions)
    if start == "end":
        return end
    found = _offsets(settings, partitions, OffsetSpec.for_timestamp(start), _ADMIN_TIMEOUT_S)
    return {key: offset if offset >= 0 else end[key] for key, offset in found.items()}


def plain_consumer(
    settings: Settings,
    source: Iterable[Topic] | Sequence[TopicPartition],
    start: Literal["beginning", "end"] | int = "beginning",
    config: Mapping[str, Any] | None = None,
) -> Consumer:
    """Return a consumer that reads every partition by itself: no group, no rebalance, nothing committed.

    Use ``poll``: ``consume(n, timeout)`` waits the whole timeout for n records.

    Args:
        settings: where the brokers are.
        source: topics, all of their partitions; or partitions, each from its own ``offset`` if that was given.
        start: where to begin: what is oldest, what comes after this call, or what was appended from a Unix time in ms on.
        config: further settings, named as librdkafka names them.

    Raises:
        MissingTopicError: a topic does not exist.
        ClusterError: the cluster does not answer.
    """
    entries = list(source)
    partitions = [entry for entry in entries if isinstance(entry, TopicPartition)]
    partitions += partitions_of(settings, [entry for entry in entries if isinstance(entry, Topic)])
    begin = start_offsets(settings, [partition for partition in partitions if partition.offset < 0], start)
    consumer = Consumer(
        client_config(settings)
        | {
            # librdkafka asks for one; nobody ever joins it.
            "group.id": f"{settings.namespace}.readers",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
            "fetch.message.max.bytes": MAX_RECORD_BYTES,
            **(config or {}),
        }
    )
    consumer.assign(
        [
            TopicPartition(partition.topic, partition.partition, begin.get((partition.topic, partition.partition), partition.offset))
            for partition in partitions
        ]
    )
    return consumer


def read_to_end(
    settings: Settings,
    topics: Iterable[Topic],
    *,
    partitions: Collection[int] | None = None,
    start: Literal["beginning"] | int = "beginning",
    config: Mapping[str, Any] | None = None,
) -> Iterator[Message]:
    """Yield what is on topics now, tombstones included, each partition in its order.

    Args:
        settings: where the brokers are.
        topics: the topics.
        partitions: numbers of the partitions; unset: all.
        start: with what to begin: what is oldest, or what was appended from a Unix time in ms on.
        config: further settings, named as librdkafka names them.

    Raises:
        MissingTopicError: a topic does not exist.
        ClusterError: the cluster does not answer, or sends nothing any more.
    """
    wanted = [found for found in partitions_of(settings, topics) if partitions is None or found.partition in partitions]
    ends = end_offsets(settings, wanted)
    starts = start_offsets(settings, wanted, start)
    left = {key: end for key, end in ends.items() if starts[key] < end and end > 0}
    wanted = [TopicPartition(topic, number, starts[topic, number]) for topic, number in left]
    if not wanted:
        return
    consumer = plain_consumer(settings, wanted, start, {"enable.partition.eof": True, **(config or {})})
    heard_s = time.monotonic()
    try:
        while left:
            message = consumer.poll(_READ_POLL_S)
            if message is None:
                if time.monotonic() - heard_s > _READ_SILENT_S:
                    names = ", ".join(sorted({topic for topic, _ in left}))
                    raise UnreachableError(f"Kafka at {settings.bootstrap_servers} sent nothing of {names} for {_READ_SILENT_S:.0f} s")
                continue
            heard_s = time.monotonic()
            key = str(message.topic()), int(message.partition() or 0)
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    left.pop(key, None)
                elif error.fatal():
                    raise translated(error, settings, f"read {key[0]}")
                continue
            offset = int(message.offset() or 0)
            if key in left and offset < left[key]:
                yield message
            if key in left and offset >= left[key] - 1:
                del left[key]
    finally:
        consumer.close()
