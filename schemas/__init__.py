"""The records on every topic: Avro schemas, their typed twins and the codec between them."""

from schemas.codec import Codec, DecodeError, default_codec
from schemas.records import *  # noqa: F403
from schemas.records import __all__ as _records

__all__ = ["Codec", "DecodeError", "default_codec", *_records]  # noqa: PLE0604
