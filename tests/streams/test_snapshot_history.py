"""Upgrade and rollback: what this release and the one before it committed can be read, stage by stage; what a newer one did is refused.

The files hold the metadata of an offset commit as it lies on the broker: one open session of 5.2 s, 26 records read. A stage whose layout
changes gets a new file, and the one of the release before stays.
"""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agents.features.core import FeaturesCore
from agents.inference import core as inference
from agents.vad import snapshot as vad
from streams.checkpoint import SNAPSHOT_VERSION, SessionSnapshot, Snapshot, SnapshotError
from streams.core import SessionKey, SessionState
from streams.errors import UserError
from streams.settings import load_settings

FILES = Path(__file__).parents[1] / "data" / "snapshots"
KEY = SessionKey(0, "session-1")
NOBODY: Any = SimpleNamespace()


def session_in(name: str) -> SessionSnapshot:
    snapshot = Snapshot.unpack((FILES / f"{name}.txt").read_text().strip())
    assert (snapshot.epoch, snapshot.ended) == (3, (123456,))
    (session,) = snapshot.sessions
    assert (session.session_id, session.track.upstream_ordinal, session.track.next_ordinal) == (KEY.session_id, 26, 31)
    return session


def test_every_version_that_can_be_read_has_a_file() -> None:
    assert {path.stem for path in FILES.iterdir()} == {
        "features",
        f"inference-{inference._STATE_VERSION}",
        f"vad-{vad.VERSION - 1}",
        f"vad-{vad.VERSION}",
    }


@pytest.mark.parametrize("version", [vad.VERSION - 1, vad.VERSION])
def test_the_vad_goes_on_from_it(version: int) -> None:
    session = session_in(f"vad-{version}")
    assert session.state[0] == version
    memory, listener = vad.unpack(session.state)
    assert (memory.started, memory.expected, memory.last_offset, memory.next_chunk) == (True, 83_200, 26, 3)
    assert (memory.standing.open, memory.standing.start) == (True, 73_600)
    assert listener is not None
    assert listener.confirmed, "speech that is forwarded goes on, also where that was not kept yet"
    assert session.needed_offset == 20


def test_features_go_on_from_it() -> None:
    session = session_in("features")
    core = FeaturesCore(load_settings(), NOBODY)
    core.load(KEY, SessionState(session.read_from_offset, session.from_offset, session.state))
    assert core.snapshot(KEY) == SessionState(27, 27, b"")


def test_inference_goes_on_from_it() -> None:
    session = session_in(f"inference-{inference._STATE_VERSION}")
    core = inference.InferenceCore(load_settings(), NOBODY)
    core.load(KEY, SessionState(session.read_from_offset, session.from_offset, session.state))
    state = core.snapshot(KEY)
    assert state is not None
    assert state.from_offset == 24
    saved = msgspec.msgpack.decode(state.state, type=inference._Saved)
    assert (saved.words, saved.flags, saved.facts.finals, saved.facts.hotword_version) == (17, ("clipped",), 2, "a1b2")


def test_what_a_newer_release_left_is_refused_with_what_to_do() -> None:
    newer_vad = bytes([vad.VERSION + 1]) + session_in(f"vad-{vad.VERSION}").state[1:]
    with pytest.raises(vad.SnapshotError, match=r"version \d+, and this program reads .*Run the version that wrote it"):
        vad.unpack(newer_vad)
    saved = msgspec.msgpack.decode(session_in(f"inference-{inference._STATE_VERSION}").state)
    newer = msgspec.msgpack.encode([inference._STATE_VERSION + 1, *saved[1:], "more"])
    with pytest.raises(UserError, match=r"version \d+, and this release reads .*Run the release that wrote it"):
        inference.InferenceCore(load_settings(), NOBODY).load(KEY, SessionState(24, 24, newer))
    packed = (FILES / "features.txt").read_text().strip()
    with pytest.raises(SnapshotError, match=f"this release reads version {SNAPSHOT_VERSION}: run the release that wrote it"):
        Snapshot.unpack("Ag" + packed[2:])


def test_a_snapshot_with_more_in_it_than_this_release_knows_can_be_read() -> None:
    """A field is added at the end of a session without a new version, so that the release before can take over again."""
    session = session_in("features")
    longer = [3, 27, [[*msgspec.to_builtins(session, builtin_types=(bytes,)), "a field of tomorrow"]], [123456]]
    packed = bytes([SNAPSHOT_VERSION]) + msgspec.msgpack.encode(longer)
    assert Snapshot.unpack(base64.b64encode(packed).decode()).sessions == (session,)
