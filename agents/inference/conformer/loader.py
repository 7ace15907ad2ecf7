"""Reads a WeNet model directory as WeNet leaves it: ``train.yaml``, ``final.pt``, ``units.txt`` and, where there is one, ``global_cmvn``.

Paths inside ``train.yaml`` are those of the machine that trained; the files of the same kind beside it are taken instead. What the model
cannot do here is refused by the name of its key, never guessed at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import yaml

from agents.inference.conformer.model import DecoderConfig, EncoderConfig, ModelConfig, StreamingModel

__all__ = ["LoadedModel", "ModelError", "Vocabulary", "load_model", "model_digest", "read_cmvn", "read_units"]

WEIGHTS_FILE: Final = "final.pt"
CONFIG_FILE: Final = "train.yaml"
UNITS_FILE: Final = "units.txt"
CMVN_FILE: Final = "global_cmvn"

#: What the encoder must say of itself beyond its sizes; the first value is WeNet's default where the key is absent.
_ENCODER_MUST: Final[Mapping[str, tuple[Any, ...]]] = {
    "input_layer": ("conv2d",),
    "pos_enc_layer_type": ("rel_pos",),
    "selfattention_layer_type": ("rel_selfattn",),
    "normalize_before": (True,),
    "macaron_style": (True,),
    "use_cnn_module": (True,),
    "causal": (False, True),
    "static_chunk_size": (0,),
    "use_dynamic_chunk": (False, True),
    "use_dynamic_left_chunk": (False, True),
    "use_sdpa": (False, True),
    "gradient_checkpointing": (False, True),
}
_DECODER_MUST: Final[Mapping[str, tuple[Any, ...]]] = {
    "input_layer": ("embed",),
    "use_output_layer": (True,),
    "normalize_before": (True,),
    "src_attention": (True,),
    "use_sdpa": (False, True),
    "gradient_checkpointing": (False, True),
    "tie_word_embedding": (False,),
}
#: ``mean_stat`` and ``var_stat`` are sums; no variance is taken for less than this.
_VARIANCE_FLOOR: Final = 1e-20


_Config = TypeVar("_Config", bound=msgspec.Struct)


class ModelError(Exception):
    """A model directory that cannot be used; the message says why and names the file or key."""


class Vocabulary(NamedTuple):
    """The model's tokens."""

    tokens: tuple[str, ...]
    #: The sentencepiece model the tokens came from, where there is one.
    bpe_model: Path | None

    def text(self, tokens: list[int] | np.ndarray) -> str:
        """Join tokens to text; U+2581 begins a word, special tokens are left out.

        >>> Vocabulary(("<blank>", "▁flat", "▁whi", "te"), None).text([1, 2, 3])
        'flat white'
        """
        pieces = (self.tokens[token] for token in tokens)
        return "".join(piece for piece in pieces if not (piece.startswith("<") and piece.endswith(">"))).replace("▁", " ").strip()


class LoadedModel(NamedTuple):
    """A model ready to run, in evaluation mode."""

    model: StreamingModel
    vocabulary: Vocabulary
    #: The whole of ``train.yaml``.
    config: dict[str, Any]
    #: SHA-256 over the directory's files, hexadecimal.
    digest: str


