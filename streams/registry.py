"""A schema registry that speaks Confluent's REST protocol (Confluent, Karapace, Apicurio), for the codec."""

from __future__ import annotations

import json
from typing import Final

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from schemas.codec import Codec, default_codec
from streams.errors import UserError

__all__ = ["ConfluentRegistry", "RegistryError", "codec_for"]

_TIMEOUT_S: Final = 5
_RETRIES: Final = 2
_RETRY_WAIT_MS: Final = 200
_NOT_FOUND: Final = 404


class RegistryError(UserError):
    """The schema registry does not answer, or refuses a schema."""


class ConfluentRegistry:
    """Looks schemas up and registers them, each once.

    A schema's subject is its full name (Confluent's RecordNameStrategy), for a topic holds records of several kinds.

    Args:
        url: where it is; may carry ``user:password@`` for basic authentication.

    Raises:
        RegistryError: the URL is none.
    """

    def __init__(self, url: str) -> None:
        self._shown = url.rpartition("@")[2]
        config = {
            "url": url,
            "timeout": _TIMEOUT_S,
            "max.retries": _RETRIES,
            "retries.wait.ms": _RETRY_WAIT_MS,
            "retries.max.wait.ms": _RETRY_WAIT_MS,
        }
        try:
            self._client = SchemaRegistryClient(config)
        except ValueError as wrong:
            raise RegistryError(f"ASR_SCHEMA_REGISTRY_URL is no URL of a registry ({wrong})") from wrong

    def id_of(self, name: str, schema: str) -> int:
        """Return the id of a schema, registering it if needed.

        Args:
            name: the record's name.
            schema: the schema as JSON.

        Raises:
            RegistryError: the registry does not answer, or finds the schema incompatible with an earlier version.
        """
        subject = f"{json.loads(schema)['namespace']}.{name}"
        try:
            return self._client.register_schema(subject, Schema(schema, "AVRO"))
        except SchemaRegistryError as refused:
            raise RegistryError(
                f"The schema registry at {self._shown} refuses the schema of {subject} ({refused.error_message})",
                "Its subject may hold another system's schema, or ours of a newer version.",
            ) from refused
        except Exception as failure:  # whatever HTTP library the client uses lets its own through
            raise self._unreachable(failure) from failure

    def schema_by_id(self, schema_id: int) -> str:
        """Return the schema (JSON) with an id.

        Raises:
            KeyError: the registry has none.
            RegistryError: the registry does not answer.
        """
        try:
            schema = self._client.get_schema(schema_id).schema_str
        except SchemaRegistryError as refused:
            if refused.http_status_code == _NOT_FOUND:
                raise KeyError(schema_id) from refused
            raise RegistryError(f"The schema registry at {self._shown} fails ({refused.error_message})") from refused
        except Exception as failure:  # whatever HTTP library the client uses lets its own through
            raise self._unreachable(failure) from failure
        if schema is None:
            raise KeyError(schema_id)
        return schema

    def _unreachable(self, failure: Exception) -> RegistryError:
        return RegistryError(
            f"The schema registry at {self._shown} does not answer ({failure})",
            "Check ASR_SCHEMA_REGISTRY_URL, or unset it to do without one.",
        )


def codec_for(url: str) -> Codec:
    """Return the codec for a configuration: Confluent's wire format with a registry, else Avro's single-object encoding.

    Args:
        url: ``Settings.schema_registry_url``; empty: no registry.

    Raises:
        RegistryError: the URL is none.
    """
    return Codec(ConfluentRegistry(url)) if url else default_codec()
