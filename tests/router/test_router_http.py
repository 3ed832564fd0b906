"""The router's HTTP API, over real sockets: what gateways see."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.kvevents.publisher import KvEventPublisher
from kvmesh.mesh.discovery import Put, open_discovery
from kvmesh.mesh.discovery.memory import MemoryDiscovery
from kvmesh.mesh.http.server import listening
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.events import Stored
from kvmesh.protocol.hashing import hash_seed, sequence_hashes
from kvmesh.protocol.ids import EngineHash, RequestId, WorkerId
from kvmesh.protocol.messages import Role, RouterCard, WorkerCard, decode, encode, pack_tokens
from kvmesh.router import api
from kvmesh.router.config import RouterConfig
from kvmesh.router.feeds import WorkerFeed
from kvmesh.router.http import RouterApi
from kvmesh.router.index import Holder, PrefixIndex
from kvmesh.router.local import LocalRouter
from kvmesh.router.service import serve
from tests.support.budget import examples
from tests.support.patience import PATIENCE_S

BLOCK = 16
TOKENS = list(range(1000, 1170))  # 10 blocks and a bit
MAX_BODY_BYTES = 64 * 1024
PLACE: dict[str, Any] = {"model": "m", "prompt_tokens": TOKENS}


def card(name: str, role: Role = Role.DECODE, **fields: object) -> WorkerCard:
    values: dict[str, object] = {"model": "m", "model_path": "/m", "address": f"{name}:1", "block_size": BLOCK}
    values |= {"total_blocks": 100, "context_tokens": 4096, "transfer": "shm"}
    return WorkerCard(worker_id=WorkerId(f"{name}-id"), name=name, role=role, **(values | fields))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


class Served:
    """A router with an HTTP API, and a client of it."""

    def __init__(self, config: RouterConfig) -> None:
        self.discovery, self.plane, self.workers = MemoryDiscovery(), PlaneClient(), WorkerFeed()
        self.router = LocalRouter(config, self.plane, self.workers)
        self.api = RouterApi(self.router, self.workers, MAX_BODY_BYTES, config.max_bookings)
        self.url = ""
        self.session: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return the status, and the JSON or the bytes."""
        status, _, answer = await self.ask_all(method, path, body)
        return status, answer

    async def ask_all(self, method: str, path: str, body: object = None) -> tuple[int, Any, Any]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with self.session.request(method, self.url + path, data=data) as reply:
            content = await reply.read()
            is_json = reply.content_type == "application/json"
            return reply.status, reply.headers, json.loads(content) if is_json else content

    async def place(self, **fields: object) -> Any:
        status, answer = await self.ask("POST", "/place", PLACE | fields)
        assert status == 200, answer
        return answer

    async def join(self, *cards: WorkerCard) -> None:
        for one in cards:
            await self.discovery.put(f"workers/{one.worker_id}", encode(one))
        await until(lambda: {c.worker_id for c in cards} <= {c.worker_id for c in self.router.state.fleet.cards})

    @property
    def in_flight(self) -> int:
        return len(self.router.state.load)


@pytest.fixture
def config() -> RouterConfig:
    return RouterConfig(gossip=False, max_bookings=3)


@pytest_asyncio.fixture
async def served(config: RouterConfig) -> AsyncIterator[Served]:
    served = Served(config)
    following = asyncio.create_task(served.workers.run(served.discovery))
    async with listening(served.api.app, "127.0.0.1", 0) as served.url, aiohttp.ClientSession() as served.session:
        yield served
    following.cancel()
    await served.router.close()
    await served.plane.close()
    await served.discovery.close()


# --- placements ---------------------------------------------------------------------------------------


