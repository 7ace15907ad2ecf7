"""Records to bytes and back: Avro's single-object encoding, or Confluent's wire format where a registry keeps the schemas.

* Single-object encoding (Avro specification, "Single-object encoding"): ``C3 01``, the schema's 64-bit Rabin fingerprint little-endian, the
  Avro body. Nothing but the schemas shipped here is needed to read it.
* Confluent's wire format: ``00``, the registry's schema id as four bytes big-endian, the Avro body.

A reader takes both. A value written with an earlier version of a schema (``history/``) or with a version that only the registry knows is
read by Avro's schema resolution, so old records stay readable.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final, Protocol

import fastavro
import msgspec
from fastavro.schema import SchemaParseException, fingerprint, to_parsing_canonical_form
from fastavro.validation import ValidationError, validate

from schemas.records import RECORDS, Record

__all__ = ["Codec", "DecodeError", "Registry", "default_codec", "schema_of"]

_SINGLE_OBJECT_MARKER: Final = b"\xc3\x01"
_FINGERPRINT_BYTES: Final = 8
_CONFLUENT_MARKER: Final = 0
_SCHEMA_ID_BYTES: Final = 4
#: What Avro's ``int`` holds: 32 bits.
_INT_MIN: Final = -(2**31)
_INT_MAX: Final = 2**31 - 1

_Schema = dict[str, Any]


class DecodeError(ValueError):
    """A value that is no record of ours; the message says why, for people."""


class Registry(Protocol):
    """What the codec needs of a schema registry."""

    def id_of(self, name: str, schema: str) -> int:
        """Return the id of a schema, registering it if needed."""

    def schema_by_id(self, schema_id: int) -> str:
        """Return the schema (JSON) with an id; raises KeyError if there is none."""


def _load(path: Traversable) -> _Schema:
    schema: _Schema = json.loads(path.read_text(encoding="utf-8"))
    return schema


@cache
def _schemas() -> Mapping[str, _Schema]:
    """Every current schema by its record's name, as parsed JSON."""
    folder = resources.files("schemas")
    return {name: _load(folder / f"{name}.avsc") for name in RECORDS}


def schema_of(record: type[Record] | str) -> _Schema:
    """Return the current Avro schema of a record class or name, as parsed JSON.

    Raises:
        KeyError: there is no such record.
    """
    return _schemas()[record if isinstance(record, str) else record.__name__]


def _earlier() -> Iterator[_Schema]:
    """Yield every earlier version of every schema, ``history/<Name>/<n>.avsc``."""
    for folder in (resources.files("schemas") / "history").iterdir():
        if folder.is_dir():
            yield from (_load(version) for version in folder.iterdir() if version.name.endswith(".avsc"))


def _fingerprint(parsed: Any) -> bytes:
    # fastavro prints the CRC's bytes in the order in which they go on the wire (little-endian).
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO"))


