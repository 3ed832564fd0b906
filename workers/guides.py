"""Hold an answer to a guide: after each token, which ones may come next. The package `llguidance` does the parsing.

The place of an answer in its guide is a function of the guide and the answer's tokens. So a decode leg or a migrated
answer continues as it would have on the first worker.

Guides come from the network, and a guide of 40 bytes may compile for minutes and take gigabytes, at its beginning or at
any later token. So each guide has a process of its own, with limits of time and memory, which compiles the guide and
follows the answers under it. A process that passes a limit is killed: the answers under this guide fail, no others.
Reasons and figures: docs/decisions/0055-expensive-work.md.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.mesh.jobs.children import Child, Children, JobError, JobLostError, JobTooLargeError, JobTooLongError
from kvmesh.mesh.jobs.frames import Setup
from kvmesh.mesh.jobs.places import Places
from kvmesh.protocol.errors import EngineError, InvalidRequestError, MeshError
from kvmesh.protocol.messages import Guide
from kvmesh.workers.guide_checks import check_certain_cost, check_guide
from kvmesh.workers.guide_messages import (
    BeginAnswer,
    Close,
    Compile,
    GuideRefused,
    GuideSetup,
    Job,
    Standing,
    Take,
    XgrammarForm,
    guide_name,
    reply_decoder,
)
from kvmesh.workers.schemas import GuideWhitespace

log = logging.getLogger(__name__)

MIB = 1 << 20
SIMPLER = "make it simpler"  # the hint of all refusals for a limit of time or memory
COMPILE_S = 5.0  # CPU time to compile a guide
# xgrammar needs 0.36 s for one text of up to 200 characters (vocabulary of 128,000), so 14 such fields took 5 s.
TRIAL_COMPILE_S = 15.0
MASK_S = 1.0  # CPU time for one token of an answer
GRACE_S = 0.005  # that a step waits for the guides of its answers; those that take longer miss the next steps
PROCESS_BYTES = 256 * MIB  # one process may have so much more than the zygote
# The parser recurses once per reference of a chain of definitions; the largest guides need a tenth of this.
STACK_BYTES = 512 * MIB
TRIAL_STACK_BYTES = 4 * MIB  # half of what a thread of an engine has: an engine that passes its stack is gone
MOST_BYTES = 1024 * MIB  # of all processes; above it idle ones end, then the largest
COMPILING, COMPILING_PER_KEY = 3, 2  # guides that are compiled at once
MOST_PROCESSES, PROCESSES_PER_KEY = 96, 64
MOST_IDLE, MOST_IDLE_BYTES = 16, 256 * MIB  # processes without an answer that are kept for the next request
IDLE_S = 300.0
MOST_ANSWERS = 16  # in one process: each has a lexer of its own
REFUSALS_BYTES = 1 * MIB  # of remembered refusals
_REFUSAL_BYTES = 512  # of one, beside its text
MOST_AFFORDABLE = 8_192  # guides that are remembered because they passed `check_cost`: about 1 MiB


class GuidedRow(Protocol):
    """Has a guide, or none. A row of a step does."""

    @property
    def guide(self) -> "Matcher | None": ...


class Matcher:
    """Keeps the place of one answer in its guide."""

    def __init__(
        self, home: "_Home", number: int, vocab_size: int, standing: Standing, on_close: Callable[[], None]
    ) -> None:
        self._home = home
        self._on_close = on_close
        self._number = number
        self._vocab_size = vocab_size
        self._standing = standing
        self._answer: asyncio.Future[bytes] | None = None
        self._is_closed = False
        self.is_lost = False  # a `failure` is not of the guide: its process ended for another reason

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return the tokens that may come next: bool [vocab_size], at least one of them. None: see `failure`."""
        if not self._standing.mask:
            return None
        packed = np.frombuffer(self._standing.mask, np.uint8)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def take(self, token_id: int) -> "asyncio.Future[bytes] | None":
        """The answer continues with this token; one that was not allowed is a `failure`.

        Return what is done when the matcher stands behind the token, None if it does already. Until then it
        `is_waiting`.
        """
        if self._is_closed or self.failure or self.is_complete:
            return None
        self._answer = self._home.send(Take(self._number, token_id))
        self._answer.add_done_callback(self._on_answer)
        return self._answer

    @property
    def is_waiting(self) -> bool:
        """Return whether the process still works on the last token."""
        return self._answer is not None

    @property
    def is_complete(self) -> bool:
        """Return whether no token may follow."""
        return self._standing.is_complete

    @property
    def failure(self) -> str:
        """Return why the answer cannot continue: too costly to follow, or it has left the guide. Empty: it can."""
        return self._standing.failure

    def close(self) -> None:
        """Free the answer's place. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._home.leave(self._number)
            self._on_close()

    def _on_answer(self, answer: "asyncio.Future[bytes]") -> None:
        self._answer = None
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            self._standing = Standing(failure=_why_ended(error))
            self.is_lost = isinstance(error, JobLostError)
            return
        reply = reply_decoder.decode(answer.result())
        assert isinstance(reply, Standing), "only a guide or its beginning is refused"
        self._standing = reply
        self._home.note(reply)


class _Home:
    """Keeps the process of one guide, and counts the answers under it."""

    def __init__(self, child: Child, guide: Guide, key: str, changed: Callable[["_Home"], None]) -> None:
        self._child = child
        self.guide = guide
        self.key = key
        self.grown_bytes = 0
        self.num_answers = 0
        self.idle_since_s = 0.0
        self.was_used = False  # a process that was just started is for those who wait for it
        self._changed = changed

    @property
    def is_idle(self) -> bool:
        return self.was_used and not self.num_answers

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    @property
    def ended(self) -> "asyncio.Future[None]":
        return self._child.ended

    def send(self, job: Job) -> "asyncio.Future[bytes]":
        return self._child.send(msgspec.msgpack.encode(job))

    def note(self, standing: Standing) -> None:
        """Remember how much memory the process has."""
        if standing.grown_bytes != self.grown_bytes:
            self.grown_bytes = standing.grown_bytes
            self._changed(self)

    def leave(self, number: int) -> None:
        """An answer has ended."""
        self.num_answers -= 1
        self.idle_since_s = asyncio.get_running_loop().time()
        if self.is_alive:
            self.send(Close(number)).add_done_callback(_ignore)
        self._changed(self)

    def follow(self) -> None:
        """The guide is compiled: from now on there are only tokens to take."""
        self._child.set_limit(MASK_S)

    def close(self) -> None:
        self._child.close()


class Guides:
    """Compiles guides for one tokenizer, in processes, and keeps the latest of them."""

    def __init__(self, children: Children, vocab_size: int, compile_s: float) -> None:
        self._children = children
        self.compile_s = compile_s  # CPU time that one guide may take
        self._vocab_size = vocab_size
        self._homes: OrderedDict[bytes, list[_Home]] = OrderedDict()  # by the guide's digest, the latest used last
        self._refused: OrderedDict[bytes, InvalidRequestError] = OrderedDict()
        self._affordable: OrderedDict[bytes, None] = OrderedDict()
        self._compilations: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._processes = Places(MOST_PROCESSES, PROCESSES_PER_KEY)
        self._compiling = Places(COMPILING, COMPILING_PER_KEY)
        self._numbers = count()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.num_answers = 0  # that are held to a guide now

    @property
    def num_processes(self) -> int:
        return len(self._all())

    @property
    def grown_bytes(self) -> int:
        """Return the memory of all processes, as last measured."""
        return sum(home.grown_bytes for home in self._all())

    async def open(self, guide: Guide, generated: Sequence[int] = (), key: str = "") -> Matcher:
        """Begin an answer, or continue one that has `generated` tokens. `key`: whose share it counts to.

        Raises InvalidRequestError for a guide that cannot be compiled or that `generated` does not follow, and
        EngineError once it is closed.
        """
        check_guide(guide)
        digest = _digest(guide)
        while True:
            if self._is_closed:
                raise EngineError("the engine is stopping")
            if (refusal := self._refused.get(digest)) is not None:
                self._refused.move_to_end(digest)
                raise refusal
            if (home := self._home_of(digest)) is not None:
                return await self._enter(home, guide, tuple(generated))
            await self._compiled(digest, guide, key)

    async def check_cost(self, guide: Guide, key: str) -> None:
        """Raise InvalidRequestError for a guide that passes a limit. The process ends after its compilation."""
        check_certain_cost(guide)
        digest = _digest(guide)
        if digest not in self._affordable:
            if (refusal := self._refused.get(digest)) is not None:
                self._refused.move_to_end(digest)
                raise refusal
            await self._compiled(digest, guide, key)
            for home in list(self._homes.get(digest, ())):
                home.close()
        self._affordable[digest] = None
        self._affordable.move_to_end(digest)
        while len(self._affordable) > MOST_AFFORDABLE:
            self._affordable.popitem(last=False)

    def close(self) -> None:
        """End all processes. The requests that wait fail."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for compilation in self._compilations.values():
            compilation.cancel()
        self._children.close()

    def _home_of(self, digest: bytes) -> _Home | None:
        for home in self._homes.get(digest, ()):
            if home.is_alive and home.num_answers < MOST_ANSWERS:
                self._homes.move_to_end(digest)
                return home
        return None

    async def _enter(self, home: _Home, guide: Guide, generated: tuple[int, ...]) -> Matcher:
        number = next(self._numbers)
        home.num_answers += 1
        home.was_used = True
        try:
            reply = reply_decoder.decode(await home.send(BeginAnswer(number, generated)))
            if isinstance(reply, GuideRefused):
                raise InvalidRequestError(reply.message, hint=reply.hint, param=reply.param)
        except JobError as error:
            home.leave(number)
            raise _refusal(guide, error, MASK_S) from None
        except BaseException:
            home.leave(number)
            raise
        home.note(reply)
        self.num_answers += 1
        return Matcher(home, number, self._vocab_size, reply, self._on_close)

    def _on_close(self) -> None:
        self.num_answers -= 1

    # --- compiling ----------------------------------------------------------------------------------------------------

    async def _compiled(self, digest: bytes, guide: Guide, key: str) -> None:
        """Wait until the guide has a process with room, or is refused.

        All requests of a tenant wait for one compilation. Those of others do not: bombs may delay it.
        """
        compilation = self._compilations.get((digest, key))
        if compilation is None:
            compilation = asyncio.create_task(self._compile(digest, guide, key), name="compile a guide")
            self._compilations[digest, key] = compilation
            compilation.add_done_callback(lambda _: self._compilations.pop((digest, key), None))
            compilation.add_done_callback(_ignore)
        try:
            await asyncio.shield(compilation)
        except asyncio.CancelledError:
            if self._is_closed:
                raise EngineError("the engine is stopping") from None
            raise

    async def _compile(self, digest: bytes, guide: Guide, key: str) -> None:
        """Give the guide a process, or remember why it is refused."""
        self._children.prepare()  # it takes longer than the rest
        self._make_room(key)
        await self._processes.enter(key)  # not inside the place to compile, which others wait for
        home = None
        try:
            async with self._compiling.hold(key):
                home = _Home(await self._children.open(self.compile_s), guide, key, self._on_change)
                home.ended.add_done_callback(partial(self._on_end, digest, home))
                standing = await self._begin(home, digest)
        finally:
            if home is None:
                self._processes.leave(key)
        home.follow()
        home.idle_since_s = asyncio.get_running_loop().time()
        self._homes.setdefault(digest, []).append(home)
        self._homes.move_to_end(digest)
        home.note(standing)

    async def _begin(self, home: _Home, digest: bytes) -> Standing:
        """Have the guide compiled. Raise InvalidRequestError, which is remembered, or EngineError."""
        try:
            reply = reply_decoder.decode(await home.send(Compile(home.guide)))
            if isinstance(reply, GuideRefused):
                raise InvalidRequestError(reply.message, hint=reply.hint, param=reply.param)
            return reply
        except JobError as error:
            refusal = _refusal(home.guide, error, self.compile_s)
            if isinstance(refusal, InvalidRequestError):
                self._refuse(digest, refusal)
            raise refusal from None
        except BaseException as error:
            if isinstance(error, InvalidRequestError):
                self._refuse(digest, error)
            home.close()
            raise

    def _refuse(self, digest: bytes, refusal: InvalidRequestError) -> None:
        self._refused[digest] = refusal
        size = sum(_REFUSAL_BYTES + len(str(known)) for known in self._refused.values())
        while size > REFUSALS_BYTES:
            _, oldest = self._refused.popitem(last=False)
            size -= _REFUSAL_BYTES + len(str(oldest))

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _all(self) -> list[_Home]:
        return [home for homes in self._homes.values() for home in homes if home.is_alive]

    def _on_end(self, digest: bytes, home: _Home, ended: "asyncio.Future[None]") -> None:
        self._processes.leave(home.key)
        homes = self._homes.get(digest, [])
        if home in homes:
            homes.remove(home)
        if not homes:
            self._homes.pop(digest, None)

    def _on_change(self, changed: _Home) -> None:
        """Keep the limits: of idle processes, and of the memory of all."""
        if self._is_closed:
            return
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_S / 4, self._sweep)
        idle = [home for home in self._all() if home.is_idle]
        idle_bytes = sum(home.grown_bytes for home in idle)
        in_use_bytes = self.grown_bytes - idle_bytes
        most_idle = 0 if self._processes.num_waiting else MOST_IDLE
        while idle and (len(idle) > most_idle or idle_bytes > min(MOST_IDLE_BYTES, MOST_BYTES - in_use_bytes)):
            idle_bytes -= idle[0].grown_bytes
            idle.pop(0).close()
        if in_use_bytes > MOST_BYTES:
            max(self._all(), key=lambda home: home.grown_bytes).close()

    def _make_room(self, key: str) -> None:
        """End the process that has been idle the longest, if there may be no further one."""
        homes = self._all()
        own = [home for home in homes if home.key == key]
        if len(own) >= PROCESSES_PER_KEY:
            homes = own
        elif len(homes) < MOST_PROCESSES:
            return
        if idle := [home for home in homes if home.is_idle]:
            idle[0].close()

    def _sweep(self) -> None:
        """End processes that have been idle for long."""
        self._sweeper = None
        now = asyncio.get_running_loop().time()
        for home in self._all():
            if not home.num_answers and now - home.idle_since_s >= IDLE_S:
                home.close()
        if self._homes:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_S / 4, self._sweep)