async def test_a_placement_says_where_and_why_and_is_booked(served: Served) -> None:
    await served.join(card("d1"), card("p1", Role.PREFILL))
    answer = await served.place(explain=True)
    booking = answer.pop("booking")
    explanation = answer.pop("explanation")
    plain = {"dp_rank": 0, "overlap_blocks": 0, "retokenizes": False, "content": ""}
    assert answer == {
        "lease_s": 120.0,
        "model": "m",
        "block_size": BLOCK,
        "isl_tokens": 170,
        "decode": {"worker_id": "d1-id", "name": "d1", "address": "d1:1", **plain},
        "prefill": {"worker_id": "p1-id", "name": "p1", "address": "p1:1", **plain},
        "reason": "170 of 170 prompt tokens are to compute",
    }
    assert explanation["policy"] == "kv"
    assert {c["worker"] for c in explanation["candidates"]} == {"d1", "p1"}
    assert RequestId(booking) in served.router.state.load


async def test_prompts_come_as_tokens_bytes_or_hashes(served: Served) -> None:
    await served.join(card("d1"))
    await served.place()  # from here on it is about to be cached there
    forms: list[dict[str, object]] = [
        {"prompt_tokens": TOKENS},
        {"prompt_tokens_b64": base64.b64encode(pack_tokens(TOKENS)).decode()},
        {"sequence_hashes": sequence_hashes(TOKENS, BLOCK), "isl_tokens": len(TOKENS)},
    ]
    for form in forms:
        status, answer = await served.ask("POST", "/place", {"model": "m", "book": False} | form)
        assert (status, answer["isl_tokens"], answer["decode"]["overlap_blocks"]) == (200, 170, 10), answer
    _, answer = await served.ask("POST", "/place", {"model": "m", "book": False, "isl_tokens": 170})
    assert (answer["isl_tokens"], answer["decode"]["overlap_blocks"]) == (170, 0)


async def test_adapters_and_salts_have_prefixes_of_their_own(served: Served) -> None:
    await served.join(card("d1", loras=("a",)))
    await served.place(lora="a", cache_salt="s")
    hashes = sequence_hashes(TOKENS, BLOCK, hash_seed("a", "s"))
    for fields, overlap in (({}, 0), ({"lora": "a"}, 0), ({"lora": "a", "cache_salt": "s"}, 10)):
        assert (await served.place(book=False, **fields))["decode"]["overlap_blocks"] == overlap
    _, answer = await served.ask("POST", "/place", {"model": "m", "sequence_hashes": hashes, "book": False})
    assert (answer["decode"]["overlap_blocks"], answer["isl_tokens"]) == (10, 160)


async def test_an_adapters_request_goes_to_a_worker_with_it(served: Served) -> None:
    await served.join(card("d1"), card("d2", loras=("a",)), card("d3"))
    for _ in range(2):
        assert (await served.place(lora="a"))["decode"]["name"] == "d2"
    status, answer = await served.ask("POST", "/place", PLACE | {"lora": "b"})
    assert (status, answer["error"]["code"]) == (503, "no_worker")
    assert "'b'" in answer["error"]["message"]


async def test_without_booking_nothing_stays_and_the_answer_explains(served: Served) -> None:
    await served.join(card("d1", max_num_seqs=1))
    answer = await served.place(book=False)
    assert (answer["booking"], answer["lease_s"], answer["explanation"]["would_wait"]) == (None, None, False)
    assert (served.in_flight, served.router.state.waiting) == (0, 0)
    await served.place()
    assert (await served.place(book=False))["explanation"]["would_wait"]
    assert served.in_flight == 1


async def test_what_is_asked_for_is_obeyed(served: Served) -> None:
    await served.join(card("d1"), card("d2", dp_size=2), card("p1", Role.PREFILL))
    answer = await served.place(pin="d2", pin_rank=1, pin_prefill="p1", book=False)
    assert (answer["decode"]["name"], answer["decode"]["dp_rank"], answer["prefill"]["name"]) == ("d2", 1, "p1")
    answer = await served.place(exclude=["d2-id"], disaggregate=False, book=False)
    assert (answer["decode"]["name"], answer["prefill"]) == ("d1", None)


