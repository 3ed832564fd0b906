"""Carry out a job: have every answer generated, and give what comes to an outlet."""

import asyncio
from collections.abc import Callable, Sequence

from kvmesh.frontend.generator import Generator
from kvmesh.frontend.job import Branch, Job
from kvmesh.frontend.lane import TokenLane
from kvmesh.frontend.outlet import Outlet
from kvmesh.protocol.errors import EngineError, MeshError
from kvmesh.protocol.messages import Delta, TokenLogprob


class _BranchFeed:
    """Implements kvmesh.frontend.generator.DeltaConsumer for one branch."""

    __slots__ = (
        "_answer", "_branch", "_now", "_of_all", "_on_begin", "_outlet", "_put", "_timing", "lane", "until_ready",
    )  # fmt: skip

    def __init__(self, branch: Branch, job: Job, outlet: Outlet, on_begin: Callable[[], None] | None) -> None:
        self._branch = branch
        self._answer = branch.answer
        self._timing = branch.timing
        self._of_all = job.timing
        self._outlet = outlet
        self._put = outlet.put
        self._now = asyncio.get_running_loop().time
        self.lane: TokenLane | None = None
        self.until_ready = outlet.until_ready
        self._on_begin = on_begin  # called with the first token

    def take(self, delta: Delta) -> bool:
        if not delta.token_ids and delta.finish_reason is None:
            return not (self.is_done or self.is_full)
        self.settle()
        answer, timing = self._answer, self._timing
        timing.last_token = self._of_all.last_token = now = self._now()
        if timing.first_token is None:
            timing.first_token = now
            self._of_all.on_tokens(now)
            if (echo := self._branch.scored_echo) is not None:
                self._put(self._branch, echo.finish())
            if self._on_begin is not None:
                self._on_begin()
        wants_more = self._put(self._branch, answer.on_delta(delta)) and answer.finish_reason is None
        if self.lane is None and self._outlet.has_lanes and answer.is_plain and answer.finish_reason is None:
            self.lane = self._outlet.lane(self._branch, self._now)
        if self.lane is not None:
            self.lane.texts = answer.plain_texts()
        return wants_more

    def take_prompt_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Raise EngineError if they are not the prompt's."""
        echo = self._branch.scored_echo
        if echo is None or self._timing.first_token is not None:
            raise EngineError("logprobs of the prompt came that nobody has asked for, or too late")
        self._put(self._branch, echo.take(logprobs))

    def settle(self) -> None:
        """Note the tokens that passed by the lane."""
        if (lane := self.lane) is not None and (count := lane.take_count()):
            self._answer.completion_tokens += count
            self._timing.last_token = lane.last_token_s
            self._of_all.last_token = max(self._of_all.last_token or 0.0, lane.last_token_s)

    @property
    def is_done(self) -> bool:
        return self._answer.finish_reason is not None

    @property
    def is_full(self) -> bool:
        return self._outlet.is_full


async def run(job: Job, generator: Generator, outlet: Outlet, deadline: float) -> None:
    """Have all answers generated. Raise MeshError, also if a stream ends before its answer does: an answer that was cut
    off must not look complete."""
    if len(job.branches) == 1:
        await _generate(job, job.branches[0], generator, outlet, deadline)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for first in range(0, len(job.branches), job.parsed.best_of):
                siblings = job.branches[first : first + job.parsed.best_of]
                name = f"answers of {siblings[0].request.request_id}"
                group.create_task(_generate_siblings(job, siblings, generator, outlet, deadline), name=name)
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from failures


async def _generate_siblings(
    job: Job, siblings: Sequence[Branch], generator: Generator, outlet: Outlet, deadline: float
) -> None:
    """Have the answers to one prompt generated. The others wait for the first token of the first one: by then the
    prompt is cached, and they need not compute it again."""
    has_begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        leading = group.create_task(_generate(job, siblings[0], generator, outlet, deadline, has_begun.set))
        leading.add_done_callback(lambda _: has_begun.set())
        await has_begun.wait()
        for branch in siblings[1:]:
            group.create_task(_generate(job, branch, generator, outlet, deadline))


async def _generate(
    job: Job,
    branch: Branch,
    generator: Generator,
    outlet: Outlet,
    deadline: float,
    on_begin: Callable[[], None] | None = None,
) -> None:
    feed = _BranchFeed(branch, job, outlet, on_begin)
    try:
        await generator.generate(branch.request, job.parsed.hints, branch.trace, deadline, feed)
    finally:
        feed.settle()
    if branch.answer.finish_reason is None:
        raise EngineError(f"the answer broke off after {branch.answer.completion_tokens} tokens", hint="try again")


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that is reported where several answers failed: a MeshError rather than a bug's."""
    flat: list[BaseException] = []
    todo: list[BaseException] = [failures]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, MeshError)), flat[0])
