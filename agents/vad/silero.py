"""Silero VAD through ONNX Runtime: a recurrent network over windows of 32 ms, batched over channels."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

__all__ = ["Silero"]

_MODEL: Final = "silero_vad_16k_op15.onnx"
_RATE: Final = np.array(SAMPLE_RATE_HZ, np.int64)
# The LSTM's hidden and cell vectors.
_STATE_SHAPE: Final = (2, 128)


def _model_path() -> Path:
    """Return the model's file in the package ``silero-vad``, which is not imported: that would load torch.

    Raises:
        UserError: the package, or the model in it, is missing.
    """
    package = find_spec("silero_vad")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / "data" / _MODEL
        if path.is_file():
            return path
    raise UserError(f"The package silero-vad with {_MODEL} is not installed", "Install it, or set ASR_VAD=traditional.")


class Silero:
    """The network, loaded when it is first called. It implements :class:`agents.vad.detectors.NeuralDetector`."""

    window_samples: Final = 512
    context_samples: Final = 64
    state_size: Final = _STATE_SHAPE[0] * _STATE_SHAPE[1]

    @cached_property
    def _session(self) -> InferenceSession:
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = 1  # the windows are small: threads cost more than they save
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors only
        return InferenceSession(str(_model_path()), options, providers=["CPUExecutionProvider"])

    def __call__(self, windows: NDArray[np.float32], states: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Hear one window of each channel; a row's result does not depend on the other rows.

        Args:
            windows: float32, channels x (context + window) samples.
            states: float32, channels x ``state_size``; zeros at the start of a channel.

        Returns:
            The probability of speech, float32, one a channel, and the new states.
        """
        channels = len(states)
        packed = states.reshape(channels, *_STATE_SHAPE).swapaxes(0, 1)
        speech, after = self._session.run(
            None, {"input": np.ascontiguousarray(windows), "state": np.ascontiguousarray(packed), "sr": _RATE}
        )
        return speech[:, 0], after.swapaxes(0, 1).reshape(channels, self.state_size)
