import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agents.vad.fusion import LONG_AGO, confirm, fuse


def test_the_neural_detector_decides_where_it_is_sure_either_way():
    probability = np.array([0.9, 0.9, 0.1, 0.1, 0.85, 0.2, 0.5], np.float32)
    traditional = np.array([False, True, False, True, True, False, True])
    assert fuse(probability, traditional, 0.86).tolist() == [True, True, False, False, True, False, True]


def test_at_full_confidence_the_traditional_one_decides_all():
    probability = np.array([1.0, 0.0], np.float32)
    assert fuse(probability, np.array([False, True]), 1.0).tolist() == [False, True]


def confirmed_hop_by_hop(speech, certain, closing):
    out, on, quiet = [], False, LONG_AGO
    for is_speech, is_certain in zip(speech, certain, strict=True):
        if is_speech:
            on = (on and quiet < closing) or is_certain
            quiet = 0
        else:
            quiet += 1
        out.append(is_speech and on)
    return out


hops = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80)


@given(hops, st.integers(1, 6), st.lists(st.integers(1, 20), min_size=1))
def test_speech_begins_with_certainty_whatever_the_pieces(decisions, closing, sizes):
    speech, certain = (np.array(column) for column in zip(*decisions, strict=True))
    expected = confirmed_hop_by_hop(speech, certain, closing)
    whole, _, _ = confirm(speech, certain, closing, LONG_AGO, False)
    assert whole.tolist() == expected
    since, known, pieces, begin = LONG_AGO, False, [], 0
    while begin < len(speech):
        end = begin + sizes[len(pieces) % len(sizes)]
        piece, since, known = confirm(speech[begin:end], certain[begin:end], closing, since, known)
        pieces += [piece]
        begin = end
    assert np.concatenate(pieces).tolist() == expected
