"""The router of the coarse world: requests wait in the live queue, and the live admission refuses and learns."""

import pytest

from kvmesh.protocol.ids import RequestId
from kvmesh.router.admission import AdmissionRules
from kvmesh.router.estimate import CAUTION, LEAST
from kvmesh.simulator.coarse_router import CoarseRouter
from kvmesh.simulator.config import SimConfig
from kvmesh.simulator.requests import SimRequest

OSL = 11


def facts(isl_tokens: int = 1000, tenant: str = "") -> SimRequest:
    return SimRequest(0.0, isl_tokens, OSL, b"", 0, tenant=tenant)


def waiting(*isl_tokens: int, admission: bool = True) -> CoarseRouter:
    """Return a router in which prompts of these lengths wait, named 0, 1, ..."""
    router = CoarseRouter(SimConfig(itl_slo_s=0.1, keeps_itl=True, admission=admission, states_deadline=True))
    for number, isl in enumerate(isl_tokens):
        assert router.push(RequestId(str(number)), facts(isl), 0.0) == []
    return router


def answered(router: CoarseRouter, count: int, itl_s: float, running: int = 4) -> None:
    for number in range(count):
        name = RequestId(f"answered {number}")
        router.placed(name, 1000, 0, running, 0.0)
        router.began(name, 1.0)
        router.ended(name, OSL, running, 1.0 + (OSL - 1) * itl_s)


def test_short_prompts_go_first() -> None:
    router = waiting(3000, 1000, 2000)
    assert (len(router), router.isl_tokens) == (3, 6000)
    assert [router.pop(1.0, lambda: True) for _ in range(4)] == ["1", "2", "0", None]
    assert (len(router), router.isl_tokens) == (0, 0)


def test_a_request_waits_while_no_worker_has_room() -> None:
    router = waiting(1000)
    assert router.pop(1.0, lambda: False) is None
    assert len(router) == 1


def test_nobody_asks_for_room_while_nobody_waits() -> None:
    def fits() -> bool:
        raise AssertionError

    assert waiting().pop(1.0, fits) is None


def test_what_would_wait_too_long_is_refused() -> None:
    """One request leaves the queue each second, so that the eleventh would wait for longer than 10 s."""
    assert AdmissionRules().max_wait_s == 10.0
    refused = {admission: refusals(admission) for admission in (True, False)}
    assert refused[True] > 0
    assert refused[False] == 0


def refusals(admission: bool) -> int:
    router, count = waiting(admission=admission), 0
    answered(router, 1, 0.01)  # a model of which nothing was placed has no queue to measure
    for number in range(100):
        now = 0.25 * number
        count += len(router.push(RequestId(str(number)), facts(), now))
        if number % 4 == 3:
            router.pop(now, lambda: True)
    return count


def test_answers_that_are_slow_leave_no_time_for_prompts() -> None:
    router = waiting()
    assert router.spare_share(4) == 1.0
    answered(router, LEAST - 1, 0.05)
    assert router.spare_share(4) == 1.0
    answered(router, 1, 0.05)
    assert router.spare_share(4) == pytest.approx(CAUTION - 0.5)
    answered(router, 500, 0.2)
    assert router.spare_share(4) < -1


def test_a_worker_without_answers_has_all_its_time_for_prompts() -> None:
    router = waiting()
    answered(router, LEAST, 0.2)
    assert router.spare_share(0) == 1.0
