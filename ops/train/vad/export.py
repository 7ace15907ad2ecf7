"""The network as an ONNX file: one step of one block, weights kept in half precision.

The graph is written by hand, so that it is as small as the network: what a general exporter adds would be larger than the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from agents.vad.tiny.bands import BANDS
from agents.vad.tiny.network import (
    BLOCK_HOPS,
    CHANNELS,
    COARSE_FACTOR,
    CONTEXT_HOPS,
    DILATIONS,
    FEATURES,
    FLOOR_DOWN,
    FLOOR_UP,
    LOG_GUARD,
    LOG_SCALE,
    LOG_SHIFT,
    MEMORY,
    STATE_SIZE,
    TinyVad,
)

__all__ = ["export"]

#: To miss speech is dearer than to take noise for it: probabilities are those of a world in which speech comes so many times as often.
#: Chosen on the development split.
_SPEECH_COUNTS: Final = 8

_OPSET: Final = 17
_IR_VERSION: Final = 8


class _Graph:
    """Nodes, and the constants that they use."""

    def __init__(self, network: TinyVad) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._weights = {name: weight.detach().numpy() for name, weight in network.named_parameters()}
        self._weights["out.bias"] = self._weights["out.bias"] + np.float32(np.log(_SPEECH_COUNTS))

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        if output in {name for node in self.nodes for name in node.output}:
            return output
        self.nodes.append(helper.make_node(kind, inputs, [output], output, **attributes))
        return output

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        if name not in {each.name for each in self.constants}:
            self.constants.append(numpy_helper.from_array(value, name))
        return name

    def scalar(self, name: str, value: float) -> str:
        return self.constant(name, np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        return self.constant("i_" + "_".join(map(str, values)), np.array(values, np.int64))

    def dense(self, layer: str, inputs: str) -> str:
        operands = [inputs]
        for name in (f"{layer}.weight", f"{layer}.bias"):
            half = self.constant(name, self._weights[name].astype(np.float16))
            operands.append(self.add("Cast", [half], f"{name}.single", to=TensorProto.FLOAT))
        return self.add("Gemm", operands, f"{layer}.out", transB=1)

    def coarse(self, inputs: str) -> str:
        """Return values rounded to 8 significant bits, by Veltkamp's splitting: so snapshots deflate better."""
        large = self.add("Mul", [inputs, self.scalar("coarse.factor", COARSE_FACTOR)], f"{inputs}.large")
        rest = self.add("Sub", [large, inputs], f"{inputs}.rest")
        return self.add("Sub", [large, rest], f"{inputs}.coarse")

    def memory(self, inputs: str, before: str) -> str:
        gate = self.add("Sigmoid", [self.dense("memory.gate", inputs)], "memory.opened")
        content = self.add("Tanh", [self.dense("memory.content", inputs)], "memory.new")
        change = self.add("Mul", [gate, self.add("Sub", [content, before], "memory.apart")], "memory.change")
        return self.add("Add", [before, change], "memory.after")

    def relu(self, inputs: str) -> str:
        return self.add("Relu", [inputs], f"{inputs}.relu")

    def cut(self, inputs: str, begin: int, end: int, axis: int = 1) -> str:
        bounds = [self.integers(begin), self.integers(end), self.integers(axis)]
        return self.add("Slice", [inputs, *bounds], f"{inputs}[{begin}:{end}]")

    def shape(self, inputs: str, *sizes: int) -> str:
        return self.add("Reshape", [inputs, self.integers(*sizes)], f"{inputs}.{'x'.join(map(str, sizes))}")


def export(network: TinyVad, path: Path) -> None:
    """Write the file.

    Its inputs are ``powers``, channels x ``BLOCK_HOPS`` x ``BANDS``, and ``state``, channels x ``STATE_SIZE``; its outputs ``speech``,
    channels x ``BLOCK_HOPS``, and ``after``, the new state; all float32. They mean what they do in :class:`TinyVad`.
    """
    graph = _Graph(network)
    add, scalar = graph.add, graph.scalar
    floor = graph.cut("state", 0, BANDS)
    context_end = BANDS + CONTEXT_HOPS * BANDS
    context = graph.shape(graph.cut("state", BANDS, context_end), -1, CONTEXT_HOPS, BANDS)

    logs = add("Log", [add("Add", ["powers", scalar("guard", LOG_GUARD)], "guarded")], "logs")
    levels = add("Mul", [add("Add", [logs, scalar("shift", LOG_SHIFT)], "shifted"), scalar("scale", LOG_SCALE)], "levels")
    mean = add("ReduceMean", [levels], "mean", axes=[1], keepdims=0)
    rise = add("Sub", [mean, floor], "rise")
    falls = add("Less", [rise, scalar("zero", 0.0)], "falls")
    share = add("Where", [falls, scalar("down", FLOOR_DOWN), scalar("up", FLOOR_UP)], "share")
    new_floor = add("Add", [floor, add("Mul", [rise, share], "move")], "floor")
    known = add("Concat", [context, levels], "known", axis=1)
    above = add("Sub", [known, graph.shape(new_floor, -1, 1, BANDS)], "above")
    seen = add("Concat", [known, above], "seen", axis=2)
    blocks = graph.relu(graph.dense("first", graph.shape(seen, -1, (CONTEXT_HOPS + BLOCK_HOPS) * FEATURES)))

    after = [new_floor, graph.shape(graph.cut(known, BLOCK_HOPS, BLOCK_HOPS + CONTEXT_HOPS), -1, CONTEXT_HOPS * BANDS)]
    begin = context_end
    for number, dilation in enumerate(DILATIONS):
        middle, end = begin + dilation * CHANNELS, begin + 2 * dilation * CHANNELS
        taps = [graph.cut("state", place, place + CHANNELS) for place in (begin, middle)]
        inner = graph.dense(f"layers.{number}.wide", add("Concat", [*taps, blocks], f"taps.{number}", axis=1))
        new = add("Add", [blocks, graph.dense(f"layers.{number}.narrow", graph.relu(inner))], f"blocks.{number}")
        after += [graph.cut("state", begin + CHANNELS, end), graph.coarse(blocks)]
        blocks, begin = new, end
    remembered = graph.memory(blocks, graph.cut("state", begin, begin + MEMORY))
    after.append(remembered)
    head = graph.relu(graph.dense("head", graph.relu(add("Concat", [blocks, remembered], "all", axis=1))))
    add("Sigmoid", [graph.dense("out", head)], "speech")
    # What is remembered is rounded to half precision, which halves snapshots.
    half = add("Cast", [add("Concat", after, "exact", axis=1)], "half", to=TensorProto.FLOAT16)
    add("Cast", [half], "after", to=TensorProto.FLOAT)

    def value(name: str, *sizes: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["channels", *sizes])

    inputs = [value("powers", BLOCK_HOPS, BANDS), value("state", STATE_SIZE)]
    outputs = [value("speech", BLOCK_HOPS), value("after", STATE_SIZE)]
    made = helper.make_graph(graph.nodes, "TinyVAD", inputs, outputs, graph.constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", _OPSET)], producer_name="asr-streams", ir_version=_IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())
