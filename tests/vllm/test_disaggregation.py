"""Prefill and decode on two real vLLM workers, through a real frontend: where the KV comes from, and what if not."""

import asyncio
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import psutil
import pytest
from tokenizers import Tokenizer

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.ids import new_request_id
from kvmesh.protocol.messages import (
    Delta,
    GenerateRequest,
    Guide,
    GuideKind,
    SamplingParams,
    StopConditions,
    Ticket,
    WorkerCard,
    pack_tokens,
)
from tests.support.listening import open_to_others
from tests.support.vllm_mesh import BLOCK, VllmMesh, idle_cores, needs_vllm, running_vllm_mesh

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

PULL_TIMEOUT_S = 8
BYTES_PER_TOKEN = 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, head size, float32
RESTS_S = 1.5  # what in vLLM waits by spinning goes to sleep after a second


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmMesh]:
    with running_vllm_mesh(tmp_path_factory.mktemp("mesh")) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVMESH_WORKER_PULL_TIMEOUT_S", str(PULL_TIMEOUT_S))
        mesh.start_worker("prefill-0", "prefill")
        mesh.start_worker("decode-0", "decode")
        mesh.until_ready("prefill-0", "decode-0")
        yield mesh


def prompt(length: int, first: int) -> list[int]:
    return [(first + 43 * i) % 1900 + 50 for i in range(length)]


def answer(mesh: VllmMesh, tokens: Sequence[int], **body: Any) -> tuple[str, dict[str, Any]]:
    """The text, and the trace."""
    reply = mesh.complete(tokens, **{"max_tokens": 24, "ignore_eos": True, **body})
    return reply["choices"][0]["text"], reply["kvmesh"]


def alone(mesh: VllmMesh, tokens: Sequence[int], **body: Any) -> str:
    """Return the decode worker's answer when it computes the prompt itself."""
    return answer(mesh, tokens, kvmesh={"trace": True, "disaggregate": False}, **body)[0]


def request_of(tokens: Sequence[int], **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        **{
            "request_id": new_request_id(),
            "model": "tiny",
            "prompt": pack_tokens(tokens),
            "sampling": SamplingParams(temperature=0),
            "stop": StopConditions(max_tokens=12, ignore_eos=True),
            **fields,
        }
    )


def ask(card: WorkerCard, request: GenerateRequest) -> list[Delta]:
    async def asked() -> list[Delta]:
        plane = PlaneClient()
        try:
            async with plane.open(card.address, "generate", request, 120.0) as stream:
                return [delta async for delta in stream.messages(Delta)]
        finally:
            await plane.close()

    return asyncio.run(asked())


def prefilled(mesh: VllmMesh, tokens: Sequence[int], **fields: Any) -> tuple[tuple[int, ...], Ticket]:
    """The first token and the ticket, from the prefill worker itself."""
    [delta] = ask(mesh.workers()["prefill-0"], request_of(tokens, offer_kv=True, **fields))
    assert delta.ticket is not None
    return delta.token_ids, delta.ticket


def test_no_pull_stalls_one_after_the_other_or_after_a_rest(mesh: VllmMesh) -> None:
    """A pull takes less than a second on an idle machine; a stall takes ten and more.

    Stalls are likeliest in workers that have just started, so this test comes first.
    """
    for number in range(12):
        if number % 3 == 0:
            time.sleep(RESTS_S)
        started = time.monotonic()
        _, trace = answer(mesh, prompt(340, first=2000 + 31 * number), max_tokens=8)
        assert not trace.get("pull_error")
        assert trace["kv_bytes_pulled"] > 0
        assert time.monotonic() - started < 6.0, f"request {number}"


