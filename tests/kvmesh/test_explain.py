"""Tests of `kvmesh explain`: its questions to a frontend or router, and its tables."""

import io
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace
from rich.console import Console

from kvmesh.commands import explain
from kvmesh.commands.explain import ExplainConfig, PlacementReply, unbooked
from kvmesh.commands.http_client import open_session
from kvmesh.frontend.http import FrontendApi, HttpSettings
from kvmesh.frontend.models import ModelRegistry
from kvmesh.mesh.http.errors import UnauthorizedError
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.mesh.http.server import App, Route, listening
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import ConfigError, MeshError, UnreachableError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import CandidateReport, Placed, Target, unpack_tokens
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.http import RouterApi
from kvmesh.router.local import LocalRouter
from tests.frontend import tiny
from tests.support.fake_mesh import explanation_of
from tests.support.generator import ScriptedGenerator

DECODE = Target(worker_id=WorkerId("d1-id"), name="d1", address="a:1", overlap_blocks=1)
PREFILL = Target(worker_id=WorkerId("p0-id"), name="p0", address="a:2")
PLACED = Placed(decode=DECODE, reason="cheapest", explanation=explanation_of("d1"))


class Frontend:
    def __init__(self, url: str, models: ModelRegistry, generator: ScriptedGenerator, folder: Path) -> None:
        self.url, self.models, self.generator, self.folder = url, models, generator, folder


@pytest_asyncio.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[Frontend]:
    generator, models = ScriptedGenerator(), ModelRegistry()
    generator.placed = PLACED
    folder = tiny.save_model(tmp_path)
    models.add(tiny.card("w", path=folder))
    async with listening(FrontendApi(HttpSettings(), models, generator).app, "127.0.0.1", 0) as url:
        yield Frontend(url, models, generator, folder)


@pytest_asyncio.fixture
async def router_url(tmp_path: Path) -> AsyncIterator[str]:
    """A router that knows one worker."""
    plane, workers = PlaneClient(), WorkerFeed()
    router = LocalRouter(RouterConfig(gossip=False), plane, workers)
    router.state.add_worker(tiny.card("w", path=tiny.save_model(tmp_path)), 0.0)
    async with listening(RouterApi(router, workers).app, "127.0.0.1", 0) as url:
        yield url
    await router.close()
    await plane.close()


