"""The codec as one of Faust's: after :func:`register_codec`, topics may say ``value_serializer="avro"``."""

from __future__ import annotations

from typing import Any, Final

from faust.serializers import codecs

from schemas.codec import Codec, default_codec
from schemas.records import Record

__all__ = ["AVRO", "AvroCodec", "register_codec"]

#: The name that topics call it by.
AVRO: Final = "avro"


class AvroCodec(codecs.Codec):
    """Records to bytes and back, as Faust's serializers do it.

    Args:
        children: further codecs behind this one, as Faust chains them.
        codec: what encodes and decodes; default: without a registry.
    """

    def __init__(self, children: tuple[Any, ...] | None = None, codec: Codec | None = None) -> None:
        self._codec = codec or default_codec()
        super().__init__(children=children, codec=self._codec)

    def _dumps(self, s: Record) -> bytes:
        return self._codec.encode(s)

    def _loads(self, s: bytes) -> Record:
        return self._codec.decode(s)


def register_codec(codec: Codec | None = None) -> None:
    """Let Faust's topics use ``"avro"`` as a serializer.

    Args:
        codec: what encodes and decodes; default: without a registry.
    """
    codecs.register(AVRO, AvroCodec(codec=codec))
