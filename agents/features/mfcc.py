"""Mel cepstra as Kaldi computes them: equal to ``torchaudio.compliance.kaldi.mfcc`` without dither, to 1e-3 of values up to about 100."""

from __future__ import annotations

import math
from typing import Final

import torch
import torchaudio

from agents.features.fbank import Fbank

__all__ = ["Mfcc"]

_MEL_BANDS: Final = 23
_CEPSTRA: Final = 13
#: Kaldi's ``cepstral_lifter``: evens out the size of the coefficients.
_LIFTER: Final = 22.0


class Mfcc(Fbank):
    """13 mel frequency cepstral coefficients of 23 bands; framed as :class:`Fbank`, called like it."""

    def __init__(self) -> None:
        super().__init__(_MEL_BANDS)
        self.dims = _CEPSTRA
        order = torch.arange(_CEPSTRA, dtype=torch.float32)
        lifter = 1.0 + 0.5 * _LIFTER * torch.sin(math.pi * order / _LIFTER)
        self._cepstra = (torchaudio.functional.create_dct(_CEPSTRA, _MEL_BANDS, norm="ortho") * lifter).T.contiguous()

    @torch.inference_mode()
    def frame_features(self, samples: torch.Tensor) -> torch.Tensor:
        """Return cepstra of shape (pieces, frames, dims); see :meth:`Fbank.frame_features`."""
        return torch.nn.functional.linear(super().frame_features(samples), self._cepstra)
