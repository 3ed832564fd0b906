"""Stored responses over real sockets: retrieve, delete, input items, and conversations that go on from them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from kvmesh.frontend.keys.guard import ApiKeyGuard
from kvmesh.frontend.responses import state
from kvmesh.frontend.responses.directory_store import DirectoryStore
from kvmesh.frontend.responses.memory_store import MemoryStore
from kvmesh.frontend.responses.retention import StoreLimits
from kvmesh.frontend.responses.state import KeptResponses
from kvmesh.frontend.responses.store import StoredResponse
from kvmesh.protocol.errors import PeerLostError
from kvmesh.protocol.messages import Delta
from tests.frontend.responses.serving import ASKED, WEATHER, Served, calling, checked, ids, serving, words

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(params=["memory", "dir"])
async def storing(request: pytest.FixtureRequest, thinking_model: Path, tmp_path: Path) -> AsyncIterator[Served]:
    store = MemoryStore(StoreLimits()) if request.param == "memory" else DirectoryStore(tmp_path / "r", StoreLimits())
    kept = KeptResponses(store, 2, is_keyed=False)
    async with serving(thinking_model, kept) as served:
        yield served
    await kept.close()


async def get(served: Served, path: str, **headers: str) -> tuple[int, Any]:
    status, _, body = await served.ask("GET", f"/v1/responses/{path}", headers=headers)
    return status, body


# --- retrieve and delete ------------------------------------------------------------------------------


async def test_an_answer_can_be_retrieved_and_deleted(storing: Served) -> None:
    body = await storing.whole(metadata={"a": "b"})
    assert body["store"] is True
    assert await get(storing, body["id"]) == (200, body)
    status, _, deleted = await storing.ask("DELETE", f"/v1/responses/{body['id']}")
    assert (status, deleted) == (200, {"id": body["id"], "object": "response", "deleted": True})
    for method in ("GET", "DELETE"):
        status, _, error = await storing.ask(method, f"/v1/responses/{body['id']}")
        assert (status, body["id"] in error["error"]["message"]) == (404, True)


async def test_a_streamed_answer_is_stored_before_its_last_event(storing: Served) -> None:
    *_, last = await storing.events()
    assert await get(storing, last["response"]["id"]) == (200, last["response"])


async def test_store_false_stores_nothing(storing: Served) -> None:
    body = await storing.whole(store=False)
    assert body["store"] is False
    assert (await get(storing, body["id"]))[0] == 404
    *_, last = await storing.events(store=False)
    assert (await get(storing, last["response"]["id"]))[0] == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_broke_off_is_not_stored(storing: Served, stream: bool) -> None:
    storing.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
    if stream:
        response_id = (await storing.events())[0]["response"]["id"]
        assert (await get(storing, response_id))[0] == 404
    else:
        assert (await storing.post(ASKED))[0] == 502


async def test_without_a_store_the_404_says_how_to_get_one(served: Served) -> None:
    for method, path in [("GET", "r"), ("DELETE", "r"), ("GET", "r/input_items"), ("POST", "r/cancel")]:
        status, _, body = await served.ask(method, f"/v1/responses/{path}")
        assert (status, "--responses-store" in body["error"]["message"]) == (404, True)
    assert (await served.whole(store=True))["store"] is False


async def test_another_key_finds_nothing(thinking_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one team\nsk-two team\n")
    kept = KeptResponses(MemoryStore(StoreLimits()), 2, is_keyed=True)
    async with serving(thinking_model, kept) as served:
        served.app.guard = ApiKeyGuard(str(keys))
        one, two = {"authorization": "Bearer sk-one"}, {"authorization": "Bearer sk-two"}
        _, _, mine = await served.post(ASKED, **one)
        assert await get(served, mine["id"], **one) == (200, mine)
        assert await get(served, mine["id"], **{"x-api-key": "sk-one"}) == (200, mine)
        known, unknown = await get(served, mine["id"], **two), await get(served, "resp_none", **two)
        assert json.dumps(known).replace(mine["id"], "") == json.dumps(unknown).replace("resp_none", "")
        for method, path in [("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]:
            assert (await served.ask(method, f"/v1/responses/{mine['id']}{path}", headers=two))[0] == 404
        status, _, error = await served.post(ASKED | {"previous_response_id": mine["id"]}, **two)
        assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
        assert await get(served, mine["id"], **one) == (200, mine)


# --- conversations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chained_conversation_is_the_same_prompt_as_the_whole_one(storing: Served, stream: bool) -> None:
    """The model reads the same tokens, so that the prefix cache serves a chain as it serves the whole."""

    async def ask(**fields: Any) -> dict[str, Any]:
        if stream:
            return dict((await storing.events(**fields))[-1]["response"])
        return await storing.whole(**fields)

    tools = {"tools": [WEATHER], "instructions": "Be brief."}
    storing.generator.scripts = [
        words(THOUGHT, "Let me see. ", calling("Köln"), calling("Ulm")),
        words(THOUGHT, "Rain."),
        words("No."),
        words("No."),
    ]
    first = await ask(input="Where does it rain?", **tools)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
    second = await ask(input=results, previous_response_id=first["id"], **tools)
    question = [{"role": "user", "content": [{"type": "input_text", "text": "And in Bonn?"}]}]
    third = await ask(input=question, previous_response_id=second["id"], **tools)
    chained = storing.generator.requests[-1].prompt
    asked = {"role": "user", "content": "Where does it rain?"}
    await ask(input=[asked, *first["output"], *results, *second["output"], *question], store=False, **tools)
    assert storing.generator.requests[-1].prompt == chained
    assert (third["previous_response_id"], first["previous_response_id"]) == (second["id"], None)
    assert "rain in" not in storing.prompt() and "And in Bonn?" in storing.prompt()


async def test_instructions_are_not_inherited(storing: Served) -> None:
    first = await storing.whole(instructions="Be brief.")
    await storing.whole(previous_response_id=first["id"], input="Go on.")
    assert "Be brief." not in storing.prompt()
    assert storing.prompt().count("<|im_start|>user") == 2


async def test_a_conversation_may_branch(storing: Served) -> None:
    first = await storing.whole(input="one")
    for text in ("left", "right"):
        await storing.whole(previous_response_id=first["id"], input=text)
        assert [word in storing.prompt() for word in ("one", "left", "right")] == [
            True,
            text == "left",
            text == "right",
        ]


async def test_other_requests_go_on_while_a_long_conversation_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "TURN_BYTES", 1)
    chain = [
        StoredResponse(id=str(n), owner="", status="completed", response=b'{"output": []}', input=b"[]")
        for n in range(5)
    ]
    reading, turns = asyncio.create_task(state.read_in_turns(chain)), 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= len(chain)
    assert await reading == [(str(n), []) for n in range(5)]


async def test_the_chain_counts_as_input(storing: Served) -> None:
    first = await storing.whole()
    body = ASKED | {"previous_response_id": first["id"]}
    _, _, counted = await storing.post(body, path="/v1/responses/input_tokens")
    second = await storing.whole(previous_response_id=first["id"])
    assert counted["input_tokens"] == second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_a_byte_order_mark_does_not_lose_the_conversation(storing: Served) -> None:
    first = await storing.whole(input="My name is Ann.")
    body = json.dumps(ASKED | {"previous_response_id": first["id"]}).encode()
    assert (await storing.post(b"\xef\xbb\xbf" + body))[0] == 200
    assert "My name is Ann." in storing.prompt()


async def test_an_unknown_previous_response_is_refused_like_openais(storing: Served) -> None:
    for previous in ("resp_none", "../../etc/passwd", "", "\ud83e\udd8a" * 500):
        status, _, body = await storing.post(ASKED | {"previous_response_id": previous})
        error = body["error"]
        assert (status, error["code"]) == (400, "previous_response_not_found")
        assert (error["param"], error["type"]) == ("previous_response_id", "invalid_request_error")
    status, _, body = await storing.post(ASKED | {"previous_response_id": 7})
    assert (status, body["error"]["param"]) == (400, "previous_response_id")


async def test_a_conversation_stays_refused_by_name(storing: Served) -> None:
    status, _, body = await storing.post(ASKED | {"conversation": "conv_1"})
    assert (status, body["error"]["param"]) == (400, "conversation")


# --- references to items ------------------------------------------------------------------------------


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


async def refused(served: Served, *items: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    status, _, body = await served.post(ASKED | {"input": list(items)}, **headers)
    return status, body["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reference_stands_for_the_stored_item(storing: Served, stream: bool) -> None:
    """Vercel's AI SDK sends earlier thoughts, prose and calls by their ids, and the rest in full."""
    tools = {"tools": [WEATHER]}
    asked = {"role": "user", "content": "Where does it rain?"}
    storing.generator.scripts = [
        words(THOUGHT, "Let me see. ", calling("Köln"), calling("Ulm")),
        words("No."),
        words("No."),
    ]
    if stream:
        first = (await storing.events(input=[asked], **tools))[-1]["response"]
    else:
        first = await storing.whole(input=[asked], **tools)
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in first["output"]}) == 4
    calls = first["output"][2:]
    rest = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
    references = [reference(item) for item in first["output"]]
    again = await storing.whole(input=[asked, *references, *rest], **tools)
    by_reference = storing.generator.requests[-1].prompt
    await storing.whole(input=[asked, *first["output"], *rest], **tools)
    assert storing.generator.requests[-1].prompt == by_reference
    _, listed = await get(storing, f"{again['id']}/input_items?order=asc")
    assert [item["id"] for item in listed["data"]][1:5] == [item["id"] for item in first["output"]]


