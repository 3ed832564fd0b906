"""Send the requests of a batch, many at once, until each has a result."""

import asyncio
import email.utils
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp
import msgspec

from kvmesh.commands.batch.lines import BatchRequest, ResultError, ResultLine, ResultResponse
from kvmesh.commands.batch.retrying import UNREACHABLE, OutageWatch, wait_before_retry
from kvmesh.commands.http_client import API_KEY, message_of
from kvmesh.protocol.errors import MeshError, UnreachableError

UNAUTHORIZED = 401  # every other request would get it too


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Hold what one try has brought. `status` is UNREACHABLE if no server has answered; `body` says why then."""

    status: int
    request_id: str = ""
    retry_after_s: float | None = None
    body: bytes = b""


class BatchSender:
    """Send requests through one HTTP session. `on_result` and `on_retry` are called on the event loop."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        priority: int,
        outage: OutageWatch,
        on_result: Callable[[ResultLine], None],
        on_retry: Callable[[HttpAnswer], None],
        rng: random.Random,
    ) -> None:
        self._http = http
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "x-kvmesh-priority": str(priority)}
        self._outage = outage
        self._on_result = on_result
        self._on_retry = on_retry
        self._rng = rng

    async def send_all(self, requests: Iterator[BatchRequest], concurrency: int) -> None:
        """Return when each request has its result.

        Raises UnreachableError if nobody has answered for long; a MeshError of `requests` or `on_result` is raised too.
        """
        try:
            async with asyncio.TaskGroup() as senders:
                for number in range(concurrency):
                    senders.create_task(self._work(requests), name=f"batch sender {number}")
        except* MeshError as group:
            raise group.exceptions[0] from None
        except* aiohttp.InvalidURL as group:
            raise UnreachableError(f"{self._url} is not a URL", hint="--url http://host:port") from group

    async def _work(self, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            self._on_result(result_of(request, await self._answer_to(request)))

    async def _answer_to(self, request: BatchRequest) -> HttpAnswer:
        """Send a request until its answer counts."""
        tries = 0
        self._outage.on_start(request.id)
        while True:
            tries += 1
            answer = await self._ask(request)
            if answer.status == UNAUTHORIZED:
                raise UnreachableError(f"{self._url}: {reason_of(answer)}", hint=f"set {API_KEY}, or --api-key")
            wait_s = wait_before_retry(answer.status, tries, answer.retry_after_s, self._rng)
            if wait_s is None and answer.status != UNREACHABLE:
                self._outage.on_answer(request.id)
                return answer
            if self._outage.on_failure(request.id, time.monotonic()):
                raise self._no_answer(answer)
            if wait_s is None:
                self._outage.on_give_up(request.id)
                return answer
            self._on_retry(answer)
            await asyncio.sleep(wait_s)

    def _no_answer(self, latest: HttpAnswer) -> UnreachableError:
        return UnreachableError(
            f"every request to {self._url} has failed for {self._outage.give_up_after_s:g} s, the latest with: "
            f"{reason_of(latest)}",
            hint="see that the mesh runs and serves the model; the same command continues then",
        )

    async def _ask(self, request: BatchRequest) -> HttpAnswer:
        try:
            async with self._http.post(self._url + request.path, data=request.body, headers=self._headers) as response:
                return HttpAnswer(
                    response.status,
                    response.headers.get("x-request-id", response.headers.get("request-id", "")),
                    seconds_in(response.headers.get("retry-after", "")),
                    await response.read(),
                )
        except aiohttp.InvalidURL:
            raise
        except aiohttp.ClientConnectorCertificateError as error:
            found = f"the certificate of {self._url} is not trusted: {error.certificate_error}"
            raise UnreachableError(found, hint="name the file that it can be checked with: --ca-file") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            return HttpAnswer(UNREACHABLE, body=why_unreachable(error).encode())


def why_unreachable(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
    return str(error) or "no answer in time"


def seconds_in(retry_after: str) -> float | None:
    """Return a Retry-After header in seconds from now. None: there is none that can be read."""
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (email.utils.parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def reason_of(answer: HttpAnswer) -> str:
    if answer.status == UNREACHABLE:
        return answer.body.decode(errors="replace")
    return f"{answer.status}, {message_of(answer.body)}"


def result_of(request: BatchRequest, answer: HttpAnswer) -> ResultLine:
    """Return the line of the output. A body that is no JSON, such as a proxy's page, becomes an error object."""
    if answer.status == UNREACHABLE:
        error = ResultError("unreachable", reason_of(answer))
        return ResultLine(request.id, request.custom_id, None, error)
    try:
        body = msgspec.json.encode(msgspec.json.decode(answer.body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {"message": message_of(answer.body), "type": "server_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": fields})
    response = ResultResponse(answer.status, answer.request_id, msgspec.Raw(body))
    return ResultLine(request.id, request.custom_id, response, None)
