"""A real headless Chromium, driven over its DevTools protocol: what a person sees, does and is told in a page."""

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. What its console says is in `errors`, and what it asks of hosts is in `requests`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        answer = self._waiting[self._next] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            found: dict[str, Any] = await answer
        assert "error" not in found, (method, found["error"])
        return dict(found.get("result", {}))

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if (answer := self._waiting.pop(data.get("id", 0), None)) is not None and not answer.done():
                answer.set_result(data)
            else:
                self._note(data.get("method", ""), data.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(part.get("value", part)) for part in params["args"]))
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
                self.headers.append(params["request"]["headers"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)

    async def run(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true in the page; return its value."""
        value = None
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while not (
                    value := await self.run(f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()")
                ):
                    await asyncio.sleep(0.1)
                return value
        raise AssertionError(f"not true in time: {expression}\n{await self.run('document.body.innerText')}")

    async def click(self, selector: str) -> None:
        await self.until(f"!!document.querySelector({json.dumps(selector)})")
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def press(self, key: str, code: str = "", text: str = "") -> None:
        number = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}.get(key, ord(key[0].upper()))
        what = {"key": key, "code": code or key, "windowsVirtualKeyCode": number}
        typed = {"text": text or (key if len(key) == 1 else "\r" if key == "Enter" else "")}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **what, **({} if not typed["text"] else typed))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **what)

    async def size(self, width: int, height: int, scale: float = 1.0, *, is_phone: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )

    async def shot(self, path: Path, *, is_whole: bool = False) -> None:
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(found["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await self._socket.close()


@asynccontextmanager
async def chromium() -> AsyncIterator["Browser"]:
    """Run a browser with a profile of its own."""
    path = find_chromium()
    assert path is not None, "Chromium is not installed: apt-get install chromium"
    with tempfile.TemporaryDirectory(prefix="kvmesh-chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path, *FLAGS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with aiohttp.ClientSession() as http:
                browser = Browser(http, await debug_port(Path(profile)))
                try:
                    yield browser
                finally:
                    await browser.close()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def debug_port(profile: Path) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(OSError, ValueError, IndexError):
                return int((profile / "DevToolsActivePort").read_text().split()[0])
            await asyncio.sleep(0.05)


class Browser:
    """A running Chromium."""

    def __init__(self, http: aiohttp.ClientSession, port: int) -> None:
        self._http = http
        self._url = f"http://127.0.0.1:{port}"
        self._pages: list[Page] = []

    async def page(self) -> Page:
        async with self._http.put(f"{self._url}/json/new?about:blank") as reply:
            where = (await reply.json())["webSocketDebuggerUrl"]
        page = Page(await self._http.ws_connect(where, max_msg_size=256 << 20))
        self._pages.append(page)
        return page

    async def close(self) -> None:
        for page in self._pages:
            await page.close()
