"""A model as ONNX, one stream and one block a step, the way sherpa-onnx takes WeNet's streaming CTC models.

Its inputs and outputs, their shapes and the metadata are those that ``OnlineWenetCtcModel`` of sherpa-onnx reads. It counts time from the
size of the cache, not from 0 as the models do, so the graph takes that off: positions are then the ones that the weights were trained with.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ops.logs import quietened

if TYPE_CHECKING:
    from agents.inference.conformer.loader import LoadedModel

__all__ = ["export_streaming_ctc", "quantise", "write_tokens"]

_OPSET: Final = 17
#: What a block reads beyond its first encoder frame: 7 frames make one.
_RIGHT_CONTEXT: Final = 6


def export_streaming_ctc(loaded: LoadedModel, file: Path, *, block_frames: int = 5, left_blocks: int = 8) -> None:
    """Write encoder and CTC head.

    Args:
        loaded: the model.
        file: where to.
        block_frames: encoder frames to a block.
        left_blocks: blocks of the past that a block sees.
    """
    import onnx
    import torch
    from torch import Tensor, nn

    from agents.inference.conformer.model import SUBSAMPLING, EncoderState, block_feature_frames

    model, config = loaded.model, loaded.model.config.encoder
    feature_frames, cached = block_feature_frames(block_frames), block_frames * left_blocks

    class _Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.ctc = model.encoder, model.ctc

        def forward(
            self, x: Tensor, offset: Tensor, required_cache_size: Tensor, attn_cache: Tensor, conv_cache: Tensor, attn_mask: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            valid = attn_mask[:, 0, :cached]
            state = EncoderState(offset - required_cache_size, attn_cache[None], conv_cache.transpose(0, 1), valid)
            hidden, after = self.encoder.step(x, torch.tensor([feature_frames]), state)
            return self.ctc(hidden), after.attention[0], after.convolution.transpose(0, 1)

    head_size = config.output_size // config.attention_heads
    mask = torch.ones(1, 1, cached + block_frames, dtype=torch.bool)
    mask[..., :cached] = False
    inputs = {
        "x": torch.zeros(1, feature_frames, config.input_dim),
        "offset": torch.tensor([cached]),
        "required_cache_size": torch.tensor([cached]),
        "attn_cache": torch.zeros(config.num_blocks, config.attention_heads, cached, 2 * head_size),
        "conv_cache": torch.zeros(config.num_blocks, 1, config.output_size, config.cnn_module_kernel - 1),
        "attn_mask": mask,
    }
    with torch.inference_mode(), warnings.catch_warnings():
        # Everything that is traced has one shape, so constants are what they are meant to be; the other exporter needs more packages.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Step().eval(),
            tuple(inputs.values()),
            str(file),
            input_names=list(inputs),
            output_names=["log_probs", "next_att_cache", "next_conv_cache"],
            opset_version=_OPSET,
            dynamo=False,
        )
    exported = onnx.load(str(file))
    metadata = {
        "model_type": "wenet_ctc",
        "version": 1,
        "chunk_size": block_frames,
        "left_chunks": left_blocks,
        "head": config.attention_heads,
        "num_blocks": config.num_blocks,
        "output_size": config.output_size,
        "cnn_module_kernel": config.cnn_module_kernel,
        "right_context": _RIGHT_CONTEXT,
        "subsampling_factor": SUBSAMPLING,
        "vocab_size": model.config.vocabulary,
    }
    onnx.helper.set_model_props(exported, {name: str(value) for name, value in metadata.items()})
    onnx.save(exported, str(file))


def quantise(file: Path, quantised: Path) -> None:
    """Write a model with its matrices in 8 bits, as sherpa-onnx's own export does."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # It recommends what sherpa-onnx's export does not do either.
    with quietened(logging.ERROR, ""):
        quantize_dynamic(file, quantised, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8)


def write_tokens(loaded: LoadedModel, file: Path) -> None:
    """Write the vocabulary as sherpa-onnx reads it."""
    file.write_text("".join(f"{token} {number}\n" for number, token in enumerate(loaded.vocabulary.tokens)), encoding="utf-8")