# --- bookings -----------------------------------------------------------------------------------------


async def test_a_booking_takes_progress_reports_and_ends(served: Served) -> None:
    await served.join(card("d1"))
    name = (await served.place())["booking"]
    load = served.router.state.load.of(Holder(WorkerId("d1-id"), 0))
    assert load.queued_tokens == 170
    assert await served.ask("POST", f"/bookings/{name}", {"first_token": True, "reused_tokens": 0}) == (
        200,
        {"booking": name, "lease_s": 120.0},
    )
    assert load.queued_tokens == 0
    await served.ask("POST", f"/bookings/{name}", {"osl_tokens": 64})
    await served.ask("POST", f"/bookings/{name}", {})  # it lives
    assert load.private_blocks == 5
    assert (await served.ask("DELETE", f"/bookings/{name}"))[0] == 204
    assert (served.in_flight, load.private_blocks, served.router._bookings) == (0, 0, {})
    for method, body in (("POST", {}), ("DELETE", None)):
        status, answer = await served.ask(method, f"/bookings/{name}", body)
        assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_a_request_that_failed_leaves_nothing_in_the_cache(served: Served) -> None:
    await served.join(card("d1"))
    for failed, overlap in (("?failed=1", 0), ("?failed=0", 10)):
        name = (await served.place())["booking"]
        assert (await served.ask("DELETE", f"/bookings/{name}{failed}"))[0] == 204
        assert (await served.place(book=False))["decode"]["overlap_blocks"] == overlap
    name = (await served.place())["booking"]
    assert (await served.ask("DELETE", f"/bookings/{name}?failed=perhaps"))[0] == 400


async def test_a_booking_without_reports_ends_with_its_lease(served: Served) -> None:
    await served.join(card("d1"))
    name = (await served.place())["booking"]
    served.router.state.load._bookings[RequestId(name)].ends_s = 0.0
    served.router._sweep()
    assert (await served.ask("POST", f"/bookings/{name}", {}))[0] == 404
    assert (served.in_flight, served.router._bookings, len(served.api._bookings)) == (0, {}, 0)


async def test_a_booking_ends_with_its_worker(served: Served) -> None:
    await served.join(card("d1"))
    name = (await served.place())["booking"]
    served.discovery.remove("workers/d1-id")
    await until(lambda: served.in_flight == 0)
    assert (await served.ask("POST", f"/bookings/{name}", {}))[0] == 404


async def test_bookings_of_frontends_cannot_be_touched(served: Served) -> None:
    await served.join(card("d1"))
    request = api.route_request(api.PlaceBody(model="m"), RequestId("chatcmpl-1"), 10, b"")
    booking = await served.router.place(request, 5)
    assert (await served.ask("DELETE", "/bookings/chatcmpl-1"))[0] == 404
    assert served.in_flight == 1
    booking.end(ok=True)


async def test_there_are_no_more_bookings_than_allowed(served: Served) -> None:
    await served.join(card("d1"))
    names = [(await served.place())["booking"] for _ in range(3)]
    status, headers, answer = await served.ask_all("POST", "/place", PLACE)
    assert (status, answer["error"]["code"], int(headers["Retry-After"])) == (429, "overloaded", 1)
    assert (await served.ask("POST", "/place", PLACE | {"book": False}))[0] == 200
    await served.ask("DELETE", f"/bookings/{names[0]}")
    await served.place()


async def test_a_client_that_leaves_the_queue_leaves_nothing(served: Served) -> None:
    await served.join(card("d1", max_num_seqs=1))
    name = (await served.place())["booking"]
    waiting = asyncio.create_task(served.place())
    await until(lambda: served.router.state.waiting == 1)
    waiting.cancel()
    await until(lambda: served.router.state.waiting == 0)
    assert (served.in_flight, served.api._placing) == (1, set())
    waiting = asyncio.create_task(served.place())
    await until(lambda: served.router.state.waiting == 1)
    await served.ask("DELETE", f"/bookings/{name}")
    assert (await waiting)["decode"]["name"] == "d1"


