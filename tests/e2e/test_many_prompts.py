"""Several prompts in one completion: each is answered as if it were asked alone, on whatever workers it runs."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.test_scores import CLOSE
from tests.support.mesh import Mesh, until

DISAGGREGATE = {"trace": True, "disaggregate": True}
SHARED = list(range(100, 180))
PROMPTS: list[list[int]] = [  # shorter and longer than a block and a step, and some begin alike
    [300],
    [*range(400, 415)],
    SHARED,
    [*SHARED, *range(500, 540)],
    [*SHARED[:40], *range(600, 800)],
    SHARED,
]
FIELDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}


def numbers(choice: dict[str, Any]) -> list[float]:
    return [n for n in choice["logprobs"]["token_logprobs"] if n is not None]


def check_equal(choices: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> None:
    assert [choice["index"] for choice in choices] == list(range(len(alone)))
    for choice, other in zip(choices, alone, strict=True):
        assert choice["text"] == other["text"]
        assert choice["finish_reason"] == other["finish_reason"]
        assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        assert numbers(choice) == pytest.approx(numbers(other), abs=CLOSE)


def alone(mesh: Mesh, **fields: Any) -> list[dict[str, Any]]:
    """Return the answers to the prompts, each asked alone of one worker that prefills and decodes."""

    def ask(prompt: list[int]) -> list[dict[str, Any]]:
        own = {"kvmesh": {"disaggregate": False}, "cache_salt": f"alone {len(prompt)}"}
        choices: list[dict[str, Any]] = mesh.complete(prompt, **(FIELDS | own | fields))["choices"]
        return choices

    with ThreadPoolExecutor(3) as pool:
        return [choice for choices in pool.map(ask, PROMPTS) for choice in choices]


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"n": 2, "temperature": 0.9, "seed": 7, "echo": True}], ids=str)
def test_each_answer_is_that_of_its_prompt_alone(mesh: Mesh, fields: dict[str, Any]) -> None:
    for _ in range(2):  # the second time the prompts are cached
        together = mesh.complete(PROMPTS, **(FIELDS | {"kvmesh": DISAGGREGATE, "cache_salt": f"all {fields}"} | fields))
        assert together["kvmesh"]["prefill_worker"] == "prefill-0"
        check_equal(together["choices"], alone(mesh, **fields))
        assert together["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


def streamed(mesh: Mesh, prompts: Sequence[Sequence[int]], leave_after: int | None = None, **fields: Any) -> list[str]:
    """Return the text of each choice of a stream, of which `leave_after` events are read."""
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "stream": True} | FIELDS | fields
    texts = [""] * len(prompts) * fields.get("n", 1)
    with mesh.http as http, http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for number, line in enumerate(filter(None, response.iter_lines())):
            if number == leave_after:
                break
            data = line.removeprefix("data: ")
            for choice in [] if data == "[DONE]" else json.loads(data)["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts


def in_flight(mesh: Mesh) -> float:
    return sum(mesh.metric(name) for name in ("kvmesh_router_in_flight", "kvmesh_frontend_inflight"))


def test_a_stream_of_many_prompts_has_the_same_answers(mesh: Mesh) -> None:
    expected = [choice["text"] for choice in alone(mesh)]
    assert streamed(mesh, PROMPTS, kvmesh=DISAGGREGATE, cache_salt="stream") == expected


def test_a_client_that_leaves_in_the_middle_frees_all_prompts(mesh: Mesh) -> None:
    expected = [choice["text"] for choice in alone(mesh)]
    for events in (0, 1, 20):
        fields = {"kvmesh": DISAGGREGATE, "cache_salt": f"leave {events}", "n": 2, "temperature": 1, "seed": 1}
        streamed(mesh, PROMPTS, events, **fields | {"max_tokens": 400})
        until(lambda: in_flight(mesh) == 0, what="the bookings to end")
        assert streamed(mesh, PROMPTS, kvmesh=DISAGGREGATE, cache_salt=f"leave {events}") == expected


def test_a_prefill_worker_that_dies_changes_no_answer(shm_mesh: Mesh) -> None:
    mesh = shm_mesh
    expected = alone(mesh)
    asked = FIELDS | {"kvmesh": DISAGGREGATE, "cache_salt": "killed"}
    with ThreadPoolExecutor(1) as pool:
        with mesh.stopped("prefill-0"):
            answer = pool.submit(mesh.complete, PROMPTS, **asked)
            until(lambda: mesh.metric("kvmesh_router_in_flight") == len(PROMPTS), what="a booking for each prompt")
            killed = mesh.kill("prefill-0")
        check_equal(answer.result()["choices"], expected)
    mesh.until_replaced("prefill-0", killed)
