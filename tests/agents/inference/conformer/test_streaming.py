"""The fast step against the plain one, and several blocks at once against one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agents.inference.conformer.loader import LoadedModel, load_model
from agents.inference.conformer.model import block_feature_frames
from agents.inference.conformer.streaming import StreamingEncoder

WENET = Path(__file__).parents[3] / "data" / "wenet"
BLOCK, LEFT, MEL = 5, 8, 80
STRIDE, WINDOW = 4 * BLOCK, block_feature_frames(BLOCK)
LOG_PROBABILITY_TOLERANCE, CACHE_TOLERANCE = 1e-4, 5e-5


@pytest.fixture(scope="module", params=["u2", "u2pp"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(WENET / "models" / request.param)


@pytest.fixture(scope="module")
def fbank() -> np.ndarray:
    with np.load(WENET / "fbank.npz") as arrays:
        return np.asarray(arrays["librispeech"])


def streaming(loaded: LoadedModel, slots: int = 4, **options: object) -> StreamingEncoder:
    return StreamingEncoder(loaded.model, slots=slots, **options)  # type: ignore[arg-type]


def window(features: np.ndarray, block: int, blocks: int = 1, stride: int = STRIDE) -> np.ndarray:
    return np.ascontiguousarray(features[None, block * stride : (block + blocks) * stride + 3])


def one_by_one(encoder: StreamingEncoder, slot: int, features: np.ndarray, blocks: range) -> torch.Tensor:
    return torch.cat([encoder.step([slot], window(features, block))[0] for block in blocks])


@pytest.mark.parametrize(("block_frames", "left_blocks"), [(5, 8), (2, 3), (16, 0)])
def test_it_equals_the_masked_pass(loaded: LoadedModel, fbank: np.ndarray, block_frames: int, left_blocks: int) -> None:
    encoder = streaming(loaded, block_frames=block_frames, left_blocks=left_blocks)
    stride = 4 * block_frames
    blocks = (len(fbank) - 3) // stride
    encoder.open([2])
    ours = torch.cat([encoder.step([2], window(fbank, block, stride=stride))[0] for block in range(blocks)])
    whole = torch.from_numpy(fbank[None, : blocks * stride + 3])
    hidden, _ = loaded.model.encoder(whole, torch.tensor([whole.size(1)]), block_frames, left_blocks)
    assert torch.allclose(ours, loaded.model.ctc(hidden)[0], atol=LOG_PROBABILITY_TOLERANCE)


def test_segments_of_all_ages_share_a_step(loaded: LoadedModel, fbank: np.ndarray) -> None:
    alone = streaming(loaded)
    alone.open([0])
    expected = one_by_one(alone, 0, fbank, range(30))
    encoder = streaming(loaded, slots=3)
    encoder.open([0, 2])
    starts = {2: 0, 0: 4, 1: 15}  # slot: the step in which its segment begins
    for step in range(30):
        if step == starts[1]:
            encoder.open([1])
        slots = [slot for slot, start in starts.items() if start <= step]
        features = np.concatenate([window(fbank, step - starts[slot]) for slot in slots])
        for slot, result in zip(slots, encoder.step(slots, features), strict=True):
            at = step - starts[slot]
            assert torch.allclose(result, expected[at * BLOCK : (at + 1) * BLOCK], atol=LOG_PROBABILITY_TOLERANCE)


@pytest.mark.parametrize("before", [0, 3, 9, 14])
@pytest.mark.parametrize("blocks", [2, 8, 9, 13])
def test_blocks_at_once_leave_what_one_by_one_leave(loaded: LoadedModel, fbank: np.ndarray, before: int, blocks: int) -> None:
    one, many = streaming(loaded), streaming(loaded)
    for encoder in (one, many):
        encoder.open([1])
        for block in range(before):
            encoder.step([1], window(fbank, block))
    expected = one_by_one(one, 1, fbank, range(before, before + blocks))
    at_once = many.step([1], window(fbank, before, blocks), blocks)[0]
    assert torch.allclose(at_once, expected, atol=LOG_PROBABILITY_TOLERANCE)
    for ours, theirs in zip(many.pools, one.pools, strict=True):
        for name in ("keys", "values", "biases", "history"):
            left, right = getattr(ours, name)[1], getattr(theirs, name)[1]
            assert torch.allclose(left, right, atol=CACHE_TOLERANCE), name
    after = before + blocks
    assert torch.allclose(
        one_by_one(many, 1, fbank, range(after, after + 2)),
        one_by_one(one, 1, fbank, range(after, after + 2)),
        atol=LOG_PROBABILITY_TOLERANCE,
    )


def test_a_slot_is_as_new_when_it_is_opened(loaded: LoadedModel, fbank: np.ndarray) -> None:
    encoder = streaming(loaded)
    encoder.open([0])
    first = one_by_one(encoder, 0, fbank, range(12))
    encoder.open([0])
    assert torch.equal(one_by_one(encoder, 0, fbank, range(12)), first)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.6), ("int8", 0.6)])
def test_lower_precisions_say_about_the_same(loaded: LoadedModel, fbank: np.ndarray, precision: str, tolerance: float) -> None:
    exact, rough = streaming(loaded), streaming(loaded, precision=precision)
    for encoder in (exact, rough):
        encoder.open([0])
    expected, found = (one_by_one(encoder, 0, fbank, range(20)).exp() for encoder in (exact, rough))
    assert (found - expected).abs().mean() < tolerance * expected.mean()
    assert not torch.equal(found, expected)


def test_a_segment_ends_with_the_table_of_positions(loaded: LoadedModel) -> None:
    encoder = streaming(loaded)
    encoder.open([0])
    encoder._taken[0] = 5_000 // BLOCK - 1
    with pytest.raises(ValueError, match="longer than the 200 s"):
        encoder.step([0], np.zeros((1, STRIDE + WINDOW, MEL), np.float32), 2)
    encoder.step([0], np.zeros((1, WINDOW, MEL), np.float32))
    assert encoder.taken(0) == 5_000 // BLOCK


def test_a_bad_segment_does_not_spoil_the_next(loaded: LoadedModel, fbank: np.ndarray) -> None:
    encoder = streaming(loaded)
    encoder.open([0])
    expected = one_by_one(encoder, 0, fbank, range(3))
    encoder.open([0])
    encoder.step([0], np.full((1, WINDOW, MEL), np.nan, np.float32))
    encoder.open([0])
    assert torch.equal(one_by_one(encoder, 0, fbank, range(3)), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the steps are recorded as CUDA graphs there")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 5e-4), ("bf16", 0.5), ("fp16", 0.1)])
def test_on_a_gpu_it_says_the_same(loaded: LoadedModel, fbank: np.ndarray, precision: str, tolerance: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    on_cpu = streaming(loaded)
    copy = load_model(loaded.vocabulary.bpe_model.parent if loaded.vocabulary.bpe_model else WENET / "models" / "u2")
    copy.model.to("cuda")
    on_gpu = streaming(copy, precision=precision)
    for encoder in (on_cpu, on_gpu):
        encoder.open([0, 1, 3])
    for block in range(12):  # three rows are padded to four
        rows = np.concatenate([window(fbank, block), window(fbank, block + 5), window(fbank, block + 9)])
        expected, found = (encoder.step([0, 1, 3], rows).exp().cpu() for encoder in (on_cpu, on_gpu))
        assert (found - expected).abs().max() < tolerance
    assert torch.allclose(on_gpu.whole(2, fbank)[1].cpu().exp(), on_cpu.whole(2, fbank)[1].exp(), atol=tolerance)