async def test_input_items_are_referred_to_as_well(storing: Served) -> None:
    first = await storing.whole(input=[{"role": "user", "content": "A riddle?"}])
    _, listed = await get(storing, f"{first['id']}/input_items")
    [asked] = listed["data"]
    for item in (reference(asked), {"id": asked["id"]}):
        await storing.whole(input=[item, reference(first["output"][0]), {"role": "user", "content": "On."}])
        assert [text in storing.prompt() for text in ("A riddle?", "Once upon a time", "On.")] == [True] * 3


async def test_a_reference_continues_a_chain(storing: Served) -> None:
    first, second = await storing.whole(input="one"), await storing.whole(input="two")
    asked = [reference(second["output"][0]), {"role": "user", "content": "three"}]
    await storing.whole(input=asked, previous_response_id=first["id"])
    prompt = storing.prompt()
    assert prompt.count("Once upon a time") == 2 and "one" in prompt and "two" not in prompt
    body = ASKED | {"input": asked}
    assert (await storing.post(body, path="/v1/responses/input_tokens"))[0] == 200


async def test_an_unknown_item_is_refused_like_openais(storing: Served) -> None:
    body = await storing.whole()
    [item] = body["output"]
    unknown = [f"msg_{body['id'].removeprefix('resp_')}_7", "msg_1", "", "_", "msg_../../x_0", "🦊" * 500]
    for item_id in unknown:
        status, error = await refused(storing, {"type": "item_reference", "id": item_id})
        assert (status, error["type"], error["param"]) == (404, "invalid_request_error", "input")
        assert error["message"].startswith(f"Item with id {item_id[:200]!r} not found.")
    status, error = await refused(storing, {"type": "item_reference", "id": 7})
    assert (status, error["param"]) == (400, "input[0].id")
    await storing.ask("DELETE", f"/v1/responses/{body['id']}")
    status, error = await refused(storing, reference(item))
    assert (status, item["id"] in error["message"]) == (404, True)