def shown(reply: PlacementReply, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    explain.show(reply, console)
    return console.export_text()


async def test_the_only_model_is_asked_and_nothing_is_generated(frontend: Frontend) -> None:
    answer = await explain.ask(ExplainConfig(url=frontend.url), "Tell me [bold]a story.")
    reply = msgspec.json.decode(answer, type=PlacementReply)
    assert (reply.model, reply.decode, reply.prefill) == ("tiny", DECODE, None)
    assert reply.explanation == explanation_of("d1")
    [(request, _)] = frontend.generator.previewed
    text = tiny.byte_level().decode(unpack_tokens(request.prompt), skip_special_tokens=False)
    assert text == "<|im_start|>user\nTell me [bold]a story.<|im_end|>\n<|im_start|>assistant\n"
    assert frontend.generator.requests == []


async def test_a_raw_prompt_has_no_template(frontend: Frontend) -> None:
    await explain.ask(ExplainConfig(url=frontend.url, raw=True), "a story")
    [(request, _)] = frontend.generator.previewed
    assert tiny.byte_level().decode(unpack_tokens(request.prompt), skip_special_tokens=False) == "<s>a story"


async def test_of_several_models_one_has_to_be_chosen(frontend: Frontend) -> None:
    frontend.models.add(tiny.card("b", model="big", path=frontend.folder))
    with pytest.raises(ConfigError, match="tiny, big; choose one with --model"):
        await explain.ask(ExplainConfig(url=frontend.url), "hi")
    await explain.ask(ExplainConfig(url=frontend.url, model="big"), "hi")


async def test_an_error_of_the_mesh_is_shown(frontend: Frontend) -> None:
    frontend.generator.placed = None
    with pytest.raises(MeshError, match="answered 503: no worker is ready"):
        await explain.ask(ExplainConfig(url=frontend.url), "hi")


async def test_a_router_gets_the_tokens_that_a_frontend_would_make(frontend: Frontend, router_url: str) -> None:
    for raw in (False, True):
        await explain.ask(ExplainConfig(url=frontend.url, raw=raw), "Tell me a story.")
        request, _ = frontend.generator.previewed[-1]
        answer = await explain.ask(ExplainConfig(router=router_url, raw=raw), "Tell me a story.")
        reply = msgspec.json.decode(answer, type=PlacementReply)
        assert reply.isl_tokens == len(unpack_tokens(request.prompt))
        assert reply.decode.name == "w"
        assert reply.explanation is not None
        assert "w would compute prompt and answer" in shown(reply)


def test_one_prompt_does_not_compare_tokenizers(tmp_path: Path) -> None:
    model = explain.load_model(tiny.card("w", path=tiny.save_model(tmp_path)))
    assert (model.tokenizer.backend_name, model.tokenizer.cache.max_bytes) == ("hf", 0)


async def test_a_router_without_workers_of_the_model_says_so(router_url: str) -> None:
    with pytest.raises(ConfigError, match="no worker of the model 'big'"):
        await explain.ask(ExplainConfig(router=router_url, model="big"), "hi")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://"])
async def test_without_a_mesh_it_says_what_to_do(url: str) -> None:
    with pytest.raises(UnreachableError, match="kvmesh up"):
        await explain.ask(ExplainConfig(url=url), "hi")


@pytest.mark.parametrize("argv", [[], ["--json"], ["tell me", "--json"], ["--bogus", "tell me"]])
def test_the_prompt_is_the_last_argument(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        explain.main(argv)


def test_the_help_shows_where_the_prompt_stands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain.main(["--help"])
    assert "kvmesh explain [options] " in " ".join(capsys.readouterr().out.split())


# --- the table ----------------------------------------------------------------------------------------


def reply_with(*candidates: CandidateReport, prefill: bool = False, would_wait: bool = False) -> PlacementReply:
    explanation = replace(explanation_of("d1"), candidates=candidates, would_wait=would_wait)
    return PlacementReply("tiny", 16, 40, DECODE, PREFILL if prefill else None, explanation)


def report(worker: str, leg: str = "whole", **fields: object) -> CandidateReport:
    values = {"overlap_blocks": (1, 1, 1, 1), "queued_tokens": 32, "held_blocks": 7, "requests": 3, "capacity": 1.0}
    values |= {"cost": 2.5, "terms": {"compute": 1.5, "queue": 1.0}, "dp_rank": 0}
    return CandidateReport(leg=leg, worker=worker, **(values | fields))  # type: ignore[arg-type]


def test_the_table_shows_the_chosen_worker_and_its_cost() -> None:
    text = shown(reply_with(report("d1", note="chosen"), report("d2", dp_rank=3, capacity=2.0, note="new: held back")))
    assert "d1 would compute prompt and answer; 16 tokens are cached there" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "d1 2.5 1 32 7 3 compute 1.5 + queue 1 chosen" in rows
    assert "d2/3 2.5 1 32 7 3 (compute 1.5 + queue 1) / 2 new: held back" in rows


def test_in_a_narrow_terminal_nothing_is_left_out() -> None:
    long = {"compute": 11.75, "queue": 102.5, "held": 20.25, "transfer": 1.175}
    text = shown(reply_with(report("prefill-0", terms=long, cost=135.675, note="chosen")), width=80)
    for fact in ("prefill-0", "135.675", "chosen", "11.75", "1.175"):
        assert fact in text


def test_each_leg_has_a_table() -> None:
    text = shown(reply_with(report("p0", "prefill", note="chosen"), report("d1", "decode"), prefill=True))
    assert "p0 would compute the prompt (0 tokens are cached there), d1 the answer" in text
    assert text.index("Who could compute the prompt;") < text.index("Who could compute the answer;")


def test_price_load_and_demand_are_shown() -> None:
    words = " ".join(shown(reply_with(report("d1"))).split())
    for fact in ("policy kv", "price 1:", "busy 50%", "demand 2 ", "why d1 it is"):
        assert fact in words
    assert "it would wait" not in words
    assert "it would wait" in shown(reply_with(report("d1"), would_wait=True))


@pytest.mark.parametrize(
    ("overlap", "text"),
    [
        ((0, 0, 0, 0), "0"),
        ((8, 8, 8, 8), "8"),
        ((2, 5, 5, 5), "2 +3 host"),
        ((0, 0, 1, 4), "0 +1 disk +3 elsewhere"),
    ],
)
def test_blocks_in_lower_tiers_are_shown_separately(overlap: tuple[int, int, int, int], text: str) -> None:
    assert explain.cached(overlap) == text


def test_no_figure_and_no_name_is_cut_in_a_narrow_terminal() -> None:
    one = report("127.0.0.1-30000", note="chosen", queued_tokens=123_456, held_blocks=2047, cost=1234.56)
    text = shown(reply_with(one), width=80)
    for whole in ("127.0.0.1-30000", "123456", "2047", "1234.56", "chosen"):
        assert whole in text, text
    assert "…" not in text


def test_names_are_no_markup() -> None:
    assert "[bold]" in shown(reply_with(report("[bold]")))


def test_without_an_explanation_the_placement_is_shown() -> None:
    assert "d1 would compute" in shown(PlacementReply("tiny", 16, 40, DECODE, None, None))


# --- TLS and keys -------------------------------------------------------------------------------------


async def test_the_key_is_sent_and_a_missing_one_is_explained() -> None:
    async def answer(request: Request) -> Reply:
        if request.header("authorization") != "Bearer right":
            raise UnauthorizedError("no API key was sent")
        return json_reply({"data": [{"id": "m"}]})

    app = App([Route("GET", "/v1/models", answer)])
    async with listening(app, "127.0.0.1", 0) as url:
        async with open_session("right", "", 30.0) as http:
            assert b'"m"' in await explain.fetch(http, "GET", f"{url}/v1/models")
        async with open_session("", "", 30.0) as http:
            with pytest.raises(MeshError, match="set KVMESH_API_KEY"):
                await explain.fetch(http, "GET", f"{url}/v1/models")


async def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("nothing")
    for name in ("no.pem", "absent.pem"):
        with pytest.raises(ConfigError, match=name):
            open_session("", str(tmp_path / name), 30.0)


def test_load_of_other_callers_is_named() -> None:
    values = {"leg": "whole", "dp_rank": 0, "overlap_blocks": (0, 0, 0, 0), "queued_tokens": 0, "held_blocks": 0}
    idle = CandidateReport(**values, worker="a", requests=0, capacity=1.0, cost=1.0, terms={})  # type: ignore[arg-type]
    busy = replace(idle, worker="b", requests=3, unbooked_requests=3, unbooked_blocks=40)
    assert list(unbooked([idle, busy, busy])) == ["b/0 reports 3 requests of other callers, 40 of their blocks"]
