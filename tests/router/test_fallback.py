"""Placements of a frontend while no router answers."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from kvmesh.protocol.errors import NoWorkerError, OtherWeightsError, OverloadedError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Role, RouteRequest, WorkerCard
from kvmesh.router.fallback import FULL_TIMES, LONG_TOKENS, FallbackRouter
from tests.support.routing import card


class News:
    """Workers that a test announces."""

    def listen(self, joined: Callable[[WorkerCard], object], left: Callable[[WorkerId], object]) -> None:
        self.joined, self.left = joined, left


def router_of(*cards: WorkerCard) -> FallbackRouter:
    news = News()
    router = FallbackRouter(news)
    for one in cards:
        news.joined(one)
    return router


def request(tokens: int = 10, **fields: object) -> RouteRequest:
    return RouteRequest(request_id=RequestId("r"), model="m", isl_tokens=tokens, **fields)  # type: ignore[arg-type]


def test_requests_go_where_the_fewest_of_this_frontend_run() -> None:
    router = router_of(card("a"), card("b"), card("c"))
    with ExitStack() as running:
        for _ in range(9):
            running.enter_context(router.counted(router.place(request())))
        assert sorted(router._in_flight.values()) == [3, 3, 3]
    assert router._in_flight == {}


def test_a_small_worker_gets_a_small_share() -> None:
    router = router_of(card("a", max_num_seqs=3), card("b", max_num_seqs=1))
    with ExitStack() as running:
        for _ in range(8):
            running.enter_context(router.counted(router.place(request())))
        assert router._in_flight == {"a": 6, "b": 2}


def test_workers_that_have_failed_the_request_are_left_out() -> None:
    router = router_of(card("a"), card("b"))
    assert {router.place(request(exclude=("a",))).decode.worker_id for _ in range(5)} == {"b"}
    with pytest.raises(NoWorkerError, match="no router answers"):
        router.place(request(exclude=("a", "b")))


def test_an_answer_continues_on_equal_weights_alone() -> None:
    router = router_of(card("a", content_fingerprint="x"), card("b", content_fingerprint="y"))
    assert {router.place(request(content="x")).decode.worker_id for _ in range(5)} == {"a"}
    with pytest.raises(OtherWeightsError, match="none continues it"):
        router.place(request(content="x", exclude=("a",)))


@pytest.mark.parametrize(
    ("asked", "tokens", "prefills"),
    [(None, 10, False), (None, LONG_TOKENS, True), (True, 10, True), (False, LONG_TOKENS, False)],
)
def test_long_prompts_go_to_prefill_workers(asked: bool | None, tokens: int, prefills: bool) -> None:
    router = router_of(card("a"), card("p", Role.PREFILL))
    placed = router.place(request(tokens, disaggregate=asked))
    assert placed.decode.worker_id == "a"
    assert (placed.prefill is not None) == prefills


def test_a_prefill_worker_of_another_transfer_is_not_used() -> None:
    router = router_of(card("a"), card("p", Role.PREFILL, transfer="nixl"))
    assert router.place(request(disaggregate=True)).prefill is None


def test_pins_and_adapters_are_kept_to() -> None:
    router = router_of(card("a"), card("b", loras=("x",)))
    assert router.place(request(pin="a")).decode.worker_id == "a"
    assert router.place(request(lora="x")).decode.worker_id == "b"
    assert router.place(request(among=("b",))).decode.worker_id == "b"


def test_full_workers_refuse_early() -> None:
    router = router_of(card("a", max_num_seqs=1))
    with ExitStack() as running:
        for _ in range(FULL_TIMES):
            running.enter_context(router.counted(router.place(request())))
        with pytest.raises(OverloadedError):
            router.place(request())
