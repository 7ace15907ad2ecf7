"""Models to measure with: a directory as WeNet leaves it, with the weights of a given model, or random ones of a given size.

A random model says nothing that means anything, but it costs what a trained one costs, if its head is calibrated: as many frames must be
blank as in real speech, else the beam search would work too hard or too little.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from streams.errors import UserError

__all__ = ["BUNDLED_SIZE", "LARGE_SIZE", "Size", "model_directory", "write_random_model"]

#: Of encoder frames of 40 ms, so many end a token in speech at 12 tokens a second; a CTC model leaves the others blank.
_BLANK_SHARE: Final = 0.6
#: Log mel energies of telephone speech lie about here.
_MEL_MEAN, _MEL_SPREAD = 11.0, 4.0
_CALIBRATION_FRAMES: Final = 400
#: How far the best token of a frame stands out, as trained models are: nearly all of the probability is on one or two tokens.
_SHARPNESS: Final = 12.0


class Size(NamedTuple):
    """How large a model is.

    Attributes:
        name: for people.
        layers: of the encoder.
        width: of the encoder.
        heads: of its attention.
        units: of its feed-forwards.
        kernel: of its convolutions.
        vocabulary: tokens.
        decoder_layers: of the attention decoder.
    """

    name: str
    layers: int
    width: int
    heads: int
    units: int
    kernel: int
    vocabulary: int
    decoder_layers: int


#: What ``ops.train`` trains.
BUNDLED_SIZE: Final = Size("8x128", layers=8, width=128, heads=4, units=512, kernel=15, vocabulary=160, decoder_layers=3)
#: WeNet's usual size: 35 M parameters in encoder and head.
LARGE_SIZE: Final = Size("12x256", layers=12, width=256, heads=4, units=2_048, kernel=15, vocabulary=5_000, decoder_layers=3)


def model_directory(given: Path | None, folder: Path, size: Size = BUNDLED_SIZE, seed: int = 0) -> Path:
    """Return the model to measure with: the given one, else the one that comes with the program, else a random one, written to a folder."""
    from agents.inference.models import ModelError, wenet_directory

    try:
        return wenet_directory(given)
    except ModelError:
        if given is not None:
            raise
    write_random_model(folder, size, seed)
    return folder


def write_random_model(folder: Path, size: Size, seed: int = 0) -> None:
    """Write a model directory with random weights, calibrated to emit tokens about as often as speech has them.

    Raises:
        UserError: the folder cannot be written to.
    """
    import torch
    import yaml

    from agents.inference.conformer.model import DecoderConfig, EncoderConfig, ModelConfig, StreamingModel

    encoder = EncoderConfig(
        output_size=size.width,
        attention_heads=size.heads,
        linear_units=size.units,
        num_blocks=size.layers,
        cnn_module_kernel=size.kernel,
        cnn_module_norm="layer_norm",
    )
    decoder = DecoderConfig(attention_heads=size.heads, linear_units=size.units, num_blocks=size.decoder_layers)
    config = ModelConfig(vocabulary=size.vocabulary, sos=size.vocabulary - 1, eos=size.vocabulary - 1, encoder=encoder, decoder=decoder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = StreamingModel(config).eval()
        model.encoder.global_cmvn.mean.fill_(_MEL_MEAN)
        model.encoder.global_cmvn.istd.fill_(1 / _MEL_SPREAD)
        _calibrate(model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder / "final.pt")
        (folder / "train.yaml").write_text(yaml.safe_dump(_train_yaml(encoder, decoder)), encoding="utf-8")
        (folder / "units.txt").write_text("".join(f"{unit} {n}\n" for n, unit in enumerate(_units(size.vocabulary))), encoding="utf-8")
    except OSError as refused:
        raise UserError(f"{folder} cannot be written to ({refused.strerror})", "Set ASR_DATA_DIR to a folder of yours.") from refused


def _calibrate(model: Any) -> None:
    """Make the head as sure of itself as a trained one, and blank as often."""
    import torch

    with torch.inference_mode():
        features = _MEL_MEAN + _MEL_SPREAD * torch.randn(1, 4 * _CALIBRATION_FRAMES + 3, model.config.encoder.input_dim)
        hidden, _ = model.encoder(features, torch.tensor([features.size(1)]), 5, 8)
        head = model.ctc.ctc_lo
        # The hidden states have unit variance, so a token's logit has that of its row's norm.
        head.weight.mul_(_SHARPNESS / head.weight.norm(dim=1, keepdim=True))
        head.bias.zero_()
        logits = head(hidden)[0]
        ahead = logits[:, 1:].amax(1) - logits[:, 0]
        head.bias[model.config.blank] = torch.quantile(ahead, _BLANK_SHARE)


def _train_yaml(encoder: Any, decoder: Any) -> Mapping[str, Any]:
    encoder_conf = {name: value for name, value in msgspec.to_builtins(encoder).items() if name != "input_dim"}
    decoder_conf = {name: value for name, value in msgspec.to_builtins(decoder).items() if name != "r_num_blocks"}
    return {
        "model": "asr_model",
        "encoder": "conformer",
        "decoder": "transformer",
        "input_dim": encoder.input_dim,
        "encoder_conf": {**encoder_conf, "causal": True},
        "decoder_conf": decoder_conf,
    }


def _units(vocabulary: int) -> list[str]:
    """Return word pieces that nobody speaks: every fourth one begins a word."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    spelt = [a + b + c for a in letters for b in letters for c in letters]
    pieces = [("▁" if n % 4 == 0 else "") + spelt[n * 7 % len(spelt)] for n in range(vocabulary - 3)]
    return ["<blank>", "<unk>", *pieces, "<sos/eos>"]
