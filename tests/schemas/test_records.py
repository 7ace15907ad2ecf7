"""The typed twins say exactly what the schemas say."""

from __future__ import annotations

import types
from collections.abc import Iterator
from importlib import resources
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from schemas.codec import schema_of
from schemas.records import RECORDS, FlowRecord, SessionRecord

_HEADER = ("channel_id", "session_id", "conversation_id", "epoch", "position_samples", "stamps")
_PRIMITIVES = {str: {"string"}, bytes: {"bytes"}, bool: {"boolean"}, int: {"int", "long"}, float: {"float", "double"}}

each_record = pytest.mark.parametrize("name", sorted(RECORDS))


def _assert_equal(twin: Any, avro: Any, where: str, seen: dict[str, Any]) -> None:
    """Compare a Python type with an Avro type, whole."""
    if isinstance(avro, str) and avro in seen:
        avro = seen[avro]
    origin = get_origin(twin)
    if origin is Literal:
        assert avro["type"] == "enum", where
        assert tuple(avro["symbols"]) == get_args(twin), where
        assert avro["doc"], where
        seen[avro["name"]] = avro
    elif origin in {Union, types.UnionType}:
        present = [part for part in get_args(twin) if part is not type(None)]
        assert avro[0] == "null", where
        assert (len(present), len(avro)) == (1, 2), where
        _assert_equal(present[0], avro[1], where, seen)
    elif origin is tuple:
        item, ellipsis = get_args(twin)
        assert (avro["type"], ellipsis) == ("array", ...), where
        _assert_equal(item, avro["items"], where, seen)
    elif isinstance(twin, type) and issubclass(twin, msgspec.Struct):
        _assert_same_record(twin, avro, where, seen)
    else:
        assert avro in _PRIMITIVES[twin], where


def _assert_same_record(twin: type[msgspec.Struct], avro: dict[str, Any], where: str, seen: dict[str, Any]) -> None:
    assert avro["type"] == "record", where
    assert avro["name"] == twin.__name__, where
    assert avro["doc"], where
    seen[avro["name"]] = avro
    hints = get_type_hints(twin)
    fields = {field.name: field for field in msgspec.structs.fields(twin)}
    assert {field["name"] for field in avro["fields"]} == set(fields), where
    for field in avro["fields"]:
        place = f"{where}.{field['name']}"
        assert field["doc"].strip(), place
        _assert_equal(hints[field["name"]], field["type"], place, seen)
        default = fields[field["name"]].default
        if fields[field["name"]].default_factory is not msgspec.NODEFAULT:
            default = fields[field["name"]].default_factory()
        assert ("default" in field) == (default is not msgspec.NODEFAULT), place
        if "default" in field:
            expected = msgspec.to_builtins(default)
            assert field["default"] == (list(expected) if isinstance(expected, tuple) else expected), place


def _named_types(avro: Any) -> Iterator[dict[str, Any]]:
    if isinstance(avro, list):
        for branch in avro:
            yield from _named_types(branch)
    elif isinstance(avro, dict):
        if avro["type"] in {"record", "enum"}:
            yield avro
        for field in avro.get("fields", ()):
            yield from _named_types(field["type"])
        if "items" in avro:
            yield from _named_types(avro["items"])


@each_record
def test_twin_equals_its_schema(name: str) -> None:
    _assert_equal(RECORDS[name], schema_of(name), name, {})


def test_every_schema_has_a_twin_and_is_in_one_namespace() -> None:
    files = {file.name.removesuffix(".avsc") for file in resources.files("schemas").iterdir() if file.name.endswith(".avsc")}
    assert files == set(RECORDS)
    assert {schema_of(name)["namespace"] for name in RECORDS} == {"asr"}


@each_record
def test_twin_explains_itself(name: str) -> None:
    assert RECORDS[name].__doc__


def test_header_is_the_same_in_every_record_of_a_session() -> None:
    headers: dict[str, set[str]] = {field: set() for field in (*_HEADER, "ordinal")}
    for name, record in RECORDS.items():
        fields = {field["name"]: field for field in schema_of(name)["fields"]}
        if issubclass(record, SessionRecord):
            assert list(fields)[:3] == list(_HEADER[:3])
            for field in _HEADER:
                headers[field].add(msgspec.json.encode(fields[field]).decode())
        if issubclass(record, FlowRecord):
            headers["ordinal"].add(msgspec.json.encode(fields["ordinal"]).decode())
    assert {field: len(versions) for field, versions in headers.items()} == dict.fromkeys(headers, 1)


def test_type_used_in_several_schemas_is_the_same_everywhere() -> None:
    definitions: dict[str, set[bytes]] = {}
    for name in RECORDS:
        for named in _named_types(schema_of(name)):
            definitions.setdefault(named["name"], set()).add(msgspec.json.encode(named))
    assert {name for name, versions in definitions.items() if len(versions) > 1} == set()
    assert {"Stamps", "FrameSpan", "Word", "Encoding"} <= set(definitions)


@each_record
def test_numbers_name_their_unit(name: str) -> None:
    """A number is a count of something, or its name ends in a unit."""
    units = ("_samples", "_sample", "_us", "_ms", "_hz", "_db")
    counts = {
        *("epoch", "ordinal", "segment", "segments", "chunk", "hops", "dims", "confidence", "boost", "load", "partition", "partitions"),
        *("offset", "pid", "sessions", "lag_records", "finals", "cancelled", "words", "gaps", "channels"),
    }
    for named in _named_types(schema_of(name)):
        for field in named.get("fields", ()):
            if field["type"] in ("int", "long", "float", "double"):
                assert field["name"] in counts or field["name"].endswith(units), field["name"]
