"""An exported model says what the model says, in onnxruntime and in sherpa-onnx."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from agents.features.fbank import Fbank
from agents.inference.conformer.loader import LoadedModel, load_model
from agents.inference.conformer.streaming import StreamingEncoder
from ops.bench.sherpa import greedy_texts, plain_text, sherpa_recogniser, sherpa_texts
from ops.bench.wenet_onnx import export_streaming_ctc, write_tokens

DATA = Path(__file__).parents[2] / "data"
BLOCK, LEFT = 5, 8


def samples(name: str) -> np.ndarray:
    with wave.open(str(DATA / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")


@pytest.fixture(scope="module", params=["u2", "u2pp"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path, Path]:
    folder = tmp_path_factory.mktemp("onnx")
    loaded = load_model(DATA / "wenet" / "models" / request.param)
    export_streaming_ctc(loaded, folder / "model.onnx", block_frames=BLOCK, left_blocks=LEFT)
    write_tokens(loaded, folder / "tokens.txt")
    return loaded, folder / "model.onnx", folder / "tokens.txt"


def test_onnxruntime_gives_the_log_probabilities_of_the_engine(exported: tuple[LoadedModel, Path, Path]) -> None:
    loaded, file, _ = exported
    session = onnxruntime.InferenceSession(str(file))
    facts = session.get_modelmeta().custom_metadata_map
    assert facts["vocab_size"] == str(loaded.model.config.vocabulary)
    assert (facts["right_context"], facts["subsampling_factor"]) == ("6", "4")

    features = Fbank()([samples("en/goforward.wav").tobytes()])[0]
    encoder = StreamingEncoder(loaded.model, slots=1, block_frames=BLOCK, left_blocks=LEFT)
    encoder.open([0])
    config = loaded.model.config.encoder
    cached = BLOCK * LEFT
    attention = np.zeros((config.num_blocks, config.attention_heads, cached, 2 * config.output_size // config.attention_heads), np.float32)
    convolution = np.zeros((config.num_blocks, 1, config.output_size, config.cnn_module_kernel - 1), np.float32)
    for number, start in enumerate(range(0, len(features) - 23 + 1, 20)):
        window = features[None, start : start + 23]
        mask = np.arange(cached + BLOCK)[None, None] >= cached - BLOCK * min(LEFT, number)
        log_probs, attention, convolution = session.run(
            None,
            {
                "x": window,
                # sherpa-onnx counts from the cache's size.
                "offset": np.array([cached + BLOCK * number]),
                "required_cache_size": np.array([cached]),
                "attn_cache": attention,
                "conv_cache": convolution,
                "attn_mask": mask,
            },
        )
        np.testing.assert_allclose(log_probs, encoder.step([0], window).numpy(), atol=2e-4)
    assert number > LEFT + 1


def test_sherpa_onnx_reads_the_same_text(exported: tuple[LoadedModel, Path, Path]) -> None:
    pytest.importorskip("sherpa_onnx", reason="sherpa-onnx is not installed: pip install sherpa-onnx")
    loaded, file, tokens = exported
    tracks = [samples("en/goforward.wav"), samples("zh/aishell1_BAC009S0724W0121.wav")]
    theirs = sherpa_texts(sherpa_recogniser(file, tokens), tracks)
    ours = greedy_texts(loaded, tracks)
    assert all(ours)
    assert [plain_text(text) for text in theirs] == [plain_text(text) for text in ours]