@pytest.mark.parametrize("length", [340, 352, 33, 31])
def test_the_whole_prompt_is_pulled_and_the_answer_is_that_of_one_worker(mesh: VllmMesh, length: int) -> None:
    """The counters are vLLM's own; 352 is a multiple of the block size."""
    sources = ("external_kv_transfer", "local_compute")
    before = [mesh.prompt_tokens("decode-0", source) for source in sources]
    tokens = prompt(length, first=7 * length)
    text, trace = answer(mesh, tokens)
    after = [mesh.prompt_tokens("decode-0", source) for source in sources]
    assert [b - a for a, b in zip(before, after, strict=True)] == [length, 0]
    assert trace["transfer"] == "vllm-nixl"
    assert trace["kv_bytes_pulled"] == -(-length // BLOCK) * BLOCK * BYTES_PER_TOKEN
    assert text == alone(mesh, tokens)


def test_the_reported_bytes_are_those_that_vllm_pulled(mesh: VllmMesh) -> None:
    """Whatever the two workers have cached of the prompt, vLLM's count of pulled tokens says what was moved."""
    beginning = prompt(10 * BLOCK, first=4400)
    answer(mesh, beginning, kvmesh={"trace": True, "disaggregate": True})
    for number, tokens in enumerate(([*beginning, *prompt(50, 4500)], [*beginning, *prompt(50, 4600)])):
        if number:  # the prefill worker has the whole prompt cached, the decode worker its beginning
            prefilled(mesh, tokens)
        metric = "kvmesh_worker_kv_pulled_bytes_total"
        before = mesh.prompt_tokens("decode-0", "external_kv_transfer"), mesh.metric(metric, "decode-0")
        _, trace = answer(mesh, tokens, kvmesh={"trace": True, "disaggregate": True})
        after = mesh.prompt_tokens("decode-0", "external_kv_transfer"), mesh.metric(metric, "decode-0")
        assert after[0] - before[0] == 50
        assert trace["kv_bytes_pulled"] == after[1] - before[1] == -(-50 // BLOCK) * BLOCK * BYTES_PER_TOKEN


def test_all_of_a_prompt_is_counted_that_the_prefill_worker_had_cached(mesh: VllmMesh) -> None:
    tokens = prompt(10 * BLOCK + 5, first=4700)
    prefilled(mesh, tokens)
    _, trace = answer(mesh, tokens, kvmesh={"trace": True, "disaggregate": True})
    assert trace["cached_tokens"] == 10 * BLOCK
    assert trace["kv_bytes_pulled"] == 11 * BLOCK * BYTES_PER_TOKEN


def test_each_of_several_prompts_gets_its_own_kv(mesh: VllmMesh) -> None:
    """Public advisories of vLLM: CVE-2026-94623 and CVE-2026-94627."""
    prompts = [prompt(200 + 40 * number, first=7000 + 100 * number) for number in range(3)]
    body = {"max_tokens": 24, "ignore_eos": True, "kvmesh": {"trace": True, "disaggregate": True}}
    with mesh.http as http:
        reply = http.post("/v1/completions", json={"model": "tiny", "prompt": prompts, "temperature": 0, **body}).json()
    assert reply["kvmesh"]["prefill_worker"] == "prefill-0"
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == [alone(mesh, tokens) for tokens in prompts]


def test_a_seed_draws_the_same_answer_with_and_without_a_prefill_worker(mesh: VllmMesh) -> None:
    sampled = {"temperature": 1.0, "seed": 11}
    tokens = prompt(200, first=3)
    assert answer(mesh, tokens, **sampled)[0] == alone(mesh, tokens, **sampled)


def test_the_prefill_worker_gives_the_logprobs_of_a_prompt(mesh: VllmMesh) -> None:
    tokens = prompt(200, 901)
    told = []
    for disaggregate in (True, False):
        fields = {"echo": True, "logprobs": 1, "kvmesh": {"trace": True, "disaggregate": disaggregate}}
        reply = mesh.complete(tokens, max_tokens=4, ignore_eos=True, **fields)
        assert (reply["kvmesh"]["prefill_worker"] is not None) == disaggregate
        told.append(reply["choices"][0]["logprobs"])
    apart, together = told
    assert len(apart["tokens"]) == len(tokens) + 4
    assert apart["token_logprobs"][0] is None
    assert apart["token_logprobs"][1:] == pytest.approx(together["token_logprobs"][1:], abs=1e-3)


def test_nobody_outside_of_this_host_can_reach_the_ports_of_vllm(mesh: VllmMesh) -> None:
    """Its processes read messages of each other that no signature protects.

    torch.distributed knows no other address for its store than all of them; docs/security.md says so.
    """
    for name in ("prefill-0", "decode-0"):
        assert [process for process, _ in open_to_others(mesh.tree(name))] == ["VLLM::EngineCore"]


def test_idle_workers_leave_the_cores_alone(mesh: VllmMesh) -> None:
    assert idle_cores([*mesh.tree("prefill-0"), *mesh.tree("decode-0")]) < 0.6


# --- what if the prefill worker dies; the last tests take workers away ------------------------------------------


def test_a_guide_holds_across_the_two_workers(mesh: VllmMesh) -> None:
    form = {"guide": Guide(kind=GuideKind.REGEX, value="(red|green)-[0-9]{3}"), "stop": StopConditions(max_tokens=20)}
    first, ticket = prefilled(mesh, prompt(100, first=5), **form)
    deltas = ask(mesh.workers()["decode-0"], request_of(prompt(100, first=5), generated=first, ticket=ticket, **form))
    assert deltas[0].pull is not None
    assert not deltas[0].pull.error
    tokens = [*first, *(token for delta in deltas for token in delta.token_ids)]
    text = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json")).decode(tokens)
    assert re.fullmatch("(red|green)-[0-9]{3}", text)


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_engine_id": None},
        {"remote_port": None},
        {"remote_engine_id": "another"},
        {"remote_request_id": "another"},
        {"remote_port": 9},
        {"tp_size": 2},
        {"tp_size": 4096},
        {"dcp_size": 2},
        {"pp_size": 2},
        {"remote_block_ids": [[0xFFFF_FFFF] * 5]},
        {"remote_block_ids": [[0x7FFF_FFFF] * 5]},
        {"remote_block_ids": [[1_000_000] * 5]},
    ],
    ids=str,
)
def test_a_forged_ticket_costs_the_pull_alone(mesh: VllmMesh, changes: dict[str, Any]) -> None:
    """Public advisories of vLLM: CVE-2026-94622 and CVE-2026-94626. None: the field is left out."""
    tokens = prompt(150, first=6000 + 37 * len(str(changes)))
    first, ticket = prefilled(mesh, tokens)
    params = json.loads(ticket.opaque) | changes
    forged = json.dumps({key: value for key, value in params.items() if value is not None}).encode()
    decode = mesh.workers()["decode-0"]
    deltas = ask(decode, request_of(tokens, generated=first, ticket=msgspec.structs.replace(ticket, opaque=forged)))
    reference = [token for delta in ask(decode, request_of(tokens, cache_salt="own")) for token in delta.token_ids]
    assert [*first, *(token for delta in deltas for token in delta.token_ids)] == reference
    assert mesh.started["decode-0"].poll() is None


