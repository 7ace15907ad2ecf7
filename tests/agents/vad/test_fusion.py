import numpy as np

from agents.vad.fusion import fuse


def test_the_neural_detector_decides_where_it_is_sure_either_way():
    probability = np.array([0.9, 0.9, 0.1, 0.1, 0.85, 0.2, 0.5], np.float32)
    traditional = np.array([False, True, False, True, True, False, True])
    assert fuse(probability, traditional, 0.86).tolist() == [True, True, False, False, True, False, True]


def test_at_full_confidence_the_traditional_one_decides_all():
    probability = np.array([1.0, 0.0], np.float32)
    assert fuse(probability, np.array([False, True]), 1.0).tolist() == [False, True]