async def test_an_item_of_another_key_is_unknown(thinking_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one team\nsk-two team\n")
    kept = KeptResponses(MemoryStore(StoreLimits()), 2, is_keyed=True)
    async with serving(thinking_model, kept) as served:
        served.app.guard = ApiKeyGuard(str(keys))
        _, _, mine = await served.post(ASKED, authorization="Bearer sk-one")
        [item] = mine["output"]
        status, error = await refused(served, reference(item), authorization="Bearer sk-two")
        unknown = await refused(served, {"type": "item_reference", "id": "msg_1"}, authorization="Bearer sk-two")
        assert status == 404
        assert json.dumps(unknown).replace("msg_1", "") == json.dumps((status, error)).replace(item["id"], "")
        status, _, _ = await served.post(ASKED | {"input": [reference(item)]}, authorization="Bearer sk-one")
        assert status == 200


async def test_references_are_bounded(storing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    [item] = (await storing.whole())["output"]
    status, error = await refused(storing, reference(item), reference(item))
    assert (status, "Duplicate item" in error["message"], item["id"] in error["message"]) == (400, True, True)
    many = [{"type": "item_reference", "id": f"msg_{n}_0"} for n in range(1025)]
    status, error = await refused(storing, *many)
    assert (status, error["param"], "1025" in error["message"]) == (400, "input", True)
    monkeypatch.setattr("kvmesh.frontend.responses.state.MAX_REFERENCED_BYTES", 10)
    status, error = await refused(storing, reference(item))
    assert (status, error["param"], "previous_response_id" in error["message"]) == (400, "input", True)


async def test_a_referenced_response_counts_as_used(thinking_model: Path) -> None:
    kept = KeptResponses(MemoryStore(StoreLimits(max_count=2)), 2, is_keyed=False)
    async with serving(thinking_model, kept) as served:
        first, _ = await served.whole(input="one"), await served.whole(input="two")
        await served.whole(input=[reference(first["output"][0])])
        assert (await get(served, first["id"]))[0] == 200


# --- input items --------------------------------------------------------------------------------------

INPUT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": "Well."},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{not json"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"type": "message", "id": "msg_1", "role": "user", "content": "So?"},
]


