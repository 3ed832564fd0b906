"""Have questions answered by a process beside the frontend: one at a time, with limits, so that no request waits."""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from kvmesh.frontend.callers import check_whole_mesh
from kvmesh.frontend.whatif.question import AskedMesh, PastMesh, WhatIfQuestion
from kvmesh.frontend.whatif.recent import RecentRequests
from kvmesh.mesh.http.request import Reply, Request
from kvmesh.protocol.errors import EngineError, InvalidRequestError, OverloadedError

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "kvmesh.simulator.whatif")  # which limits its CPU time and memory itself
TIMEOUT_S = 120.0
MAX_LOGGED_BYTES = 2000

Meshes = Callable[[WhatIfQuestion], Sequence[PastMesh]]


class NoAnswer(Struct):
    """The reply of the process where there is none, and what the page shows then."""

    refused: str = ""
    hint: str = ""


class WhatIfRunner:
    """Answers questions about the recent requests of this frontend."""

    def __init__(self, recent: RecentRequests, meshes: Meshes, command: Sequence[str] = COMMAND) -> None:
        """Answer with what `recent` remembers; `meshes` says which workers there are, or raises MeshError."""
        self.recent = recent
        self._meshes = meshes
        self._command = command
        self.is_busy = False

    async def handle(self, request: Request) -> Reply:
        """Answer a question in the query of a request. Raise MeshError."""
        check_whole_mesh(request)
        return Reply(await self.ask(read_question(request.query)))

    async def ask(self, question: WhatIfQuestion) -> bytes:
        """Return the report, JSON. Raise InvalidRequestError, OverloadedError, EngineError."""
        if self.is_busy:
            raise OverloadedError("another question is being answered", hint="ask again", retry_after_s=5)
        asked = msgspec.json.encode(AskedMesh(question=question, meshes=tuple(self._meshes(question))))
        lines = self.recent.lines()
        if not lines:
            raise InvalidRequestError(
                "no requests are remembered here",
                hint="start the frontend with --access-log or --access-log-file, or keep the live page open",
            )
        self.is_busy = True
        try:
            reply = await self._run(b"\n".join([asked, *lines]))
        finally:
            self.is_busy = False
        refusal = msgspec.json.decode(reply, type=NoAnswer)
        if refusal.refused:
            raise InvalidRequestError(refusal.refused, hint=refusal.hint)
        return reply

    async def _run(self, sent: bytes) -> bytes:
        """Return what the process says. It ends with the question, whatever happens."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply, problems = await process.communicate(sent)
        except TimeoutError as error:
            raise EngineError(
                f"the simulation takes more than {TIMEOUT_S:g} s", hint="ask for fewer cases, or with a lower `limit`"
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            log.error("the simulation has ended with %s: %s", process.returncode, problems[-MAX_LOGGED_BYTES:])
            raise EngineError("the simulation has failed", hint="see the log of the frontend")
        return reply


def read_question(query: Mapping[str, str]) -> WhatIfQuestion:
    """Return the question of a query. Raise InvalidRequestError."""
    try:
        return msgspec.convert(dict(query), WhatIfQuestion, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(WhatIfQuestion.__struct_fields__)
        raise InvalidRequestError(f"the question cannot be read: {error}", hint=f"its fields are {known}") from error
