"""Records to bytes and back, in both wire formats, and bytes that are no records."""

from __future__ import annotations

import io
import json
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import fastavro
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import Codec, DecodeError, default_codec, schema_of
from schemas.records import RECORDS, AudioFrame, Record, Session, Stamps

_INTEGERS = {"int": st.integers(-(2**31), 2**31 - 1), "long": st.integers(-(2**63), 2**63 - 1)}
_FRAME = AudioFrame(
    channel_id="7",
    session_id="s-1",
    conversation_id="c-1",
    position_samples=3_200,
    stamps=Stamps(captured_us=1),
    encoding="mulaw",
    sample_rate_hz=8_000,
    payload=b"\x7f\xff",
)


def _values(twin: Any, avro: Any) -> st.SearchStrategy[Any]:
    """Return every value of a Python type, as wide as the Avro type beside it."""
    origin = get_origin(twin)
    if origin is Literal:
        return st.sampled_from(get_args(twin))
    if origin in {Union, types.UnionType}:
        (present,) = (part for part in get_args(twin) if part is not type(None))
        return st.none() | _values(present, next(branch for branch in avro if branch != "null"))
    if origin is tuple:
        return st.lists(_values(get_args(twin)[0], avro["items"]), max_size=3).map(tuple)
    if isinstance(twin, type) and issubclass(twin, msgspec.Struct):
        hints = get_type_hints(twin)
        return st.builds(twin, **{field["name"]: _values(hints[field["name"]], field["type"]) for field in avro["fields"]})
    if twin is float:
        return st.floats(allow_nan=False, width=32 if avro == "float" else 64)
    return {int: _INTEGERS.get(avro), str: st.text(), bytes: st.binary(max_size=64), bool: st.booleans()}[twin]


records = st.sampled_from(sorted(RECORDS)).flatmap(lambda name: _values(RECORDS[name], schema_of(name)))


class _Registry:
    """A registry in memory: ids from 1."""

    def __init__(self) -> None:
        self.schemas: list[str] = []

    def id_of(self, name: str, schema: str) -> int:
        assert json.loads(schema)["name"] == name
        if schema not in self.schemas:
            self.schemas.append(schema)
        return self.schemas.index(schema) + 1

    def schema_by_id(self, schema_id: int) -> str:
        try:
            return self.schemas[schema_id - 1]
        except IndexError:
            raise KeyError(schema_id) from None


_REGISTRY = _Registry()
_REGISTERED = Codec(_REGISTRY)


@given(records)
def test_every_record_comes_back_as_it_was(record: Record) -> None:
    assert default_codec().decode(default_codec().encode(record)) == record


@given(records)
def test_both_wire_formats_hold_the_same_and_a_reader_with_a_registry_takes_both(record: Record) -> None:
    single, registered = default_codec().encode(record), _REGISTERED.encode(record)
    assert single[:2] == b"\xc3\x01"
    assert registered[0] == 0
    assert single[10:] == registered[5:]
    assert _REGISTERED.decode(single) == _REGISTERED.decode(registered) == record


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_fingerprint_is_the_one_of_the_avro_specification(name: str) -> None:
    """The Rabin fingerprint of the canonical form as the specification defines it, computed here bit by bit, lowest byte first."""
    empty = 0xC15D213AA4D7A795
    fingerprint = empty
    for byte in fastavro.schema.to_parsing_canonical_form(schema_of(name)).encode():
        table_entry = (fingerprint ^ byte) & 0xFF
        for _ in range(8):
            table_entry = (table_entry >> 1) ^ (empty & -(table_entry & 1))
        fingerprint = (fingerprint >> 8) ^ table_entry
    assert Codec()._writers[name].prefix[2:] == fingerprint.to_bytes(8, "little")


def test_record_written_by_another_schema_version_in_the_registry_is_resolved() -> None:
    older = schema_of(AudioFrame) | {
        "fields": [field for field in schema_of(AudioFrame)["fields"] if field["name"] not in {"ordinal", "stamps"}]
    }
    registry = _Registry()
    schema_id = registry.id_of("AudioFrame", json.dumps(older))
    value = bytes([0]) + schema_id.to_bytes(4, "big") + _body(older, _FRAME)
    assert Codec(registry).decode(value) == msgspec.structs.replace(_FRAME, ordinal=0, stamps=Stamps())


def test_field_that_only_a_newer_writer_knows_is_left_out() -> None:
    extra = {"name": "loudness", "type": "double", "doc": "New.", "default": 0.0}
    newer = schema_of(AudioFrame) | {"fields": [*schema_of(AudioFrame)["fields"], extra]}
    registry = _Registry()
    schema_id = registry.id_of("AudioFrame", json.dumps(newer))
    assert Codec(registry).decode(bytes([0]) + schema_id.to_bytes(4, "big") + _body(newer, _FRAME)) == _FRAME


def _body(schema: dict[str, Any], record: Record) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(
        out, fastavro.parse_schema(dict(schema), named_schemas={}), msgspec.to_builtins(record, builtin_types=(bytes,))
    )
    return out.getvalue()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_rate_hz", 2**31),
        ("position_samples", 2**63),
        ("encoding", "opus"),
        ("payload", "text"),
        ("channel_id", None),
        ("stamps", None),
    ],
)
def test_value_that_does_not_fit_is_never_written_and_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"AudioFrame.*{field}"):
        default_codec().encode(msgspec.structs.replace(_FRAME, **{field: value}))


