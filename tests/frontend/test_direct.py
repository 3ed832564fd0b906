"""A frontend behind an endpoint picker: the headers say where a request runs, and nothing is placed again."""

import pytest
from msgspec.structs import replace

from kvmesh.frontend.direct import DirectRouter
from kvmesh.frontend.generator import Hints
from kvmesh.frontend.hints import with_headers
from kvmesh.frontend.route_requests import route_request
from kvmesh.protocol.errors import InvalidRequestError, MeshError, NoWorkerError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import Placed, Role, RouteRequest
from tests.frontend import tiny


class News:
    """Workers that have joined."""

    def __init__(self, *names: str, **fields: object) -> None:
        self._names, self._fields = names, fields

    def listen(self, joined, left) -> None:  # type: ignore[no-untyped-def]
        for number, name in enumerate(self._names):
            role = {"p": Role.PREFILL, "d": Role.DECODE}.get(name[0], Role.AGGREGATED)
            joined(replace(tiny.card(name, role), http_endpoint=f"10.0.0.{number}:80", **self._fields))
        left(WorkerId("never there"))


def asked(hints: Hints, failed: tuple[str, ...] = ()) -> RouteRequest:
    return route_request(RequestId("r"), "tiny", None, 10, b"", hints, tuple(map(WorkerId, failed)))


async def placed(hints: Hints, own: str = "", failed: tuple[str, ...] = ()) -> Placed:
    async with DirectRouter(News("d1", "d2", "p1"), own).book(asked(hints, failed), 1.0) as place:
        return place.placed


async def test_the_named_workers_do_both_halves() -> None:
    found = await placed(Hints(pin="d2", pin_prefill="p1", pin_rank=1))
    assert (found.decode.name, found.decode.dp_rank) == ("d2", 1)
    assert found.prefill is not None and found.prefill.name == "p1"


async def test_a_prefill_worker_can_be_named_by_its_endpoint() -> None:
    hints = with_headers(Hints(pin="d1"), [("X-Prefiller-Host-Port", "10.0.0.2:80")], is_steered=True)
    found = await placed(hints)
    assert found.prefill is not None and found.prefill.name == "p1"


def test_that_header_counts_behind_a_picker_alone() -> None:
    assert with_headers(Hints(), [("x-prefiller-host-port", "10.0.0.2:80")]) == Hints()


@pytest.mark.parametrize("gone", ["p9", "10.0.0.9:80", "d2"])
async def test_without_its_prefill_worker_one_does_all(gone: str) -> None:
    found = await placed(Hints(pin="d1", pin_prefill=gone))
    assert (found.decode.name, found.prefill) == ("d1", None)


async def test_a_prefill_worker_that_failed_is_left_out() -> None:
    assert (await placed(Hints(pin="d1", pin_prefill="p1"), failed=("p1",))).prefill is None


async def test_requests_without_a_placement_go_to_the_own_worker() -> None:
    assert (await placed(Hints(), own="d2")).decode.name == "d2"


@pytest.mark.parametrize(
    ("hints", "failed", "kind"),
    [
        (Hints(), (), InvalidRequestError),
        (Hints(pin="d9"), (), NoWorkerError),
        (Hints(pin="p1"), (), NoWorkerError),
        (Hints(pin="d1"), ("d1",), NoWorkerError),
    ],
)
async def test_what_cannot_run_as_named_is_refused(
    hints: Hints, failed: tuple[str, ...], kind: type[MeshError]
) -> None:
    with pytest.raises(kind):
        await placed(hints, failed=failed)


async def test_a_model_runs_on_its_own_workers_alone() -> None:
    router = DirectRouter(News("d1", model="other"))
    with pytest.raises(NoWorkerError, match="'tiny'"):
        await router.preview(asked(Hints(pin="d1")), 1.0)
