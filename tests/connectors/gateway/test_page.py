"""The live page, in a real browser."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from connectors.gateway.server import Gateway, make_app, serve
from connectors.results import Received
from streams.settings import load_settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt install chromium)"),
    pytest.mark.asyncio(loop_scope="module"),
]

FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP: Final = {"width": 1280, "height": 840}
PHONE: Final = {"width": 360, "height": 740}
#: WCAG 2.1, level AA, for text.
READABLE_CONTRAST: Final = 4.5

Give = Callable[..., None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        await started.close()


class Live:
    """A gateway, and a page of it."""

    def __init__(self, gateway: Gateway, url: str, page: Page) -> None:
        self.gateway = gateway
        self.url = url
        self.page = page
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def give(self, *records: Any) -> None:
        for record in records:
            self.gateway.take(Received(record, time.time_ns() // 1_000))

    async def open(self, query: str = "") -> None:
        await self.page.goto(self.url + query)
        await expect(self.page.locator("#connection")).to_have_text("Connected")


@pytest_asyncio.fixture(loop_scope="module")
async def live(browser: Browser) -> AsyncIterator[Live]:
    async with serve(load_settings(gateway_port=0), read=False) as (gateway, url):
        gateway.catch_up()
        page = await browser.new_page(viewport=DESKTOP)
        shown = Live(gateway, url, page)
        yield shown
        await page.close()
        assert shown.errors == []


async def sideways_px(page: Page) -> int:
    """Return how far the page can be scrolled sideways."""
    return int(await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


async def test_it_waits_for_calls_and_shows_one_as_it_is_spoken(live: Live, party: Any) -> None:
    await live.open()
    page = live.page
    await expect(page.get_by_text("Waiting for calls")).to_be_visible()

    caller = party("7")
    live.give(caller.state(), caller.partial(0, "can I have a"))
    await expect(page.get_by_text("Waiting for calls")).to_be_hidden()
    card = page.locator(".channel")
    await expect(card.locator(".party")).to_have_text("customer")
    await expect(card.locator(".channel-id")).to_have_text("Channel 7")
    await expect(card.locator(".state")).to_have_text("Live")
    text = card.locator(".text")
    await expect(text).to_have_text("can I have a")
    grey = await settled_colour(page)

    live.give(caller.ended(0, "Can I have a light roast?"))
    await expect(text).to_have_text("Can I have a light roast?")
    await expect(card.locator("time")).to_have_text("0:00")
    assert await settled_colour(page) != grey
    assert await page.title() == "1 live · Live captions"

    live.give(caller.state("idle", seconds=30))
    await expect(card.locator(".state")).to_have_text("Quiet")
    live.give(caller.state("closed", seconds=31, reason="hangup"))
    await expect(card.locator(".state")).to_have_text("Ended")
    await expect(card.locator(".clock")).to_have_text("0:31")


async def settled_colour(page: Page) -> str:
    """Return the colour of the only text once it has faded over."""
    return str(
        await page.evaluate(
            "async () => { const text = document.querySelector('.text');"
            " await Promise.all(text.getAnimations().map((fade) => fade.finished)); return getComputedStyle(text).color; }"
        )
    )


async def test_latencies_are_shown_and_marked_where_they_break_the_promise(live: Live, party: Any) -> None:
    await live.open()
    fast, slow = party("1"), party("2")
    live.give(fast.state(), slow.state(), *(fast.frame(at, 100) for at in range(10)), *(slow.frame(at, 900) for at in range(10)))
    live.give(fast.partial(0, "hello"))
    live.gateway.tick(time.time_ns() // 1_000)
    one, other = live.page.locator(".channel").nth(0), live.page.locator(".channel").nth(1)
    await expect(one.locator(".p95")).to_have_text(re.compile(r"^1\d\d ms$"))
    await expect(one.locator(".p95")).not_to_have_class(re.compile("late"))
    await expect(other.locator(".p95")).to_have_class(re.compile("late"))
    await expect(one.locator(".word-age")).to_have_text(re.compile("^last word (just now|. s ago)$"))
    await expect(live.page.locator("#all-p95")).to_have_text(re.compile(r"^9\d\d ms$"))
    await expect(live.page.locator("#open-channels")).to_have_text("2")


async def test_what_somebody_has_selected_stays_selected(live: Live, party: Any) -> None:
    await live.open()
    caller = party()
    live.give(caller.state(), caller.ended(0, "Hello there."), caller.partial(1, "we moved up"))
    await expect(live.page.locator(".text")).to_have_count(2)
    await live.page.evaluate(
        """() => {
            const [first, second] = [...document.querySelectorAll(".text")].map((text) => text.firstChild);
            document.getSelection().setBaseAndExtent(first, 6, second, 8);
        }"""
    )
    selected = "document.getSelection().toString()"
    before = await live.page.evaluate(selected)
    assert "there." in before and before.endswith("we moved")
    live.give(caller.partial(1, "we moved up to the third"), caller.state("open", seconds=4))
    live.give(caller.ended(1, "we moved up to the third floor."), caller.partial(2, "and"), caller.ended(0, "Hi there!", "refined"))
    live.gateway.tick(time.time_ns() // 1_000)
    await expect(live.page.locator(".text").last).to_have_text("and")
    await expect(live.page.locator(".refined")).to_have_text("Hi there!")
    assert (await live.page.evaluate(selected)).endswith("we moved")


async def test_texts_are_texts_whatever_they_hold(live: Live, party: Any) -> None:
    await live.open()
    evil = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
    caller = party("1", conversation=f"c{evil}", name=evil)
    live.give(caller.state(), caller.ended(0, evil), caller.partial(1, evil), caller.ended(0, evil + "!", "refined"))
    await expect(live.page.locator(".text").last).to_have_text(evil)
    await expect(live.page.locator(".party")).to_have_text(evil)
    assert await live.page.locator("main img, main script").count() == 0
    assert "owned" not in await live.page.title()


async def test_the_parties_of_a_call_stand_side_by_side(live: Live, party: Any) -> None:
    await live.open()
    live.give(party("2", name="agent").state(), party("1").state(), party("3", conversation="call-2").state())
    channels = live.page.locator(".channel")
    await expect(channels).to_have_count(3)
    await expect(live.page.locator(".call")).to_have_count(2)
    customer, agent = await channels.nth(0).bounding_box(), await channels.nth(1).bounding_box()
    assert customer is not None and agent is not None
    assert customer["y"] == agent["y"] and customer["x"] + customer["width"] <= agent["x"]
    assert await live.page.locator(".party").all_text_contents() == ["customer", "agent", "customer"]

    await live.page.set_viewport_size(PHONE)
    customer, agent = await channels.nth(0).bounding_box(), await channels.nth(1).bounding_box()
    assert customer is not None and agent is not None
    assert customer["x"] == agent["x"] and customer["y"] + customer["height"] <= agent["y"]
    assert await sideways_px(live.page) == 0


async def test_a_channel_shows_its_newest_call(live: Live, party: Any) -> None:
    await live.open()
    old, new = party("1", conversation="old", age_s=100), party("1", conversation="new", age_s=5)
    live.give(old.state(), old.ended(0, "from before"), old.state("closed", seconds=9), new.state(), new.ended(0, "from now"))
    await expect(live.page.locator(".text")).to_have_text("from now")
    live.give(old.ended(0, "second thoughts", "refined"))
    live.give(new.ended(1, "more"))
    await expect(live.page.locator(".text")).to_have_text(["from now", "more"])
    await live.page.reload()
    await expect(live.page.locator(".text")).to_have_text(["from now", "more"])


async def test_a_cancelled_segment_vanishes(live: Live, party: Any) -> None:
    await live.open()
    caller = party()
    live.give(caller.state(), caller.ended(0, "Hello."), caller.partial(1, "tsk"))
    await expect(live.page.locator(".text")).to_have_text(["Hello.", "tsk"])
    live.give(caller.ended(1, kind="cancelled"))
    await expect(live.page.locator(".text")).to_have_text(["Hello."])


async def test_the_newest_text_is_in_view_unless_somebody_reads_back(live: Live, party: Any) -> None:
    await live.open()
    caller = party()
    live.give(caller.state(), *(caller.ended(at, f"This is sentence number {at} of a long call.") for at in range(30)))
    lines = live.page.locator(".line")
    await expect(lines).to_have_count(30)
    await expect(lines.last).to_be_in_viewport(ratio=1)
    await live.page.locator(".lines").evaluate("(lines) => new Promise((done) => { lines.onscroll = done; lines.scrollTop = 0; })")
    live.give(caller.ended(30, "The newest."))
    await expect(lines).to_have_count(31)
    await expect(lines.first).to_be_in_viewport(ratio=1)
    await expect(lines.last).not_to_be_in_viewport()


async def test_it_reconnects_and_shows_what_it_missed(live: Live, party: Any) -> None:
    await live.open()
    caller = party()
    live.give(caller.state(), caller.ended(0, "before"), caller.partial(1, "half a sen"))
    await expect(live.page.locator(".text")).to_have_text(["before", "half a sen"])
    await live.gateway.close_sockets(make_app(live.gateway))
    live.give(caller.ended(1, "half a sentence"), caller.ended(2, "meanwhile"))
    await expect(live.page.locator(".text")).to_have_text(["before", "half a sentence", "meanwhile"])
    await expect(live.page.locator("#connection")).to_have_text("Connected")


async def test_it_says_when_the_gateway_is_away_and_recovers_when_it_is_back(browser: Browser, party: Any) -> None:
    caller = party()
    settings = load_settings(gateway_port=0)
    async with serve(settings, read=False) as (gateway, url):
        gateway.catch_up()
        page = await browser.new_page(viewport=DESKTOP)
        live = Live(gateway, url, page)
        live.give(caller.state(), caller.ended(0, "before"), caller.partial(1, "never finished"))
        await live.open()
        await expect(page.locator(".text")).to_have_text(["before", "never finished"])
    await expect(page.locator("#connection")).to_have_text("Reconnecting")
    port = int(url.rstrip("/").rpartition(":")[2])
    async with serve(load_settings(gateway_port=port), read=False) as (gateway, _):
        live.gateway = gateway
        live.give(caller.state(), caller.ended(0, "before"), caller.ended(1, kind="cancelled"), caller.ended(2, "after"))
        gateway.catch_up()
        await expect(page.locator("#connection")).to_have_text("Connected", timeout=20_000)
        await expect(page.locator(".text")).to_have_text(["before", "after"])
        await page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_can_be_read(live: Live, party: Any, scheme: Any) -> None:
    await live.page.emulate_media(color_scheme=scheme)
    await live.open()
    parties = [party(str(at), conversation=str(at)) for at in range(3)]
    for each, state in zip(parties, ("open", "idle", "closed"), strict=True):
        live.give(
            each.state(state, seconds=9),
            each.ended(0, "Said.", confidence=0.3),
            each.ended(0, "Meant.", "refined"),
            each.partial(1, "open"),
        )
        live.give(*(each.frame(at, 900) for at in range(3)))
    live.gateway.tick(time.time_ns() // 1_000)
    await expect(live.page.locator(".p95.late").first).to_be_visible()
    await asyncio.sleep(0.5)  # colours fade over
    contrasts = await live.page.evaluate(_CONTRASTS)
    assert len(contrasts) > 20
    unreadable = {name: round(contrast, 2) for name, contrast in contrasts.items() if contrast < READABLE_CONTRAST}
    assert unreadable == {}


#: Contrast of each kind of text with what is behind it, as WCAG defines it.
_CONTRASTS: Final = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = ([red, green, blue]) => {
        const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = [red, green, blue].map((value) => linear(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const colour = rgba(getComputedStyle(each).backgroundColor);
            if (colour[3] > 200) return colour;
        }
        return [255, 255, 255];
    };
    const contrasts = {};
    for (const element of document.querySelectorAll("body *")) {
        const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!hasText || !element.checkVisibility() || element.tagName === "NOSCRIPT") continue;
        const [one, other] = [luminance(rgba(getComputedStyle(element).color)), luminance(behind(element))].sort((a, b) => b - a);
        const name = `${element.tagName}.${element.className}#${element.id} ${element.textContent}`;
        contrasts[name] = Math.min(contrasts[name] ?? 99, (one + 0.05) / (other + 0.05));
    }
    return contrasts;
}"""


