"""A real Apache Kafka on this machine, without Docker and without an installed Java."""

from ops.broker.runtime import BrokerError
from ops.broker.server import EmbeddedBroker, Node

__all__ = ["BrokerError", "EmbeddedBroker", "Node"]
