"""Hand KV from prefill to decode servers: by vLLM's kv_transfer_params, or by SGLang's bootstrap."""

import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec

from kvmesh.protocol.errors import ConfigError, EngineError, InvalidRequestError, TransferError
from kvmesh.protocol.messages import Delta, GenerateRequest, PullReport, Role, Ticket, TokenLogprob
from kvmesh.workers.engines.attached.completions import COMPLETIONS, Completions, as_engine_errors
from kvmesh.workers.engines.attached.server import Body, Disaggregation
from kvmesh.workers.engines.attached.tickets import START_HINT, params_of, ticket_of
from kvmesh.workers.engines.attached.translate import ServerAnswer, delta_of, prompt_of
from kvmesh.workers.engines.external.content import ServerContent
from kvmesh.workers.engines.external.life import EngineLife
from kvmesh.workers.engines.sglang.bootstrap import Bootstrap, bootstrap_to_decode
from kvmesh.workers.engines.sglang.offers import PrefillOffers, new_room
from kvmesh.workers.engines.vllm.params import ASK_FOR_OFFER

log = logging.getLogger(__name__)


class Handover(Protocol):
    """The part of one server in handing KV over. Belongs to one event loop."""

    async def prove(self) -> None:
        """Raise ConfigError if a prefill server offers nothing."""

    def prefill(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Compute the prompt and yield its ticket. Raise InvalidRequestError, EngineError."""

    def answer(self, body: Body, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Compute the answer, from the KV of the request's ticket if there is one."""

    def release(self, offer_id: int, nonce: int) -> None: ...

    def __len__(self) -> int:
        """Return how many offers stand."""

    async def close(self) -> None:
        """A second call does nothing."""


class ParamsHandover:
    """Implements Handover as vLLM does: parameters in the prefill server's answer make a decode server pull.

    The servers agree between themselves when blocks are freed: by the pull's notification, or by the lease.
    """

    def __init__(
        self, completions: Completions, life: EngineLife, url: str, model: str, role: Role, content: ServerContent
    ) -> None:
        self._completions = completions
        self._life = life
        self._url = url
        self._model = model
        self._role = role
        self._content = content

    async def prove(self) -> None:
        if self._role is not Role.PREFILL:
            return
        body = {"model": self._model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        with as_engine_errors():
            answer = await self._completions.whole(body | {"kv_transfer_params": dict(ASK_FOR_OFFER)})
            try:
                self._ticket(answer, 1)
            except EngineError as error:
                raise ConfigError(f"{self._url} cannot prefill for others", hint=START_HINT) from error

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The ticket, and no token: vLLM's decode side draws the first one itself, from the same logits.

        The prompt's logprobs come with it, if they are asked for. Not streamed, because vLLM leaves kv_transfer_params
        out of streams.
        """
        body = self._completions.body(request, max_tokens=1, stream=False)
        answer = await self._completions.whole(body | {"kv_transfer_params": dict(ASK_FOR_OFFER)})
        ticket = self._ticket(answer, len(prompt_of(request)))
        yield Delta(ticket=ticket, cached_tokens=answer.cached_tokens, logprobs=_prompt_logprobs(answer, request))

    def answer(self, body: Body, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if request.ticket is None:
            return self._completions.deltas(body, request)
        return self._pulling(body, request, request.ticket)

    def release(self, offer_id: int, nonce: int) -> None: ...

    def __len__(self) -> int:
        return 0

    async def close(self) -> None: ...

    async def _pulling(self, body: Body, request: GenerateRequest, ticket: Ticket) -> AsyncGenerator[Delta, None]:
        """Answer with a ticket. The server computes what it cannot pull, and the first delta says why."""
        started = time.perf_counter()
        has_begun = False
        try:
            self._content.check(request)
            params, num_blocks = params_of(ticket, len(prompt_of(request)), self._life.check().block_size)
            with_params = body | {"kv_transfer_params": params}
            async with aclosing(self._completions.deltas(with_params, request)) as deltas:
                async for delta in deltas:
                    report = None if has_begun else pull_report(ticket, num_blocks, started)
                    has_begun = True
                    yield msgspec.structs.replace(delta, pull=report)
            return
        except (TransferError, EngineError, InvalidRequestError) as error:
            if has_begun:
                raise
            log.warning("KV of %s was not pulled: %s", ticket.worker_id, error)
            problem = str(error)
        async with aclosing(self._completions.deltas(body, request)) as deltas:
            async for delta in deltas:
                report = None if has_begun else pull_report(ticket, 0, started, problem)
                has_begun = True
                yield msgspec.structs.replace(delta, pull=report)

    def _ticket(self, answer: ServerAnswer, prompt_tokens: int) -> Ticket:
        nonce = secrets.randbits(62) + 1
        params = bytes(answer.kv_transfer_params)
        return ticket_of(params, self._life.worker_id, self._life.address, nonce, prompt_tokens)


class BootstrapHandover:
    """Implements Handover as SGLang does: both servers are asked at once, and meet by themselves in a `room`."""

    def __init__(
        self,
        completions: Completions,
        life: EngineLife,
        role: Role,
        host: str,
        told: Disaggregation,
        backend: str,
        content: ServerContent,
    ) -> None:
        """The server at `host` said `told`. `backend` is that of tickets and of the worker's card."""
        self._completions = completions
        self._life = life
        self._role = role
        self._host = host
        self._told = told
        self._backend = backend
        self._content = content
        self._offers = PrefillOffers()

    async def prove(self) -> None:
        """The server said so itself."""

    def prefill(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Yield the ticket at once, while the server computes the prompt."""
        if self._role is not Role.PREFILL:
            raise InvalidRequestError("this SGLang server offers no KV", hint="attach one with --role prefill")
        bootstrap = Bootstrap(self._host, self._told.bootstrap_port, new_room())
        body = self._completions.body(request, max_tokens=1, stream=False) | bootstrap.kwargs

        async def prefill() -> None:
            await self._completions.post(COMPLETIONS, body)

        num_tokens = len(prompt_of(request))
        return self._offers.hand_out(bootstrap, prefill, backend=self._backend, num_tokens=num_tokens, life=self._life)

    def answer(self, body: Body, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        try:
            self._content.check(request)
        except TransferError as error:
            raise EngineError(str(error)) from error
        remedy = "attach a prefill server, or one without --role"
        bootstrap = bootstrap_to_decode(request, self._backend, remedy=remedy)
        return self._bootstrapped(body | bootstrap.kwargs, request)

    def release(self, offer_id: int, nonce: int) -> None:
        self._offers.release(offer_id, nonce)

    def __len__(self) -> int:
        return len(self._offers)

    async def close(self) -> None:
        await self._offers.close()

    async def _bootstrapped(self, body: Body, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The first delta reports that the KV has come; there is no answer without."""
        report: PullReport | None = PullReport(self._backend, 0, 0, 0.0)
        async with aclosing(self._completions.deltas(body, request)) as deltas:
            async for delta in deltas:
                yield delta if report is None else msgspec.structs.replace(delta, pull=report)
                report = None


def _prompt_logprobs(answer: ServerAnswer, request: GenerateRequest) -> tuple[TokenLogprob, ...] | None:
    if request.sampling.prompt_logprobs is None:
        return None
    delta = delta_of(answer, request.sampling.top_logprobs)
    if delta is None or delta.logprobs is None:
        raise EngineError("the server echoed no prompt with logprobs", hint="see its log")
    return delta.logprobs[: len(delta.logprobs) - len(delta.token_ids)]


def pull_report(ticket: Ticket, num_blocks: int, started: float, problem: str = "") -> PullReport:
    """The server does not report how many bytes it moved: its metrics do. `started`: by time.perf_counter."""
    return PullReport(ticket.backend, 0, num_blocks, time.perf_counter() - started, problem)
