"""The live page in Chromium, on a whole stack of two stages: what moves, a killed rank, a chat, and who can use it.

It needs Chromium (Debian's), playwright and axe-core, which `make page` fetches into build/page.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from stacks import Running, folder_in_memory, running

from orca_local.stack import DEMO_MODEL

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[2] / "build/page/package/axe.min.js"
SHOTS = Path(__file__).parents[2] / "build/page/shots"
playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed: `make page` fetches it")
pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
SCREENS = {"large": (1440, 1000), "phone": (390, 844)}
LONG = 480  # tokens; the model has 512 positions
SEEN = 3.0  # seconds until a browser shows a killed rank


@dataclass
class Seen:
    """A page in a browser, and what must not happen there."""

    page: Any
    wrong: list[str] = field(default_factory=list)


@dataclass
class Site:
    stack: Running
    browser: Any

    @property
    def url(self) -> str:
        return f"http://{self.stack.stack.ui_address}"

    async def open(self, screen: str = "large", scheme: str = "light", **more: Any) -> Seen:
        """A page that has drawn an engine. Requests to elsewhere, errors and warnings are noted."""
        width, height = SCREENS[screen]
        context = await self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **more
        )
        seen = Seen(await context.new_page())
        page, wrong = seen.page, seen.wrong
        page.on("console", lambda told: wrong.append(told.text) if told.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(self.url) else wrong.append(asked.url))
        await page.goto(self.url)
        await page.wait_for_selector("orca-engine .state.good")
        return seen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    with folder_in_memory() as folder:
        async with (
            running(Path(folder) / "run", DEMO_MODEL, ui=True, pp=2, max_batch_size=2, ui_port=0) as stack,
            playwright.async_playwright() as driver,
        ):
            await stack.until(lambda: any(c.role == "ui" and c.addresses for c in stack.stack.children))
            browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            yield Site(stack, browser)
            await browser.close()


async def until(page: Any, condition: str, arg: Any = None, seconds: float = 60.0) -> None:
    """Waits for a function of JavaScript. playwright's own way would evaluate in the page, whose policy forbids it."""
    async with asyncio.timeout(seconds):
        while not await page.evaluate(condition, arg):
            await asyncio.sleep(0.02)


async def busy(site: Site) -> asyncio.Task[None]:
    """One request after the other; the first has its first token."""
    begun = asyncio.Event()

    async def one_by_one() -> None:
        while True:
            await site.stack.tokens([5, 6, 7], LONG, lambda _: begun.set())

    task = asyncio.create_task(one_by_one())
    first = asyncio.create_task(begun.wait())
    async with asyncio.timeout(60):
        await asyncio.wait([task, first], return_when=asyncio.FIRST_COMPLETED)
    assert begun.is_set(), task
    return task


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_it_moves_with_the_engine(site: Site) -> None:
    """Iterations, slots, the queue and the table, without a reload."""
    seen = await site.open()
    page = seen.page
    tasks = [asyncio.create_task(site.stack.tokens([5, 6, 7 + n], LONG)) for n in range(7)]
    try:
        await until(page, "() => document.querySelectorAll('.figure .block').length > 4")
        await until(page, "() => document.querySelectorAll('.queue i').length > 0")
        assert "wait" in await page.inner_text("orca-queue .caption")
        before = await page.get_attribute(".figure svg", "aria-label")
        assert "over 2 stages" in before
        assert "slots are reserved by" in await page.get_attribute("orca-slots canvas", "aria-label")
        first = await page.inner_text("tbody tr[data-state=running] td.num")
        await until(
            page, "first => document.querySelector('tbody tr[data-state=running] td.num').innerText !== first", first
        )
        await page.click("button[aria-pressed]")
        held = await page.inner_html(".figure")
        await asyncio.gather(*tasks[:1])
        assert await page.inner_html(".figure") == held, "what is held stays"
    finally:
        await ended(*tasks)
    assert not seen.wrong
    await page.context.close()


