"""Compiles lists of hotwords in a process of its own: ``python -m agents.inference.decoding.compiler FD PARENT MODEL``.

Spelling 50,000 phrases is most of a second of pure Python: on a thread of the worker or of the engine it would keep Python from everybody
else. The process is there before the first list, warm, and lives as long as the worker. It is asked through the socket ``FD``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from agents.inference.decoding.hotwords import FORMAT, Hotwords
from agents.inference.decoding.units import UnitTable
from agents.inference.engine import HOTWORD_VERSIONS_KEPT
from agents.inference.frames import Compile, Compiled, pack, receive
from agents.inference.lifetime import live_as_long_as
from schemas.records import Hotword

__all__ = ["ListCompiler", "main"]

#: Phrases left out that an answer names; it counts them all.
_NAMED: Final = 20


class ListCompiler:
    """Compiles lists for a model, and keeps them on disk, where the machine's other workers find them.

    Args:
        model_dir: a folder with ``units.txt``, and a SentencePiece model ``*.model`` where there is one.
        cache_dir: where lists are kept.

    Raises:
        ValueError: the model's units cannot be read.
        OSError: likewise.
    """

    def __init__(self, model_dir: Path, cache_dir: Path) -> None:
        units, bpe_model = model_dir / "units.txt", next(iter(sorted(model_dir.glob("*.model"))), None)
        self._units = UnitTable.read(units, bpe_model)
        digest = hashlib.sha256(units.read_bytes() + (bpe_model.read_bytes() if bpe_model else b"")).hexdigest()[:16]
        self._folder = cache_dir / "hotwords" / f"{digest}-{FORMAT}"

    def warm_up(self) -> None:
        """Compile a list of one phrase, so that the first one does not wait for the compiled functions."""
        Hotwords.compile([Hotword(phrase=self._units.units[-2], boost=1.0)], self._units)

    def compile(self, request: Compile) -> Compiled:
        """Compile a list, unless it is there; never raises."""
        started_s = time.monotonic()
        target = self._folder / request.version
        try:
            found = self._found(target)
            hotwords = found or Hotwords.compile([Hotword(phrase=phrase, boost=boost) for phrase, boost in request.phrases], self._units)
            if found is None:
                self._keep(hotwords, target)
            self._prune()
        except (OSError, ValueError, MemoryError) as failure:
            return Compiled(request.version, error=f"{type(failure).__name__}: {failure}")
        return Compiled(
            request.version,
            str(target),
            hotwords.phrases,
            len(hotwords.rejected),
            tuple((one.phrase, one.reason) for one in hotwords.rejected[:_NAMED]),
            found is None,
            round((time.monotonic() - started_s) * 1_000),
        )

    def _found(self, target: Path) -> Hotwords | None:
        try:
            os.utime(target)  # it is in use: the last to be thrown away
            return Hotwords.load(target)
        except (OSError, ValueError, KeyError):
            return None

    def _keep(self, hotwords: Hotwords, target: Path) -> None:
        """Write a list whole, or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".") as work:
            whole = Path(work) / "list"
            hotwords.save(whole)
            shutil.rmtree(target, ignore_errors=True)  # damaged, else it would have been found
            try:
                whole.rename(target)
            except OSError:
                if self._found(target) is None:  # else another worker was faster
                    raise

    def _prune(self) -> None:
        """Throw away what was not used for longest; who has it mapped keeps it."""
        kept = sorted((path for path in self._folder.iterdir() if not path.name.startswith(".")), key=lambda path: -path.stat().st_mtime)
        for path in kept[HOTWORD_VERSIONS_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Serve until the worker is gone."""
    live_as_long_as(int(arguments[1]))
    connection = socket.socket(fileno=int(arguments[0]))
    try:
        compiler = ListCompiler(Path(arguments[2]), Path(arguments[3]))
        compiler.warm_up()
    except (OSError, ValueError) as refused:
        connection.sendall(pack(Compiled("", error=str(refused))))
        return 1
    connection.sendall(pack(Compiled("")))
    decoder = msgspec.msgpack.Decoder(Compile)
    while True:
        try:
            request = decoder.decode(receive(connection))
        except EOFError:
            return 0
        connection.sendall(pack(compiler.compile(request)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
