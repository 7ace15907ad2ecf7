from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ops.bench.capacity import most_channels


@given(
    carried=st.integers(0, 600),
    first=st.integers(1, 400),
    most=st.integers(1, 400),
    resolution=st.sampled_from((0.0, 0.05, 0.3)),
)
def test_it_finds_the_edge_and_asks_nobody_twice(carried: int, first: int, most: int, resolution: float) -> None:
    asked: list[int] = []

    def holds(channels: int) -> bool:
        asked.append(channels)
        return channels <= carried

    found = most_channels(holds, first, most, resolution)
    assert found <= min(carried, most)
    assert min(carried, most) - found <= max(1, round(found * resolution)) - 1
    assert len(asked) == len(set(asked))
    assert all(1 <= channels <= most for channels in asked)
    assert found == 0 or found in asked
