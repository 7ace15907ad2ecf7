"""The encoder and CTC head as live audio needs them: many segments of any age in one step, their past in pools that are allocated once.

It computes what ``ConformerEncoder.step`` computes, arranged for speed:

* *Keys* are cached with their position in them. WeNet's attention has no relative shift, so a score is
  ``(q + u) k + (q + v) p = q (k + p) + (u k + v p)``: one product with a sum that never changes, and a number per key that never changes
  either. That number is minus infinity for keys that have not been, which makes it the mask as well.
* The window over the past is a *ring* of ``left_blocks + 1`` blocks. The new block takes the place of the one that leaves the window;
  nothing is shifted.
* The causal convolution keeps its input *behind* the gate, so that no frame passes the first pointwise convolution twice.
* Query, key, value and ``u k`` are one matrix; the halves of the feed-forwards and the scale of the attention are in the weights.

Several blocks of a segment may be taken in one pass, masked by blocks: it leaves the pools as if they had come one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from agents.inference.conformer.model import (
    FEATURE_OVERLAP,
    SUBSAMPLING,
    ConformerLayer,
    FeedForward,
    StreamingModel,
    Subsampling,
    block_feature_frames,
)

__all__ = ["Precision", "StreamingEncoder", "default_precision"]

Precision = Literal["fp32", "bf16", "fp16", "int8"]

#: What activations are kept in; int8 is for weights and for what is multiplied with them.
_TYPES: Final[dict[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.float32,
}
_INT8_STEPS: Final = 127
#: Of both convolutions of the subsampling, over time and mel.
_KERNEL: Final = 3
_STRIDE: Final = 2

#: Names of oneDNN for what it can do at the end of a product.
_FUSED: Final[dict[type, str]] = {type(None): "none", nn.ReLU: "relu", nn.SiLU: "swish"}
#: Rows that weights are laid out for: a step of 50 segments.
_USUAL_ROWS: Final = 250

_Map = Callable[[Tensor], Tensor]
_Indices = npt.NDArray[np.int64]


def default_precision(device: torch.device) -> Precision:
    """Return the fastest precision that a device computes in without a loss that can be heard."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"  # noqa: SLF001 torch has no public name for it


#: One every 10 ms.
_FEATURES_PER_S: Final = 100
#: Sizes of step that are recorded on a GPU; what lies between is padded.
_GRAPH_ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


class _Block(NamedTuple):
    """Where a step reads and writes, the same for every layer. B rows of n frames, of which the last m are kept in the rings.

    Attributes:
        slots: (B,) int64.
        positions: absolute positions of the frames, (B * n,) int64.
        columns: places in the rings of the last m frames, (B, m) int64; None for whole segments: nothing was before, nothing follows.
        hidden: what each frame must not look at, (B, 1, n, ring + n) bool, or (B, 1, n, n) for whole segments; None for a single whole
            block, which the ring itself holds.
    """

    slots: Tensor
    positions: Tensor
    columns: Tensor | None
    hidden: Tensor | None


class _Pools(NamedTuple):
    """One layer's past, for all slots and one more that padding is written to.

    Attributes:
        keys: (slots, heads, ring, head size).
        values: the same.
        biases: (slots, heads, ring) float32; -inf where there is no key.
        history: (slots, kernel - 1, size).
    """

    keys: Tensor
    values: Tensor
    biases: Tensor
    history: Tensor


def _linear(weight: Tensor, bias: Tensor | None, precision: Precision, activation: nn.Module | None = None) -> _Map:
    """Return a matrix product in a precision, and what is to be done with each of its elements."""
    if precision == "int8":
        scale = (weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / _INT8_STEPS).double()
        quantised = torch.quantize_per_channel(weight, scale, torch.zeros_like(scale, dtype=torch.int64), 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, bias)
        return _then(lambda inputs: torch.ops.quantized.linear_dynamic(inputs, packed), activation)
    kind = _TYPES[precision]
    matrix, offset = weight.to(kind).contiguous(), None if bias is None else bias.to(kind)
    if not weight.is_cuda and (fused := _FUSED.get(type(activation))) is not None:
        # A tenth faster with many rows and a third with few: it adds the bias and maps each element while they are at hand.
        ordered = torch.ops.mkldnn._reorder_linear_weight(matrix, _USUAL_ROWS)  # noqa: SLF001 torch is pinned
        return lambda inputs: cast("Tensor", torch.ops.mkldnn._linear_pointwise(inputs, ordered, offset, fused, [], ""))  # noqa: SLF001
    return _then(lambda inputs: F.linear(inputs, matrix, offset), activation)


