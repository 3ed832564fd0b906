"""The live page, as a person at a browser meets it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.frontend.keys.command import main as keys_command
from kvmesh.mesh.discovery import open_discovery
from kvmesh.protocol.messages import encode_card
from tests.frontend import tiny
from tests.support.chromium import Browser, Page
from tests.support.mesh import Mesh, running_mesh
from tests.ui.conftest import MOCK

AXE = Path(__file__).parents[2] / "ui" / "node_modules" / "axe-core" / "axe.min.js"
LONG = [100 + (i * 31) % 1800 for i in range(300)]
READY = "document.documentElement.dataset.ready === 'yes'"


@asynccontextmanager
async def looking(browser: Browser, url: str, width: int = 1400, height: int = 1000) -> AsyncIterator[Page]:
    """Open the page. At the end its console must be clean, and it must have asked its own host alone."""
    page = await browser.page()
    await page.size(width, height, is_phone=width < 700)
    await page.open(f"{url}/ui")
    await page.until(READY)
    yield page
    assert page.errors == []
    assert [asked for asked in page.requests if not asked.startswith((url, "data:"))] == []


async def ask(url: str, count: int = 1, tokens: int = 40, key: str = "") -> None:
    """Send requests with prompts of their own, long enough for a prefill worker."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "tiny", "max_tokens": tokens, "ignore_eos": True}

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        prompt = [100 + number, *LONG]
        async with http.post(f"{url}/v1/completions", json={**body, "prompt": prompt}, headers=headers) as reply:
            assert reply.status == 200, await reply.text()

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(one(http, number) for number in range(count)))


def text_of(selector: str) -> str:
    return f"(document.querySelector({json.dumps(selector)})?.innerText ?? '')"


# --- what is seen -------------------------------------------------------------------------------------------------


async def test_a_worker_that_dies_and_comes_back_is_seen(mesh: Mesh, browser: Browser) -> None:
    async with looking(browser, mesh.url) as page:
        await page.until(f"{text_of('#mesh-note')} === '5 workers'")
        events = text_of("#events")
        await page.until(f"{events}.includes('decode-1')")
        pid = mesh.kill("decode-1")
        await page.until(f"/died\\s*decode-1/.test({events})")
        await page.until(f"/returned\\s*decode-1/.test({events})")
        await page.until(f"{text_of('#mesh-note')} === '5 workers'")
        await asyncio.to_thread(mesh.until_replaced, "decode-1", pid)


async def test_a_decision_is_explained(mesh: Mesh, browser: Browser) -> None:
    async with looking(browser, mesh.url) as page:
        await ask(mesh.url)
        await page.until(f"{text_of('#decisions')}.includes('prompt tokens')")
        await page.click("#decisions button.decision:has(.more)")
        await page.until("document.getElementById('details').open")
        told = await page.run(text_of("#details-body"))
        assert "Why there" in told and "Who was weighed" in told and "chosen" in told


async def test_a_request_shows_its_life_as_a_timeline(mesh: Mesh, browser: Browser) -> None:
    async with looking(browser, mesh.url) as page:
        await ask(mesh.url, count=3)
        # Not one whose prompt a worker had cached: that one has no pull.
        pulled = "[...document.querySelectorAll('#streams button.stream.over')].find((e) => e.innerText.includes('→'))"
        await page.until(f"{pulled} !== undefined")
        await page.run(f"{pulled}.click()")
        stages = "[...document.querySelectorAll('.timeline .stage')].map((each) => each.innerText).join()"
        await page.until(f"/queue.*prefill.*pull.*decode/.test({stages})")


async def test_a_planners_step_is_seen(browser: Browser, tmp_path: Path) -> None:
    flags = ["--planner", "--planner-reactive-interval-s", "0.5", "--planner-min-decode", "2", "--planner-start-s", "1"]
    with running_mesh(tmp_path, *MOCK, "--prefill", "1", "--decode", "1", *flags) as mesh:
        async with looking(browser, mesh.url) as page:
            await page.until(f"{text_of('#planner-counts')}.includes('decode: 2 ready')")
            await page.until(f"{text_of('#planner-words')}.length > 20")
            await page.until(f"{text_of('#events')}.includes('decode-')")


async def test_another_fleet_is_asked_for_and_answered_or_refused(mesh: Mesh, browser: Browser) -> None:
    told = text_of("#whatif-words")
    async with looking(browser, mesh.url) as page:
        await page.click("#whatif-ask")
        await page.until(f"{told}.startsWith('Not known: ')")  # nothing is remembered yet
        for number in range(15):
            await ask(mesh.url, count=4, tokens=8 + number)
        await page.click("#whatif-ask")
        await page.until(f"/figures differ by up to|is \\d+% off/.test({told})")
        shown = await page.run(text_of("#whatif-body"))
        assert "measured" in shown and "simulated" in shown and "2 prefill + 3 decode" in shown
        is_known = await page.run(f"{told}.startsWith('Simulated')")
        rows = await page.run("document.querySelectorAll('#whatif-body .cases tr').length")
        assert rows == (4 if is_known else 0)


