"""TinyVAD at work: all channels in one call a block, on ONNX Runtime, OpenVINO or torch.

The three agree to ``TOLERANCE``. Decisions must not depend on which channels happen to share a call, and matrix kernels choose their
order of summation by the number of rows; so rows are padded to a multiple of ``ROWS``, where every row is computed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from agents.vad.tiny.bands import BANDS, band_powers
from streams.errors import UserError

__all__ = ["MODEL", "ROWS", "TOLERANCE", "Backend", "TinyDetector"]

Backend = Literal["onnx", "openvino", "torch"]

#: The network as bundled, weights in half precision; ``MODEL_CARD.md`` beside it says what it is.
MODEL: Final = "tiny_vad.onnx"
#: By so much the probabilities of two backends may differ: they sum in another order.
TOLERANCE: Final = 1e-3
#: Calls have a multiple of so many rows.
ROWS: Final = 16

#: Takes blocks and states; the new states hold what half precision can: half the snapshot. What is kept is what is used, so a restart
#: changes nothing.
_Step = Callable[[NDArray[np.float32], NDArray[np.float32]], tuple[NDArray[np.float32], NDArray[np.float32]]]


def model_path() -> Path:
    """Return the bundled model's file."""
    return Path(str(resources.files(__package__) / MODEL))


class TinyDetector:
    """The network, loaded when made. It implements :class:`agents.vad.detectors.SpectralDetector`.

    Args:
        backend: what runs it.
        path: another model file than the bundled one.

    Raises:
        UserError: the backend is not installed.
    """

    unit_hops: Final = 4
    delay_hops: Final = 16
    state_size: Final = 729

    def __init__(self, backend: Backend = "onnx", path: Path | None = None) -> None:
        load = {"onnx": _onnx_step, "openvino": _openvino_step, "torch": _torch_step}[backend]
        try:
            self._step: _Step = load(path or model_path())
        except ModuleNotFoundError as missing:
            raise UserError(
                f"ASR_VAD_BACKEND={backend} needs the Python package {missing.name}, which is not installed",
                f"Install it (pip install {missing.name}), or set ASR_VAD_BACKEND=onnx.",
            ) from missing

    def fresh(self) -> NDArray[np.float32]:
        """Return the state at the start of a channel."""
        return np.zeros(self.state_size, np.float32)

    def __call__(
        self, power: NDArray[np.float32], counts: NDArray[np.intp], states: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Hear hops; a channel's result does not depend on the other channels, nor on how its hops are spread over calls.

        Args:
            power: spectra, float32, all channels' hops one after the other x bins.
            counts: how many hops each channel has, whole blocks of ``unit_hops``, in falling order.
            states: float32, channels x ``state_size``.

        Returns:
            The probability of speech ``delay_hops`` before each hop, in the order of ``power``, and the new states.
        """
        blocks = band_powers(power).reshape(-1, self.unit_hops, BANDS)
        speech = np.zeros((len(blocks), self.unit_hops), np.float32)
        turns = counts // self.unit_hops
        after = np.empty_like(states)
        padded, active = _padded(states), len(states)
        for rows in _rows_by_turn(turns):
            channels = len(rows)
            if channels < active:  # those that have this many blocks come first
                after[channels:active] = padded[channels:active]
                padded, active = _padded(padded[:channels]), channels
            said, padded = self._step(_padded(blocks[rows]), padded)
            speech[rows] = said[:channels]
        after[:active] = padded[:active]
        return speech.reshape(-1), after


def _rows_by_turn(turns: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield which blocks, of all channels' one after the other, have their turn together."""
    firsts = np.cumsum(turns) - turns
    for turn in range(int(turns[0]) if len(turns) else 0):
        yield firsts[: int(np.searchsorted(-turns, -turn))] + turn


def _padded(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows with as many of zeros behind them as make a multiple of ``ROWS``."""
    padded = np.zeros((len(rows) + -len(rows) % ROWS, *rows.shape[1:]), np.float32)
    padded[: len(rows)] = rows
    return padded


def _onnx_step(path: Path) -> _Step:
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def step(powers: NDArray[np.float32], states: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        speech, after = session.run(["speech", "after"], {"powers": powers, "state": states})
        return speech, after

    return step


def _openvino_step(path: Path) -> _Step:
    import openvino

    hints: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(str(path), "CPU", hints).create_infer_request()

    def step(powers: NDArray[np.float32], states: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        said = request.infer({"powers": powers, "state": states})
        # It takes the rounding out of the graph.
        return said["speech"].copy(), said["after"].astype(np.float16).astype(np.float32)

    return step


def _torch_step(path: Path) -> _Step:
    import onnx
    import torch
    from onnx import numpy_helper

    from agents.vad.tiny.network import TinyVad, rounded

    network = TinyVad().eval()
    stored = {each.name: numpy_helper.to_array(each) for each in onnx.load(str(path)).graph.initializer}
    network.load_state_dict({name: torch.from_numpy(stored[name].astype(np.float32)) for name in network.state_dict()})

    def step(powers: NDArray[np.float32], states: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        with torch.inference_mode():
            speech, after = network(torch.from_numpy(powers), torch.from_numpy(states))
            return speech.numpy(), rounded(after).numpy()

    return step