def read_units(path: Path) -> tuple[str, ...]:
    """Read ``units.txt``: a token and its number on each line.

    Raises:
        ModelError: the file is missing or its numbers are not 0, 1, 2 and so on.
    """
    try:
        rows = [line.rsplit(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    if [row[-1] for row in rows] != [str(number) for number in range(len(rows))] or any(len(row) != 2 for row in rows):
        raise ModelError(f"{path} must hold a token and its number on each line, counted from 0")
    return tuple(row[0] for row in rows)


def read_cmvn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read mean and inverse standard deviation of the features, float64, from WeNet's JSON or Kaldi's text.

    Raises:
        ModelError: the file is neither; Kaldi's binary form is not read.
    """
    raw = path.read_bytes()
    if raw.startswith(b"\0B"):
        raise ModelError(f"{path} is a binary Kaldi matrix; write it as text (copy-matrix --binary=false)")
    try:
        text = raw.decode("utf-8").strip()
        if text.startswith("{"):
            stats = json.loads(text)
            sums, squares, count = np.array(stats["mean_stat"]), np.array(stats["var_stat"]), float(stats["frame_num"])
        else:
            # [ sums count \n sums-of-squares 0 ]
            table = np.array(text.strip("[] \n").split(), dtype=np.float64).reshape(2, -1)
            sums, squares, count = table[0, :-1], table[1, :-1], float(table[0, -1])
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is neither WeNet's JSON nor Kaldi's text: {error}") from error
    mean = sums / count
    return mean, 1.0 / np.sqrt(np.maximum(squares / count - mean**2, _VARIANCE_FLOOR))


def model_digest(directory: Path) -> str:
    """Return the SHA-256 over names and contents of the directory's model files."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, UNITS_FILE, CMVN_FILE, WEIGHTS_FILE):
        path = directory / name
        if path.exists():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _part(section: str, given: Mapping[str, Any], must: Mapping[str, tuple[Any, ...]], kind: type[_Config]) -> _Config:
    """Read one part's configuration, refusing by name what is not supported."""
    for key, value in given.items():
        if key in must:
            if value not in must[key]:
                supported = " or ".join(str(choice).lower() for choice in must[key])
                raise ModelError(f"{section}.{key} is {value!r}; this engine supports {supported}")
        elif key not in kind.__struct_fields__:
            raise ModelError(f"{section}.{key} is not known to this engine")
    try:
        return msgspec.convert({key: value for key, value in given.items() if key not in must}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{section}: {error}") from error


def _expect(config: Mapping[str, Any], key: str, *choices: Any) -> None:
    if config.get(key, choices[0]) not in choices:
        raise ModelError(f"{key} is {config[key]!r}; this engine supports {' or '.join(str(choice) for choice in choices)}")


def _model_config(config: Mapping[str, Any], vocabulary: int) -> ModelConfig:
    _expect(config, "model", "asr_model")
    _expect(config, "encoder", "conformer")
    _expect(config, "decoder", "transformer", "bitransformer")
    encoder_conf, decoder_conf = config.get("encoder_conf") or {}, config.get("decoder_conf") or {}
    if not encoder_conf.get("causal", False):
        raise ModelError("encoder_conf.causal is false; without causal convolutions a model cannot stream")
    if config.get("output_dim", vocabulary) != vocabulary:
        raise ModelError(f"output_dim is {config['output_dim']}, but {UNITS_FILE} has {vocabulary} tokens")
    encoder = _part("encoder_conf", encoder_conf, _ENCODER_MUST, EncoderConfig)
    encoder = msgspec.structs.replace(encoder, input_dim=config.get("input_dim", encoder.input_dim))
    decoder = _part("decoder_conf", decoder_conf, _DECODER_MUST, DecoderConfig)
    if config.get("decoder") == "transformer" and decoder.r_num_blocks:
        raise ModelError("decoder_conf.r_num_blocks needs decoder: bitransformer")
    special = (config.get("tokenizer_conf") or {}).get("special_tokens") or {}
    return ModelConfig(
        vocabulary=vocabulary,
        blank=(config.get("ctc_conf") or {}).get("ctc_blank_id", 0),
        # WeNet's own rule: without special tokens the last unit both begins and ends a sentence.
        sos=special.get("<sos>", vocabulary - 1),
        eos=special.get("<eos>", vocabulary - 1),
        encoder=encoder,
        decoder=decoder,
    )


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        # weights_only: a pickle from elsewhere must not run code.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise ModelError(f"{path} holds no weights that can be read safely: {error}") from error
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def load_model(directory: Path) -> LoadedModel:
    """Load a WeNet model directory.

    Raises:
        ModelError: a file is missing or damaged, or the model needs something that this engine does not do; the message names it.
    """
    try:
        config = yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{directory / CONFIG_FILE} is missing: not a WeNet model directory") from None
    except yaml.YAMLError as error:
        raise ModelError(f"{directory / CONFIG_FILE} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{directory / CONFIG_FILE} holds no settings")
    tokens = read_units(directory / UNITS_FILE)
    model = StreamingModel(_model_config(config, len(tokens)))
    state = _read_weights(directory / WEIGHTS_FILE)
    cmvn = directory / CMVN_FILE
    if "encoder.global_cmvn.mean" not in state:
        if cmvn.exists():
            mean, istd = read_cmvn(cmvn)
            state |= {"encoder.global_cmvn.mean": torch.tensor(mean).float(), "encoder.global_cmvn.istd": torch.tensor(istd).float()}
        elif config.get("cmvn"):
            raise ModelError(f"cmvn is {config['cmvn']!r}, but {cmvn} is missing and {WEIGHTS_FILE} has no statistics")
    # Position tables may be left out: they are the same in every model of a size.
    expected = model.state_dict()
    missing = [
        name
        for name in expected
        if name not in state and not name.endswith((".pe", "num_batches_tracked", "global_cmvn.mean", "global_cmvn.istd"))
    ]
    unknown = [name for name in state if name not in expected]
    misshapen = [name for name in state if name in expected and state[name].shape != expected[name].shape]
    for names, problem in ((missing, "lacks"), (unknown, "has, beyond this model,"), (misshapen, f"does not fit {CONFIG_FILE} in")):
        if names:
            raise ModelError(f"{directory / WEIGHTS_FILE} {problem} {', '.join(names[:3])}{' …' if len(names) > 3 else ''}")
    model.load_state_dict(state, strict=False)
    model.eval().requires_grad_(False)
    bpe_model = next(iter(sorted(directory.glob("*.model"))), None)
    return LoadedModel(model, Vocabulary(tokens, bpe_model), config, model_digest(directory))