async def test_input_items_are_listed_in_full(storing: Served) -> None:
    body = await storing.whole(input=INPUT)
    status, listed = await get(storing, f"{body['id']}/input_items?order=asc")
    assert (status, listed["object"], listed["has_more"]) == (200, "list", False)
    items = listed["data"]
    for item in items:
        ITEM.validate_python(item)
    assert [item["type"] for item in items] == [item.get("type", "message") for item in INPUT]
    assert (items[2]["id"], items[3]["id"], items[4]["arguments"]) == ("rs_1", "msg_1", "{not json")
    assert len({item["id"] for item in items}) == len(items), "a second item of the same id gets another"
    assert items[3]["content"] == [{"type": "output_text", "text": "Well.", "logprobs": [], "annotations": []}]
    assert (listed["first_id"], listed["last_id"]) == (items[0]["id"], items[-1]["id"])
    assert (await get(storing, f"{body['id']}/input_items"))[1]["data"] == items[::-1], "newest first"


async def test_input_items_come_in_pages(storing: Served) -> None:
    body = await storing.whole(input=[{"role": "user", "content": f"{n}"} for n in range(5)])
    path = f"{body['id']}/input_items?order=asc&limit=2"
    found, page = [], (await get(storing, path))[1]
    while True:
        found += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            break
        last, page = page["last_id"], (await get(storing, f"{path}&after={page['last_id']}"))[1]
    assert found == [f"{n}" for n in range(5)]
    before = (await get(storing, f"{body['id']}/input_items?order=asc&before={last}"))[1]
    assert [item["content"][0]["text"] for item in before["data"]] == ["0", "1", "2"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=none", "before=none"])
async def test_bad_pages_are_refused_by_name(storing: Served, query: str) -> None:
    body = await storing.whole()
    status, refused = await get(storing, f"{body['id']}/input_items?{query}")
    assert (status, refused["error"]["param"]) == (400, query.partition("=")[0])


# --- the official client ------------------------------------------------------------------------------


async def test_the_official_client_stores(storing: Served) -> None:
    async with storing.client() as client:
        first = await client.responses.create(model="tiny", input="hi")
        second = await client.responses.create(model="tiny", input="Go on.", previous_response_id=first.id)
        assert (await client.responses.retrieve(second.id)) == second
        items = [item async for item in client.responses.input_items.list(second.id, limit=1, order="asc")]
        assert [item.type for item in items] == ["message"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as gone:
            await client.responses.create(model="tiny", input="On.", previous_response_id=second.id)
        assert gone.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await client.responses.cancel(second.id)


# --- background ---------------------------------------------------------------------------------------


async def until(served: Served, response_id: str, *statuses: str) -> dict[str, Any]:
    """Poll until the response has one of these statuses."""
    while True:
        status, body = await get(served, response_id)
        assert status == 200, body
        if body["status"] in statuses:
            return checked(body)
        await asyncio.sleep(0.01)


async def test_a_background_response_survives_its_client(storing: Served) -> None:
    gate = asyncio.Event()
    storing.generator.script = [gate, *words("Once", " upon", " a time")]
    begun = await storing.whole(background=True)
    assert (begun["status"], begun["background"], begun["output"], begun["usage"]) == ("queued", True, [], None)
    assert (await get(storing, begun["id"]))[1]["status"] == "queued"
    gate.set()
    ended = await until(storing, begun["id"], "completed")
    assert ended["output"][0]["content"][0]["text"] == "Once upon a time"
    assert ended["usage"]["output_tokens"] > 0
    after = await storing.whole(previous_response_id=begun["id"], input="And then?")
    assert after["status"] == "completed"
    assert "Once upon a time" in storing.prompt()


async def test_a_background_response_is_in_progress_from_its_first_token(storing: Served) -> None:
    gate = asyncio.Event()
    storing.generator.script = [Delta(ids("Once")), gate, *words(" upon")]
    begun = await storing.whole(background=True)
    await until(storing, begun["id"], "in_progress")
    status, _, body = await storing.post(ASKED | {"previous_response_id": begun["id"]})
    gate.set()
    await until(storing, begun["id"], "completed")
    assert (status, body["error"]["param"]) == (400, "previous_response_id")


async def test_a_background_response_can_be_cancelled(storing: Served) -> None:
    storing.generator.script = [Delta(ids("Once")), asyncio.Event()]
    begun = await storing.whole(background=True)
    await until(storing, begun["id"], "in_progress")
    for _ in range(2):
        status, _, body = await storing.ask("POST", f"/v1/responses/{begun['id']}/cancel")
        assert (status, checked(body)["status"]) == (200, "cancelled")
    assert [item["status"] for item in body["output"]] == ["incomplete"]
    assert len(storing.generator.cancelled) == 1, "the workers were told"
    assert (await get(storing, begun["id"]))[1] == body
    assert storing.admission.inflight == 0


async def test_a_deleted_background_response_does_not_run_on(storing: Served) -> None:
    storing.generator.script = [Delta(ids("Once")), asyncio.Event()]
    begun = await storing.whole(background=True)
    assert (await storing.ask("DELETE", f"/v1/responses/{begun['id']}"))[0] == 200
    await storing.admission.wait_idle()
    assert (await get(storing, begun["id"]))[0] == 404


async def test_a_background_response_that_fails_says_why(storing: Served) -> None:
    storing.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
    begun = await storing.whole(background=True)
    ended = await until(storing, begun["id"], "failed")
    assert ended["error"] == {"code": "server_error", "message": "worker w died"}
    assert ended["output"][0]["content"][0]["text"] == "Once"


async def test_background_responses_are_bounded(storing: Served) -> None:
    storing.generator.script = [asyncio.Event()]
    begun = [await storing.whole(background=True) for _ in range(2)]
    status, headers, body = await storing.post(ASKED | {"background": True})
    assert (status, body["error"]["code"], "Retry-After" in headers) == (429, "overloaded", True)
    for response in begun:
        await storing.ask("POST", f"/v1/responses/{response['id']}/cancel")
    storing.generator.script = [*words("Once")]
    again = await storing.whole(background=True)
    await until(storing, again["id"], "completed")


async def test_what_cannot_begin_in_the_background_is_refused_at_once(storing: Served) -> None:
    for fields, param in [({"store": False}, "background"), ({"input": []}, "input"), ({"model": "none"}, "model")]:
        status, _, body = await storing.post(ASKED | {"background": True} | fields)
        assert (status in (400, 404), body["error"]["param"]) == (True, param)
    status, _, body = await storing.post(ASKED | {"background": True, "input": "word " * 9000})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stop_waits_for_background_responses(storing: Served) -> None:
    gate = asyncio.Event()
    storing.generator.script = [gate, *words("Once")]
    begun = await storing.whole(background=True)
    await storing.generator.started.wait()
    storing.admission.drain()
    waiting = asyncio.ensure_future(storing.admission.wait_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    await waiting
    assert (await get(storing, begun["id"]))[1]["status"] == "completed"


async def test_a_stop_that_cannot_wait_reports_background_responses_as_failed(storing: Served) -> None:
    storing.generator.script = [Delta(ids("Once")), asyncio.Event()]
    begun = await storing.whole(background=True)
    await until(storing, begun["id"], "in_progress")
    storing.admission.drain()
    storing.admission.cut_off()
    ended = await until(storing, begun["id"], "failed")
    assert "stopped" in ended["error"]["message"]


# --- background streams -------------------------------------------------------------------------------


async def test_a_background_stream_goes_on_where_the_client_left(storing: Served) -> None:
    gate = asyncio.Event()
    storing.generator.script = [Delta(ids("Once")), gate, *words(" upon", " a time")]
    seen: list[Any] = []
    async with storing.client() as client:
        async with await client.responses.create(model="tiny", input="hi", background=True, stream=True) as stream:
            async for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    break
        response_id = seen[0].response.id
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert (await client.responses.retrieve(response_id)).status == "in_progress"
        gate.set()
        for _ in range(2):  # while it runs or after it, and then again
            last = seen[-1].sequence_number
            resumed = await client.responses.retrieve(response_id, stream=True, starting_after=last)
            rest = [event async for event in resumed]
            numbers = [event.sequence_number for event in [*seen, *rest]]
            assert numbers == list(range(len(numbers)))
            assert rest[-1].type == "response.completed"
            assert rest[-1].response.output_text == "Once upon a time"
            await until(storing, response_id, "completed")
        everything = [event async for event in await client.responses.retrieve(response_id, stream=True)]
        assert [event.to_dict() for event in everything] == [event.to_dict() for event in [*seen, *rest]]


async def test_only_background_streams_can_be_streamed_again(storing: Served) -> None:
    for fields in ({}, {"background": True}):
        body = await storing.whole(**fields)
        await until(storing, body["id"], "completed")
        status, refused = await get(storing, f"{body['id']}?stream=true")
        assert (status, refused["error"]["param"]) == (400, "stream")
    status, refused = await get(storing, f"{body['id']}?stream=yes")
    assert (status, refused["error"]["param"]) == (400, "stream")


async def test_no_stream_is_refused_before_the_response_ends(storing: Served) -> None:
    gate = asyncio.Event()
    storing.generator.script = [gate, *words("Once")]
    begun = await storing.whole(background=True)
    status, refused = await get(storing, f"{begun['id']}?stream=true")
    assert (status, refused["error"]["param"]) == (400, "stream")
    assert (await get(storing, begun["id"]))[1]["status"] == "queued", "it was not waited for"
    gate.set()
    await until(storing, begun["id"], "completed")


async def test_a_background_stream_that_fails_ends_with_the_failure(storing: Served) -> None:
    storing.generator.script = [Delta(ids("Once")), PeerLostError("worker w died")]
    *_, told, failed = await storing.events(background=True)
    assert (told["type"], failed["type"]) == ("error", "response.failed")
    assert failed["response"] == await until(storing, failed["response"]["id"], "failed")
