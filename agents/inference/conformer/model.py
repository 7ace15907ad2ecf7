"""WeNet's streaming Conformer: encoder, CTC head and attention decoders, with WeNet's parameter names.

Two ways through the encoder give the same output. ``forward`` takes whole utterances and hides from each frame what its block could not
know yet (training, and finals). ``step`` takes one block of each of many sessions, whatever their age, and carries what they need to know
of the past in an `EncoderState` of fixed shape. Both are written to be read against WeNet; ``streaming.py`` does the same as ``step``,
faster.

Time in the encoder is counted in *encoder frames* of 40 ms (four feature frames of 10 ms). One block of C encoder frames reads
``4 * C + 3`` feature frames, the last three of which the next block reads again.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple, cast

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

__all__ = [
    "FEATURE_OVERLAP",
    "SUBSAMPLING",
    "DecoderConfig",
    "EncoderConfig",
    "EncoderState",
    "ModelConfig",
    "StreamingModel",
    "block_feature_frames",
    "block_mask",
    "encoder_frames",
]

#: Feature frames to one encoder frame.
SUBSAMPLING: Final = 4
#: The first convolution takes 3 frames of features, the second 3 of those two apart: 7 frames make one encoder frame, 4 more the next.
_RECEPTIVE_FRAMES: Final = 7
#: Feature frames at a block's end that the next block needs again.
FEATURE_OVERLAP: Final = _RECEPTIVE_FRAMES - SUBSAMPLING
#: 5,000 encoder frames are 200 s; WeNet's table has as many.
MAX_POSITIONS: Final = 5000


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder's shape, in WeNet's names; defaults are WeNet's."""

    input_dim: int = 80
    output_size: int = 256
    attention_heads: int = 4
    linear_units: int = 2048
    num_blocks: int = 6
    cnn_module_kernel: int = 15
    cnn_module_norm: Literal["batch_norm", "layer_norm"] = "batch_norm"
    activation_type: Literal["swish", "relu", "gelu"] = "swish"
    dropout_rate: float = 0.1
    positional_dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.0


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The attention decoder's shape, in WeNet's names; ``r_num_blocks`` above 0 adds a right-to-left one."""

    attention_heads: int = 4
    linear_units: int = 2048
    num_blocks: int = 6
    r_num_blocks: int = 0
    dropout_rate: float = 0.1
    positional_dropout_rate: float = 0.1
    self_attention_dropout_rate: float = 0.0
    src_attention_dropout_rate: float = 0.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model: its parts and the tokens with a meaning of their own."""

    vocabulary: int
    blank: int = 0
    sos: int
    eos: int
    encoder: EncoderConfig = EncoderConfig()
    decoder: DecoderConfig = DecoderConfig()


class EncoderState(NamedTuple):
    """What the encoder knows of each session's past; the first axis is the session.

    Attributes:
        offset: encoder frames so far, (B,) int64.
        attention: keys and values of the last K encoder frames, right-aligned, (B, layers, heads, K, 2 * head size).
        convolution: the inputs of the causal convolutions, (B, layers, d, kernel - 1).
        valid: which of the K frames have been, (B, K) bool.
    """

    offset: Tensor
    attention: Tensor
    convolution: Tensor
    valid: Tensor


def block_feature_frames(block_frames: int) -> int:
    """Return how many feature frames a block of ``block_frames`` encoder frames reads."""
    return SUBSAMPLING * block_frames + FEATURE_OVERLAP