def _then(first: _Map, activation: nn.Module | None) -> _Map:
    return first if activation is None else lambda inputs: cast("Tensor", activation(first(inputs)))


def _norm(module: nn.Module, kind: torch.dtype) -> _Map:
    """Return a layer norm."""
    if not isinstance(module, nn.LayerNorm):
        raise TypeError(f"a layer norm is expected, not {type(module).__name__}")
    size, weight, bias, epsilon = list(module.normalized_shape), module.weight.to(kind), module.bias.to(kind), module.eps
    return lambda inputs: F.layer_norm(inputs, size, weight, bias, epsilon)


class _Embedding:
    """`Subsampling` with channels last, so that its output is a matrix as it lies in memory."""

    def __init__(self, module: Subsampling, mean: Tensor, istd: Tensor, precision: Precision) -> None:
        self._mean, self._istd = mean, istd
        self._kind = _TYPES[precision]
        # A quarter of the encoder's work. Quantised convolutions would need another layout; in bfloat16 they are as fast.
        inside = default_precision(mean.device) if precision == "int8" else precision
        self._inside = _TYPES[inside]
        first, second = (each for each in module.conv if isinstance(each, nn.Conv2d))
        # With one channel in, a convolution is a product with few columns; as such its output has the channels last.
        self._first = _linear(first.weight.flatten(1), first.bias, inside, nn.ReLU())
        self._second = second.weight.to(self._inside).contiguous(memory_format=torch.channels_last), _required(second.bias).to(self._inside)
        out = cast("nn.Linear", module.out[0])
        weight, bias = out.weight, out.bias
        # Columns from (channel, band) to (band, channel).
        by_channel = weight.view(len(weight), second.out_channels, -1)
        scale = module.pos_enc.scale
        self._out = _linear(by_channel.transpose(1, 2).reshape(len(weight), -1) * scale, bias * scale, precision)

    def __call__(self, features: Tensor) -> Tensor:
        """Turn (B, T, mel) float32 into (B, (T - 3) // 4, size)."""
        normal = ((features - self._mean) * self._istd).to(self._inside)
        patches = normal.unfold(1, _KERNEL, _STRIDE).unfold(2, _KERNEL, _STRIDE).flatten(3)
        maps = self._first(patches).permute(0, 3, 1, 2)
        maps = F.relu(F.conv2d(maps, *self._second, stride=_STRIDE), inplace=True)
        return self._out(maps.permute(0, 2, 3, 1).flatten(2).to(self._kind))


