"""A worker pulls a prefix from a peer that is killed meanwhile, and at whose address another model starts."""

import asyncio
import signal
from pathlib import Path

import pytest

from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import Delta, GenerateRequest, PrefixSource, SamplingParams, StopConditions, pack_tokens
from kvmesh.workers.engines.mock.answers import mock_token
from tests.faults.prompts import prompt_of
from tests.faults.test_address_reused import worker
from tests.support.mesh import Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S
from tests.support.streams import Stream, check_mock_answer

PROMPT = prompt_of(300)
TOKENS = 8


def request(source: PrefixSource) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("pulls"),
        model="tiny",
        prompt=pack_tokens(PROMPT),
        sampling=SamplingParams(temperature=0),
        stop=StopConditions(max_tokens=TOKENS, ignore_eos=True),
        source=source,
    )


async def answer(address: str, asked: GenerateRequest) -> list[int]:
    plane = PlaneClient()
    try:
        async with plane.open(address, "generate", asked, PATIENCE_S) as stream:
            return [token async for delta in stream.messages(Delta) for token in delta.token_ids]
    finally:
        await plane.close()


@pytest.mark.e2e
async def test_a_pull_from_an_address_where_another_model_starts_costs_no_token(tmp_path: Path) -> None:
    with running_mesh(tmp_path, "--engine", "mock", "--kv-transfer", "shm") as mesh, worker(mesh, 0, "tiny") as first:
        check_mock_answer(await asyncio.to_thread(lambda: Stream(mesh.url, PROMPT, 4, headers=to("of-tiny")).join()))
        card, puller = mesh.workers()["of-tiny"], mesh.workers()["decode-0"]
        source = PrefixSource(worker_id=card.worker_id, name=card.name, address=card.address, blocks=len(PROMPT) // 16)
        first.send_signal(signal.SIGSTOP)  # it takes the connection, and does not answer
        pulling = asyncio.create_task(answer(puller.address, request(source)))
        await asyncio.to_thread(until, lambda: in_hand(mesh, "decode-0") > 0, what="the pull")
        first.kill()
        await asyncio.to_thread(first.wait)
        with worker(mesh, int(card.address.rpartition(":")[2]), "other"):
            right = [mock_token(PROMPT, index, 2048) for index in range(TOKENS)]
            assert await pulling == right
            assert await answer(puller.address, request(source)) == right


def in_hand(mesh: Mesh, name: str) -> float:
    gauges = ("kvmesh_worker_running_requests", "kvmesh_worker_waiting_requests")
    return sum(mesh.metric(gauge, name) for gauge in gauges)


def to(name: str) -> dict[str, str]:
    return {"x-kvmesh-worker": name}
