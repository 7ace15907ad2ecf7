"""What was said in a segment, for good: one computation from all its features, the same whatever happened around it.

A final must come out the same in company and alone, live and in a replay, however the audio was cut. Floating-point arithmetic does not
give that by itself: the sum in a matrix product is taken in an order that depends on the shapes, so the last bits of a streaming step
depend on who shares it, and one bit may decide between two hypotheses. Here nothing but the segment has a say:

* The encoder takes the segment *alone*, whole, in float32 by default, in blocks of its own: longer ones than the stream's, as nothing
  waits for them (the bundled model gets a third fewer numbers wrong in blocks of 4 s). Every shape follows from the segment's length.
* The search runs in float64 over those log-probabilities, alone in its slot.
* The decoders take the n-best of this one segment; their shapes follow from the segment's hypotheses.
* Features are a function of their chunk alone (see ``agents.features``), and chunks are counted from the segment's start.

What streaming found is not used. This holds on one class of machine: another processor, library or number of threads may round
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agents.inference.conformer.model import FEATURE_OVERLAP, SUBSAMPLING, StreamingModel, TransformerDecoder
from agents.inference.conformer.streaming import Precision, StreamingEncoder
from agents.inference.decoding.endpoint import Endpoint
from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.lm import NgramLm
from agents.inference.decoding.prefix_beam import BeamOptions, NBest, PrefixBeamSearch
from agents.inference.decoding.rescoring import Rescored, decoder_inputs, rescore
from agents.inference.engine import MOST_UTTERANCES

__all__ = ["FinalDecoder", "FinalOptions", "Reading", "Stretch", "held_ends", "held_start"]

_Features = npt.NDArray[np.float32]


def held_start(features: _Features) -> _Features:
    """Return the first frame as often as a block overlaps with the one before it: so the first block is as long as all others.

    Args:
        features: (T, mel), T at least 1.
    """
    return np.repeat(features[:1], FEATURE_OVERLAP, axis=0)


def held_ends(features: _Features) -> _Features:
    """Return a segment's features with the first frame held before them, and the last behind them until they make whole encoder frames.

    So no frame is lost: T feature frames make T / 4 encoder frames, rounded up; frame i looks at feature frames 4 i - 3 to 4 i + 3.

    Args:
        features: (T, mel).
    """
    if not len(features):
        return features
    return np.concatenate((held_start(features), features, np.repeat(features[-1:], -len(features) % SUBSAMPLING, axis=0)))


@dataclass(frozen=True, slots=True)
class FinalOptions:
    """How finals are decided.

    Attributes:
        beam: hypotheses of the search, and of the rescoring.
        ctc_weight: what the search counts beside the decoders.
        reverse_weight: what the right-to-left decoder counts among the decoders.
        rescoring: whether the decoders are asked at all.
        max_frames: encoder frames of the longest segment that is expected; a longer one takes its own room.
        precision: what the encoder computes in. What the module promises holds for each: it rests on shapes.
    """

    beam: int = 10
    ctc_weight: float = 0.5
    reverse_weight: float = 0.0
    rescoring: bool = True
    max_frames: int = 500
    precision: Precision = "fp32"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a segment says.

    Attributes:
        tokens: int32, L unit ids.
        frames: int32, L; the encoder frame of each.
        token_confidences: L, 0 to 1.
        confidence: 0 to 1.
        nbest: what the search found.
        rescored: what the decoders made of it, where they were asked.
    """

    tokens: npt.NDArray[np.int32]
    frames: npt.NDArray[np.int32]
    token_confidences: npt.NDArray[np.floating]
    confidence: float
    nbest: NBest
    rescored: Rescored | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a segment that endpoint rules found: encoder frames from ``start`` to before ``stop``.

    Attributes:
        start: its first encoder frame.
        stop: one past its last.
        ruled: whether a rule ended it; else the segment did.
        reading: what it says; frames are counted from its own start.
    """

    start: int
    stop: int
    ruled: bool
    reading: Reading


class FinalDecoder:
    """See the module. Several threads may decode at the same time, each in a lane of its own.

    Args:
        model: in float32, on the device where to compute.
        lanes: how many may decode at the same time.
        block_frames: encoder frames to a block.
        left_blocks: blocks of the past that a block sees.
        options: how to decide.
        lm: a language model that the search listens to.
    """

    def __init__(
        self,
        model: StreamingModel,
        *,
        lanes: int = 1,
        block_frames: int = 5,
        left_blocks: int = 8,
        options: FinalOptions | None = None,
        lm: NgramLm | None = None,
    ) -> None:
        self._model = model
        self._options = options or FinalOptions()
        self._lm = lm
        self._encoder = StreamingEncoder(
            model, slots=lanes, block_frames=block_frames, left_blocks=left_blocks, precision=self._options.precision
        )
        self._searches = [self._search(self._options.max_frames).compile() for _ in range(lanes)]
        self._reverse_weight = self._options.reverse_weight if model.right_to_left is not None else 0.0

    def decode(self, lane: int, features: _Features, hotwords: Hotwords | None = None) -> Reading:
        """Return what a segment says.

        Args:
            lane: which nobody else uses meanwhile.
            features: (T, mel) float32, the whole segment, ends held.
            hotwords: phrases to favour.
        """
        hidden, log_probs = self._encoder.whole(lane, features)
        return self._reading(self._search_of(lane, len(log_probs)), hidden, log_probs.cpu().numpy(), hotwords)

    def utterances(self, lane: int, features: _Features, hotwords: Hotwords | None = None) -> list[Stretch]:
        """Return what a segment says, cut where the endpoint rules end an utterance; silence makes none.

        The rules look at what the canonical pass over the whole segment found, so the cuts depend on the segment alone. Where an utterance
        ends the search begins anew; the encoder heard all of the segment as one.

        Args:
            lane: as in ``decode``.
            features: as in ``decode``.
            hotwords: as in ``decode``.
        """
        hidden, log_probs = self._encoder.whole(lane, features)
        values = log_probs.cpu().numpy()
        search = self._search_of(lane, len(values))
        found: list[Stretch] = []
        start = 0
        while start < len(values):
            length = self._ends_after(search, values[start:], hotwords) if len(found) < MOST_UTTERANCES - 1 else 0
            stop = start + length if length else len(values)
            reading = self._reading(search, hidden[start:stop], values[start:stop], hotwords)
            if len(reading.tokens):
                found.append(Stretch(start, stop, bool(length), reading))
            start = stop
        return found

    def _ends_after(self, search: PrefixBeamSearch, log_probs: _Features, hotwords: Hotwords | None) -> int:
        """Return after how many of these frames a rule ends the utterance that begins with them; 0: none does."""
        search.open([0], hotwords)
        has_text = search.step([0], log_probs[None])
        search.close([0])
        blanks = log_probs[None, :, self._model.config.blank]
        return int(Endpoint(1).step([0], blanks, has_text).frames[0])

    def _reading(self, search: PrefixBeamSearch, hidden: torch.Tensor, log_probs: _Features, hotwords: Hotwords | None) -> Reading:
        search.open([0], hotwords)
        search.step([0], log_probs[None])
        nbest = search.finish([0])[0]
        search.close([0])
        if not (self._options.rescoring and len(hidden)):
            best = nbest.best
            return Reading(best.tokens, best.frames, best.token_confidences, best.confidence, nbest)
        rescored = self._rescored(hidden.float(), nbest)
        winner = nbest.hypotheses[rescored.winner]
        confidences = rescored.token_confidences[rescored.winner]
        return Reading(winner.tokens, winner.frames, confidences, rescored.confidence, nbest, rescored)

    def _search_of(self, lane: int, frames: int) -> PrefixBeamSearch:
        return self._searches[lane] if frames <= self._options.max_frames else self._search(frames)

    def _search(self, max_frames: int) -> PrefixBeamSearch:
        config = self._model.config
        return PrefixBeamSearch(1, config.vocabulary, BeamOptions(self._options.beam, max_frames, config.blank), self._lm)

    @torch.inference_mode()
    def _rescored(self, hidden: torch.Tensor, nbest: NBest) -> Rescored:
        config = self._model.config
        hypotheses = nbest.hypotheses
        inputs = decoder_inputs([hypothesis.tokens for hypothesis in hypotheses], config.sos, config.eos)

        def scores(decoder: TransformerDecoder, tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> _Features:
            on_device = (torch.from_numpy(each).to(hidden.device) for each in (tokens, targets))
            sequence, following = on_device
            frames = torch.tensor([len(hidden)], device=hidden.device)
            log_probs = torch.log_softmax(decoder(hidden[None], frames, sequence), -1)
            return np.asarray(log_probs.gather(2, following[..., None])[..., 0].cpu().numpy())

        backwards = self._model.right_to_left if self._reverse_weight > 0 else None
        return rescore(
            [[hypothesis.ctc_score + hypothesis.lm_score for hypothesis in hypotheses]],
            inputs.lengths,
            scores(self._model.left_to_right, inputs.inputs, inputs.targets),
            None if backwards is None else scores(backwards, inputs.reversed_inputs, inputs.reversed_targets),
            first_pass_weight=self._options.ctc_weight,
            reverse_weight=self._reverse_weight,
            # What hotwords bring is meant as it is said, whatever the search counts.
            bonuses=[[hypothesis.hotword_score for hypothesis in hypotheses]],
        )[0]