class _Layer:
    """`ConformerLayer`, with its past in pools."""

    def __init__(self, layer: ConformerLayer, table: Tensor, pools: _Pools, precision: Precision) -> None:
        self.pools = pools
        kind = _TYPES[precision]
        attention, convolution = layer.self_attn, layer.conv_module
        self._heads, self._head_size = attention.heads, attention.head_size
        size = self._heads * self._head_size
        scale = 1 / math.sqrt(self._head_size)
        self._before = _norm(layer.norm_ff_macaron, kind), *_feed_forward(layer.feed_forward_macaron, precision)
        self._after = _norm(layer.norm_ff, kind), *_feed_forward(layer.feed_forward, precision)
        self._norm_attention, self._norm_convolution = _norm(layer.norm_mha, kind), _norm(layer.norm_conv, kind)
        self._norm_final = _norm(layer.norm_final, kind)

        # Rows for query, key, value, and u k of each head.
        key_weight, key_bias = attention.linear_k.weight, attention.linear_k.bias
        by_head = key_weight.view(self._heads, self._head_size, size), key_bias.view(self._heads, self._head_size)
        u_weight = torch.einsum("hd,hdi->hi", attention.pos_bias_u, by_head[0]) * scale
        u_bias = (attention.pos_bias_u * by_head[1]).sum(1) * scale
        weight = torch.cat((attention.linear_q.weight * scale, key_weight, attention.linear_v.weight, u_weight))
        bias = torch.cat((attention.linear_q.bias * scale, key_bias, attention.linear_v.bias, u_bias))
        self._project = _linear(weight, bias, precision)
        self._widths = [size, size, size, self._heads]
        self._join = _linear(attention.linear_out.weight, attention.linear_out.bias, precision)
        positions = F.linear(table, attention.linear_pos.weight)
        self._key_positions = positions.to(kind)
        self._bias_positions = torch.einsum("phd,hd->ph", positions.view(-1, self._heads, self._head_size), attention.pos_bias_v) * scale
        self._head_numbers = torch.arange(self._heads, device=table.device)[None, None]

        self._expand = _linear(convolution.pointwise_conv1.weight[:, :, 0], convolution.pointwise_conv1.bias, precision)
        self._shrink = _linear(convolution.pointwise_conv2.weight[:, :, 0], convolution.pointwise_conv2.bias, precision)
        depthwise, depthwise_bias = convolution.depthwise_conv.weight[:, :, None], _required(convolution.depthwise_conv.bias)
        norm = convolution.norm
        if isinstance(norm, nn.BatchNorm1d):
            gain = norm.weight / torch.sqrt(_required(norm.running_var) + norm.eps)
            depthwise = depthwise * gain[:, None, None, None]
            depthwise_bias = (depthwise_bias - _required(norm.running_mean)) * gain + norm.bias
        self._norm_channels = None if isinstance(norm, nn.BatchNorm1d) else _norm(norm, kind)
        self._depthwise = depthwise.to(kind), depthwise_bias.to(kind)
        self._activation = convolution.activation
        #: What stands before a segment: zeros, behind the gate.
        self.silence = F.glu(_required(convolution.pointwise_conv1.bias), 0).to(kind)

    def __call__(self, hidden: Tensor, block: _Block) -> Tensor:
        """Take n frames of each row, (B, n, size), and keep what the next ones need."""
        norm, expand, shrink = self._before
        hidden = hidden + shrink(expand(norm(hidden)))
        hidden = hidden + self._attend(self._norm_attention(hidden), block)
        hidden = hidden + self._convolve(self._norm_convolution(hidden), block)
        norm, expand, shrink = self._after
        hidden = hidden + shrink(expand(norm(hidden)))
        return self._norm_final(hidden)

    def _attend(self, inputs: Tensor, block: _Block) -> Tensor:
        rows, frames = inputs.shape[:2]
        heads = (rows, frames, self._heads, self._head_size)
        query, key, value, bias = self._project(inputs).split_with_sizes(self._widths, -1)
        key = (key + self._key_positions.index_select(0, block.positions).view(rows, frames, -1)).reshape(heads)
        value = value.reshape(heads)
        bias = bias.float() + self._bias_positions.index_select(0, block.positions).view(rows, frames, -1)
        pools, slots = self.pools, block.slots
        if block.columns is None:
            keys, values, biases = key.transpose(1, 2), value.transpose(1, 2), bias.transpose(1, 2)
        elif block.hidden is None:
            self._keep(key, value, bias, slots, block.columns)
            keys, values, biases = (pool.index_select(0, slots) for pool in (pools.keys, pools.values, pools.biases))
        else:
            keys = torch.cat((pools.keys.index_select(0, slots), key.transpose(1, 2)), 2)
            values = torch.cat((pools.values.index_select(0, slots), value.transpose(1, 2)), 2)
            biases = torch.cat((pools.biases.index_select(0, slots), bias.transpose(1, 2)), 2)
            self._keep(key, value, bias, slots, block.columns)
        scores = query.reshape(heads).transpose(1, 2) @ keys.transpose(2, 3) + biases[:, :, None]
        if block.hidden is not None:
            scores = scores.masked_fill(block.hidden, -math.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        return self._join((weights @ values).transpose(1, 2).flatten(2))

    def _keep(self, key: Tensor, value: Tensor, bias: Tensor, slots: Tensor, columns: Tensor) -> None:
        """Write the last frames into the rings."""
        last = columns.size(1)
        place = slots[:, None, None], self._head_numbers, columns[:, :, None]
        self.pools.keys.index_put_(place, key[:, -last:])
        self.pools.values.index_put_(place, value[:, -last:])
        self.pools.biases.index_put_(place, bias[:, -last:])

    def _convolve(self, inputs: Tensor, block: _Block) -> Tensor:
        history = self.pools.history
        whole = torch.cat((history.index_select(0, block.slots), F.glu(self._expand(inputs), -1)), 1)
        history.index_copy_(0, block.slots, whole[:, whole.size(1) - history.size(1) :])
        # As an image one pixel high in the order it has in memory: faster than in one dimension, and than a sum over the taps.
        image = whole.transpose(1, 2)[:, :, None]
        filtered = F.conv2d(image, *self._depthwise, groups=whole.size(2))[:, :, 0].transpose(1, 2)
        if self._norm_channels is not None:
            filtered = self._norm_channels(filtered)
        return self._shrink(self._activation(filtered))


def _required(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise TypeError("the model lacks a bias that WeNet's models have")
    return tensor


def _feed_forward(module: FeedForward, precision: Precision) -> tuple[_Map, _Map]:
    """Return both matrices; the result counts half."""
    first, second = module.w_1, module.w_2
    return _linear(first.weight, first.bias, precision, module.activation), _linear(second.weight * 0.5, second.bias * 0.5, precision)


class StreamingEncoder:
    """See the module. One thread may call it.

    Args:
        model: whose weights to take, on the device where to compute; it may stay in use.
        slots: segments that can be in progress at the same time.
        block_frames: encoder frames to a block.
        left_blocks: blocks of the past that a block sees.
        precision: what to compute in; int8 on CPU only.
    """

    @torch.inference_mode()
    def __init__(
        self, model: StreamingModel, *, slots: int, block_frames: int = 5, left_blocks: int = 8, precision: Precision = "fp32"
    ) -> None:
        encoder, config = model.encoder, model.config.encoder
        kind = _TYPES[precision]
        self.slots, self.block_frames, self.left_blocks = slots, block_frames, left_blocks
        self.device, self.mel, self._size = encoder.global_cmvn.mean.device, config.input_dim, config.output_size
        #: Blocks that each slot's segment has taken; the last slot is for padding.
        self._taken: _Indices = np.zeros(slots + 1, dtype=np.int64)
        self._ring_blocks = left_blocks + 1
        table = encoder.embed.pos_enc.pe[0]
        self._longest_blocks = len(table) // block_frames
        self._embed = _Embedding(encoder.embed, encoder.global_cmvn.mean, encoder.global_cmvn.istd, precision)
        head_size = config.output_size // config.attention_heads
        ring = (slots + 1, config.attention_heads, self._ring_blocks * block_frames)
        self._layers = []
        for layer in encoder.encoders:
            pools = _Pools(
                keys=torch.zeros(*ring, head_size, device=self.device, dtype=kind),
                values=torch.zeros(*ring, head_size, device=self.device, dtype=kind),
                biases=torch.full(ring, -math.inf, device=self.device),
                history=torch.zeros(slots + 1, config.cnn_module_kernel - 1, config.output_size, device=self.device, dtype=kind),
            )
            self._layers.append(_Layer(cast("ConformerLayer", layer), table, pools, precision))
        self._norm = _norm(encoder.after_norm, kind)
        self._ctc = _linear(model.ctc.ctc_lo.weight, model.ctc.ctc_lo.bias, precision)
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def open(self, slots: Sequence[int]) -> None:
        """Begin segments in slots, whatever was there."""
        rows = self._begin(slots)
        for pools in self.pools:
            pools.biases.index_fill_(0, rows, -math.inf)
            # What is not looked at counts nothing, unless it is no number: one bad segment must not spoil the next.
            pools.keys.index_fill_(0, rows, 0.0)
            pools.values.index_fill_(0, rows, 0.0)

    def _begin(self, slots: Sequence[int]) -> Tensor:
        """Forget what was in slots, but for the rings, which whole segments do not look at; return the slots as an index."""
        rows = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for layer in self._layers:
            layer.pools.history[rows] = layer.silence
        self._taken[list(slots)] = 0
        return rows

    @property
    def pools(self) -> list[_Pools]:
        """The layers' pools."""
        return [layer.pools for layer in self._layers]

    def taken(self, slot: int) -> int:
        """Return how many blocks a segment has taken."""
        return int(self._taken[slot])

    @torch.inference_mode()
    def step(self, slots: Sequence[int], features: npt.NDArray[np.float32], blocks: int = 1) -> Tensor:
        """Take the next blocks of segments.

        Args:
            slots: B different slots.
            features: (B, `block_feature_frames` of that many blocks' encoder frames, mel) float32.
            blocks: how many blocks each row holds.

        Returns:
            Log-probabilities of the tokens, (B, blocks * block_frames, vocabulary) float32, on the device.
        """
        rows = np.asarray(slots, dtype=np.int64)
        before = self._advance(rows, blocks)
        positions, columns = self._places(before, blocks)
        hidden = None if blocks == 1 else self._hidden(before, blocks)
        if self.device.type == "cuda" and blocks == 1:
            return self._graph_for(len(rows)).run(rows, positions, columns, features)
        slots_at, at, into = (torch.from_numpy(each).to(self.device) for each in (rows, positions, columns))
        return self._score(self._encode(torch.from_numpy(features).to(self.device), _Block(slots_at, at, into, hidden)))

    @torch.inference_mode()
    def whole(self, slot: int, features: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        """Take a whole segment, in one pass of its own; what was in the slot is forgotten.

        Several threads may do so at the same time, each with a slot of its own.

        Args:
            slot: where to compute.
            features: (T, mel) float32, any length.

        Returns:
            The encoder's output, (`encoder_frames` of T, size), and the tokens' log-probabilities, (the same, vocabulary) float32.
        """
        rows = self._begin([slot])
        frames = max(0, (len(features) - FEATURE_OVERLAP) // SUBSAMPLING)
        if not frames:
            nothing = torch.zeros(0, self._size, device=self.device)
            return nothing, self._score(nothing)
        blocks = -(-frames // self.block_frames)
        self._advance(np.array([slot]), blocks)
        # Nothing was before, so only the segment itself is looked at; and behind its end there is nothing.
        own = np.arange(blocks)[None]
        hidden = self._unseen(own, own)[..., :frames, :frames]
        block = _Block(rows, torch.arange(frames, device=self.device), None, hidden)
        needed = np.ascontiguousarray(features[None, : block_feature_frames(frames)], np.float32)
        encoded = self._encode(torch.from_numpy(needed).to(self.device), block)[0]
        return encoded, self._score(encoded)

    def _encode(self, features: Tensor, block: _Block) -> Tensor:
        hidden = self._embed(features)
        for layer in self._layers:
            hidden = layer(hidden, block)
        return self._norm(hidden)

    def _score(self, encoded: Tensor) -> Tensor:
        return torch.log_softmax(self._ctc(encoded), -1, dtype=torch.float32)

    def _advance(self, slots: _Indices, blocks: int) -> _Indices:
        """Move on by so many blocks; return how many each segment had.

        Raises:
            ValueError: a segment would outrun the table of positions.
        """
        before = self._taken[slots]
        if (before + blocks > self._longest_blocks).any():
            seconds = self._longest_blocks * self.block_frames * SUBSAMPLING / _FEATURES_PER_S
            raise ValueError(f"a segment is longer than the {seconds:g} s that the model has positions for")
        self._taken[slots] = before + blocks
        return before

    def _places(self, before: _Indices, blocks: int) -> tuple[_Indices, _Indices]:
        """Return the positions of the rows' next frames, and where in the ring they go."""
        positions = before[:, None] * self.block_frames + np.arange(blocks * self.block_frames)
        ring = self._ring_blocks * self.block_frames
        return positions.reshape(-1), positions[:, -ring:] % ring

    def _hidden(self, before: _Indices, blocks: int) -> Tensor:
        """Return what the frames of several blocks must not look at: of the ring and of themselves, (B, 1, n, ring + n) bool."""
        places = np.arange(self._ring_blocks)
        # The newest block in each place of a ring whose next block is ``before``.
        newest = before[:, None] - 1
        in_ring = newest - (newest - places) % self._ring_blocks
        own = before[:, None] + np.arange(blocks)
        return self._unseen(own, np.concatenate((in_ring, own), 1))

    def _unseen(self, own: _Indices, others: _Indices) -> Tensor:
        """Return what the frames of some blocks must not look at in those of others, (B, 1, n, m) bool."""
        distance = own[:, :, None] - others[:, None]
        hidden = (distance < 0) | (distance > self.left_blocks)
        return torch.from_numpy(hidden.repeat(self.block_frames, 1).repeat(self.block_frames, 2)[:, None]).to(self.device)

    def _graph_for(self, rows: int) -> _Graph:
        """Return the smallest graph that so many rows fit in."""
        size = min((size for size in _GRAPH_ROWS if size >= rows), default=rows)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = _Graph(self, lambda features, block: self._score(self._encode(features, block)), size)
        return graph


class _Graph:
    """A step of one size, recorded once and replayed: on a GPU, starting the kernels one by one takes longer than the kernels."""

    def __init__(self, encoder: StreamingEncoder, step: Callable[[Tensor, _Block], Tensor], rows: int) -> None:
        device, block = encoder.device, encoder.block_frames
        self._padding = encoder.slots
        self._slots = torch.full((rows,), self._padding, device=device)
        self._positions = torch.zeros(rows * block, dtype=torch.int64, device=device)
        self._columns = torch.zeros(rows, block, dtype=torch.int64, device=device)
        self._features = torch.zeros(rows, block_feature_frames(block), encoder.mel, device=device)
        place = _Block(self._slots, self._positions, self._columns, None)
        # Recording needs libraries that are warm, on a stream of its own; all rows are padding, so it changes no segment.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step(self._features, place)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = step(self._features, place)

    def run(self, slots: _Indices, positions: _Indices, columns: _Indices, features: npt.NDArray[np.float32]) -> Tensor:
        """Take a step of at most as many rows."""
        rows = len(slots)
        self._slots[rows:] = self._padding
        for target, source in ((self._slots, slots), (self._positions, positions), (self._columns, columns), (self._features, features)):
            target[: len(source)].copy_(torch.from_numpy(source), non_blocking=True)
        self._graph.replay()
        return self._result[:rows]