async def test_a_screen_reader_hears_finals_once(live: Live, party: Any) -> None:
    await live.open()
    caller = party()
    live.give(caller.state(), caller.partial(0, "hel"))
    log = live.page.get_by_role("log", name="customer, Channel 1")
    await expect(log).to_have_attribute("aria-live", "polite")
    line = log.locator(".line")
    await expect(line).to_have_attribute("aria-busy", "true")
    live.give(caller.ended(0, "Hello."))
    await expect(line).to_have_attribute("aria-busy", "false")


async def test_fifty_channels_have_room(live: Live, party: Any) -> None:
    await live.open()
    for pair in range(20):
        for at, name in enumerate(("customer", "agent")):
            each = party(str(pair * 2 + at), conversation=f"pair-{pair}", name=name)
            live.give(each.state(), *(each.ended(segment, f"Sentence {segment}.") for segment in range(12)), each.partial(12, "and"))
    for at in range(40, 50):
        each = party(str(at), conversation=f"single-{at}")
        live.give(each.state(), each.partial(0, "hello"))
    await expect(live.page.locator(".channel")).to_have_count(50)
    await expect(live.page.locator(".call")).to_have_count(30)
    await expect(live.page.locator("#open-channels")).to_have_text("50")
    for size in (DESKTOP, PHONE, {"width": 1920, "height": 1080}):
        await live.page.set_viewport_size(size)
        assert await sideways_px(live.page) == 0


async def test_it_asks_nobody_but_the_gateway(live: Live, party: Any) -> None:
    await live.open()
    live.give(party().state())
    await expect(live.page.locator(".channel")).to_have_count(1)
    outside = [url for url in live.asked if not url.startswith((live.url, "data:"))]
    assert live.asked and outside == []


async def test_the_address_chooses_what_is_shown(live: Live, party: Any) -> None:
    live.give(party("1").state(), party("2", name="agent").state())
    await live.open("?channel=2")
    await expect(live.page.locator(".party")).to_have_text(["agent"])


async def test_it_looks_as_it_should(live: Live, party: Any, tmp_path: Path) -> None:
    """Keeps pictures for people; what must hold of them is asserted above."""
    await live.open()
    caller, agent = party("1"), party("2", name="agent")
    live.give(
        caller.state(), agent.state(), caller.ended(0, "Can I have a light roast, twelve ounce?"), agent.partial(1, "of course, with")
    )
    await expect(live.page.locator(".text")).to_have_count(2)
    for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        await live.page.set_viewport_size(size)
        picture = await live.page.screenshot(path=tmp_path / f"{name}.png")
        assert len(picture) > 10_000