# --- refusals -----------------------------------------------------------------------------------------

WRONG = [
    (b"", 400, "body"),
    (b"{", 400, "body"),
    (b"[]", 400, "Expected `object`"),
    (b"\xff" * 100, 400, "body"),
    (b"[" * 10_000, 400, "body"),
    (b'{"model": "\\ud800", "isl_tokens": 1}', 400, "body"),
    ({"prompt_tokens": [1]}, 400, "model"),
    ({"model": "m"}, 400, "prompt is missing"),
    ({"model": "m", "prompt_tokens": []}, 400, "prompt is missing"),
    ({"model": "m", "prompt_tokens": [-1]}, 400, "prompt_tokens[0]"),
    ({"model": "m", "prompt_tokens": [1 << 32]}, 400, "prompt_tokens[0]"),
    ({"model": "m", "prompt_tokens": [1.5]}, 400, "prompt_tokens[0]"),
    ({"model": "m", "prompt_tokens": [1], "sequence_hashes": [1]}, 400, "sequence_hashes"),
    ({"model": "m", "prompt_tokens": [1], "isl_tokens": 2}, 400, "isl_tokens is 2, the prompt has 1"),
    ({"model": "m", "sequence_hashes": [1, 2], "isl_tokens": 31}, 400, "isl_tokens is 31, the prompt has 32 or more"),
    ({"model": "m", "sequence_hashes": [1 << 64]}, 400, "u64"),
    ({"model": "m", "sequence_hashes": [-1]}, 400, "sequence_hashes[0]"),
    ({"model": "m", "prompt_tokens_b64": "?"}, 400, "prompt_tokens_b64"),
    ({"model": "m", "prompt_tokens_b64": "AAAA"}, 400, "3 bytes are not whole tokens"),
    (PLACE | {"priority": 101}, 400, "priority"),
    (PLACE | {"timeout_s": 0}, 400, "timeout_s"),
    (PLACE | {"pin_rank": 1}, 400, "pin_rank needs a worker"),
    (PLACE | {"pin": ""}, 400, "pin"),
    (PLACE | {"exclude": ["x"] * 65}, 400, "exclude"),
    (PLACE | {"prioriti": 1}, 400, "prioriti"),
    (b" " * (MAX_BODY_BYTES + 1), 413, "larger than 65536 bytes"),
    (PLACE | {"model": "other"}, 503, "'other' is known; there are: m"),
    (PLACE | {"pin": "nobody"}, 503, "'nobody'"),
    (PLACE | {"exclude": ["d1-id"]}, 503, "has failed this request"),
]


@pytest.mark.parametrize(("body", "status", "said"), WRONG, ids=lambda value: str(value)[:40])
async def test_an_error_says_what_is_wrong(served: Served, body: object, status: int, said: str) -> None:
    await served.join(card("d1"))
    for fields in ({}, {"book": False}):
        sent = body | fields if isinstance(body, dict) else body
        got, headers, answer = await served.ask_all("POST", "/place", sent)
        assert got == status, answer
        assert said in answer["error"]["message"]
        assert ("Retry-After" in headers) == (status == 503)
    assert (served.in_flight, served.router.state.waiting) == (0, 0)


async def test_a_request_over_http_times_out(served: Served) -> None:
    await served.join(card("d1", max_num_seqs=1))
    await served.place()
    status, answer = await served.ask("POST", "/place", PLACE | {"timeout_s": 0.05})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert (served.in_flight, served.router.state.waiting) == (1, 0)


