"""What administrators push, from the command's side and the workers'."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from schemas import Hotword, HotwordList, Rejected, SessionEnd, SessionStart, VersionChange, default_codec
from schemas.digest import hotword_version
from streams.checkpoint import Snapshot
from streams.control import Control, HotwordBook, PushedList, archive_key
from streams.errors import UserError
from streams.kafka import MissingTopicError
from streams.pushing import push_hotwords, read_hotwords
from streams.settings import Settings
from streams.stage import Route, Stage
from streams.tenure import Tenure
from streams.topic_admin import ensure_topics
from streams.topics import AUDIO, HOTWORDS, SPEECH

PATIENCE_S = 60.0


def phrases(*texts: str, boost: float = 3.0) -> tuple[Hotword, ...]:
    return tuple(Hotword(phrase=text, boost=boost) for text in texts)


def pushed(name: str, *texts: str, pushed_us: int = 0) -> PushedList:
    return PushedList(name, hotword_version(phrases(*texts)), pushed_us, len(texts), b"")


def put(book: HotwordBook, each: PushedList) -> None:
    book.take(archive_key(each.name, each.version), each)
    book.take(each.name, each)


@given(st.permutations(["a", "b", "c"]))
def test_all_lists_are_in_force_together_whatever_their_order(order: list[str]) -> None:
    book = HotwordBook()
    assert (book.version, book.names) == ("", "")
    for name in order:
        put(book, pushed(name, f"phrase {name}"))
    assert book.version == "+".join(sorted(pushed(name, f"phrase {name}").version for name in "abc"))
    assert book.names == "a, b, c"
    parts = book.parts(book.version)
    assert parts is not None
    assert {part.name for part in parts} == {"a", "b", "c"}


def test_a_version_is_found_after_the_next_push_and_not_after_its_deletion() -> None:
    book = HotwordBook()
    old, new, none = pushed("a", "one"), pushed("a", "two"), pushed("a")
    for each in (old, new, none):
        put(book, each) if each.version else book.take("a", each)
    assert book.version == ""
    assert book.parts(old.version) == (old,)
    book.take(archive_key("a", old.version), None)
    assert book.parts(old.version) is None
    assert book.parts(f"{new.version}+{old.version}") is None
    assert book.parts(new.version) == (new,)


def test_what_old_versions_hold_is_forgotten_and_where_they_lie_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.control._VALUES_KEPT_BYTES", 250)
    book = HotwordBook()
    names = [pushed("names", "Ng")._replace(value=bytes(100), offset=offset) for offset in (0, 1)]
    versions = [
        (pushed("a", text)._replace(value=bytes(100), offset=2 * n + 2), pushed("a", text)._replace(value=bytes(100), offset=2 * n + 3))
        for n, text in enumerate(("one", "two", "three", "four"))
    ]
    for archived, in_force in ((names[0], names[1]), *versions):
        book.take(archive_key(archived.name, archived.version), archived)
        book.take(in_force.name, in_force)
    held = {each.version: len(each.value) for each in book.archive.values()}
    assert held == {names[0].version: 100, **{each.version: size for (each, _), size in zip(versions, (0, 0, 100, 100), strict=True)}}
    assert [each.offset for each in book.archive.values()] == [0, 2, 4, 6, 8], "of the copies, which stay on the topic"


async def test_a_version_is_announced_when_there_was_time_to_compile_it() -> None:
    now_s = [100.0]
    control = Control(Settings(), default_codec(), clock=lambda: now_s[0])
    control.take("a", pushed("a", "one"))
    assert control.hotwords_to_announce == ""
    now_s[0] += 0.9
    control.take("a", pushed("a", "two"))
    assert control.hotwords_to_announce == ""
    now_s[0] += 0.1
    assert control.hotwords_to_announce == pushed("a", "two").version, "a second push does not put off the first one's moment"


def test_a_version_is_its_content() -> None:
    record = HotwordList(name="a", version=hotword_version(phrases("x", boost=0.1)), pushed_us=1, phrases=phrases("x", boost=0.1))
    back = default_codec().decode(default_codec().encode(record))
    assert isinstance(back, HotwordList)
    assert hotword_version(back.phrases) == back.version, "whatever the wire's float made of the boost"
    assert hotword_version(()) == ""


class Following:
    """A control on the broker, and what it said."""

    def __init__(self, settings: Settings) -> None:
        self.rejected: list[Rejected] = []
        self.changes: list[str] = []
        self.control = Control(settings, default_codec(), self.rejected.append)
        self.control.on_change(lambda: self.changes.append(self.control.hotwords.version))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 as an outsider
                await asyncio.sleep(0.01)


@pytest.fixture
def raw(settings: Settings) -> Callable[[str, bytes | None], None]:
    def produce(key: str, value: bytes | None) -> None:
        producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
        producer.produce(HOTWORDS.full_name(settings), value, key.encode())
        assert producer.flush(PATIENCE_S) == 0

    return produce


@pytest.mark.broker
async def test_pushes_reach_a_worker_that_runs_and_one_that_comes_later(settings: Settings, raw: Any) -> None:
    codec = default_codec()
    await asyncio.to_thread(ensure_topics, settings)
    live = Following(settings)
    await live.control.start()
    assert (live.control.hotwords.version, live.control.ever_pushed) == ("", False)
    one = await asyncio.to_thread(push_hotwords, settings, codec, "orders", phrases("flat white", "cortado"))
    two = await asyncio.to_thread(push_hotwords, settings, codec, "names", phrases("Ng"))
    await live.until(lambda: live.control.hotwords.version.count("+") == 1)

    alien = SessionEnd(channel_id="c", session_id="s", conversation_id="k", position_samples=0, reason="hangup")
    forged = HotwordList(name="orders", version="0123456789abcdef", pushed_us=1, phrases=phrases("x"))
    for key, value in (
        ("orders", b"no record"),
        ("orders", codec.encode(alien)),
        ("orders", codec.encode(forged)),
        ("others", codec.encode(msgspec.structs.replace(forged, version=hotword_version(forged.phrases)))),
    ):
        raw(key, value)
    await live.until(lambda: len(live.rejected) == 4)
    for rejected, reason in zip(
        live.rejected, ("", "SessionEnd does not belong", "but its content is", "under the key 'others'"), strict=True
    ):
        assert reason in rejected.reason
        assert rejected.topic == HOTWORDS.full_name(settings)
    assert live.control.hotwords.version == "+".join(sorted((one.version, two.version))), "what was good stays in force"

    await asyncio.to_thread(push_hotwords, settings, codec, "orders", ())
    await live.until(lambda: live.control.hotwords.version == two.version)
    late = Following(settings)
    await late.control.start()
    assert late.control.hotwords.version == late.control.hotwords_to_announce == two.version
    parts = late.control.hotwords.parts(one.version)
    assert parts is not None
    assert parts[0].name == "orders", "a replay finds what is out of force"
    (again,) = await asyncio.to_thread(late.control.fetched, (parts[0]._replace(value=b""),))
    assert again == parts[0]
    with pytest.raises(LookupError, match="not on the topic any more"):
        await asyncio.to_thread(late.control.fetched, (parts[0]._replace(value=b"", version="another"),))
    assert live.changes[-1] == two.version
    await live.control.stop()
    await late.control.stop()


@pytest.mark.broker
def test_copies_that_nothing_can_name_any_more_go(settings: Settings) -> None:
    codec = default_codec()
    ensure_topics(settings)
    brief = settings.model_copy(update={"audio_retention_ms": 1})
    first = push_hotwords(brief, codec, "a", phrases("one"))
    second = push_hotwords(brief, codec, "a", phrases("two"))
    assert read_hotwords(brief, codec).parts(first.version) is not None, "it was in force until a moment ago"
    time.sleep(0.01)
    third = push_hotwords(brief, codec, "a", phrases("three"))
    book = read_hotwords(brief, codec)
    assert book.parts(first.version) is None
    assert book.parts(second.version) is not None
    again = push_hotwords(settings, codec, "a", phrases("two"))
    assert (again.version, read_hotwords(settings, codec).version) == (second.version, second.version)
    assert read_hotwords(settings, codec).parts(third.version) is not None


@pytest.mark.broker
def test_what_cannot_be_pushed_says_why(settings: Settings) -> None:
    codec = default_codec()
    with pytest.raises(MissingTopicError, match="asr topics create"):
        push_hotwords(settings, codec, "a", phrases("one"))
    ensure_topics(settings)
    with pytest.raises(UserError, match="cannot be a list's name"):
        push_hotwords(settings, codec, "a:b", phrases("one"))
    with pytest.raises(UserError, match="boost of 'one' is 101"):
        push_hotwords(settings, codec, "a", phrases("one", boost=101.0))
    for number in range(8):
        push_hotwords(settings, codec, f"list-{number}", phrases(f"phrase {number}"))
    with pytest.raises(UserError, match="8 are the most"):
        push_hotwords(settings, codec, "one-more", phrases("one"))
    push_hotwords(settings, codec, "list-3", phrases("another"))


class Outbox:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int | None, VersionChange]] = []

    def send(self, topic: str, partition: int | None, key: bytes | None, value: bytes, on_ack: Callable[[], None]) -> None:
        record = default_codec().decode(value)
        assert isinstance(record, VersionChange)
        self.sent.append((topic, partition, record))

    def take(self) -> list[tuple[str, str]]:
        told = [(record.session_id, record.version) for _, _, record in self.sent]
        self.sent.clear()
        return told


async def test_each_session_is_told_once_and_what_is_told_acts_when_it_is_read() -> None:
    now_s = [100.0]
    control = Control(Settings(), default_codec(), clock=lambda: now_s[0])
    outbox: Any = Outbox()
    stage = Stage(
        SimpleNamespace(), Settings(), Route("vad", AUDIO, SPEECH), lambda *_: SimpleNamespace(), default_codec(), outbox, control=control
    )
    tenure = stage.tenures[3] = Tenure(3, Snapshot(epoch=7), 0, numbered_by_recorder=True)
    for offset, session_id in enumerate(("a", "b")):
        ids = {"channel_id": "c", "session_id": session_id, "conversation_id": "k"}
        tenure.place(offset, SessionStart(**ids, position_samples=0, encoding="pcm_s16le", sample_rate_hz=16_000))

    def announce(now_s: float) -> None:
        assert stage.proposals is not None
        stage.proposals.announce_versions(stage.tenures.values(), now_s)

    announce(100.0)
    assert outbox.take() == [], "nobody has ever pushed anything"

    one = pushed("orders", "one")
    control.take("orders", one)
    announce(100.0)
    assert outbox.take() == []
    now_s[0] = 101.0
    announce(101.0)
    assert [(topic, partition, record.epoch, record.kind, record.name) for topic, partition, record in outbox.sent] == [
        ("asr.audio", 3, 7, "hotwords", "orders")
    ] * 2
    told = outbox.sent[0][2]
    assert outbox.take() == [("a", one.version), ("b", one.version)]
    announce(105.9)
    assert outbox.take() == [], "it is on its way"
    tenure.place(2, told)
    announce(106.1)
    assert outbox.take() == [("b", one.version)], "what was not read after a while is written again"

    control.take("orders", pushed("orders"))
    now_s[0] = 110.0
    announce(110.0)
    assert outbox.take() == [("a", "")], "and b never had any"
    tenure.sessions["b"].hotword_version = None
    announce(110.0)
    assert outbox.take() == [("b", "")], "after a takeover nobody knows"
