"""The engine ``conformer``: streaming recognition of many segments at once, with WeNet's models.

*Live*: each block of 200 ms goes through the encoder in one step over all segments that have one (``streaming.py``), then through the beam
search; the best hypothesis is the partial text. *Finals*: one computation of the whole segment that depends on nothing else
(``finals.py``).

How a segment becomes blocks. A block of C encoder frames takes ``4 C`` new feature frames and reads 3 before them again. The engine keeps
those; before a segment's first frame stands that frame, three times, so that the first block is as long as the others and nothing waits for
the next one. Feature frames that do not make a block wait for more; at the segment's end they are left to the final, which holds the last
frame until the frames make whole encoder frames. Several blocks that wait are taken in one pass.

A segment may go without partials, to its end: the batcher says so when the machine has more to do than it can (``Block.quiet``), and it
is so for segments beyond the engine's slots or longer than its search. Its features are kept, and its final is the same.
"""

from __future__ import annotations

import hashlib
import logging
import queue
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from agents.inference.conformer.finals import FinalDecoder, FinalOptions, Reading, held_ends, held_start
from agents.inference.conformer.loader import LoadedModel, load_model
from agents.inference.conformer.model import FEATURE_OVERLAP, SUBSAMPLING
from agents.inference.conformer.streaming import Precision, StreamingEncoder, default_precision
from agents.inference.conformer.words import languages_of, words_of
from agents.inference.decoding.hotwords import Hotwords
from agents.inference.decoding.lm import NgramLm
from agents.inference.decoding.prefix_beam import BeamOptions, PrefixBeamSearch
from agents.inference.decoding.units import UnitTable
from agents.inference.engine import HOTWORD_VERSIONS_KEPT, Block, EngineError, FinalText, Finish, Hypothesis, Opening, SegmentKey, Utterance
from agents.inference.postprocess import Writer, WritingOptions, Written, joined
from schemas.records import SAMPLE_RATE_HZ, Word

__all__ = ["ConformerEngine", "ConformerOptions", "conformer_engine"]

log = logging.getLogger(__name__)

_Features = npt.NDArray[np.float32]

_HOP_SAMPLES: Final = SAMPLE_RATE_HZ // 100
_SAMPLES_PER_MS: Final = SAMPLE_RATE_HZ // 1_000
_ENCODER_FRAME_MS: Final = 40
_ENCODER_FRAME_SAMPLES: Final = _ENCODER_FRAME_MS * _SAMPLES_PER_MS
_FLOAT_BYTES: Final = 4
_LM_FILE: Final = "lm.arpa"
#: 5 s of audio: about as much work as a step of 25 segments.
_BLOCKS_AT_ONCE: Final = 25


@dataclass(slots=True, eq=False)
class _Segment:
    """A segment's features, and what of them the stream has not taken.

    Attributes:
        pieces: all features, as they came.
        waiting: what the stream has not taken, the overlap included, (frames, mel); None: it takes no more.
        slot: where its past is; None: it has none yet.
    """

    opening: Opening
    pieces: list[_Features] = field(default_factory=list)
    waiting: _Features | None = None
    slot: int | None = None
    quiet: bool = False
    hops: int = 0
    heard: tuple[bytes, int] = (b"", 0)
    text: str = ""
    stable_text: str = ""

    def take(self, block: Block, mel: int) -> None:
        """Add a block's features.

        Raises:
            ValueError: they are not what the model takes.
        """
        self.hops += block.hops
        if len(block.features) % (mel * _FLOAT_BYTES):
            raise ValueError(f"{len(block.features)} bytes of features are no whole frames of {mel} float32: the model needs fbank")
        piece = np.frombuffer(block.features, dtype="<f4").reshape(-1, mel)
        if not len(piece):
            return
        if not np.isfinite(piece).all():
            raise ValueError("a feature is not a number")
        self.pieces.append(piece)
        if self.quiet:
            return
        before = held_start(piece) if self.waiting is None else self.waiting
        self.waiting = np.concatenate((before, piece))

    def blocks_due(self, stride: int) -> int:
        """Return how many whole blocks of ``stride`` feature frames wait."""
        return 0 if self.waiting is None or self.quiet else (len(self.waiting) - FEATURE_OVERLAP) // stride

    def next_window(self, blocks: int, stride: int) -> _Features:
        """Return the features of the next blocks, and keep what is behind them."""
        if self.waiting is None:
            raise RuntimeError("nothing waits")
        window = self.waiting[: blocks * stride + FEATURE_OVERLAP]
        self.waiting = self.waiting[blocks * stride :]
        return window

    def features(self, mel: int) -> _Features:
        """Return all features, (frames, mel)."""
        return np.concatenate(self.pieces) if self.pieces else np.empty((0, mel), np.float32)


class ConformerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to recognise.

    Attributes:
        device: ``cpu``, ``cuda`` or ``auto``.
        precision: what partials are computed in: ``auto``, ``fp32``, ``bf16``, ``fp16`` (CUDA), ``int8`` (CPU).
        final_precision: what finals are computed in: the same, without ``auto``.
        threads: CPU threads of the live lane, and of each final.
        finals_lanes: finals that are decoded at the same time.
        slots: segments that can have partials at the same time.
        block_frames: encoder frames to a block; 5 are 200 ms.
        left_blocks: blocks of the past that a block sees.
        final_block_frames: encoder frames to a block in finals, which need not wait for what comes: 100 are 4 s; 0: as live.
        final_left_blocks: blocks of the past that such a block sees.
        beam: hypotheses that the searches follow.
        ctc_weight: what the search counts beside the attention decoders.
        reverse_weight: what the right-to-left decoder counts; None: as the model says.
        rescoring: whether the attention decoders have a say in finals.
        lm: an n-gram in ARPA format that the searches listen to; empty: ``lm.arpa`` in the model's directory, where there is one.
        lm_weight: what its log-probabilities count.
        lm_word_bonus: what each word gets beside them, so that few words are not preferred.
        longest_ms: the longest segment that is expected.
        endpoints: whether endpoint rules cut finals into utterances, for want of a detector that ends segments where speech ends.
        language: BCP 47 tag for sessions that name none.
        numbers: write numbers in finals as digits.
        punctuation: set punctuation in finals.
        capitals: begin sentences in finals with capitals.
        cache_dir: where compiled grammars are kept; empty: nowhere.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision | Literal["auto"] = "auto"
    final_precision: Precision = "fp32"
    threads: int = 1
    finals_lanes: int = 1
    slots: int = 128
    block_frames: int = 5
    left_blocks: int = 16
    final_block_frames: int = 100
    final_left_blocks: int = 4
    beam: int = 10
    ctc_weight: float = 0.8
    reverse_weight: float | None = None
    rescoring: bool = True
    lm: str = ""
    lm_weight: float = 0.5
    lm_word_bonus: float = 0.5
    longest_ms: int = 20_000
    endpoints: bool = False
    language: str = ""
    numbers: bool = True
    punctuation: bool = True
    capitals: bool = True
    cache_dir: str = ""


def conformer_engine(folder: str, **options: Any) -> ConformerEngine:
    """Make an engine from plain values, as they come from another process; see `ConformerEngine`."""
    return ConformerEngine(Path(folder), msgspec.convert(options, ConformerOptions))


