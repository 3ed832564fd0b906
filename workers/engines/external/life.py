"""Track one external engine: whether it is starting, ready, failed or stopping, and how many requests it has."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.protocol.errors import EngineError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import GenerateRequest
from kvmesh.workers.engine import EngineInfo
from kvmesh.workers.engines.external.guide_trial import GuideTrial
from kvmesh.workers.engines.external.waits import Waits
from kvmesh.workers.guide_messages import XgrammarForm


class EngineLife:
    """Belongs to the event loop that the engine starts on."""

    def __init__(self) -> None:
        self.worker_id = WorkerId("")
        self.address = ""  # of the worker's request plane
        self.info: EngineInfo | None = None  # set once the engine is ready
        self.in_flight = 0  # requests
        self._most_in_flight = 0  # since `take_most_in_flight`
        self.is_stopping = False
        self.waits = Waits()
        self._trial = GuideTrial()
        self._failure: EngineError | None = None

    def begin(self, worker_id: WorkerId, address: str) -> None:
        self.worker_id, self.address = worker_id, address

    def fail(self, failure: EngineError) -> None:
        """The engine can serve no more. End all waits for it; the first failure is the one that is reported."""
        self._failure = self._failure or failure
        self.waits.fail(self._failure)

    def stop(self) -> bool:
        """End all waits. Return False if it was stopped before."""
        if self.is_stopping:
            return False
        self.is_stopping = True
        self._trial.close()
        self.waits.fail(self._stopping())
        return True

    def check(self) -> EngineInfo:
        """Return what the engine is. Raise EngineError if it is starting, stopping or has failed."""
        if self.is_stopping:
            raise self._stopping()
        if self._failure is not None:
            raise self._failure
        if self.info is None:
            raise EngineError("the engine has not started")
        return self.info

    def uses_xgrammar(self, form: XgrammarForm) -> None:
        """Say how the engine gives guides to xgrammar, if it does. Call it before the first request."""
        self._trial.xgrammar = form

    async def try_guide(self, request: GenerateRequest) -> None:
        """Raise InvalidRequestError if the request has a guide that would be too costly for the engine."""
        if request.guide is not None and self.info is not None:
            await self._trial.check(request.guide, self.info.model_path, request.tenant)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as in flight for as long as the block runs."""
        self.in_flight += 1
        if self.in_flight > self._most_in_flight:
            self._most_in_flight = self.in_flight
        try:
            yield
        finally:
            self.in_flight -= 1

    def take_most_in_flight(self) -> int:
        """Return how many requests were in flight at once, at most, since the last call."""
        most, self._most_in_flight = self._most_in_flight, self.in_flight
        return most

    def _stopping(self) -> EngineError:
        return EngineError(f"{self.worker_id or 'the worker'} is stopping")
