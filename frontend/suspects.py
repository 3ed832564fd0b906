"""Find the request that ends the processes of workers, and keep it from further ones (docs/workers.md).

A worker's process ends together with all that it runs, and one request of these may be the cause. A request that got
tokens from the worker is not suspected: its prompt has been computed. The others are tried one at a time, until their
first token. So the cause is alone when it ends the next process, and the innocent ones are cleared before.
"""

import asyncio
from collections import OrderedDict, deque

import msgspec
from xxhash import xxh3_128_digest

from kvmesh.mesh.plane.client import PlaneClient, is_refused
from kvmesh.protocol.errors import MeshError, PeerLostError, UnreachableError
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import EmbedRequest, GenerateRequest, Target, WorkerIdentity, encode

MAX_ENDED = 2  # processes that one request may end
REMEMBERED_S = 300.0  # the client's own retries get an error for so long
MAX_REMEMBERED = 1024  # of more, the oldest are forgotten
TRIAL_S = 0.25  # a trial without a first token lets the next one begin: this prompt takes long, or waits
MAX_ALONE = 8  # of more suspects, several are tried at a time, so that all get their turn within MAX_ALONE trials
ASK_S = 0.6  # a worker that does not answer in this time hangs or is cut off; its process may live
ASK_AGAIN_S = 0.02  # a process that is ending may still accept a connection


async def has_ended(plane: PlaneClient, target: Target) -> bool:
    """Return whether a worker's process has certainly ended: nobody listens at its address, or another worker does.

    A worker that answers was lost to the network. The same is assumed of one that gives no answer.
    """
    now = asyncio.get_running_loop().time
    until_s = now() + ASK_S
    while (left_s := until_s - now()) > 0:
        try:
            found = await plane.ask(target.address, "identify", None, WorkerIdentity, left_s)
        except UnreachableError as error:
            if is_refused(error):
                return True
            if not isinstance(error.__cause__, ConnectionError):
                return False
        except PeerLostError:
            pass
        except MeshError:
            return False
        else:
            return found.worker_id != target.worker_id
        # The connection, its handshake or the call on it broke off: the process may be about to end.
        await asyncio.sleep(ASK_AGAIN_S)
    return False


def fingerprint(request: GenerateRequest | EmbedRequest) -> bytes:
    """Return a hash of all that a worker computes for a request; requests that repeat it have the same."""
    plain = msgspec.structs.replace(request, request_id=RequestId(""), worker_id=WorkerId(""), dp_rank=0)
    if isinstance(plain, GenerateRequest):  # a seed that the client does not send is drawn for each request
        sampling = msgspec.structs.replace(plain.sampling, seed=0)
        plain = msgspec.structs.replace(plain, sampling=sampling, generated=(), ticket=None)
    return xxh3_128_digest(encode(plain))


class Condemned:
    """Remembers the fingerprints of requests that have ended MAX_ENDED processes. Pure; the time is a parameter."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # in the order of time

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, name: bytes, now: float) -> None:
        self._until_s[name] = now + REMEMBERED_S
        self._until_s.move_to_end(name)
        if len(self._until_s) > MAX_REMEMBERED:
            self._until_s.popitem(last=False)

    def left_s(self, name: bytes, now: float) -> float:
        """Return for how long a request is still refused; 0: it is not."""
        while self._until_s and next(iter(self._until_s.values())) <= now:
            self._until_s.popitem(last=False)
        return max(0.0, self._until_s.get(name, now) - now)


class Trials:
    """Lets suspects be tried one at a time, in their order; of very many, a few at a time."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running: set[Trial] = set()
        self._open: set[Trial] = set()  # those, and trials that have had their time without a result

    async def begin(self) -> "Trial":
        """Return once this suspect may be tried."""
        if self._waiting or not self._has_room():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._go_on()
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._go_on()
                raise
        trial = Trial(self, is_alone=not self._open)
        for other in self._open:
            other.is_alone = False
        self._open.add(trial)
        self._running.add(trial)
        self._go_on()
        return trial

    def expire(self, trial: "Trial") -> None:
        """Let the next suspect begin. It is not known yet what becomes of this one."""
        self._running.discard(trial)
        self._go_on()

    def end(self, trial: "Trial") -> None:
        self._open.discard(trial)
        self.expire(trial)

    def _has_room(self) -> bool:
        return len(self._running) < 1 + (len(self._running) + len(self._waiting)) // MAX_ALONE

    def _go_on(self) -> None:
        """Let the next suspect begin if it may. It lets the one after it begin."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if self._waiting and self._has_room():
            self._waiting.popleft().set_result(None)


class Trial:
    """A suspect's turn. It ends with the first token or with the attempt; after TRIAL_S the next one begins."""

    __slots__ = ("_timer", "_trials", "is_alone")

    def __init__(self, trials: Trials, *, is_alone: bool) -> None:
        self._trials = trials
        self._timer = asyncio.get_running_loop().call_later(TRIAL_S, trials.expire, self)
        self.is_alone = is_alone  # no other suspect was tried at the same time

    def end(self) -> None:
        """End the turn. A second call does nothing."""
        self._timer.cancel()
        self._trials.end(self)
