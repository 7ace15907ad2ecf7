"""Confluent's client against a registry that speaks its REST protocol, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from schemas.codec import Codec, DecodeError, default_codec
from schemas.records import Heartbeat
from streams.errors import UserError
from streams.registry import ConfluentRegistry, RegistryError, codec_for

_RECORD = Heartbeat(channel_id="7", session_id="s", conversation_id="c", position_samples=16_000)
_USER = "Basic YXNyOnNlc2FtZQ=="  # asr:sesame


class _RegistryServer(ThreadingHTTPServer):
    """Keeps schemas in memory: ``POST /subjects/S/versions`` and ``GET /schemas/ids/N``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.subjects: list[tuple[str, str]] = []
        self.authorizations: set[str | None] = set()
        self.refusal: tuple[int, dict[str, Any]] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _RegistryServer

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        subject = unquote(self.path.split("/")[2])
        if (subject, asked["schema"]) not in self.server.subjects:
            self.server.subjects.append((subject, asked["schema"]))
        self._answer(200, {"id": self.server.subjects.index((subject, asked["schema"])) + 1})

    def do_GET(self) -> None:
        number = int(self.path.partition("?")[0].rsplit("/", 1)[1])
        if 0 < number <= len(self.server.subjects):
            self._answer(200, {"schema": self.server.subjects[number - 1][1]})
        else:
            self._answer(404, {"error_code": 40403, "message": f"Schema {number} not found"})

    def log_message(self, *_arguments: object) -> None:
        """Tests are quiet."""

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self.server.authorizations.add(self.headers["Authorization"])
        status, content = self.server.refusal or (status, content)
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def registry() -> Iterator[_RegistryServer]:
    with _RegistryServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_record_goes_through_the_registry_to_another_reader(registry: _RegistryServer) -> None:
    value = codec_for(registry.url).encode(_RECORD)
    assert value[:5] == b"\x00\x00\x00\x00\x01"
    assert codec_for(registry.url).decode(value) == _RECORD
    ((subject, schema),) = registry.subjects
    assert subject == "asr.Heartbeat"
    assert json.loads(schema)["name"] == "Heartbeat"


def test_reader_with_a_registry_takes_values_written_without(registry: _RegistryServer) -> None:
    assert codec_for(registry.url).decode(default_codec().encode(_RECORD)) == _RECORD
    assert registry.subjects == []


def test_without_a_url_there_is_no_registry() -> None:
    assert codec_for("") is default_codec()


def test_id_that_the_registry_lacks_is_a_damaged_record(registry: _RegistryServer) -> None:
    with pytest.raises(DecodeError, match="no schema 9"):
        codec_for(registry.url).decode(b"\x00\x00\x00\x00\x09")


def test_refused_schema_names_the_subject(registry: _RegistryServer) -> None:
    registry.refusal = (409, {"error_code": 409, "message": "incompatible with an earlier schema"})
    with pytest.raises(RegistryError, match=r"refuses the schema of asr\.Heartbeat \(incompatible"):
        codec_for(registry.url).encode(_RECORD)


def test_registry_that_fails_is_not_a_damaged_record(registry: _RegistryServer) -> None:
    registry.refusal = (403, {"error_code": 403, "message": "no"})
    with pytest.raises(RegistryError, match="fails"):
        codec_for(registry.url).decode(b"\x00\x00\x00\x00\x01")


def test_absent_registry_is_said_with_what_to_do() -> None:
    codec = Codec(ConfluentRegistry("http://127.0.0.1:1"))
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1:1 does not answer.*ASR_SCHEMA_REGISTRY_URL"):
        codec.encode(_RECORD)
    assert issubclass(RegistryError, UserError)


def test_password_in_the_url_is_sent_and_never_shown(registry: _RegistryServer) -> None:
    url = registry.url.replace("http://", "http://asr:sesame@")
    codec_for(url).encode(_RECORD)
    assert registry.authorizations == {_USER}
    registry.refusal = (403, {"error_code": 403, "message": "no"})
    with pytest.raises(RegistryError) as refused:
        codec_for(url).encode(_RECORD)
    assert "sesame" not in str(refused.value)


def test_url_that_is_none_is_refused() -> None:
    with pytest.raises(RegistryError, match="ASR_SCHEMA_REGISTRY_URL"):
        codec_for("not a url")