async def follow_guides(rows: Sequence[GuidedRow], results: Sequence[object], on_late: Callable[[], object]) -> None:
    """Let the guides of a step's answers take their tokens. Wait a moment for all, which nearly always is enough.

    Of a guide that is costly, `on_late` reports later that it stands behind its token.
    """
    answers = []
    for row, result in zip(rows, results, strict=True):
        sampled = getattr(result, "sampled", result)
        token_id = getattr(sampled, "token_id", None)
        if row.guide is not None and token_id is not None and (answer := row.guide.take(token_id)) is not None:
            answers.append(answer)
    if answers:
        _, late = await asyncio.wait(answers, timeout=GRACE_S)
        for answer in late:
            answer.add_done_callback(lambda _: on_late())


def open_guides(
    model_path: Path, vocab_size: int, eos_token_ids: Sequence[int], whitespace: GuideWhitespace = "compact"
) -> Guides | None:
    """Return what compiles guides for a model, None where answers cannot be guided: the log says why."""
    tokenizer = model_path / "tokenizer.json"
    if not tokenizer.is_file():
        log.info("no guided decoding: %s is missing", tokenizer)
        return None
    try:
        from llguidance import LLTokenizer

        LLTokenizer(
            tokenizer.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None, slices=[]
        )
    except ImportError as error:
        log.info("no guided decoding: %s; pip install 'kvmesh[torch]'", error)
        return None
    except ValueError as error:
        log.warning("no guided decoding: llguidance cannot read %s: %s", tokenizer, error)
        return None
    argument = msgspec.msgpack.encode(
        GuideSetup(str(tokenizer.resolve()), vocab_size, tuple(eos_token_ids), whitespace)
    )
    setup = Setup("kvmesh.workers.guide_process:prepare", argument, PROCESS_BYTES, STACK_BYTES)
    return Guides(Children(setup), vocab_size, COMPILE_S)