async def test_what_is_not_there_is_said_in_the_same_shape(served: Served) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/place", 405),
        ("POST", "/bookings/x", 404),
        ("GET", "/snapshot", 404),
        ("GET", "/snapshot?model=m", 404),
    ):
        got, answer = await served.ask(method, path, {} if method == "POST" else None)
        assert got == status
        assert set(answer["error"]) == {"message", "type", "param", "code"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
bodies = st.fixed_dictionaries(
    {"model": st.just("m") | json_values},
    optional={
        name: json_values | st.lists(st.integers(-1, 2**64), max_size=4)
        for name in sorted(set(api.PlaceBody.__struct_fields__) - {"model"})
    },
)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies, st.sampled_from([api.PlaceBody, api.OverlapBody, api.ProgressBody]))
def test_whatever_is_sent_is_taken_or_refused(body: dict, kind: type[api.Body]) -> None:
    with suppress(InvalidRequestError):
        read = api.read(json.dumps(body).encode(), kind)
        if isinstance(read, api.PromptBody):
            isl_tokens, hashes = api.prompt_of(read, BLOCK)
            assert isl_tokens * 8 >= len(hashes) * BLOCK


# --- what is known ------------------------------------------------------------------------------------


async def test_overlap_reports_blocks_and_load_of_every_rank(served: Served) -> None:
    publisher = KvEventPublisher()
    await served.join(card("d1", kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint))
    await served.join(card("d2", dp_size=2), card("x1", model="other"))
    names = tuple(EngineHash(i) for i in range(4))
    publisher.publish([Stored(names, None, tuple(TOKENS[: 4 * BLOCK]), BLOCK)])
    publisher.publish([Stored(names, None, tuple(TOKENS[: 4 * BLOCK]), BLOCK, medium="CPU")])
    publisher.publish([Stored((EngineHash(9),), names[-1], tuple(TOKENS[4 * BLOCK : 5 * BLOCK]), BLOCK, medium="CPU")])
    await until(lambda: served.router.state.fleet.indexes["m"].num_blocks == 5)
    await served.place(isl_tokens=7, prompt_tokens=None, pin="d2", pin_rank=1)
    status, answer = await served.ask("POST", "/overlap", {"model": "m", "prompt_tokens": TOKENS})
    assert (status, answer["block_size"], answer["isl_tokens"], answer["prompt_blocks"]) == (200, BLOCK, 170, 10)
    nothing_here = {"queued_tokens": 0, "held_blocks": 0, "requests": 0}
    idle = nothing_here | {"unbooked": nothing_here}
    nothing = {"device": 0, "host": 0, "disk": 0, "any": 0}
    rows = [(r["name"], r["role"], r["dp_rank"], r["overlap_blocks"], r["load"]) for r in answer["workers"]]
    assert rows == [
        ("d1", "decode", 0, {"device": 4, "host": 5, "disk": 5, "any": 5}, idle),
        ("d2", "decode", 0, nothing, idle),
        ("d2", "decode", 1, nothing, idle | {"queued_tokens": 7, "held_blocks": 1, "requests": 1}),
    ]
    await publisher.close()


async def test_workers_are_listed_with_load_and_feed_status(served: Served) -> None:
    publisher = KvEventPublisher()
    publisher.publish([Stored((EngineHash(1),), None, tuple(TOKENS[:BLOCK]), BLOCK)])
    await served.join(card("d1", kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint))
    await served.join(card("d2"), card("d3", kv_events="nonsense"), card("d4", kv_events="tcp://127.0.0.1:1"))
    await until(lambda: served.router.state.fleet.indexes["m"].num_blocks == 1)
    await served.place(pin="d2")
    _, answer = await served.ask("GET", "/workers")
    rows = {row["name"]: row for row in answer["workers"]}
    assert {name: row["kv_events"] for name, row in rows.items()} == {
        "d1": "live", "d2": "none", "d3": "broken", "d4": rows["d4"]["kv_events"],
    }  # fmt: skip
    assert rows["d4"]["kv_events"] in ("live", "recovering")
    assert [rank["index_blocks"] for rank in rows["d1"]["ranks"]] == [1]
    assert [rank["load"]["requests"] for rank in rows["d2"]["ranks"]] == [1]
    assert (rows["d1"]["address"], rows["d1"]["total_blocks"]) == ("d1:1", 100)
    await publisher.close()