async def test_a_story_by_keyboard(site: Site) -> None:
    seen = await site.open()
    page = seen.page
    await site.stack.tokens([9, 9, 9], 6)
    await page.wait_for_selector("tbody .request")
    await page.focus("tbody .request")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("dialog[open] orca-story li:has-text('of engine-0')")
    await page.wait_for_selector("dialog[open] orca-story p:has-text('finished after')")
    told = await page.inner_text("dialog[open]")
    for part in ("input token", "in the queue until engine-0 had claimed it", "1 initiation of 3 positions"):
        assert part in told
    assert await page.is_hidden("dialog[open] button:has-text('Show the text')"), "prompts are not shown unasked"
    await page.keyboard.press("Escape")
    assert await page.locator("dialog[open]").count() == 0
    assert await page.evaluate("document.activeElement.className") == "request", "the focus is where it was"
    await until(page, "() => document.querySelector('orca-slots .caption').innerText.startsWith('0 reserved')")
    assert not seen.wrong
    await page.context.close()


async def test_a_killed_rank_is_seen_and_told(site: Site) -> None:
    seen = await site.open()
    page = seen.page
    task = await busy(site)
    try:
        before = await page.locator(".failures li").count()
        pid = site.stack.stack.rank_pid(1, 0)
        assert pid is not None
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await until(page, "n => document.querySelectorAll('.failures li').length > n", before)
        assert time.monotonic() - began < SEEN
        await page.wait_for_selector(".failures li.over:has-text('paused')", timeout=60_000)
        told = await page.inner_text(".failures li >> nth=0")
        for part in ("engine-0 (stage 1)", "verdict", "formed again", "1 stream paused"):
            assert part in told, told
    finally:
        await ended(task)
    assert not seen.wrong
    await page.context.close()


async def test_a_chat_is_streamed_and_two_settings_compared(site: Site) -> None:
    seen = await site.open()
    page = seen.page
    await page.fill("textarea", "def main(")
    await page.check("input[name=compare]")
    await page.fill("input[name=tokens-A]", "200")
    await page.fill("input[name=tokens-B]", "30")
    await page.keyboard.press("Tab")
    await page.focus("textarea")
    await page.keyboard.press("Enter")
    grows = "() => document.querySelectorAll('.answer pre')[0]?.textContent.length ?? 0"
    await until(page, f"() => ({grows})() > 0")
    some = await page.evaluate(grows)
    await until(page, f"some => ({grows})() > some", some)
    assert await page.is_visible("button:has-text('Stop')"), "it came in parts, before the end"
    await page.wait_for_selector("[role=status]:has-text('Answer B ended')", timeout=60_000)
    texts = await page.locator(".answer pre").all_inner_texts()
    assert len(texts) == 2
    assert texts[0] != texts[1]
    assert not seen.wrong
    await page.context.close()


async def test_a_page_s_death_touches_no_stream_and_it_comes_back(site: Site) -> None:
    seen = await site.open()
    page = seen.page
    task = asyncio.create_task(site.stack.tokens([5, 6, 7], LONG))
    await until(page, "() => document.querySelector('tbody tr[data-state=running]') !== null")
    (child,) = [one for one in site.stack.stack.children if one.role == "ui"]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    await page.wait_for_selector(".connection.bad")
    await page.wait_for_selector(".connection:not(.bad)", timeout=60_000)
    assert len(await task) == LONG
    await page.context.close()


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everybody_can_use_it(site: Site, screen: str, scheme: str) -> None:
    """axe finds nothing that is serious, nothing is wider than the screen, and a picture is left to look at."""
    if not AXE.exists():
        pytest.skip("axe-core is not there: `make page` fetches it")
    seen = await site.open(screen, scheme, bypass_csp=True)
    page = seen.page
    task = await busy(site)
    try:
        await page.wait_for_selector("tbody .request")
        await page.evaluate(AXE.read_text())
        SHOTS.mkdir(parents=True, exist_ok=True)
        for name in ("page", "story"):
            if name == "story":
                await page.click("tbody .request")
                await page.wait_for_selector("dialog[open] li")
            found = (await page.evaluate("axe.run()"))["violations"]
            bad = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
            assert not bad, name
            await page.screenshot(path=SHOTS / f"{name}-{screen}-{scheme}.png", full_page=name == "page")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    finally:
        await ended(task)
    assert not seen.wrong
    await page.context.close()