def test_a_prefill_worker_that_hangs_is_waited_for_no_longer_than_a_pull_may_take(mesh: VllmMesh) -> None:
    tokens = prompt(340, first=1500)
    first, ticket = prefilled(mesh, tokens)
    decode = mesh.workers()["decode-0"]
    stopped = mesh.signal_all("prefill-0", signal.SIGSTOP)
    try:
        deltas = ask(decode, request_of(tokens, generated=first, ticket=ticket))
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)
    assert deltas[0].pull is not None
    assert f"longer than {PULL_TIMEOUT_S:g} s" in deltas[0].pull.error
    reference = [token for delta in ask(decode, request_of(tokens)) for token in delta.token_ids]
    assert [*first, *(token for delta in deltas for token in delta.token_ids)] == reference


def test_once_it_goes_on_it_is_pulled_from_again(mesh: VllmMesh) -> None:
    mesh.until_ready("prefill-0")
    tokens = prompt(340, first=1700)
    first, ticket = prefilled(mesh, tokens)
    deltas = ask(mesh.workers()["decode-0"], request_of(tokens, generated=first, ticket=ticket))
    assert deltas[0].pull is not None
    assert deltas[0].pull.error == ""


def test_a_prefill_worker_that_dies_while_it_is_pulled_from_costs_time_alone(mesh: VllmMesh) -> None:
    tokens = prompt(340, first=900)
    first, ticket = prefilled(mesh, tokens)
    decode = mesh.workers()["decode-0"]
    whole = [token for delta in ask(decode, request_of(prompt(340, first=900))) for token in delta.token_ids]
    later = prompt(340, first=1100)
    later_first, later_ticket = prefilled(mesh, later)
    stopped = mesh.signal_all("prefill-0", signal.SIGSTOP)
    killer = threading.Timer(2.0, lambda: [process.kill() for process in stopped])
    killer.start()
    during = ask(decode, request_of(later, generated=later_first, ticket=later_ticket))
    killer.join()
    after = ask(decode, request_of(tokens, generated=first, ticket=ticket))
    psutil.wait_procs(stopped, 10)
    assert during[0].pull is not None
    assert during[0].pull.error
    assert sum(len(delta.token_ids) for delta in during) == 11
    assert [*first, *(token for delta in after for token in delta.token_ids)] == whole
    reference = [token for delta in ask(decode, request_of(later)) for token in delta.token_ids]
    assert [*later_first, *(token for delta in during for token in delta.token_ids)] == reference


def test_without_its_prefill_worker_the_mesh_still_answers(mesh: VllmMesh) -> None:
    tokens = prompt(340, first=1300)
    assert answer(mesh, tokens)[0] == alone(mesh, tokens)


def test_a_worker_that_is_killed_leaves_none_of_vllms_processes_behind(mesh: VllmMesh) -> None:
    processes = mesh.tree("decode-0")
    assert len(processes) > 2
    processes[0].kill()
    mesh.started["decode-0"].wait(10)
    assert psutil.wait_procs(processes, 20)[1] == []
