"""Model directories: what is read, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from agents.inference.conformer.loader import ModelError, Vocabulary, load_model, model_digest, read_cmvn, read_units

MODELS = Path(__file__).parents[3] / "data" / "wenet" / "models"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "u2", tmp_path / "u2"))


def change(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "train.yaml"
    config = yaml.safe_load(path.read_text())
    edit(config)
    path.write_text(yaml.safe_dump(config))


def test_special_tokens_by_wenets_rules() -> None:
    plain, named = load_model(MODELS / "u2"), load_model(MODELS / "u2pp")
    assert (plain.model.config.sos, plain.model.config.eos, plain.model.config.blank) == (39, 39, 0)
    assert (named.model.config.sos, named.model.config.eos) == (2, 2)
    assert plain.model.right_to_left is None
    assert named.model.right_to_left is not None
    assert named.vocabulary.bpe_model == MODELS / "u2pp" / "bpe.model"
    assert not named.model.training


@pytest.mark.parametrize(
    "edit,named",
    [
        (lambda config: config["encoder_conf"].update(pos_enc_layer_type="abs_pos"), "encoder_conf.pos_enc_layer_type"),
        (lambda config: config["encoder_conf"].update(input_layer="conv2d8"), "encoder_conf.input_layer"),
        (lambda config: config["encoder_conf"].update(causal=False), "encoder_conf.causal"),
        (lambda config: config["encoder_conf"].update(n_kv_head=2), "encoder_conf.n_kv_head"),
        (lambda config: config["encoder_conf"].update(activation_type="silu2"), "activation_type"),
        (lambda config: config["decoder_conf"].update(normalize_before=False), "decoder_conf.normalize_before"),
        (lambda config: config.update(encoder="e_branchformer"), "encoder is 'e_branchformer'"),
        (lambda config: config.update(model="transducer"), "model is 'transducer'"),
        (lambda config: config.update(output_dim=41), "output_dim is 41"),
    ],
)
def test_what_is_not_supported_is_named(directory: Path, edit: Callable[[dict[str, Any]], None], named: str) -> None:
    change(directory, edit)
    with pytest.raises(ModelError, match=named):
        load_model(directory)


@pytest.mark.parametrize("name", ["train.yaml", "units.txt", "final.pt"])
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ModelError, match=name):
        load_model(directory)


def test_weights_of_another_model_are_refused(directory: Path) -> None:
    change(directory, lambda config: config["encoder_conf"].update(num_blocks=4))
    with pytest.raises(ModelError, match=r"lacks encoder\.encoders\.3"):
        load_model(directory)


def test_a_pickle_with_code_is_refused(directory: Path) -> None:
    torch.save({"weights": Path("x")}, directory / "final.pt")
    with pytest.raises(ModelError, match="read safely"):
        load_model(directory)


def test_statistics_come_from_the_file_where_the_weights_have_none(directory: Path) -> None:
    before = load_model(directory).model.encoder.global_cmvn
    state = torch.load(directory / "final.pt", weights_only=True)
    torch.save({name: tensor for name, tensor in state.items() if "global_cmvn" not in name}, directory / "final.pt")
    after = load_model(directory).model.encoder.global_cmvn
    assert torch.allclose(before.mean, after.mean)
    assert torch.allclose(before.istd, after.istd)
    (directory / "global_cmvn").unlink()
    with pytest.raises(ModelError, match="global_cmvn is missing"):
        load_model(directory)


def test_statistics_as_kaldi_text_and_as_json_are_the_same(tmp_path: Path) -> None:
    features = np.random.default_rng(1).normal(3, 2, (500, 4))
    sums, squares = features.sum(0), (features**2).sum(0)
    (tmp_path / "json").write_text(json.dumps({"mean_stat": sums.tolist(), "var_stat": squares.tolist(), "frame_num": 500}))
    (tmp_path / "kaldi").write_text(f" [\n  {' '.join(map(repr, sums.tolist()))} 500 \n  {' '.join(map(repr, squares.tolist()))} 0 ]\n")
    for name in ("json", "kaldi"):
        mean, istd = read_cmvn(tmp_path / name)
        np.testing.assert_allclose(mean, features.mean(0))
        np.testing.assert_allclose(istd, 1 / features.std(0))


@pytest.mark.parametrize("content,why", [(b"\0BDM \x04", "binary"), (b"mean 3", "neither"), (b'{"mean_stat": [1]}', "neither")])
def test_other_statistics_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "global_cmvn").write_bytes(content)
    with pytest.raises(ModelError, match=why):
        read_cmvn(tmp_path / "global_cmvn")


def test_units_must_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "units.txt"
    path.write_text("<blank> 0\n▁a 2\n", encoding="utf-8")
    with pytest.raises(ModelError, match="counted from 0"):
        read_units(path)


def test_tokens_become_words() -> None:
    vocabulary = Vocabulary(("<blank>", "<unk>", "<sos/eos>", "▁flat", "▁whi", "te", "咖"), None)
    assert vocabulary.text([2, 3, 0, 4, 5, 1, 6, 2]) == "flat white咖"


def test_the_digest_follows_the_files(directory: Path) -> None:
    before = model_digest(directory)
    assert before == load_model(directory).digest
    change(directory, lambda config: config.update(model_dir="elsewhere"))
    assert model_digest(directory) != before