def trial_guides(tokenizer: Path, xgrammar: XgrammarForm) -> Guides:
    """Return what only checks the cost of guides, for an engine that compiles them itself."""
    argument = msgspec.msgpack.encode(GuideSetup(str(tokenizer.resolve()), 0, (), "compact", xgrammar))
    setup = Setup("kvmesh.workers.trial_process:prepare", argument, PROCESS_BYTES, TRIAL_STACK_BYTES)
    return Guides(Children(setup), 0, TRIAL_COMPILE_S)


def _digest(guide: Guide) -> bytes:
    return hashlib.blake2b(f"{guide.kind} {guide.value}".encode(errors="surrogatepass"), digest_size=16).digest()


def _refusal(guide: Guide, error: JobError, limit_s: float) -> MeshError:
    if isinstance(error, JobTooLongError):
        return InvalidRequestError(
            f"the {guide_name(guide)} took longer than {limit_s:g} s to compile", hint=SIMPLER, param="guide"
        )
    if isinstance(error, JobTooLargeError):
        return InvalidRequestError(
            f"the {guide_name(guide)} took more than {PROCESS_BYTES // MIB} MiB of memory to compile, or it is "
            "nested too deeply",
            hint=SIMPLER,
            param="guide",
        )
    return EngineError(f"the process of the {guide_name(guide)} has ended: {error}")


def _why_ended(error: BaseException) -> str:
    if isinstance(error, JobTooLongError):
        return f"its next token took longer than {MASK_S:g} s to find"
    if isinstance(error, JobTooLargeError):
        return f"it took more than {PROCESS_BYTES // MIB} MiB of memory"
    return f"its process was ended: {error}"


def _ignore(future: "asyncio.Future[bytes] | asyncio.Task[None]") -> None:
    """Take the failure of what nobody waits for any more."""
    if not future.cancelled():
        future.exception()
