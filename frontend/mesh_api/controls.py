"""Let operators see and control the workers, with a key that is an admin's."""

import logging

import msgspec

from kvmesh.frontend.bodies import decode_body
from kvmesh.frontend.callers import caller_of, check_admin
from kvmesh.frontend.crew import CrewList, WorkerControl, WorkerControlled, WorkerCrew
from kvmesh.frontend.endpoint import Endpoint, Services, identified
from kvmesh.frontend.operation import ASKED_FAILURES, Operation
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.protocol.errors import NoWorkerError

log = logging.getLogger(__name__)

_decoder = msgspec.json.Decoder(WorkerControl)


def crew_of(services: Services, request: Request) -> WorkerCrew:
    """Return the workers that the caller may control. Raise ForbiddenError, NoWorkerError."""
    check_admin(request)
    if services.crew is None:
        raise NoWorkerError("this frontend reaches no workers")
    return services.crew


async def list_workers(services: Services, request: Request) -> Reply:
    return json_reply(CrewList(await crew_of(services, request).members()))


async def control_worker(services: Services, request: Request) -> Reply:
    """Have one worker do something, and log who asked for it."""
    crew, name = crew_of(services, request), request.params["worker"]
    asked = decode_body(request.body, _decoder)
    caller = caller_of(request)
    who = "" if caller is None else caller.usage.name
    card = crew.find(name)
    log.warning("control", extra={"worker": card.worker_id, "action": asked.action, "key": who})
    return json_reply(await crew.control(card, asked))


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/kvmesh/workers",
        handler=identified(list_workers, "workers"),
        operation=Operation(
            summary="All workers and how each of them is; for admin keys", reply=CrewList, failures=ASKED_FAILURES
        ),
    ),
    Endpoint(
        method="POST",
        path="/kvmesh/workers/{worker}/control",
        handler=identified(control_worker, "control"),
        operation=Operation(
            summary="Drain a worker, change its role, have it sleep, profile it, reset its cache; for admin keys",
            request=(WorkerControl,),
            reply=WorkerControlled,
            failures=(*ASKED_FAILURES, 409),
        ),
    ),
)