class ConformerEngine:
    """See the module.

    Args:
        folder: a WeNet model directory.
        options: how to recognise.

    Raises:
        ModelError: the model cannot be used.
        EngineError: the device or the precision cannot be had.
        ValueError: the language model cannot be used.
    """

    name = "conformer"
    finals_batch = 1
    blocks_at_once = _BLOCKS_AT_ONCE

    def __init__(self, folder: Path, options: ConformerOptions | None = None) -> None:
        self._options = options = options or ConformerOptions()
        device = _device(options.device)
        torch.set_num_threads(options.threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # finals are to be exact
        loaded = load_model(folder)
        model = loaded.model.to(device)
        self._units = UnitTable(loaded.vocabulary.tokens, loaded.vocabulary.bpe_model)
        lm, self.model_digest = self._with_lm(folder, loaded.digest)
        self._mel, self._stride = model.config.encoder.input_dim, SUBSAMPLING * options.block_frames
        self._max_frames = -(-options.longest_ms // _ENCODER_FRAME_MS) + options.block_frames

        precision = default_precision(device) if options.precision == "auto" else _possible(options.precision, device)
        blocks: dict[str, int] = {"block_frames": options.block_frames, "left_blocks": options.left_blocks}
        self._encoder = StreamingEncoder(model, slots=options.slots, precision=precision, **blocks)
        beam = BeamOptions(options.beam, self._max_frames, model.config.blank)
        self._search = PrefixBeamSearch(options.slots, model.config.vocabulary, beam, lm).compile()
        self._free_slots = list(reversed(range(options.slots)))

        self.finals_lanes = options.finals_lanes
        lanes = range(max(1, options.finals_lanes))
        final_options = FinalOptions(
            beam=options.beam,
            ctc_weight=options.ctc_weight,
            reverse_weight=_reverse_weight(loaded) if options.reverse_weight is None else options.reverse_weight,
            rescoring=options.rescoring,
            max_frames=self._max_frames,
            precision=_possible(options.final_precision, device),
        )
        if options.final_block_frames:
            blocks = {"block_frames": options.final_block_frames, "left_blocks": options.final_left_blocks}
        self._finals = FinalDecoder(model, lanes=len(lanes), options=final_options, lm=lm, **blocks)
        self._free_lanes: queue.SimpleQueue[int] = queue.SimpleQueue()
        for lane in lanes:
            self._free_lanes.put(lane)
        writing = WritingOptions(options.numbers, options.punctuation, options.capitals)
        self._writer = Writer(writing, Path(options.cache_dir) if options.cache_dir else None)

        self._segments: dict[SegmentKey, _Segment] = {}
        self._hotwords: dict[str, Hotwords] = {}
        self._hotwords_in_force: Hotwords | None = None
        self._warm_up()

    # ------------------------------------------------------------------ live

    def open(self, segments: Sequence[Opening]) -> None:
        """Begin segments."""
        for opening in segments:
            self._segments[opening.key] = _Segment(opening)

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        """Take blocks, of a segment as many as there are; return the texts that changed."""
        touched: dict[SegmentKey, _Segment] = {}
        for block in blocks:
            segment = touched[block.key] = self._segments[block.key]
            if block.quiet:
                self._silence(segment)
            segment.take(block, self._mel)
        by_length: dict[int, list[_Segment]] = defaultdict(list)
        for segment in touched.values():
            due = segment.blocks_due(self._stride)
            if due and self._has_room(segment, due):
                by_length[due].append(segment)
        return [hypothesis for due, group in by_length.items() for hypothesis in self._advance(group, due)]

    def close(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments."""
        for key in keys:
            segment = self._segments.pop(key, None)
            if segment is not None:
                self._silence(segment)

    def hotwords(self, version: str, folder: str, *, in_force: bool = True) -> None:
        """Learn a compiled list, see `Hotwords.save`. Partials listen to it at once if it is in force; finals name their version.

        Raises:
            ValueError: it was compiled for another model, or by another release.
        """
        self.use_hotwords(version, Hotwords.load(Path(folder)) if version else None, in_force=in_force)

    def use_hotwords(self, version: str, hotwords: Hotwords | None, *, in_force: bool = True) -> None:
        """Learn a compiled list that is in memory; None: no hotwords."""
        if hotwords is not None and hotwords.units != len(self._units):
            raise ValueError(f"the hotwords were compiled for {hotwords.units} units, not {len(self._units)}: compile them for this model")
        if in_force:
            following = [segment.slot for segment in self._segments.values() if segment.slot is not None]
            self._search.swap(following, hotwords)
            self._hotwords_in_force = hotwords
        if hotwords is not None:
            self._hotwords.pop(version, None)
            self._hotwords[version] = hotwords
            while len(self._hotwords) > HOTWORD_VERSIONS_KEPT:
                del self._hotwords[next(iter(self._hotwords))]

    def stop(self) -> None:
        """Do nothing: there is nothing to let go of."""

    def _has_room(self, segment: _Segment, blocks: int) -> bool:
        """See that a segment can take blocks: that it has a slot, and that it has not become too long; else it goes on without partials."""
        if segment.slot is None and self._free_slots:
            segment.slot = self._free_slots.pop()
            self._encoder.open([segment.slot])
            self._search.open([segment.slot], self._hotwords_in_force)
        if segment.slot is not None and (self._encoder.taken(segment.slot) + blocks) * self._options.block_frames <= self._max_frames:
            return True
        log.warning("segment %d of session %s goes on without partials", segment.opening.key.segment, segment.opening.key.session_id)
        self._silence(segment)
        return False

    def _silence(self, segment: _Segment) -> None:
        """Follow a segment no more; its slot is free."""
        segment.quiet = True
        segment.waiting = None
        if segment.slot is not None:
            self._search.close([segment.slot])
            self._free_slots.append(segment.slot)
            segment.slot = None

    def _advance(self, group: Sequence[_Segment], blocks: int) -> Iterator[Hypothesis]:
        """Take the next blocks of segments; yield the texts that changed."""
        slots = [segment.slot for segment in group if segment.slot is not None]
        features = np.stack([segment.next_window(blocks, self._stride) for segment in group])
        log_probs = self._encoder.step(slots, features, blocks)
        if log_probs.is_cuda:
            best, tokens = log_probs.topk(min(self._search.options.beam, log_probs.size(-1)))
            self._search.step_top(slots, best.cpu().numpy(), tokens.cpu().numpy())
        else:
            self._search.step(slots, log_probs.numpy())
        for segment, partial in zip(group, self._search.partials(slots), strict=True):
            heard = partial.tokens.tobytes(), partial.stable
            if heard == segment.heard:
                continue
            segment.heard = heard
            text, stable_text = self._text(partial.tokens), self._text(partial.tokens[: partial.stable])
            if (text, stable_text) != (segment.text, segment.stable_text):
                segment.text, segment.stable_text = text, stable_text
                end_sample = segment.opening.start_sample + segment.hops * _HOP_SAMPLES
                yield Hypothesis(key=segment.opening.key, text=text, stable_text=stable_text, end_sample=end_sample)

    def _text(self, tokens: npt.NDArray[np.int32]) -> str:
        return joined("".join(self._units.units[token] for token in tokens))

    # ------------------------------------------------------------------ finals

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        """Decode segments whole, each on its own. Threads may call it beside the live one, as many as there are lanes."""
        lane = self._free_lanes.get()
        try:
            return [self._final(request, lane) for request in requests]
        finally:
            self._free_lanes.put(lane)

    def _final(self, request: Finish, lane: int) -> FinalText:
        segment = self._segments[request.key]
        hotwords, problem = None, ""
        if request.hotword_version:
            hotwords = self._hotwords.get(request.hotword_version)
            if hotwords is None:
                problem = f"the hotwords {request.hotword_version} are not known here: decoded without any"
                log.error("segment %d of session %s: %s", request.key.segment, request.key.session_id, problem)
        features = held_ends(segment.features(self._mel))
        start_sample, end_sample = segment.opening.start_sample, request.end_sample
        language = segment.opening.language or self._options.language
        complete = end_sample - start_sample < self._options.longest_ms * _SAMPLES_PER_MS
        cut = self._options.endpoints
        if cut:
            utterances = tuple(
                self._utterance(
                    stretch.reading,
                    start_sample + stretch.start * _ENCODER_FRAME_SAMPLES,
                    min(end_sample, start_sample + stretch.stop * _ENCODER_FRAME_SAMPLES),
                    language,
                    complete=complete or stretch.ruled,
                )
                for stretch in self._finals.utterances(lane, features, hotwords)
            )
        else:
            reading = self._finals.decode(lane, features, hotwords)
            utterances = (self._utterance(reading, start_sample, end_sample, language, complete=complete),)
        return FinalText(
            key=request.key,
            text=" ".join(each.text for each in utterances),
            raw_text=" ".join(each.raw_text for each in utterances),
            words=tuple(word for each in utterances for word in each.words),
            confidence=min((each.confidence for each in utterances), default=0.0),
            language=language,
            error=problem,
            utterances=utterances if cut else (),
        )

    def _utterance(self, reading: Reading, start_sample: int, end_sample: int, language: str, *, complete: bool) -> Utterance:
        """Write down what was said between two samples; ``complete``: it does not go on right after."""
        words = self._words(reading, start_sample, end_sample)
        return Utterance(
            start_sample=start_sample,
            end_sample=end_sample,
            text=self._writer.write([Written(word.text, word.start_ms, word.end_ms) for word in words], language, complete=complete),
            raw_text=self._units.text(reading.tokens),
            words=words,
            confidence=round(reading.confidence, 2) if len(reading.tokens) else 0.0,
        )

    def _words(self, reading: Reading, start_sample: int, end_sample: int) -> tuple[Word, ...]:
        start_ms, end_ms = start_sample // _SAMPLES_PER_MS, end_sample // _SAMPLES_PER_MS
        return words_of(reading, self._units.units, start_ms, end_ms)

    def _with_lm(self, folder: Path, digest: str) -> tuple[NgramLm | None, str]:
        """Return the language model, if there is one, and the model's digest with it: it has a say in every final."""
        options = self._options
        path = Path(options.lm) if options.lm else folder / _LM_FILE
        if not (options.lm or path.exists()) or not options.lm_weight:
            return None, digest
        lm = NgramLm.read(path, self._units, weight=options.lm_weight, word_bonus=options.lm_word_bonus, ignore_case=True)
        return lm, hashlib.sha256(digest.encode() + path.read_bytes()).hexdigest()

    def _warm_up(self) -> None:
        """Compute once what the first audio must not wait for, and load the grammars of the languages that the units spell."""
        self._encoder.open([0])
        silence = np.zeros((1, self._stride + FEATURE_OVERLAP, self._mel), np.float32)
        self._encoder.step([0], silence)
        self._finals.decode(0, silence[0])
        for language in languages_of(self._units.units):
            self._writer.warm_up(language)


def _device(name: str) -> torch.device:
    """Return a device to compute on.

    Raises:
        EngineError: there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise EngineError("no GPU can be used here: set ASR_DEVICE to cpu or auto")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _possible(precision: Precision, device: torch.device) -> Precision:
    """Return a precision if a device can compute in it.

    Raises:
        EngineError: it cannot.
    """
    possible = ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16", "int8")
    if precision not in possible:
        raise EngineError(f"the precision {precision} cannot be had on {device.type}: set it to {', '.join(possible)}")
    return precision


def _reverse_weight(loaded: LoadedModel) -> float:
    """Return what the right-to-left decoder counts, as the model's training says."""
    return float((loaded.config.get("model_conf") or {}).get("reverse_weight", 0.0))
