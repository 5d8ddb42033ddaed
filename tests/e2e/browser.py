"""Headless Chromium over its debugging protocol, with aiohttp alone."""

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking"
)


class Page:
    """One tab. Collects what it logs as an error, and every address that it asks for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        async for frame in self._socket:
            said = frame.json()
            what, about = said.get("method"), said.get("params", {})
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif what == "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            elif what == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
                self.errors.append(str(about["args"]))
            elif what == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{about['entry']['text']} {about['entry'].get('url')}")
            elif what == "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(60):
            said = await answer
        assert "error" not in said, said
        return said["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not await self.run(script):  # noqa: ASYNC110 (the page does not tell)
                await asyncio.sleep(0.2)

    async def size(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def scheme(self, name: str) -> None:
        """`light` or `dark`: what the user prefers."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text
            )

    async def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def opened(url: str, width: int = 1280, scheme: str = "light") -> AsyncIterator[Page]:
    """A browser with a page that is loading."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS.split(), "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        quiet = asyncio.subprocess.DEVNULL
        browser = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
        try:
            where = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(60):
                while not where.exists() or not where.read_text().strip():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            port = where.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    [tab] = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.size(width)
                    await page.scheme(scheme)
                    await page.call("Page.navigate", url=url)
                    yield page
                    listening.cancel()
        finally:
            browser.kill()
            await browser.wait()
