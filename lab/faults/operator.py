"""Be the operator of the mesh: order workers to sleep, wake, drain, resume and change their role, in any sequence.

Orders go to the address where a worker listens, past its proxies. An order may be refused, but it has to be answered.
After the last one the worker has to serve again in its own role.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import aiohttp

from kvmesh.lab.faults.kinds import DECODE, PREFILL
from kvmesh.lab.faults.mesh import PLANE, FaultsMesh
from kvmesh.lab.faults.traffic import MODEL
from kvmesh.lab.faults.weights import ORIGINAL
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.protocol.errors import DeadlineExceededError, MeshError, UnreachableError
from kvmesh.protocol.messages import Control, ControlAction, ControlReply

ANSWERED_S = 60.0  # an order waits for requests in hand; a drain may take 20 s, twice where offers are fetched
BACK_S = 60.0  # a worker serves again, or its process has been started again
ANSWER_S = 5.0  # of a request that names its worker
TRY_S = 0.2
PAUSE_S = (0.0, 0.4)  # between two orders
HOW_MANY = (6, 10)
Order = tuple[ControlAction, Mapping[str, str]]
WAKE: Order = (ControlAction.WAKE, {})
RESUME: Order = (ControlAction.RESUME, {})
SLEEP: Order = (ControlAction.SLEEP, {})


def orders_of(seed: str, role: str) -> list[tuple[float, Order]]:
    """Return orders in a sequence that a seed draws, each with the seconds to wait before it."""
    draw = random.Random(seed)
    roles = [(ControlAction.SET_ROLE, {"role": one}) for one in (PREFILL, DECODE)]
    known: list[Order] = [SLEEP, WAKE, (ControlAction.DRAIN, {}), RESUME, *roles]
    return [(round(draw.uniform(*PAUSE_S), 2), draw.choice(known)) for _ in range(draw.randint(*HOW_MANY))]


class Operator:
    """Gives orders, and adds a line to `complaints` for each one that fails to do what it must."""

    def __init__(self, mesh: FaultsMesh, clock: Callable[[], float], complaints: list[str]) -> None:
        self._mesh = mesh
        self._clock = clock
        self._complaints = complaints
        self._plane: PlaneClient
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._plane = PlaneClient(self._mesh.credentials)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._plane.close()
        await self._http.close()

    async def order(self, name: str, order: Order) -> ControlReply:
        """Give one order. Raise MeshError if it is refused, or if the worker is away."""
        action, arguments = order
        control = Control(action=action, arguments=dict(arguments))
        address = f"{self._mesh.host(name)}:{PLANE}"
        return await self._plane.ask(address, "control", control, ControlReply, ANSWERED_S)

    async def any_sequence(self, name: str, seed: str) -> None:
        """Give orders one after the other, some before the last one is answered, and bring the worker back."""
        role = name.rpartition("-")[0]
        given: list[Order] = []
        async with asyncio.TaskGroup() as group:
            for wait_s, order in orders_of(seed, role):
                given.append(order)
                answer = group.create_task(self._try(name, order), name=f"order {order[0].value}")
                if wait_s > PAUSE_S[1] / 3:  # else the next one comes while this one is under way
                    await asyncio.wait([answer])
                await asyncio.sleep(wait_s)
        await self.bring_back(name, f"after {in_words(given)}")

    async def _try(self, name: str, order: Order) -> None:
        began_s = self._clock()
        try:
            await self.order(name, order)
        except DeadlineExceededError:
            self._complaints.append(
                f"{name} did not answer the order {in_words([order])} at {began_s:.1f} s within {ANSWERED_S:.0f} s"
            )
        except MeshError:
            pass  # refused, or its process has ended meanwhile

    async def nap_until(self, name: str, weights: int) -> None:
        """Have a worker sleep and wake until it has read these weights."""
        ends_s = self._clock() + BACK_S
        while self._mesh.switches[name].weights != weights:
            for order in (SLEEP, WAKE):
                await self._try(name, order)
            if self._clock() > ends_s:
                self._complaints.append(f"{name} does not read its weights again when it wakes")
                break
            await asyncio.sleep(TRY_S)

    async def bring_back(self, name: str, why: str) -> None:
        """Have a worker serve in its own role again, whatever its state is."""
        ends_s = self._clock() + BACK_S
        while problem := await self._missing(name):
            if self._clock() > ends_s:
                self._complaints.append(f"{name} does not serve again {why}: {problem}")
                return
            await asyncio.sleep(TRY_S)

    async def _missing(self, name: str) -> str:
        """Return what a worker lacks to serve, after an order to mend it."""
        role = name.rpartition("-")[0]
        try:
            status = (await self.order(name, (ControlAction.STATUS, {}))).status
            state = "" if status is None else status.state
            if state != "serving":
                await self.order(name, WAKE if state == "asleep" else RESUME)
            await self.order(name, (ControlAction.SET_ROLE, {"role": role}))
        except UnreachableError as error:
            return f"it is away: {error}"
        except MeshError as error:
            return str(error)
        return "" if state == "serving" and await self._answers(name) else f"it is {state} and gives no answer"

    async def _answers(self, name: str) -> bool:
        """Return whether a request that names the worker gets its answer there."""
        is_prefill = name.startswith(PREFILL)
        if is_prefill and self._mesh.switches[name].weights != ORIGINAL:
            return True  # no decode worker may use its KV
        header = "x-kvmesh-prefill-worker" if is_prefill else "x-kvmesh-worker"
        body = {"model": MODEL, "prompt": [20, 21, 22, 23], "max_tokens": 2, "kvmesh": {"disaggregate": is_prefill}}
        for url in self._mesh.urls:
            try:
                async with self._http.post(
                    f"{url}/v1/completions", json=body, headers={header: name, "x-request-timeout-s": str(ANSWER_S)}
                ) as response:
                    if response.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
        return False


def in_words(orders: Sequence[Order]) -> str:
    return ", ".join(" ".join([action.value, *arguments.values()]) for action, arguments in orders)