async def test_the_snapshot_is_the_index(served: Served) -> None:
    await served.join(card("d1"))
    served.router.state.fleet.on_kv_events(
        WorkerId("d1-id"), 0, [Stored((EngineHash(1),), None, tuple(TOKENS[:BLOCK]), BLOCK)]
    )
    for query in ("", "?model=m"):
        status, headers, data = await served.ask_all("GET", f"/snapshot{query}")
        assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
        index = PrefixIndex()
        index.load(data)
        assert index.num_blocks == 1
    await served.join(card("x1", model="other"))
    status, answer = await served.ask("GET", "/snapshot")
    assert (status, "m, other" in answer["error"]["message"]) == (404, True)


async def test_health_is_ready_from_first_worker_to_drain(served: Served) -> None:
    status, answer = await served.ask("GET", "/health")
    assert (status, answer["status"]) == (503, "no worker is known yet")
    await served.join(card("d1"))
    assert await served.ask("GET", "/health") == (
        200,
        {"status": "ready", "workers": 1, "recovering": 0, "waiting": 0, "in_flight": 0}
        | {"discovery": {"place": "this process", "status": "reached", "workers_found": 1, "ignored": []}},
    )
    name = (await served.place())["booking"]
    await served.api.drain(1)
    status, answer = await served.ask("GET", "/health")
    assert (status, answer["status"]) == (503, "draining")
    status, headers, answer = await served.ask_all("POST", "/place", PLACE)
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "draining", "2")
    assert (await served.ask("POST", f"/bookings/{name}", {}))[0] == 200
    assert (await served.ask("GET", "/live"))[0] == 200


async def test_draining_leaves_waiting_requests_time(served: Served) -> None:
    await served.join(card("d1", max_num_seqs=1))
    name = (await served.place())["booking"]
    waiting = asyncio.create_task(served.place())
    await until(lambda: served.router.state.waiting == 1)
    draining = asyncio.create_task(served.api.drain(5))
    await asyncio.sleep(0)
    await served.ask("DELETE", f"/bookings/{name}")
    await asyncio.gather(waiting, draining)


async def test_metrics_count_requests_by_route(served: Served) -> None:
    await served.join(card("d1"))
    await served.place()
    await served.ask("POST", "/bookings/x", {})
    await served.ask("GET", "/no/such/route")
    _, text = await served.ask("GET", "/metrics")
    assert b'kvmesh_router_http_requests_total{route="/bookings/{id}",status="404"}' in text
    assert b'kvmesh_router_http_requests_total{route="other",status="404"}' in text
    assert b"kvmesh_router_http_bookings 1.0" in text
    assert b"kvmesh_router_in_flight 1.0" in text


async def test_python_m_router_serves_it(tmp_path: Path) -> None:
    url = f"file:{tmp_path}"
    stop, discovery = asyncio.Event(), open_discovery(url)
    await discovery.put("workers/d1-id", encode(card("d1")))
    serving = asyncio.create_task(serve(RouterConfig(discovery=url, metrics_port=0, drain_timeout_s=1), stop))
    async with asyncio.timeout(PATIENCE_S):
        async for change in discovery.watch("routers/"):
            assert isinstance(change, Put)
            found = decode(change.value, RouterCard)
            break
        async with aiohttp.ClientSession(base_url=found.http_url) as http:
            while True:
                async with http.get("/health") as reply:
                    if reply.status == 200:
                        break
                await asyncio.sleep(0.01)
            async with http.post("/place", json=PLACE) as reply:
                assert (await reply.json())["decode"]["name"] == "d1"
            async with http.get("/metrics") as reply:
                assert 'kvmesh_router_in_flight{component="router",namespace="kvmesh"} 1.0' in await reply.text()
        stop.set()
        await serving
    await discovery.close()
