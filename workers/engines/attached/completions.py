"""Ask a server for answers and read them: /v1/completions, streamed or whole."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress

import msgspec

from kvmesh.protocol.errors import EngineError, MeshError, PeerLostError, WireError
from kvmesh.protocol.messages import Delta, GenerateRequest
from kvmesh.workers.engines.attached.http import ServerHttp
from kvmesh.workers.engines.attached.refusals import failure_in_stream
from kvmesh.workers.engines.attached.server import AttachedServer, Body
from kvmesh.workers.engines.attached.texts import Texts
from kvmesh.workers.engines.attached.translate import ServerAnswer, body_of, delta_of, merged, prompt_of, read_answer
from kvmesh.workers.engines.external.waits import Waits

COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
LINGER_S = 1.0  # for the end of a stream, after its answer has ended

_DONE = b"[DONE]"


class Completions:
    """The answers of one server. Belongs to one event loop."""

    def __init__(self, http: ServerHttp, server: AttachedServer, texts: Texts | None, waits: Waits) -> None:
        """Ask `http`. `texts` is for a server that returns no token ids. `waits` end when the server is gone."""
        self._http = http
        self._server = server
        self._texts = texts
        self._waits = waits
        self._tokenize = None if texts is None else texts.tokens_of

    def spoken(self, tokens: list[int]) -> list[int] | str:
        """Return a prompt in the form that the server takes."""
        if self._server.kind.takes_token_ids:
            return tokens
        assert self._texts is not None, "a server that takes no token ids returns none"
        return self._texts.text_of(tokens)

    def body(self, request: GenerateRequest, *, max_tokens: int, stream: bool = True) -> Body:
        prompt = self.spoken(prompt_of(request))
        return body_of(request, self._server, prompt, max_tokens=max_tokens, stream=stream)

    async def post(self, path: str, body: Body) -> bytes:
        return await self._waits.result(lambda: self._http.post(path, body))

    async def whole(self, body: Body) -> ServerAnswer:
        """Return an answer that is not streamed. Raise the error that it carries."""
        return _checked(read_answer(await self.post(COMPLETIONS, body)))

    async def deltas(self, body: Body, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Yield one delta for the events that came together, until the finish reason.

        The last delta has the number of cached tokens, where the server reports it in its usage.
        Raise what a stream carries as an error, PeerLostError for a stream that ends without a finish reason.
        """
        async with aclosing(self._http.events(COMPLETIONS, body)) as pieces:
            while (piece := await self._waits.next(pieces)) is not None:
                delta, failure = read_events(piece, request.sampling.top_logprobs, self._tokenize)
                if delta is not None:
                    if delta.finish_reason is None:
                        yield delta
                    else:
                        if request.ticket is None:  # else the prefill server's count is the one to report
                            cached = cached_tokens_of(piece)
                            if cached is None and "stream_options" in body:
                                cached = await later_cached_tokens(pieces)
                            delta = msgspec.structs.replace(delta, cached_tokens=cached)
                        yield delta
                        await read_to_end(pieces)
                        return
                if failure is not None:
                    raise failure
        raise PeerLostError(f"{self._http.url} ended a stream without a finish reason")


def read_events(
    events: Sequence[bytes], top_logprobs: int | None, tokenize: Callable[[str], Sequence[int]] | None
) -> tuple[Delta | None, MeshError | None]:
    """Return what came together as one delta, and the failure after it if there is one: no token is lost."""
    deltas: list[Delta] = []
    failure: MeshError | None = None
    for data in events:
        if data == _DONE:
            continue
        try:
            delta = delta_of(_checked(read_answer(data)), top_logprobs, tokenize)
        except MeshError as error:
            failure = error
            break
        if delta is not None:
            deltas.append(delta)
    return merged(deltas), failure


async def later_cached_tokens(pieces: AsyncIterator[list[bytes]]) -> int | None:
    """Read what follows an answer, until its usage or its end; return the cached tokens of the prompt if told."""
    with suppress(TimeoutError, MeshError):
        async with asyncio.timeout(LINGER_S):
            async for events in pieces:
                if (cached := cached_tokens_of(events)) is not None or _DONE in events:
                    return cached
    return None


def cached_tokens_of(events: Sequence[bytes]) -> int | None:
    """Return what a usage among `events` says of the prompt's cached tokens. Events that cannot be read say nothing."""
    for data in reversed(events):
        with suppress(WireError):
            if data != _DONE and (cached := read_answer(data).cached_tokens) is not None:
                return cached
    return None


async def read_to_end(pieces: AsyncIterator[list[bytes]]) -> None:
    """Read what comes after an answer: a connection that was read to its end can be used again."""
    with suppress(TimeoutError, MeshError):
        async with asyncio.timeout(LINGER_S):
            async for _ in pieces:
                pass


@contextmanager
def as_engine_errors() -> Iterator[None]:
    """Turn an answer that cannot be read into an EngineError: the server's failure, another one may do better."""
    try:
        yield
    except WireError as error:
        raise EngineError(str(error)) from error


def _checked(answer: ServerAnswer) -> ServerAnswer:
    if answer.error is not None:
        raise failure_in_stream(answer.error)
    return answer