class _Writer:
    """One current schema, ready to write."""

    def __init__(self, name: str, schema: _Schema) -> None:
        self.name = name
        self.text = json.dumps(schema)
        self.parsed = fastavro.parse_schema(dict(schema), named_schemas={})
        self._ints = [field["name"] for field in schema["fields"] if field["type"] == "int"]
        self.prefix = _SINGLE_OBJECT_MARKER + _fingerprint(self.parsed)

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise OverflowError for an int of more than 32 bits: fastavro reads it from damaged bytes, and nobody could write it on."""
        for name in self._ints:
            if not _INT_MIN <= fields[name] <= _INT_MAX:
                raise OverflowError(f"{name} is {fields[name]}, which is no int")

    def complaint(self, fields: Mapping[str, Any]) -> str:
        """Return which fields do not fit, and why; empty if all do. Far too slow for every record."""
        try:
            validate(fields, self.parsed)
        except ValidationError as wrong:
            return "; ".join(map(str, wrong.errors))
        return ""


class Codec:
    """Encodes and decodes every record of :data:`schemas.records.RECORDS`.

    Args:
        registry: where given, values are written in Confluent's wire format, and ids unknown so far are looked up there.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._writers = {name: _Writer(name, schema) for name, schema in _schemas().items()}
        self._by_fingerprint: dict[bytes, tuple[str, Any]] = {}
        for earlier in _earlier():
            parsed = fastavro.parse_schema(dict(earlier), named_schemas={})
            self._by_fingerprint[_fingerprint(parsed)] = (earlier["name"], parsed)
        for name, writer in self._writers.items():
            self._by_fingerprint[writer.prefix[len(_SINGLE_OBJECT_MARKER) :]] = (name, writer.parsed)
        self._by_id: dict[int, tuple[str, Any]] = {}
        self._ids: dict[str, int] = {}

    def encode(self, record: Record) -> bytes:
        """Return the record as bytes for a topic.

        Raises:
            ValueError: a field does not fit its schema; the message names it.
        """
        writer = self._writers[type(record).__name__]
        fields = msgspec.to_builtins(record, builtin_types=(bytes,))
        out = io.BytesIO()
        out.write(self._prefix(writer))
        try:
            writer.check(fields)  # the writer itself would take an int of 40 bits, and other languages' readers would not
            fastavro.schemaless_writer(out, writer.parsed, fields)
        except Exception as wrong:  # fastavro raises whatever the value leads it to
            raise ValueError(f"the {writer.name} does not fit its schema: {writer.complaint(fields) or wrong}") from wrong
        return out.getvalue()

    def decode(self, value: bytes | None) -> Record:
        """Return the record that the bytes hold.

        Raises:
            DecodeError: no record of ours: another format, an unknown schema, or a damaged body.
        """
        if not value:
            raise DecodeError("the value is empty")
        name, written_with, start = self._written_with(value)
        writer = self._writers.get(name)
        if writer is None:
            raise DecodeError(f"the value holds {name!r}, which is no record of this system")
        body = io.BytesIO(value)
        body.seek(start)
        try:
            fields: Any = fastavro.schemaless_reader(body, written_with, None if written_with is writer.parsed else writer.parsed)
            writer.check(fields)
            record = msgspec.convert(fields, RECORDS[name])
        except Exception as damage:  # fastavro raises whatever the damaged bytes lead it to
            raise DecodeError(f"the {name} is damaged: {type(damage).__name__}: {damage}") from damage
        if trailing := len(value) - body.tell():
            raise DecodeError(f"{trailing} bytes are left over after the {name}")
        return record

    def _prefix(self, writer: _Writer) -> bytes:
        if self._registry is None:
            return writer.prefix
        if writer.name not in self._ids:
            self._ids[writer.name] = self._registry.id_of(writer.name, writer.text)
        return bytes([_CONFLUENT_MARKER]) + self._ids[writer.name].to_bytes(_SCHEMA_ID_BYTES, "big")

    def _written_with(self, value: bytes) -> tuple[str, Any, int]:
        """Return the name and the parsed schema that a value was written with, and where its body starts."""
        if value.startswith(_SINGLE_OBJECT_MARKER):
            start = len(_SINGLE_OBJECT_MARKER) + _FINGERPRINT_BYTES
            mark = value[len(_SINGLE_OBJECT_MARKER) : start]
            if mark not in self._by_fingerprint:
                raise DecodeError(f"no schema has the fingerprint {mark.hex()}: was it written by a newer version?")
            return *self._by_fingerprint[mark], start
        if value[0] == _CONFLUENT_MARKER:
            start = 1 + _SCHEMA_ID_BYTES
            return *self._registered(int.from_bytes(value[1:start], "big")), start
        raise DecodeError(f"the value starts with {value[:2].hex()}, neither Avro's single-object encoding nor Confluent's wire format")

    def _registered(self, schema_id: int) -> tuple[str, Any]:
        if schema_id not in self._by_id:
            if self._registry is None:
                raise DecodeError(f"the value names schema {schema_id} of a registry, but none is configured (ASR_SCHEMA_REGISTRY_URL)")
            try:
                text = self._registry.schema_by_id(schema_id)
            except KeyError as unknown:
                raise DecodeError(f"the schema registry has no schema {schema_id}") from unknown
            try:
                schema = json.loads(text)
                self._by_id[schema_id] = (schema["name"], fastavro.parse_schema(schema, named_schemas={}))
            except (ValueError, LookupError, TypeError, SchemaParseException) as foreign:
                raise DecodeError(f"the registry's schema {schema_id} is no Avro schema of a record: {foreign}") from foreign
        return self._by_id[schema_id]


@cache
def default_codec() -> Codec:
    """Return the codec without a registry."""
    return Codec()
