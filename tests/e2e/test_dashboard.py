"""The dashboard of a real cluster, in headless Chromium."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
import uvloop

from tests.e2e.browser import CHROMIUM, Page, opened
from tests.e2e.live import Live, live

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
KEY = "correct-horse-battery"
SNAPSHOTS = 2_000  # as in half an hour; charts and lists are full after ten minutes

LIVE = "document.querySelector('#state')?.className === 'live'"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "admin.key").write_text(KEY)
    options = ("--decode", "2", "--admin-key-file", str(folder / "admin.key"), "--event-log", str(folder / "events"))
    with live(tiny, folder, *options) as up:
        yield up


def visited(cluster: Live, scene: Callable[[Page], Awaitable[None]], **how: int | str) -> None:
    """Visits the page under load. Whatever the scene does, the page logs no error and asks no other server."""
    origin, ended = f"http://{cluster.status().metrics['coordinator']}", Event()

    def load() -> None:
        while not ended.is_set():
            cluster.complete("Hello, how are you?", 8)

    async def visit() -> None:
        async with opened(f"{origin}/dashboard", **how) as page:  # type: ignore[arg-type]
            await page.until(LIVE)
            await scene(page)
            assert page.errors == []
            assert [url for url in page.requests if not url.startswith((f"{origin}/dashboard", "data:"))] == []

    loading = Thread(target=load)
    loading.start()
    try:
        uvloop.run(visit())
    finally:
        ended.set()
        loading.join()


def test_page_follows_the_cluster(cluster: Live) -> None:
    """The page shows workers and requests, and goes on changing."""

    async def scene(page: Page) -> None:
        await page.until("document.querySelectorAll('#workers tbody tr').length === 3")
        await page.until("document.querySelectorAll('#requests tbody tr').length > 2")
        assert await page.run("document.querySelectorAll('#charts canvas').length") == 4
        before = await page.run("document.querySelector('#requests tbody tr').textContent")
        await page.until(f"document.querySelector('#requests tbody tr').textContent !== {before!r}")

    visited(cluster, scene)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_its_window(cluster: Live, width: int, scheme: str) -> None:
    """The page needs no scrolling sideways, follows the preferred colours, and lets people switch them."""

    async def scene(page: Page) -> None:
        colour = "getComputedStyle(document.body).backgroundColor"
        await page.until("document.querySelectorAll('#requests tbody tr').length > 0")
        assert await page.run(OVERFLOW) <= 0
        before = await page.run(colour)
        assert (int(before[4:].split(",")[0]) < 100) == (scheme == "dark")
        await page.run("document.querySelector('#theme').click()")
        assert await page.run(colour) != before

    visited(cluster, scene, width=width, scheme=scheme)


def test_keyboard_drains_a_worker(cluster: Live) -> None:
    """A person with a keyboard alone types the key, drains a worker and puts it back."""
    focused = "document.activeElement.getAttribute('aria-label')"

    async def choose(page: Page, dialog_value: str) -> None:
        for _ in range(60):
            if await page.run(focused) == "Manage: decode-0":
                break
            await page.press("Tab")
        await page.press("Enter")
        await page.run(f"document.querySelector('#manage button[value={dialog_value}]').focus()")
        await page.press("Enter")

    async def scene(page: Page) -> None:
        await page.until("document.querySelectorAll('#workers button').length === 3")
        await choose(page, "drain")
        await page.until("document.querySelector('#key').open")
        await page.call("Input.insertText", text=KEY)
        await page.press("Enter")
        health = (
            "[...document.querySelectorAll('#workers tr')].find(r => r.cells[0].textContent === 'decode-0').textContent"
        )
        await page.until(f"{health}.includes('draining')")
        await choose(page, "undo")
        await page.until(f"!{health}.includes('draining')")

    visited(cluster, scene)


def test_timeline_tells_of_a_request(cluster: Live) -> None:
    """The timeline of a request has the steps that `crossdock explain` tells."""

    async def scene(page: Page) -> None:
        await page.run(f"sessionStorage.setItem('key', '{KEY}')")
        await page.until("document.querySelectorAll('#requests button').length > 0")
        await page.run("document.querySelector('#requests button').click()")
        await page.until("document.querySelectorAll('#steps li').length > 3", 120.0)
        assert "submitted" in await page.run("document.querySelector('#steps').textContent")

    visited(cluster, scene)


def test_open_page_does_not_grow(cluster: Live) -> None:
    """A page that has been open for long has as many nodes, points and kept figures as before."""
    size = "[document.querySelectorAll('*').length, charts[0].data[0].length, counted.size]"

    async def scene(page: Page) -> None:
        await page.until("document.querySelectorAll('#requests tbody tr').length > 10", 120.0)
        await page.run(
            "window.repeat = (n) => { for (let at = 0; at < n; at++) show({...structuredClone(last),"
            " uptime_s: last.uptime_s + 1, unix_s: last.unix_s + 1,"
            " requests: last.requests.map((r) => ({...r, request_id: `r${at}-${r.request_id}`})) }); }"
        )
        await page.run("repeat(700)")
        before = await page.run(size)
        for _ in range(SNAPSHOTS // 100):
            await page.run("repeat(100)")
            await asyncio.sleep(0)
        after = await page.run(size)
        assert after[1] == before[1] == 600 and abs(after[0] - before[0]) < 200 and abs(after[2] - before[2]) < 20

    visited(cluster, scene)
