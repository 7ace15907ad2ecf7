"""Schemas change only so that records written with any earlier version can still be read."""

from __future__ import annotations

import io
import json
from importlib import resources
from typing import Any

import fastavro
import pytest
from fastavro.schema import fingerprint, to_parsing_canonical_form
from fastavro.utils import generate_many

from schemas.codec import DecodeError, default_codec, schema_of
from schemas.records import RECORDS

_HISTORY = resources.files("schemas") / "history"
_RECORDS_PER_VERSION = 20


def _versions(name: str) -> dict[int, dict[str, Any]]:
    folder = _HISTORY / name
    return {int(file.name.removesuffix(".avsc")): json.loads(file.read_text()) for file in folder.iterdir() if file.name.endswith(".avsc")}


def _single_object(schema: dict[str, Any], fields: Any) -> bytes:
    out = io.BytesIO()
    parsed = fastavro.parse_schema(dict(schema), named_schemas={})
    out.write(b"\xc3\x01" + bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO")))
    fastavro.schemaless_writer(out, parsed, fields)
    return out.getvalue()


each_record = pytest.mark.parametrize("name", sorted(RECORDS))


def test_history_is_of_our_records_only() -> None:
    assert {folder.name for folder in _HISTORY.iterdir() if folder.is_dir() and folder.name != "__pycache__"} == set(RECORDS)


@each_record
def test_current_schema_is_the_newest_version_kept(name: str) -> None:
    """Whoever changes a schema adds the new version to ``history/``, and never touches the earlier ones."""
    versions = _versions(name)
    assert sorted(versions) == list(range(1, len(versions) + 1))
    assert versions[max(versions)] == schema_of(name)


@each_record
def test_records_of_every_version_can_be_read(name: str) -> None:
    for schema in _versions(name).values():
        parsed = fastavro.parse_schema(dict(schema), named_schemas={})
        for fields in generate_many(parsed, _RECORDS_PER_VERSION):
            assert type(default_codec().decode(_single_object(schema, fields))) is RECORDS[name]


@each_record
def test_field_without_which_old_records_exist_must_have_a_default(name: str) -> None:
    """The check notices what it is for: an old record without a required field is refused."""
    schema = schema_of(name)
    required = next(field["name"] for field in schema["fields"] if "default" not in field)
    older = schema | {"fields": [field for field in schema["fields"] if field["name"] != required]}
    parsed = fastavro.parse_schema(dict(older), named_schemas={})
    (fields,) = generate_many(parsed, 1)
    reader = fastavro.parse_schema(dict(schema), named_schemas={})
    body = io.BytesIO()
    fastavro.schemaless_writer(body, parsed, fields)
    body.seek(0)
    with pytest.raises(fastavro.read.SchemaResolutionError):
        fastavro.schemaless_reader(body, parsed, reader)
    with pytest.raises(DecodeError, match="newer version"):
        default_codec().decode(_single_object(older, fields))
