"""Models are found where they are, and where they are not the message says what to do."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from agents.inference import models
from agents.inference.models import ModelError, digest_of, resolve, wenet_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in {"model.bin": b"weights", "config.json": b"{}", "tokenizer.json": b"{}", "vocabulary.txt": b"a\n"}.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_folder(model: Path, tmp_path: Path) -> None:
    found = resolve(str(model), tmp_path)
    assert (found.folder, found.digest) == (model, digest_of(model))


def test_a_name_in_the_cache_comes_before_a_package(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "models" / "tiny.en")
    assert resolve("tiny.en", tmp_path).folder == tmp_path / "models" / "tiny.en"


def test_a_name_in_a_package(tmp_path: Path) -> None:
    found = resolve("tiny.en", tmp_path)
    assert (found.folder / "model.bin").stat().st_size > 70_000_000


def test_a_model_in_parts_is_put_together_once(tmp_path: Path) -> None:
    first = resolve("base", tmp_path)
    assert first.folder == tmp_path / "models" / "base"
    joined = (first.folder / "model.bin").read_bytes()
    assert len(joined) == 2 * 72_608_766
    assert sorted(path.name for path in first.folder.iterdir()) == ["config.json", "model.bin", "tokenizer.json", "vocabulary.txt"]
    written_ns = (first.folder / "model.bin").stat().st_mtime_ns
    assert resolve("base", tmp_path) == first
    assert (first.folder / "model.bin").stat().st_mtime_ns == written_ns
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == [first.folder], "nothing is left lying about"


def test_a_digest_is_of_names_and_contents(model: Path) -> None:
    digest = digest_of(model)
    (model / "README.md").write_text("not part of the model")
    assert digest_of(model) == digest
    (model / "model.bin").write_bytes(b"weighty")
    changed = digest_of(model)
    assert changed != digest
    (model / "vocabulary.txt").rename(model / "vocabulary.json")
    assert digest_of(model) not in {digest, changed}
    assert len(digest) == 2 * hashlib.sha256().digest_size


def test_a_digest_is_remembered_until_a_file_changes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    digest = digest_of(model, cache)
    computed = []
    real = models._digest
    monkeypatch.setattr(models, "_digest", lambda files: computed.append(1) or real(files))
    assert digest_of(model, cache) == digest
    assert not computed
    (model / "config.json").write_bytes(b'{"changed": 1}')
    assert digest_of(model, cache) != digest
    (remembered,) = cache.iterdir()
    remembered.write_bytes(b"damaged")
    assert digest_of(model, cache) == digest_of(model)


def test_a_cache_that_cannot_be_written_costs_only_time(model: Path) -> None:
    assert digest_of(model, Path("/proc/nowhere")) == digest_of(model)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("/no/such/folder", "there is no model at /no/such/folder. Set ASR_MODEL"),
        ("gigantic.en", "no name that the hub knows. Known names: tiny.en, "),
    ],
)
def test_what_is_nowhere(name: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        resolve(name, tmp_path)
    assert cause in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.bin is missing"):
        resolve(str(tmp_path), tmp_path)


def test_a_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as refused:
        resolve("small.en", tmp_path)
    assert "the hub gave none" in str(refused.value)
    assert f"Put its files into {tmp_path / 'models' / 'small.en'}, or set ASR_MODEL to its folder" in str(refused.value)


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agents.inference.models.shutil.copyfileobj", full)
    with pytest.raises(ModelError, match=r"No space left on device\. It needs 145 MB there; ASR_CACHE_DIR"):
        resolve("base", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wenet_model_is_a_folder(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "data" / "wenet" / "models" / "u2"
    assert wenet_directory(folder) == folder.resolve()
    (tmp_path / "train.yaml").touch()
    with pytest.raises(ModelError, match=r"final\.pt, units\.txt missing") as refused:
        wenet_directory(tmp_path)
    assert "ASR_MODEL_DIR" in (refused.value.remedy or "")
