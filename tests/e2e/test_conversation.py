"""A conversation goes where its prefix is; what was evicted is forgotten; tenants share nothing."""

import pytest

from tests.support.mesh import Mesh, running_mesh, until


def turn(question: str) -> list[dict[str, str]]:
    """A first turn that shares no block with another question's."""
    guide = f"{question} That is what you explain, in simple words, as a friendly guide for children. " * 3
    return [{"role": "system", "content": guide}, {"role": "user", "content": question}]


def follow_up(messages: list[dict[str, str]], answer: dict, question: str) -> list[dict[str, str]]:
    said = answer["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": question}]


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_second_turn_goes_where_its_prefix_is(mesh: Mesh) -> None:
    for question in ["How does a post office work?", "What does a router do?", "And a ship?"]:
        first_turn = turn(question)
        first = mesh.chat(first_turn, max_tokens=40)
        assert first["kvmesh"]["prefill_worker"] == "prefill-0"
        second = mesh.chat(follow_up(first_turn, first, "Thank you!"), max_tokens=8)
        assert second["kvmesh"]["decode_worker"] == first["kvmesh"]["decode_worker"]
        assert second["kvmesh"]["prefill_worker"] is None
        whole_blocks = (first["usage"]["total_tokens"] - 1) // 16 * 16
        assert cached(second) >= whole_blocks - 16


def test_a_prompt_that_a_prefill_worker_knows_is_cached_there(mesh: Mesh) -> None:
    messages = turn("What is a boat?")
    together = {"kvmesh": {"disaggregate": True, "trace": True}, "max_tokens": 8}
    mesh.chat(messages, **together)
    again = mesh.chat(messages, **together)
    assert again["kvmesh"]["prefill_worker"] == "prefill-0"
    assert cached(again) > 0


def test_another_salt_finds_nothing(mesh: Mesh) -> None:
    messages = turn("What is a kite?")
    mesh.chat(messages, max_tokens=4, cache_salt="tenant-a")
    same, other = (mesh.chat(messages, max_tokens=4, cache_salt=salt) for salt in ("tenant-a", "tenant-b"))
    assert cached(same) > 0
    assert cached(other) == 0


@pytest.fixture(scope="module")
def small_mesh(tmp_path_factory: pytest.TempPathFactory):
    """Workers whose caches hold two prompts at most."""
    flags = ["--num-blocks", "24", "--kv-transfer", "shm", "--decode", "1"]
    with running_mesh(tmp_path_factory.mktemp("small"), *flags) as mesh:
        yield mesh


def test_eviction_makes_the_router_forget(small_mesh: Mesh) -> None:
    mesh = small_mesh
    messages = turn("What is a bridge?")
    first = mesh.chat(messages, max_tokens=8)
    second_turn = follow_up(messages, first, "Thank you!")
    assert cached(mesh.chat(second_turn, max_tokens=4)) > 0
    held = mesh.metric("kvmesh_router_index_blocks")
    for number in range(6):
        mesh.complete(list(range(100 * number + 10, 100 * number + 250)), max_tokens=4)
    until(lambda: mesh.metric("kvmesh_router_index_blocks") <= 2 * 24, what="the index to shrink to what workers hold")
    assert held > 0
    again = mesh.chat(second_turn, max_tokens=4)
    assert cached(again) == 0
    assert again["kvmesh"]["prefill_worker"] == "prefill-0", "nothing is cached any more, so it is disaggregated"
