from pathlib import Path

from ops.train.vad.plots import draw_labels
from ops.train.vad.sources import Recording

DATA = Path(__file__).parents[3] / "data"
PNG = b"\x89PNG\r\n\x1a\n"


def test_labels_of_each_recording_are_drawn(tmp_path):
    one = Recording("goforward.wav", DATA / "en/goforward.wav", "speech", "sphinx", "train", "", "")
    sizes = []
    for count in (1, 2):
        path = tmp_path / f"{count}.png"
        draw_labels([one] * count, path)
        assert path.read_bytes().startswith(PNG)
        sizes.append(path.stat().st_size)
    assert sizes[1] > 1.5 * sizes[0]
