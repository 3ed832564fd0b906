"""Adapters and several models in one mesh, over real sockets: each is asked for by its name."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from msgspec.structs import replace
from tokenizers import AddedToken

from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Feature, Role, unpack_tokens
from tests.frontend import tiny
from tests.frontend.serving import BACKEND, CHAT, TEXT, Served, able_card, ids, serving, words

OTHER_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture
async def adapted(able_folder: Path) -> AsyncIterator[Served]:
    """The model tiny with the adapters poet and critic."""
    async with serving(able_card(able_folder, loras=("poet", "critic"))) as served:
        yield served


async def names(served: Served) -> list[tuple[str, str | None]]:
    """Return (name, the model it belongs to) of what is listed."""
    _, body = await served.get("/v1/models")
    return [(model["id"], model["parent"]) for model in body["data"]]


# --- adapters -----------------------------------------------------------------------------------------


async def test_adapters_are_listed_as_models_with_a_parent(adapted: Served) -> None:
    assert await names(adapted) == [("tiny", None), ("critic", "tiny"), ("poet", "tiny")]
    _, listed = await adapted.get("/v1/models")
    for model in listed["data"]:
        assert (await adapted.get(f"/v1/models/{model['id']}"))[1] == model
        assert (model["object"], model["max_model_len"], model["block_size"]) == ("model", 4096, 16)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_an_adapter_is_asked_for_by_its_name(adapted: Served, path: str, body: dict[str, object]) -> None:
    for name, lora in (("poet", "poet"), ("tiny", None), ("critic", "critic")):
        _, _, reply = await adapted.post(path, body | {"model": name})
        request = adapted.generator.requests[-1]
        assert (request.model, request.lora, reply["model"]) == ("tiny", lora, name)
    *chunks, _ = await adapted.events(path, body | {"model": "poet"})
    assert {chunk["model"] for chunk in chunks} == {"poet"}


async def test_an_adapter_embeds_tokenizes_and_is_previewed(adapted: Served) -> None:
    _, _, reply = await adapted.post("/v1/embeddings", {"model": "poet", "input": "a"})
    [request] = adapted.generator.embed_requests
    assert (request.model, request.lora, reply["model"]) == ("tiny", "poet", "poet")
    _, _, reply = await adapted.post("/tokenize", {"model": "poet", "prompt": "a", "add_special_tokens": False})
    assert reply["tokens"] == list(ids("a"))
    assert (await adapted.post("/kvmesh/route", CHAT | {"model": "poet"}))[0] == 503  # nobody to preview it here
    [(previewed, _)] = adapted.generator.previewed
    assert (previewed.model, previewed.lora) == ("tiny", "poet")


async def test_an_unknown_adapter_is_told_with_those_there_are(adapted: Served) -> None:
    status, _, body = await adapted.post("/v1/chat/completions", CHAT | {"model": "painter"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    assert "tiny, critic, poet" in body["error"]["message"]
    assert (await adapted.get("/v1/models/painter"))[0] == 404


async def test_adapters_come_and_go_with_their_workers(adapted: Served, able_folder: Path) -> None:
    adapted.models.add(able_card(able_folder, worker_id=WorkerId("second"), loras=("poet", "painter")))
    assert [name for name, _ in await names(adapted)] == ["tiny", "critic", "painter", "poet"]
    adapted.models.remove(WorkerId("w"))
    assert [name for name, _ in await names(adapted)] == ["tiny", "painter", "poet"]
    assert (await adapted.post("/v1/completions", TEXT | {"model": "critic"}))[0] == 404


async def test_adapters_of_a_model_without_workers_get_a_503(adapted: Served, able_folder: Path) -> None:
    adapted.models.remove(WorkerId("w"))
    for step in range(2):
        status, headers, body = await adapted.post("/v1/completions", TEXT | {"model": "poet"})
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "no_worker", "2")
        assert (await adapted.get("/v1/models/poet"))[0] == 503
        assert await names(adapted) == []
        if step == 0:  # a worker that cannot answer changes nothing
            adapted.models.add(able_card(able_folder, worker_id=WorkerId("p"), role=Role.PREFILL))
    adapted.models.add(able_card(able_folder, loras=("poet",)))
    assert (await adapted.post("/v1/completions", TEXT | {"model": "poet"}))[0] == 200
    assert (await adapted.post("/v1/completions", TEXT | {"model": "critic"}))[0] == 404


async def test_a_worker_that_only_prefills_makes_no_adapter(adapted: Served, able_folder: Path) -> None:
    card = able_card(able_folder, worker_id=WorkerId("p"), role=Role.PREFILL, loras=("painter",))
    adapted.models.add(card)
    assert ("painter", "tiny") not in await names(adapted)


# --- several models -----------------------------------------------------------------------------------


@pytest.fixture
async def two(adapted: Served, tmp_path: Path) -> Served:
    """Serve tiny, and a model with another tokenizer, another template and fewer abilities."""
    tokenizer = type(BACKEND).from_str(BACKEND.to_str())
    tokenizer.add_tokens([AddedToken("fox", normalized=False)])
    folder = tiny.save_model(tmp_path, OTHER_TEMPLATE, tokenizer)
    card = able_card(folder, worker_id=WorkerId("v"), model="org/other", context_tokens=64, features=())
    adapted.models.add(replace(card, tool_parser="none", reasoning_parser="none", loras=("poet", "painter")))
    return adapted


async def test_several_models_are_listed_and_each_name_once(two: Served) -> None:
    assert await names(two) == [
        ("tiny", None), ("critic", "tiny"), ("poet", "tiny"), ("org/other", None), ("painter", "org/other"),
    ]  # fmt: skip
    assert (await two.get("/v1/models/org/other"))[1]["max_model_len"] == 64
    assert (await two.get("/health"))[1]["ready_models"] == ["tiny", "org/other"]


async def test_each_model_has_its_own_template_tokenizer_and_context(two: Served) -> None:
    body = {"messages": [{"role": "user", "content": "fox"}]}
    prompts = {}
    for name in ("tiny", "org/other", "painter"):
        await two.post("/v1/chat/completions", body | {"model": name})
        prompts[name] = unpack_tokens(two.generator.requests[-1].prompt)
    assert prompts["painter"] == prompts["org/other"] == [*ids("[user] "), BACKEND.get_vocab_size(), *ids("\n")]
    assert BACKEND.get_vocab_size() not in prompts["tiny"]
    assert two.generator.requests[1].stop.max_tokens == 64 - len(prompts["org/other"])
    status, _, reply = await two.post("/v1/completions", {"model": "org/other", "prompt": [5] * 64})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")


async def test_what_one_models_engine_can_the_others_need_not(two: Served) -> None:
    body = CHAT | {"response_format": {"type": "json_object"}}
    assert (await two.post("/v1/chat/completions", body))[0] == 200
    for name in ("org/other", "painter"):
        status, _, reply = await two.post("/v1/chat/completions", body | {"model": name})
        assert (status, reply["error"]["param"]) == (400, "response_format")
        assert f"the engine of {name!r}" in reply["error"]["message"]


async def test_how_thoughts_are_written_is_each_models_own(two: Served) -> None:
    for name, content in (("tiny", "b"), ("org/other", "<think>a</think>b")):
        two.generator.script = words("<think>a</think>b")
        _, _, reply = await two.post("/v1/chat/completions", CHAT | {"model": name})
        assert reply["choices"][0]["message"]["content"] == content


async def test_an_adapter_of_two_models_belongs_to_the_ready_one(two: Served) -> None:
    await two.post("/v1/completions", TEXT | {"model": "poet"})
    two.models.remove(WorkerId("w"))
    await two.post("/v1/completions", TEXT | {"model": "poet"})
    assert [request.model for request in two.generator.requests] == ["tiny", "org/other"]
    assert await names(two) == [("org/other", None), ("painter", "org/other"), ("poet", "org/other")]


async def test_a_models_name_wins_over_an_adapters(two: Served, able_folder: Path) -> None:
    two.models.add(able_card(able_folder, worker_id=WorkerId("x"), model="poet", features=tuple(Feature)))
    await two.post("/v1/completions", TEXT | {"model": "poet"})
    assert (two.generator.requests[0].model, two.generator.requests[0].lora) == ("poet", None)
    assert (await names(two)).count(("poet", None)) == 1
    assert ("poet", "tiny") not in await names(two)


# --- the official client ------------------------------------------------------------------------------


async def test_adapters_with_the_official_client(adapted: Served) -> None:
    async with adapted.openai() as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "critic", "poet"]
        assert (await client.models.retrieve("poet")).id == "poet"
        answer = await client.chat.completions.create(model="poet", messages=CHAT["messages"])
        assert answer.model == "poet"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("painter")
