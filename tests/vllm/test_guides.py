"""Guides that only vLLM's compiler finds costly, sent from outside to a real vLLM."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.mesh import until
from tests.support.vllm_mesh import VllmMesh, idle_cores, needs_vllm, running_vllm_mesh

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

TEXT = {"type": "string"}
NAMES = {f"p{i}": TEXT for i in range(400)}
COUNTED = "|".join(f"[^{chr(97 + i % 26)}]{{0,800}}[^{chr(98 + i % 24)}]{{0,800}}" for i in range(200))
CHAIN = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(8000)} | {"d8000": TEXT}
BOMBS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^({COUNTED})*$"}}, "required": ["a"]},
    {"type": "object", "properties": NAMES, "minProperties": 100, "maxProperties": 200},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": CHAIN},  # ends a thread of vLLM's
    {"type": "integer", "multipleOf": 9_999_991},  # costly for vLLM's other compiler
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmMesh]:
    with running_vllm_mesh(tmp_path_factory.mktemp("mesh")) as mesh:
        mesh.start_worker("w", "aggregated")
        mesh.until_ready("w")
        yield mesh


def guided(mesh: VllmMesh, schema: dict[str, Any], tenant: str) -> tuple[int, str]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "response_format": form}
    with mesh.http as http:
        reply = http.post("/v1/chat/completions", json=body, headers={"x-kvmesh-tenant": tenant}, timeout=200)
    return reply.status_code, reply.text


def test_bombs_are_refused_and_ordinary_guides_go_on_meanwhile(mesh: VllmMesh) -> None:
    pid = mesh.started["w"].pid
    with ThreadPoolExecutor(len(BOMBS)) as pool:
        bombs = [pool.submit(guided, mesh, bomb, "attacker") for bomb in BOMBS]
        num_meanwhile = 0
        while num_meanwhile < 5 or not all(bomb.done() for bomb in bombs):
            schema = {"type": "object", "properties": {f"a{num_meanwhile}": {"type": "boolean"}}}
            status, text = guided(mesh, schema | {"required": [*schema["properties"]]}, "customer")
            assert status == 200, text
            assert json.loads(text)["choices"][0]["message"]["content"].startswith("{")
            num_meanwhile += 1
        refusals = [bomb.result() for bomb in bombs]
    assert [status for status, _ in refusals] == [400] * len(BOMBS), refusals
    assert mesh.started["w"].pid == pid and mesh.started["w"].poll() is None
    until(lambda: idle_cores(mesh.tree("w"), over_s=1.0) < 0.5, 60.0, "the worker to be idle")


def test_a_refused_guide_is_refused_at_once_the_next_time(mesh: VllmMesh) -> None:
    used = sum(sum(process.cpu_times()[:2]) for process in mesh.tree("w"))
    for _ in range(3):
        status, text = guided(mesh, BOMBS[0], "attacker")
        assert status == 400 and "took longer than 15 s to compile; make it simpler" in text
    assert sum(sum(process.cpu_times()[:2]) for process in mesh.tree("w")) - used < 3.0