@given(records, st.integers(2**31, 2**40) | st.integers(-(2**40), -(2**31) - 1))
def test_int_that_is_too_long_is_a_decode_error(record: Record, number: int) -> None:
    schema = schema_of(type(record))
    head = default_codec().encode(record)[:10]
    for name in (field["name"] for field in schema["fields"] if field["type"] == "int"):
        body = io.BytesIO()
        fields = msgspec.to_builtins(record, builtin_types=(bytes,)) | {name: number}
        fastavro.schemaless_writer(body, fastavro.parse_schema(dict(schema), named_schemas={}), fields)
        with pytest.raises(DecodeError, match=f"{name} is {number}"):
            default_codec().decode(head + body.getvalue())


@given(st.binary(max_size=200) | st.none())
def test_any_bytes_are_a_record_or_a_decode_error(value: bytes | None) -> None:
    _decodes_or_refuses(value)


@given(records, st.data())
def test_truncated_record_is_a_decode_error(record: Record, data: st.DataObject) -> None:
    value = default_codec().encode(record)
    length = data.draw(st.integers(0, len(value) - 1))
    with pytest.raises(DecodeError):
        default_codec().decode(value[:length])


@given(records, st.binary(min_size=1, max_size=20))
def test_record_with_more_behind_it_is_a_decode_error(record: Record, more: bytes) -> None:
    with pytest.raises(DecodeError, match="left over"):
        default_codec().decode(default_codec().encode(record) + more)


@given(records, st.data())
def test_damaged_record_is_a_record_or_a_decode_error(record: Record, data: st.DataObject) -> None:
    value = bytearray(default_codec().encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] ^= data.draw(st.integers(1, 255))
    _decodes_or_refuses(bytes(value))


@given(records, st.binary(max_size=100))
def test_right_head_with_any_body_is_a_record_or_a_decode_error(record: Record, body: bytes) -> None:
    _decodes_or_refuses(default_codec().encode(record)[:10] + body)


def _decodes_or_refuses(value: bytes | None) -> None:
    try:
        record = default_codec().decode(value)
    except DecodeError as refused:
        assert str(refused)
        return
    assert type(record).__name__ in RECORDS
    # What was taken can be passed on.
    assert default_codec().decode(default_codec().encode(record)) == record


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "empty"),
        (b"", "empty"),
        (b'{"text": "json"}', "neither"),
        (b"\xc3\x01" + bytes(8), "no schema has the fingerprint"),
        (b"\xc3\x01", "no schema has the fingerprint"),
        (b"\x00\x00\x00\x00\x07body", "none is configured .ASR_SCHEMA_REGISTRY_URL"),
    ],
)
def test_reason_of_a_refusal_is_for_people(value: bytes | None, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        default_codec().decode(value)


def test_id_that_the_registry_does_not_know_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="has no schema 999"):
        _REGISTERED.decode(b"\x00\x00\x00\x03\xe7")


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param('syntax = "proto3"; message Invoice {}', id="protobuf"),
        pytest.param('{"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}', id="json-schema"),
        pytest.param('"string"', id="no-record"),
        pytest.param('["null", "string"]', id="union"),
        pytest.param('{"type": "record", "fields": []}', id="no-name"),
        pytest.param('{"type": "record", "name": "AudioFrame", "fields": [{"name": "a", "type": "unheard.of"}]}', id="unknown-type"),
        pytest.param("[]", id="nothing"),
    ],
)
def test_schema_of_the_registry_that_is_no_record_of_avro_is_a_decode_error(schema: str) -> None:
    class Foreign:
        def id_of(self, name: str, schema: str) -> int:
            raise AssertionError("nothing is written")

        def schema_by_id(self, schema_id: int) -> str:
            return schema

    with pytest.raises(DecodeError, match="schema 7 is no Avro schema of a record"):
        Codec(Foreign()).decode(bytes([0, 0, 0, 0, 7]) + b"\x02")


def test_record_of_another_system_in_the_registry_is_a_decode_error() -> None:
    registry = _Registry()
    foreign = {"type": "record", "name": "Invoice", "fields": [{"name": "total", "type": "int"}]}
    schema_id = registry.id_of("Invoice", json.dumps(foreign))
    with pytest.raises(DecodeError, match="'Invoice', which is no record of this system"):
        Codec(registry).decode(bytes([0]) + schema_id.to_bytes(4, "big") + b"\x02")


def test_each_schema_is_registered_once() -> None:
    class Counting(_Registry):
        calls = 0

        def id_of(self, name: str, schema: str) -> int:
            self.calls += 1
            return super().id_of(name, schema)

    registry = Counting()
    codec = Codec(registry)
    for _ in range(3):
        codec.encode(_FRAME)
    assert registry.calls == 1


def test_records_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        _FRAME.payload = b""  # type: ignore[misc]


def test_session_flags_come_back_as_a_tuple() -> None:
    hints = get_type_hints(Session)
    assert get_origin(hints["flags"]) is tuple