async def test_what_comes_from_the_mesh_stays_text(browser: Browser, mesh: Mesh) -> None:
    bad = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    discovery = open_discovery(f"file:{mesh.run_dir}/discovery")
    try:
        async with looking(browser, mesh.url) as page:
            card = tiny.card("evil", model=bad)
            await discovery.put("workers/evil", encode_card(replaced(card, name=bad)))
            await page.until(f"{text_of('#events')}.includes('<script>window')")
            assert await page.run("document.querySelectorAll('#events script, #events img').length") == 0
            assert await page.run("window.hacked") is None
    finally:
        await discovery.close()


def replaced(card: Any, **fields: Any) -> Any:
    from msgspec.structs import replace

    return replace(card, **fields)


# --- who may look -------------------------------------------------------------------------------------------------


async def test_a_mesh_with_keys_asks_for_one_and_hides_it(
    browser: Browser, tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys_command(["new", "--name", "operator", "--file", str(key_file)])
    key = capsys.readouterr().out.split()[0]
    flags = (*MOCK, "--decode", "1", "--prefill", "0", "--api-keys-file", str(key_file))
    with running_mesh(tmp_path / "run", *flags) as mesh:
        page = await browser.page()
        await page.open(f"{mesh.url}/ui")
        await page.until("document.getElementById('login').open")
        for sent in ("wrong", key):
            await page.run(f"document.getElementById('key').value = {json.dumps(sent)}")
            await page.click("#login .primary")
        await page.until(READY)
        await page.until("!document.getElementById('login').open")
        assert await page.run("sessionStorage.length") == 1
        assert [asked for asked in page.requests if key in asked] == []
        assert [headers for headers in page.headers if headers.get("authorization") == f"Bearer {key}"]


# --- for everybody ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "theme"), [(1400, "dark"), (1400, "light"), (390, "dark")])
async def test_axe_finds_no_serious_fault(mesh: Mesh, browser: Browser, width: int, theme: str) -> None:
    async with looking(browser, mesh.url, width) as page:
        await page.run(
            f"document.documentElement.dataset.theme === '{theme}' || document.getElementById('theme').click()"
        )
        await ask(mesh.url, count=2)
        await page.until("document.querySelectorAll('#streams li').length > 0")
        await page.run(AXE.read_text("utf-8") + ";1")
        assert await serious_faults(page) == []
        await page.click("#decisions button")
        await page.until("document.getElementById('details').open")
        assert await serious_faults(page) == []


async def serious_faults(page: Page) -> list[Any]:
    found = json.loads(await page.run("axe.run().then((found) => JSON.stringify(found.violations))"))
    bad = [fault for fault in found if fault["impact"] in ("serious", "critical")]
    return [(fault["id"], fault["nodes"][0]["html"], fault["nodes"][0]["failureSummary"]) for fault in bad]


async def test_the_page_fits_a_phone(mesh: Mesh, browser: Browser) -> None:
    async with looking(browser, mesh.url, 390, 844) as page:
        await ask(mesh.url, count=2)
        await page.until("document.querySelectorAll('#streams li').length > 0")
        assert await page.run("document.documentElement.scrollWidth") <= 390


async def test_all_is_reached_with_the_keyboard(mesh: Mesh, browser: Browser) -> None:
    async with looking(browser, mesh.url) as page:
        await ask(mesh.url, count=2)
        await page.until("document.querySelectorAll('#streams li').length > 0")
        await page.press("p", text="p")
        await page.until(f"{text_of('#status-text')} === 'paused'")
        await page.press("p", text="p")
        await page.until(f"{text_of('#status-text')} === 'live'")
        await page.press("m", text="m")
        await page.press("ArrowRight")
        await page.until("document.getElementById('spoken').textContent.includes('request')")
        await page.press("Enter")
        await page.until(f"document.getElementById('details').open && {text_of('#details-kind')} === 'Worker'")
        await page.press("Escape")
        await page.until("!document.getElementById('details').open")
        await page.press("/", "Slash", "/")
        for letter in "zzz":
            await page.press(letter, text=letter)
        await page.until("document.querySelectorAll('#streams li').length === 0")
        await page.press("Escape")
        await page.until("document.querySelectorAll('#streams li').length > 0")
        await page.run("document.querySelector('#streams button').focus()")
        await page.press("Enter")
        await page.until(f"document.getElementById('details').open && {text_of('#details-kind')} === 'Request'")
