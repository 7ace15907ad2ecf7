"""The model against the numbers of WeNet's own implementation, on random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agents.inference.conformer.loader import LoadedModel, load_model
from agents.inference.conformer.model import EncoderState, block_feature_frames, block_mask, encoder_frames

WENET = Path(__file__).parents[3] / "data" / "wenet"
BLOCK, LEFT = 5, 8
CACHED = BLOCK * LEFT
#: What float32 noise allows on CPU: ten times what two implementations in float32 and float64 differ by.
ENCODER_TOLERANCE, CACHE_TOLERANCE, LOG_PROBABILITY_TOLERANCE = 2e-5, 5e-5, 1e-4


@pytest.fixture(scope="module", params=["u2", "u2pp"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> LoadedModel:
    return load_model(WENET / "models" / name)


@pytest.fixture(scope="module")
def fbank() -> dict[str, torch.Tensor]:
    with np.load(WENET / "fbank.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


def vectors(name: str, part: str) -> dict[str, np.ndarray]:
    with np.load(WENET / name / f"{part}.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def largest_difference(ours: torch.Tensor, theirs: np.ndarray) -> float:
    assert tuple(ours.shape) == theirs.shape
    return float((ours - torch.from_numpy(theirs)).abs().max())


def stream(loaded: LoadedModel, features: torch.Tensor, cached: int, block: int = BLOCK) -> tuple[torch.Tensor, list[EncoderState]]:
    """Encode features block by block; returns the whole output and the state after each block."""
    encoder, window = loaded.model.encoder, block_feature_frames(block)
    state, outputs, states = encoder.start(1, cached), [], []
    total = int(encoder_frames(torch.tensor(len(features))))
    for first in range(0, total, block):
        piece = features[4 * first : 4 * first + window]
        padded = torch.zeros(1, window, features.size(1))
        padded[0, : len(piece)] = piece
        output, state = encoder.step(padded, torch.tensor([len(piece)]), state)
        outputs.append(output[0, : total - first])
        states.append(state)
    return torch.cat(outputs), states


@pytest.mark.parametrize("block,left,label", [(5, 8, "c5_l8"), (4, -1, "c4_lall"), (16, 4, "c16_l4"), (0, -1, "full")])
@pytest.mark.parametrize("wav", ["aishell", "librispeech"])
def test_masked_pass_equals_wenet(
    name: str, loaded: LoadedModel, fbank: dict[str, torch.Tensor], wav: str, block: int, left: int, label: str
) -> None:
    features = fbank[wav]
    expected = vectors(name, "encoder")[f"{wav}_{label}"]
    output, lengths = loaded.model.encoder(features[None], torch.tensor([len(features)]), block, left)
    assert lengths.tolist() == [len(expected)]
    assert largest_difference(output[0], expected) < ENCODER_TOLERANCE


def test_padding_changes_nothing(loaded: LoadedModel, fbank: dict[str, torch.Tensor]) -> None:
    short, long = fbank["aishell"], fbank["librispeech"]
    batch = torch.full((2, len(long), 80), 3.0)
    batch[0, : len(short)], batch[1] = short, long
    together, lengths = loaded.model.encoder(batch, torch.tensor([len(short), len(long)]), BLOCK, LEFT)
    alone, _ = loaded.model.encoder(short[None], torch.tensor([len(short)]), BLOCK, LEFT)
    assert lengths.tolist() == [105, 217]
    assert torch.allclose(together[0, :105], alone[0], atol=ENCODER_TOLERANCE)


@pytest.mark.parametrize("wav", ["aishell", "librispeech"])
def test_blocks_equal_the_masked_pass_of_wenet(name: str, loaded: LoadedModel, fbank: dict[str, torch.Tensor], wav: str) -> None:
    output, _ = stream(loaded, fbank[wav], CACHED)
    assert largest_difference(output, vectors(name, "encoder")[f"{wav}_c5_l8"]) < ENCODER_TOLERANCE


@pytest.mark.parametrize("blocks", [3, 12])
def test_caches_equal_wenet(name: str, loaded: LoadedModel, fbank: dict[str, torch.Tensor], blocks: int) -> None:
    expected = vectors(name, "caches")
    _, states = stream(loaded, fbank["aishell"], CACHED)
    state = states[blocks - 1]
    theirs = expected[f"c5_l8_after{blocks}_att_cache"]
    kept = theirs.shape[2]
    assert state.valid[0].tolist() == [False] * (CACHED - kept) + [True] * kept
    assert largest_difference(state.attention[0, :, :, CACHED - kept :], theirs) < CACHE_TOLERANCE
    assert largest_difference(state.convolution[0], expected[f"c5_l8_after{blocks}_cnn_cache"][:, 0]) < CACHE_TOLERANCE
    assert int(state.offset[0]) == int(expected[f"c5_l8_after{blocks}_offset"])


def test_ctc_equals_wenet(name: str, loaded: LoadedModel, fbank: dict[str, torch.Tensor]) -> None:
    expected = vectors(name, "ctc")
    for wav in ("aishell", "librispeech"):
        output, _ = stream(loaded, fbank[wav], CACHED)
        assert largest_difference(loaded.model.ctc(output), expected[wav]) < LOG_PROBABILITY_TOLERANCE


def test_decoders_equal_wenet(name: str, loaded: LoadedModel, fbank: dict[str, torch.Tensor]) -> None:
    expected, model = vectors(name, "ctc"), loaded.model
    memory, frames = model.encoder(fbank["aishell"][None], torch.tensor([len(fbank["aishell"])]), BLOCK, LEFT)
    tokens, lengths = (torch.from_numpy(expected[f"aishell_dec_hyps_{part}"]) for part in ("in", "lens"))
    memory, frames = memory.expand(len(tokens), -1, -1), frames.expand(len(tokens))
    reversed_tokens = tokens.clone()
    for row, length in zip(reversed_tokens, lengths.tolist(), strict=True):
        row[1:length] = row[1:length].flip(0)
    for key, decoder, sequence in (("l2r", model.left_to_right, tokens), ("r2l", model.right_to_left, reversed_tokens)):
        if decoder is None:
            assert name == "u2"
            continue
        scores = torch.log_softmax(decoder(memory, frames, sequence), -1)
        for ours, theirs, length in zip(scores, expected[f"aishell_dec_{key}_logp"], lengths.tolist(), strict=True):
            assert largest_difference(ours[:length], theirs[:length]) < LOG_PROBABILITY_TOLERANCE


def test_batch_of_three_ages_equals_wenet(name: str, loaded: LoadedModel) -> None:
    expected, model = vectors(name, "batch3"), loaded.model
    state = EncoderState(
        offset=torch.from_numpy(expected["in_offset"])[:, 0],
        attention=torch.from_numpy(expected["in_att_cache"]),
        convolution=torch.from_numpy(expected["in_cnn_cache"]),
        valid=torch.from_numpy(expected["in_cache_mask"])[:, 0] > 0,
    )
    for step in range(3):
        frames = torch.from_numpy(expected[f"s{step}_chunk_lens"]).long()
        output, state = model.encoder.step(torch.from_numpy(expected[f"s{step}_chunk_xs"]), frames, state)
        theirs = expected[f"s{step}_chunk_out_lens"].tolist()
        assert encoder_frames(frames).tolist() == theirs
        log_probabilities = model.ctc(output)
        for session, length in enumerate(theirs):
            assert largest_difference(output[session, :length], expected[f"s{step}_chunk_out"][session, :length]) < ENCODER_TOLERANCE
            assert (
                largest_difference(log_probabilities[session, :length], expected[f"s{step}_ctc_log_probs"][session, :length])
                < LOG_PROBABILITY_TOLERANCE
            )
        assert state.offset.tolist() == expected[f"s{step}_r_offset"][:, 0].tolist()
        assert torch.equal(state.valid, torch.from_numpy(expected[f"s{step}_r_cache_mask"])[:, 0] > 0)
    seen = state.valid[:, None, None, :, None]
    assert largest_difference(state.attention * seen, (expected["final_att_cache"] * seen.numpy())) < CACHE_TOLERANCE
    # The second session's last block was short: what follows it is padding, in both.
    for session in (0, 2):
        assert largest_difference(state.convolution[session], expected["final_cnn_cache"][session]) < CACHE_TOLERANCE


def test_block_mask_over_a_whole_utterance_hides_nothing() -> None:
    assert block_mask(4, 0, -1).all()