def encoder_frames(feature_frames: Tensor) -> Tensor:
    """Return how many encoder frames so many feature frames make."""
    return ((feature_frames - FEATURE_OVERLAP) // SUBSAMPLING).clamp(min=0)


def block_mask(frames: int, block_frames: int, left_blocks: int, device: torch.device | None = None) -> Tensor:
    """Return which frames each frame may look at: (frames, frames) bool.

    A frame sees its own block to the end and ``left_blocks`` before it (all, if negative). ``block_frames`` of 0 or less means the whole
    utterance.

    >>> block_mask(5, 2, 1).int().tolist()
    [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    """
    if block_frames <= 0:
        return torch.ones(frames, frames, dtype=torch.bool, device=device)
    block = torch.arange(frames, device=device) // block_frames
    distance = block[:, None] - block[None, :]
    return (distance >= 0) if left_blocks < 0 else (distance >= 0) & (distance <= left_blocks)


def position_table(positions: int, size: int) -> Tensor:
    """Return the sinusoids of the positions, (1, positions, size), built in float32 as WeNet builds them."""
    position = torch.arange(positions, dtype=torch.float32)[:, None]
    rate = torch.exp(torch.arange(0, size, 2, dtype=torch.float32) * -(math.log(10_000.0) / size))
    table = torch.zeros(1, positions, size)
    table[0, :, 0::2] = torch.sin(position * rate)
    table[0, :, 1::2] = torch.cos(position * rate)
    return table


def _activation(name: str) -> nn.Module:
    activations: dict[str, type[nn.Module]] = {"swish": nn.SiLU, "relu": nn.ReLU, "gelu": nn.GELU}
    return activations[name]()


class GlobalCmvn(nn.Module):
    """Features to zero mean and unit variance, over the training set."""

    mean: Tensor
    istd: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("istd", torch.ones(size))

    def forward(self, features: Tensor) -> Tensor:
        """Normalise (..., size)."""
        return (features - self.mean) * self.istd


class PositionalEncoding(nn.Module):
    """The table of positions; the checkpoint's own, where it has one."""

    pe: Tensor

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.scale = math.sqrt(size)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", position_table(MAX_POSITIONS, size))

    def forward(self, inputs: Tensor) -> Tensor:
        """Add positions from 0 to (B, T, size)."""
        encoded: Tensor = self.dropout(inputs * self.scale + self.pe[:, : inputs.size(1)])
        return encoded


class Subsampling(nn.Module):
    """Two convolutions with stride 2 over time and mel: 4 feature frames to one encoder frame."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.output_size
        self.conv = nn.Sequential(nn.Conv2d(1, size, 3, 2), nn.ReLU(), nn.Conv2d(size, size, 3, 2), nn.ReLU())
        self.out = nn.Sequential(nn.Linear(size * (((config.input_dim - 1) // 2 - 1) // 2), size))
        self.pos_enc = PositionalEncoding(size, config.positional_dropout_rate)

    def forward(self, features: Tensor) -> Tensor:
        """Turn (B, T, mel) into (B, (T - 3) // 4, size)."""
        maps = self.conv(features[:, None])
        embedded: Tensor = self.pos_enc.dropout(self.out(maps.transpose(1, 2).flatten(2)) * self.pos_enc.scale)
        return embedded


class RelativeAttention(nn.Module):
    """Multi-head attention with a position term; like WeNet's, without the shift, so that the term is of absolute positions."""

    def __init__(self, heads: int, size: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_size = heads, size // heads
        self.linear_q = nn.Linear(size, size)
        self.linear_k = nn.Linear(size, size)
        self.linear_v = nn.Linear(size, size)
        self.linear_out = nn.Linear(size, size)
        self.linear_pos = nn.Linear(size, size, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(heads, self.head_size))
        self.pos_bias_v = nn.Parameter(torch.empty(heads, self.head_size))
        nn.init.xavier_uniform_(self.pos_bias_u)
        nn.init.xavier_uniform_(self.pos_bias_v)
        self.dropout = nn.Dropout(dropout)

    def _split(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], self.heads, self.head_size).transpose(-3, -2)

    def _attend(self, scores: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        # The lowest finite number instead of -inf: padding rows that may look at nothing must not become NaN.
        weights = torch.softmax(scores.float().masked_fill(~mask, torch.finfo(torch.float32).min), dim=-1).masked_fill(~mask, 0.0)
        mixed = self.dropout(weights.to(value.dtype)) @ value
        attended: Tensor = self.linear_out(mixed.transpose(1, 2).flatten(2))
        return attended

    def forward(self, inputs: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Attend within whole utterances.

        Args:
            inputs: (B, T, size).
            positions: the rows of the position table for them, (T, size).
            mask: what each frame may look at, (B or 1, 1, T, T) bool.

        Returns:
            (B, T, size).
        """
        query, key, value = (self._split(linear(inputs)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        position = self._split(self.linear_pos(positions))
        by_content = (query + self.pos_bias_u[:, None]) @ key.transpose(-2, -1)
        by_position = (query + self.pos_bias_v[:, None]) @ position.transpose(-2, -1)
        return self._attend((by_content + by_position) / math.sqrt(self.head_size), mask, value)

    def step(self, inputs: Tensor, positions: Tensor, mask: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from a block to the cached past and to itself.

        Args:
            inputs: (B, C, size).
            positions: the rows of the position table of past and block, each session its own, (B, K + C, size).
            mask: (B, 1, 1, K + C) bool.
            cache: keys and values, (B, heads, K, 2 * head size).

        Returns:
            (B, C, size) and the cache with the block at its end, (B, heads, K + C, 2 * head size).
        """
        query, key, value = (self._split(linear(inputs)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        cache = torch.cat((cache, torch.cat((key, value), -1)), 2)
        key, value = cache.chunk(2, -1)
        by_content = (query + self.pos_bias_u[:, None]) @ key.transpose(-2, -1)
        # The positions differ by session. Projecting the few queries instead of all positions, q (W p) = (q W) p, is the cheaper side.
        weight = self.linear_pos.weight.view(self.heads, self.head_size, -1)
        by_position = ((query + self.pos_bias_v[:, None]) @ weight) @ positions[:, None].transpose(-2, -1)
        return self._attend((by_content + by_position) / math.sqrt(self.head_size), mask, value), cache


class CausalConvolution(nn.Module):
    """Pointwise convolution with a gate, causal depthwise convolution, norm, activation, pointwise convolution."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.output_size
        self.history = config.cnn_module_kernel - 1
        self.pointwise_conv1 = nn.Conv1d(size, 2 * size, 1)
        self.depthwise_conv = nn.Conv1d(size, size, config.cnn_module_kernel, groups=size)
        self.over_channels = config.cnn_module_norm == "layer_norm"
        self.norm: nn.Module = nn.LayerNorm(size) if self.over_channels else nn.BatchNorm1d(size)
        self.pointwise_conv2 = nn.Conv1d(size, size, 1)
        self.activation = _activation(config.activation_type)

    def forward(self, inputs: Tensor, history: Tensor) -> Tensor:
        """Convolve.

        Args:
            inputs: (B, T, size).
            history: the inputs before them, (B, size, kernel - 1); zeros at an utterance's start.

        Returns:
            (B, T, size).
        """
        # As matrix products over (B, T, size): the pointwise convolutions are faster so, and no transposes are needed for them.
        whole = torch.cat((history.transpose(1, 2), inputs), 1)
        gated = F.glu(F.linear(whole, self.pointwise_conv1.weight[:, :, 0], self.pointwise_conv1.bias), -1)
        # As a convolution over an image one pixel high, in the memory order it has: up to nine times as fast on CPU, in bfloat16, as the
        # same in one dimension.
        image = gated.transpose(1, 2)[:, :, None].contiguous(memory_format=torch.channels_last)
        filtered = F.conv2d(image, self.depthwise_conv.weight[:, :, None], self.depthwise_conv.bias, groups=gated.size(2))[:, :, 0]
        normed = self.norm(filtered.transpose(1, 2)) if self.over_channels else self.norm(filtered).transpose(1, 2)
        return F.linear(self.activation(normed), self.pointwise_conv2.weight[:, :, 0], self.pointwise_conv2.bias)


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, size: int, units: int, dropout: float, activation: str) -> None:
        super().__init__()
        self.w_1 = nn.Linear(size, units)
        self.activation = _activation(activation)
        self.dropout = nn.Dropout(dropout)
        self.w_2 = nn.Linear(units, size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (..., size) to (..., size)."""
        result: Tensor = self.w_2(self.dropout(self.activation(self.w_1(inputs))))
        return result


class ConformerLayer(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, each normalised before and added to its input."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.output_size
        self.self_attn = RelativeAttention(config.attention_heads, size, config.attention_dropout_rate)
        self.feed_forward = FeedForward(size, config.linear_units, config.dropout_rate, config.activation_type)
        self.feed_forward_macaron = FeedForward(size, config.linear_units, config.dropout_rate, config.activation_type)
        self.conv_module = CausalConvolution(config)
        self.norm_ff = nn.LayerNorm(size)
        self.norm_mha = nn.LayerNorm(size)
        self.norm_ff_macaron = nn.LayerNorm(size)
        self.norm_conv = nn.LayerNorm(size)
        self.norm_final = nn.LayerNorm(size)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, inputs: Tensor, positions: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        """Take whole utterances; see `RelativeAttention.forward`. ``padding`` is True where there is no frame, (B, T, 1)."""
        hidden = inputs + 0.5 * self.dropout(self.feed_forward_macaron(self.norm_ff_macaron(inputs)))
        hidden = hidden + self.dropout(self.self_attn(self.norm_mha(hidden), positions, mask))
        history = hidden.new_zeros(len(hidden), hidden.size(2), self.conv_module.history)
        convolved = self.conv_module(self.norm_conv(hidden).masked_fill(padding, 0.0), history)
        hidden = hidden + self.dropout(convolved.masked_fill(padding, 0.0))
        hidden = hidden + 0.5 * self.dropout(self.feed_forward(self.norm_ff(hidden)))
        result: Tensor = self.norm_final(hidden)
        return result

    def step(
        self, inputs: Tensor, positions: Tensor, mask: Tensor, attention: Tensor, convolution: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a block; see `RelativeAttention.step`. Returns the output and both caches, moved on."""
        hidden = inputs + 0.5 * self.feed_forward_macaron(self.norm_ff_macaron(inputs))
        attended, attention = self.self_attn.step(self.norm_mha(hidden), positions, mask, attention)
        hidden = hidden + attended
        normed = self.norm_conv(hidden)
        hidden = hidden + self.conv_module(normed, convolution)
        hidden = hidden + 0.5 * self.feed_forward(self.norm_ff(hidden))
        past = torch.cat((convolution, normed.transpose(1, 2)), 2)
        return self.norm_final(hidden), attention, past[:, :, past.size(2) - self.conv_module.history :]


class ConformerEncoder(nn.Module):
    """Features to hidden states."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.global_cmvn = GlobalCmvn(config.input_dim)
        self.embed = Subsampling(config)
        self.encoders = nn.ModuleList(ConformerLayer(config) for _ in range(config.num_blocks))
        self.after_norm = nn.LayerNorm(config.output_size)

    def forward(self, features: Tensor, feature_frames: Tensor, block_frames: int = 0, left_blocks: int = -1) -> tuple[Tensor, Tensor]:
        """Encode whole utterances, each frame seeing what it would see in a stream of such blocks.

        Args:
            features: (B, T, mel) float32, padded with anything.
            feature_frames: how many are real, (B,) int64.
            block_frames: encoder frames to a block; 0 for full context.
            left_blocks: blocks of the past that a block sees; negative for all.

        Returns:
            (B, T', size), and how many frames of them are real, (B,) int64.
        """
        hidden = self.embed(self.global_cmvn(features))
        frames, lengths = hidden.size(1), encoder_frames(feature_frames)
        real = torch.arange(frames, device=hidden.device) < lengths[:, None]
        mask = (block_mask(frames, block_frames, left_blocks, hidden.device) & real[:, None])[:, None]
        padding = ~real[:, :, None]
        positions = self.embed.pos_enc.dropout(self.embed.pos_enc.pe[0, :frames])
        for layer in self.encoders:
            hidden = layer(hidden, positions, mask, padding)
        return self.after_norm(hidden), lengths

    def start(
        self, sessions: int, cached_frames: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> EncoderState:
        """Return the state of sessions that have heard nothing; they will look back ``cached_frames`` encoder frames."""
        config = self.config
        head_size = config.output_size // config.attention_heads
        return EncoderState(
            offset=torch.zeros(sessions, dtype=torch.int64, device=device),
            attention=torch.zeros(
                sessions, config.num_blocks, config.attention_heads, cached_frames, 2 * head_size, device=device, dtype=dtype
            ),
            convolution=torch.zeros(
                sessions, config.num_blocks, config.output_size, config.cnn_module_kernel - 1, device=device, dtype=dtype
            ),
            valid=torch.zeros(sessions, cached_frames, dtype=torch.bool, device=device),
        )

    def step(self, features: Tensor, feature_frames: Tensor, state: EncoderState) -> tuple[Tensor, EncoderState]:
        """Encode one block of each session.

        Args:
            features: (B, `block_feature_frames`, mel) float32.
            feature_frames: how many are real, (B,) int64: fewer only in a session's last block.
            state: the sessions' past.

        Returns:
            (B, C, size), of which a short block's `encoder_frames` are meaningful, and the state to go on with. It grows by whole blocks.
        """
        hidden = self.embed(self.global_cmvn(features))
        block, cached = hidden.size(1), state.valid.size(1)
        real = torch.arange(block, device=hidden.device) < encoder_frames(feature_frames)[:, None]
        valid = torch.cat((state.valid, real), 1)
        ages = torch.arange(-cached, block, device=hidden.device)
        positions = self.embed.pos_enc.pe[0][(state.offset[:, None] + ages).clamp(min=0)].to(hidden.dtype)
        attention, convolution = [], []
        for number, layer in enumerate(self.encoders):
            hidden, keys_values, history = cast("ConformerLayer", layer).step(
                hidden, positions, valid[:, None, None], state.attention[:, number], state.convolution[:, number]
            )
            attention.append(keys_values[:, :, block:])
            convolution.append(history)
        moved = EncoderState(state.offset + block, torch.stack(attention, 1), torch.stack(convolution, 1), valid[:, block:])
        return self.after_norm(hidden), moved


class Ctc(nn.Module):
    """The CTC head."""

    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__()
        self.ctc_lo = nn.Linear(size, vocabulary)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities of the tokens, (B, T, vocabulary) float32."""
        return torch.log_softmax(self.ctc_lo(hidden).float(), -1)


class Attention(nn.Module):
    """Multi-head attention of the decoders."""

    def __init__(self, heads: int, size: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_size = heads, size // heads
        self.linear_q = nn.Linear(size, size)
        self.linear_k = nn.Linear(size, size)
        self.linear_v = nn.Linear(size, size)
        self.linear_out = nn.Linear(size, size)
        self.dropout_rate = dropout

    def forward(self, queries: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Attend from (B, L, size) to (B or 1, T, size), one memory for all; ``mask`` (B or 1, 1, L or 1, T) bool."""
        query, key, value = (
            linear(inputs).view(len(inputs), -1, self.heads, self.head_size).transpose(1, 2).expand(len(queries), -1, -1, -1)
            for linear, inputs in ((self.linear_q, queries), (self.linear_k, memory), (self.linear_v, memory))
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=self.dropout_rate if self.training else 0.0)
        attended: Tensor = self.linear_out(mixed.transpose(1, 2).flatten(2))
        return attended


class DecoderLayer(nn.Module):
    """Attention to the tokens so far, attention to the encoder, feed-forward."""

    def __init__(self, size: int, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.attention_heads, size, config.self_attention_dropout_rate)
        self.src_attn = Attention(config.attention_heads, size, config.src_attention_dropout_rate)
        self.feed_forward = FeedForward(size, config.linear_units, config.dropout_rate, "relu")
        self.norm1 = nn.LayerNorm(size)
        self.norm2 = nn.LayerNorm(size)
        self.norm3 = nn.LayerNorm(size)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, hidden: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Map (B, L, size) to (B, L, size)."""
        normed = self.norm1(hidden)
        hidden = hidden + self.dropout(self.self_attn(normed, normed, mask))
        hidden = hidden + self.dropout(self.src_attn(self.norm2(hidden), memory, memory_mask))
        result: Tensor = hidden + self.dropout(self.feed_forward(self.norm3(hidden)))
        return result


class TransformerDecoder(nn.Module):
    """Tokens so far and the encoder's output to the next token."""

    def __init__(self, vocabulary: int, size: int, config: DecoderConfig, layers: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(vocabulary, size), PositionalEncoding(size, config.positional_dropout_rate))
        self.decoders = nn.ModuleList(DecoderLayer(size, config) for _ in range(layers))
        self.after_norm = nn.LayerNorm(size)
        self.output_layer = nn.Linear(size, vocabulary)

    def forward(self, memory: Tensor, memory_frames: Tensor, tokens: Tensor) -> Tensor:
        """Score every next token.

        Args:
            memory: the encoder's output, (B, T, size), or (1, T, size) for all rows.
            memory_frames: how much of it is real, (B or 1,) int64.
            tokens: sos and the tokens so far, (B, L) int64; padding at the end disturbs nothing before it.

        Returns:
            Logits, (B, L, vocabulary).
        """
        length = tokens.size(1)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None, None]
        memory_mask = (torch.arange(memory.size(1), device=memory.device) < memory_frames[:, None])[:, None, None]
        hidden = self.embed(tokens)
        for layer in self.decoders:
            hidden = layer(hidden, mask, memory, memory_mask)
        result: Tensor = self.output_layer(self.after_norm(hidden))
        return result


class BiTransformerDecoder(nn.Module):
    """Two decoders: one reads the tokens left to right, the other right to left."""

    def __init__(self, vocabulary: int, size: int, config: DecoderConfig) -> None:
        super().__init__()
        self.left_decoder = TransformerDecoder(vocabulary, size, config, config.num_blocks)
        self.right_decoder = TransformerDecoder(vocabulary, size, config, config.r_num_blocks)


class StreamingModel(nn.Module):
    """Encoder, CTC head and decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.output_size
        self.encoder = ConformerEncoder(config.encoder)
        self.ctc = Ctc(size, config.vocabulary)
        self.decoder: TransformerDecoder | BiTransformerDecoder = (
            BiTransformerDecoder(config.vocabulary, size, config.decoder)
            if config.decoder.r_num_blocks
            else TransformerDecoder(config.vocabulary, size, config.decoder, config.decoder.num_blocks)
        )

    @property
    def left_to_right(self) -> TransformerDecoder:
        """The decoder that reads left to right."""
        return self.decoder.left_decoder if isinstance(self.decoder, BiTransformerDecoder) else self.decoder

    @property
    def right_to_left(self) -> TransformerDecoder | None:
        """The decoder that reads right to left, where the model has one; it takes sos and the reversed tokens."""
        return self.decoder.right_decoder if isinstance(self.decoder, BiTransformerDecoder) else None
