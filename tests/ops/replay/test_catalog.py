"""Which calls are meant, and when is when."""

from __future__ import annotations

from datetime import datetime

import pytest

from ops.replay.catalog import Call, Wanted, moment_us
from schemas.records import Session
from streams.errors import UserError

S_US = 1_000_000


def call(session_id: str = "s", channel_id: str = "7", *, started_s: int = 1_000, seconds: int = 60) -> Call:
    return Call(
        Session(
            channel_id=channel_id,
            session_id=session_id,
            conversation_id="c",
            position_samples=seconds * 16_000,
            state="closed",
            started_us=started_s * S_US,
            covered_to_sample=seconds * 16_000,
            decoded_to_sample=0,
            segments=0,
            finals=0,
            cancelled=0,
            words=0,
            gaps=0,
            gap_samples=0,
        ),
        3,
    )


@pytest.mark.parametrize(
    ("wanted", "is_meant"),
    [
        (Wanted(), True),
        (Wanted(sessions={"s"}), True),
        (Wanted(sessions={"t"}), False),
        (Wanted(channels={"7", "8"}), True),
        (Wanted(sessions={"s"}, channels={"8"}), False),
        (Wanted(from_us=1_059 * S_US), True),
        (Wanted(from_us=1_061 * S_US), False),
        (Wanted(to_us=1_001 * S_US), True),
        (Wanted(to_us=1_000 * S_US), False),
        (Wanted(from_us=1_010 * S_US, to_us=1_020 * S_US), True),
    ],
)
def test_all_conditions_hold_together(wanted: Wanted, is_meant: bool) -> None:
    assert wanted.includes(call()) is is_meant


def test_moments_as_people_write_them() -> None:
    now = datetime(2026, 11, 30, 15, 30).astimezone()
    at = {"now": now.timestamp}
    assert moment_us("90s", **at) == round((now.timestamp() - 90) * S_US)
    assert moment_us("2 h", **at) == round((now.timestamp() - 7_200) * S_US)
    assert moment_us("14:00", **at) == round(now.replace(hour=14, minute=0).timestamp() * S_US)
    assert moment_us("2026-11-29T08:15:00+00:00", **at) == 1_795_940_100 * S_US
    with pytest.raises(UserError, match="30min, 2h, 1d"):
        moment_us("yesterday", **at)
