"""The training, on examples made up: that it learns, that a stopped run goes on where it was, and what is mined."""

import numpy as np
import pytest
import torch

from agents.vad.tiny.bands import BANDS
from agents.vad.tiny.detector import TinyDetector
from agents.vad.tiny.network import TinyVad
from ops.train.vad import trainer
from ops.train.vad.examples import Examples
from ops.train.vad.export import export

SCENES, HOPS = 48, 160


def made_up(seed):
    """Speech is loud and harmonic, noise is not; scenes with an even number hold no speech."""
    rng = np.random.default_rng(seed)
    speech = np.zeros((SCENES, HOPS), np.bool_)
    speech[1::2, 60:120] = True
    bands = rng.normal(-12, 1, (SCENES, HOPS, BANDS))
    bands[speech] += 5 * (np.arange(BANDS) % 3 == 0)
    return Examples(bands.astype(np.float16), speech, np.zeros_like(speech))


@pytest.fixture
def work_dir(tmp_path):
    for seed in (0, trainer._CHECK_SEED):
        with (tmp_path / f"examples-{seed:07d}.npz").open("wb") as file:
            np.savez(file, **made_up(seed)._asdict())
    return tmp_path


class StoppedError(Exception):
    pass


def test_a_stopped_run_goes_on_to_the_same_network(work_dir, tmp_path):
    told = []
    whole = trainer.train(work_dir, 1, 0, 4, told.append)
    for file in work_dir.glob("*.pt"):
        file.unlink()

    def stop(line):
        if line.startswith("epoch 2"):
            raise StoppedError

    with pytest.raises(StoppedError):
        trainer.train(work_dir, 1, 0, 4, stop)
    resumed = trainer.train(work_dir, 1, 0, 4, told.append)
    assert "going on after epoch 1" in told
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    losses = [float(line.rpartition(" ")[2]) for line in told if line.startswith("epoch")]
    assert losses[3] < losses[0]
    export(resumed, tmp_path / "made.onnx")
    assert TinyDetector(path=tmp_path / "made.onnx").fresh().shape == (TinyDetector.state_size,)


def test_scenes_whose_noise_passes_for_speech_are_found():
    shards = trainer._Shards([made_up(5)])
    torch.manual_seed(3)
    network = TinyVad().eval()
    with torch.no_grad():
        network.out.weight.zero_()
        network.out.bias.fill_(3.0)  # all is speech to it
    fooled = shards.fooling(network)
    assert fooled.shape == (SCENES,)
    # Without speech there is more noise to be fooled by.
    assert fooled[::2].min() > fooled[1::2].max()
    with torch.no_grad():
        network.out.bias.fill_(-9.0)
    assert shards.fooling(network).max() < 1e-3
