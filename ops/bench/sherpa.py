"""Side by side with sherpa-onnx: the same weights, the same audio, the same cores, the same latency: how many channels?

sherpa-onnx takes WeNet's streaming CTC models one stream at a time, so it gets a thread for each core. Both compute features, encoder, CTC
head and a search in 200 ms blocks with the same context; finals, voice activity detection and Kafka are left out. Our search is a beam of
ten, its is the best path.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ops.bench.capacity import most_channels
from ops.bench.load import BatchedRecogniser, Load, Recogniser, SherpaRecogniser, play, speech_tracks
from ops.bench.report import Document, Table, document, figure, percentiles
from ops.bench.wenet_onnx import export_streaming_ctc, quantise, write_tokens
from ops.measure import cores
from streams.errors import UserError

if TYPE_CHECKING:
    from agents.inference.conformer.loader import LoadedModel
    from agents.inference.conformer.streaming import Precision

__all__ = ["BASELINE", "compare", "greedy_texts", "plain_text", "sherpa_recogniser", "sherpa_texts", "tables"]

BASELINE: Final = "sherpa-onnx fp32"
_BLOCK_FRAMES: Final = 5
_LEFT_BLOCKS: Final = 8
_FIRST_CHANNELS: Final = 64
_MOST_CHANNELS: Final = 800
_RESOLUTION: Final = 0.06
#: Clips that both must read alike.
_TEXTS: Final = 20
_SPECIAL: Final = re.compile(r"<[^<>]*>")


@dataclass(frozen=True, slots=True)
class _Case:
    """A contestant: what makes it."""

    name: str
    make: Callable[[], Recogniser]


def compare(
    model_dir: Path, *, p95_ms: float, seconds: float, precision: Precision | None, tell: Callable[[str], None] = lambda _line: None
) -> Document:
    """Find out how many channels each contestant carries.

    Args:
        model_dir: a WeNet model directory.
        p95_ms: the latency that 95 % of the frames must keep.
        seconds: how long each trial plays; at most 20, for our segments end there.
        precision: of ours, besides fp32; None: the fastest one here.
        tell: hears what is going on.

    Raises:
        UserError: sherpa-onnx is not installed.
    """
    import torch

    from agents.inference.conformer.loader import load_model
    from agents.inference.conformer.streaming import default_precision

    loaded, threads = load_model(model_dir), cores()
    fastest = precision or default_precision(torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="asr-bench-") as folder:
        plain, small, tokens = (Path(folder) / name for name in ("model.onnx", "model.int8.onnx", "tokens.txt"))
        export_streaming_ctc(loaded, plain, block_frames=_BLOCK_FRAMES, left_blocks=_LEFT_BLOCKS)
        quantise(plain, small)
        write_tokens(loaded, tokens)
        tell("comparing the texts")
        agreement = _agreement(loaded, plain, tokens)
        cases = [
            _Case(BASELINE, lambda: SherpaRecogniser(sherpa_recogniser(plain, tokens), threads)),
            _Case("sherpa-onnx int8", lambda: SherpaRecogniser(sherpa_recogniser(small, tokens), threads)),
            _Case("ours fp32", lambda: _ours(model_dir, "fp32", threads)),
            *([_Case(f"ours {fastest}", lambda: _ours(model_dir, fastest, threads))] if fastest != "fp32" else []),
            _Case(f"ours {fastest}, batch 1", lambda: _ours(model_dir, fastest, threads, max_batch=1)),
        ]
        results = [_measure(case, p95_ms, seconds, tell) for case in cases]
    parameters = sum(weight.numel() for name, weight in loaded.model.named_parameters() if not name.startswith("decoder."))
    conditions = {
        "p95_ms": p95_ms,
        "seconds": seconds,
        "threads": threads,
        "parameters": parameters,
        "vocabulary": loaded.model.config.vocabulary,
        "model_digest": loaded.digest,
    }
    return document("sherpa", conditions, {"texts": agreement, "cases": results})


def _measure(case: _Case, p95_ms: float, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    recogniser = case.make()
    tracks = speech_tracks(_MOST_CHANNELS, seconds)
    tried: dict[int, Load] = {}

    def holds(channels: int) -> bool:
        load = tried[channels] = play(recogniser, tracks[:channels])
        tell(f"{case.name}, {channels} channels: P95 {figure(load.latency.p95)} ms{'' if load.finished else ', fell behind'}")
        return load.holds(p95_ms)

    most = most_channels(holds, _FIRST_CHANNELS, _MOST_CHANNELS, _RESOLUTION)
    trials = [
        {
            "channels": channels,
            "cpu_cores": round(load.cpu_share, 3),
            "finished": load.finished,
            "latency_ms": msgspec.to_builtins(load.latency),
        }
        for channels, load in sorted(tried.items())
    ]
    return {"case": case.name, "most_channels": most, "channels_per_core": round(most / cores(), 1), "trials": trials}


def _ours(model_dir: Path, precision: Precision, threads: int, max_batch: int = 64) -> BatchedRecogniser:
    from agents.inference.conformer.engine import conformer_engine

    engine = conformer_engine(
        str(model_dir),
        device="cpu",
        precision=precision,
        threads=threads,
        slots=_MOST_CHANNELS,
        block_frames=_BLOCK_FRAMES,
        left_blocks=_LEFT_BLOCKS,
        numbers=False,
    )
    return BatchedRecogniser(engine, max_batch)


def sherpa_recogniser(model: Path, tokens: Path, threads: int = 1) -> Any:
    """Return a sherpa-onnx recogniser of an exported model, with the features that the model was trained with.

    Raises:
        UserError: sherpa-onnx is not installed.
    """
    try:
        import sherpa_onnx
    except ModuleNotFoundError as missing:
        raise UserError("The comparison needs sherpa-onnx, which is not installed", "Install it: pip install sherpa-onnx.") from missing
    made = sherpa_onnx.OnlineRecognizer.from_wenet_ctc(
        tokens=str(tokens), model=str(model), chunk_size=_BLOCK_FRAMES, num_left_chunks=_LEFT_BLOCKS, num_threads=threads
    )
    # Its default is another framing and another highest band than WeNet's.
    features = made.config.feat_config
    features.snip_edges, features.high_freq = True, 0.0
    made.recognizer = type(made.recognizer)(made.config)
    return made


def sherpa_texts(recogniser: Any, tracks: Sequence[NDArray[np.int16]]) -> list[str]:
    """Return what sherpa-onnx hears in whole blocks of audio."""
    texts = []
    for pcm in tracks:
        stream = recogniser.create_stream()
        stream.accept_waveform(16_000, pcm.astype(np.float32) / 32_768)
        while recogniser.is_ready(stream):
            recogniser.decode_stream(stream)
        texts.append(str(recogniser.get_result(stream)))
    return texts


def greedy_texts(loaded: LoadedModel, tracks: Sequence[NDArray[np.int16]]) -> list[str]:
    """Return the best path of our encoder in fp32, through the same windows of features, as text."""
    from agents.features.fbank import Fbank
    from agents.inference.conformer.model import SUBSAMPLING, block_feature_frames
    from agents.inference.conformer.streaming import StreamingEncoder

    encoder = StreamingEncoder(loaded.model, slots=1, block_frames=_BLOCK_FRAMES, left_blocks=_LEFT_BLOCKS)
    fbank, stride, window = Fbank(), SUBSAMPLING * _BLOCK_FRAMES, block_feature_frames(_BLOCK_FRAMES)
    texts = []
    for pcm in tracks:
        features = fbank([pcm.tobytes()])[0]
        encoder.open([0])
        starts = range(0, len(features) - window + 1, stride)
        best = [encoder.step([0], features[None, start : start + window])[0].argmax(1).numpy() for start in starts]
        path = np.concatenate(best) if best else np.zeros(0, np.int64)
        changed = path[np.flatnonzero(np.diff(path, prepend=-1))]
        texts.append(loaded.vocabulary.text(changed[changed != loaded.model.config.blank]))
    return texts


def _agreement(loaded: LoadedModel, model: Path, tokens: Path) -> dict[str, Any]:
    """Let both read some clips."""
    from ops.demo.calls import clips, read_clip

    tracks = [read_clip(clip.file) for clip in clips()[:_TEXTS]]
    theirs = [plain_text(text) for text in sherpa_texts(sherpa_recogniser(model, tokens), tracks)]
    ours = [plain_text(text) for text in greedy_texts(loaded, tracks)]
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    differing = [{"ours": one, "theirs": other} for one, other in zip(ours, theirs, strict=True) if one != other]
    return {"clips": len(tracks), "same": same, "differing": differing}


def plain_text(text: str) -> str:
    """Return what is said in a text, without how each program writes it."""
    # sherpa-onnx shows special tokens, we do not.
    return " ".join(_SPECIAL.sub("", text.lower()).replace("▁", " ").split())


def tables(found: Document) -> list[Table]:
    """Return the comparison as tables."""
    conditions, results = found["conditions"], found["results"]
    cases: Sequence[Mapping[str, Any]] = results["cases"]
    base = next(case["channels_per_core"] for case in cases if case["case"] == BASELINE)
    rows = []
    for case in cases:
        most = case["most_channels"]
        trial = next((trial for trial in case["trials"] if trial["channels"] == most), None)
        late = percentiles(trial["latency_ms"]) if trial else ("-",) * 4
        cpu_ms = figure(1_000 * trial["cpu_cores"] / most) if trial else "-"
        ratio = figure(case["channels_per_core"] / base, 2) if base else "-"
        rows.append((case["case"], str(most), figure(case["channels_per_core"], 1), ratio, cpu_ms, *late))
    same = f"{results['texts']['same']} of {results['texts']['clips']} clips read alike"
    title = (
        f"Channels of continuous speech with P95 ≤ {conditions['p95_ms']:g} ms, encoder and head of {conditions['parameters'] / 1e6:.1f} M "
        f"parameters, {conditions['threads']} threads ({same})"
    )
    headings = ("", "channels", "per core", f"against {BASELINE}", "CPU ms per s of audio", "P50 ms", "P95", "P99", "max")
    return [Table(title, headings, tuple(rows))]
