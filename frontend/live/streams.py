"""Follow the requests of this frontend while somebody looks at the live page. Nothing is followed otherwise."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from kvmesh.frontend.live.picture import MAX_NAME_CHARS, MAX_TEXT_CHARS, Row, cut
from kvmesh.frontend.timeline import Attempt, Phase, RequestTimeline, Timelines, phases
from kvmesh.protocol.ids import RequestId, WorkerId
from kvmesh.protocol.messages import CandidateReport, Explanation, Placed

MAX_LISTED = 64  # requests in flight, the newest, that viewers see with their tokens as they grow
MAX_ENDED = 64  # between two messages
MAX_DECISIONS = 8  # between two messages
MAX_FLOWS = 200  # pairs of workers, between two messages
MAX_SPANS = 24  # stages of a request: a migration adds some
EXPLAIN_S = 0.5  # at least, between two requests whose placement is explained in full
EXPLAIN_A_WORKER_S = 0.001  # ... and for each worker, because all of them are scored for it
MAX_CANDIDATES = 6  # of one leg of an explained decision


class Followed(Struct):
    """A request as viewers know it."""

    row: Row | None = None
    attempts_told: int = 0  # placements that viewers have seen
    pulls_told: int = 0


class RequestNews(Struct):
    """The changes of the requests since the message before."""

    streams: Sequence[Row]
    decisions: Sequence[Row]
    flows: Sequence[tuple[str, str, int, int]]
    tokens: int


class RequestWatch:
    """Follows the requests that begin after it, until `close`."""

    def __init__(self, timelines: Timelines) -> None:
        self._running = timelines.running
        self._leave = timelines.look(self._end)
        self._followed: dict[RequestId, Followed] = {}
        self._ended: deque[RequestTimeline] = deque(maxlen=MAX_ENDED)
        self._flows: dict[tuple[str, str], list[int]] = {}
        self._explain_next_s = 0.0
        self._tokens_of_ended = 0
        self._tokens_before = 0
        self.num_workers = 0  # of the mesh

    def close(self) -> None:
        """Follow nothing any more."""
        self._leave()

    def wants_reasons(self) -> bool:
        """Return whether the next placement should be explained: a few of them are, because it costs time."""
        at = asyncio.get_running_loop().time()
        if at < self._explain_next_s:
            return False
        self._explain_next_s = at + EXPLAIN_S + EXPLAIN_A_WORKER_S * self.num_workers
        return True

    def by_worker(self) -> dict[WorkerId, int]:
        """Return how many requests each worker decodes."""
        counts: dict[WorkerId, int] = {}
        for timeline in self._running.values():
            for answer in timeline.answers:
                if answer.attempts and (placed := answer.attempts[-1].placed) is not None:
                    counts[placed.decode.worker_id] = counts.get(placed.decode.worker_id, 0) + 1
        return counts

    @property
    def num_listed(self) -> int:
        """Return how many requests in flight viewers can see."""
        return min(MAX_LISTED, len(self._running))

    def take(self) -> RequestNews:
        """Return what has changed since the last call."""
        ended, self._ended = list(self._ended), deque(maxlen=MAX_ENDED)
        listed = [*ended, *reversed(list(islice(reversed(self._running.values()), MAX_LISTED)))]
        streams: list[Row] = []
        decisions: list[Row] = []
        for timeline in listed:
            followed = self._followed.setdefault(timeline.request_id, Followed())
            self._note_pulls(timeline, followed)
            decisions += new_decisions(timeline, followed)
            row = stream_row(timeline)
            if row != followed.row:
                followed.row = row
                streams.append(row)
        for timeline in ended:
            self._followed.pop(timeline.request_id, None)
        if len(self._followed) > 2 * MAX_LISTED:  # of requests that newer ones have pushed from the list
            wanted = {timeline.request_id for timeline in listed}
            self._followed = {name: one for name, one in self._followed.items() if name in wanted}
        flows = [(source, target, count, size) for (source, target), (count, size) in self._flows.items()]
        self._flows.clear()
        decisions.sort(key=lambda row: "candidates" not in row)  # with too many, those with reasons come first
        told = sorted(decisions[:MAX_DECISIONS], key=lambda row: float(row["at"]))
        return RequestNews(streams, told, flows, self._count_tokens())

    def _end(self, timeline: RequestTimeline) -> None:
        self._tokens_of_ended += timeline.osl_tokens
        self._note_pulls(timeline, self._followed.get(timeline.request_id, Followed()))
        self._ended.append(timeline)
        if timeline.request_id not in self._followed:
            self._followed[timeline.request_id] = Followed(pulls_told=len(list(pulls_of(timeline))))

    def _count_tokens(self) -> int:
        """Return how many tokens the requests have got since the last call."""
        total = sum([answer.tokens_so_far for t in self._running.values() for answer in t.answers])
        grown = total + self._tokens_of_ended - self._tokens_before
        self._tokens_before, self._tokens_of_ended = total, 0
        return max(0, grown)

    def _note_pulls(self, timeline: RequestTimeline, followed: Followed) -> None:
        pulls = list(pulls_of(timeline))
        for source, target, size in pulls[followed.pulls_told :]:
            pair = cut(source, MAX_NAME_CHARS), cut(target, MAX_NAME_CHARS)
            if pair in self._flows or len(self._flows) < MAX_FLOWS:
                flow = self._flows.setdefault(pair, [0, 0])
                flow[0] += 1
                flow[1] += size
        followed.pulls_told = len(pulls)


def pulls_of(timeline: RequestTimeline) -> Iterator[tuple[str, str, int]]:
    """Yield the pulls of a request that succeeded: from, to, bytes."""
    for answer in timeline.answers:
        for attempt in answer.attempts:
            prefill, decode = attempt.prefill, attempt.decode
            if prefill is not None and decode is not None and decode.pull is not None and not decode.pull.error:
                yield prefill.worker, decode.worker, decode.pull.num_bytes


def stream_row(timeline: RequestTimeline) -> Row:
    """Return a request as viewers see it. A request that only waits gives the same row again."""
    answers = timeline.answers
    attempts = answers[0].attempts if answers else []
    last = attempts[-1] if attempts else None
    placed = None if last is None else last.placed
    stages = list(islice(phases(timeline), MAX_SPANS))
    phase = "ended" if timeline.outcome else stages[-1].name if stages else "parse"
    row: dict[str, Any] = {
        "id": cut(timeline.request_id, MAX_NAME_CHARS),
        "model": cut(timeline.model, MAX_NAME_CHARS),
        "at": round(timeline.started_unix_s, 3),
        "isl": timeline.isl_tokens or (attempts[0].isl_tokens if attempts else 0),
        "osl": sum([answer.tokens_so_far for answer in answers]),
        "most": sum([answer.max_tokens for answer in answers]),
        "cached": timeline.cached_tokens if timeline.outcome else expected_tokens(attempts),
        "phase": phase,
        "spans": [span_row(stage, timeline) for stage in stages],
    }
    if placed is not None:
        row["decode"] = cut(placed.decode.name, MAX_NAME_CHARS)
        if placed.prefill is not None:
            row["prefill"] = cut(placed.prefill.name, MAX_NAME_CHARS)
    if pulled := sum([size for *_, size in pulls_of(timeline)]):
        row["pulled"] = pulled
    if len(attempts) > 1:
        row["migrations"] = len(attempts) - 1
    if timeline.ttft_s is not None:
        row["ttft_s"] = round(timeline.ttft_s, 4)
    if timeline.outcome:
        row["outcome"] = cut(timeline.outcome, MAX_NAME_CHARS)
        row["took_s"] = round(timeline.s(timeline.ended) or 0.0, 4)
    return row


def expected_tokens(attempts: Sequence[Attempt]) -> int:
    """Return how many tokens of the prompt the router expects in the cache where it is computed first."""
    if not attempts or (placed := attempts[0].placed) is None:
        return 0
    return min(attempts[0].isl_tokens, (placed.prefill or placed.decode).overlap_blocks * attempts[0].block_size)


def span_row(stage: Phase, timeline: RequestTimeline) -> Row:
    """Return a stage for the timeline. Of one that lasts the page extends the end by itself."""
    end_s = stage.end_s if stage.end_s is not None else timeline.s(timeline.ended)
    row: dict[str, Any] = {"kind": stage.name, "from_s": round(stage.start_s, 5)}
    if end_s is not None:
        row["to_s"] = round(end_s, 5)
    if stage.worker:
        row["worker"] = cut(stage.worker, MAX_NAME_CHARS)
    return row


def new_decisions(timeline: RequestTimeline, followed: Followed) -> list[Row]:
    """Return the placements of a request that viewers have not seen, of its first answer."""
    attempts = timeline.answers[0].attempts if timeline.answers else []
    placed = [attempt for attempt in attempts if attempt.placed is not None]
    new = placed[followed.attempts_told :]
    followed.attempts_told = len(placed)
    return [decision_row(timeline, attempt) for attempt in new]


def decision_row(timeline: RequestTimeline, attempt: Attempt) -> Row:
    """Return a placement with its reason in one sentence."""
    placed = attempt.placed
    assert placed is not None
    explanation = placed.explanation
    began_s = timeline.s(attempt.placed_at) or 0.0
    row: dict[str, Any] = {
        "id": cut(timeline.request_id, MAX_NAME_CHARS),
        "at": round(timeline.started_unix_s + began_s, 3),
        "model": cut(timeline.model, MAX_NAME_CHARS),
        "isl": attempt.isl_tokens,
        "why": cut(sentence_of(placed, attempt.isl_tokens, attempt.block_size, explanation), MAX_TEXT_CHARS),
    }
    if explanation is not None:
        row["policy"] = cut(explanation.policy, MAX_NAME_CHARS)
        row["candidates"] = [candidate_row(c) for c in told_candidates(explanation.candidates)]
    return row


def sentence_of(placed: Placed, isl_tokens: int, block_size: int, explanation: Explanation | None) -> str:
    """Return one sentence that says where a request runs, and why."""
    computes = placed.prefill or placed.decode
    cached = min(isl_tokens, computes.overlap_blocks * block_size)
    prompt = f"{isl_tokens} prompt tokens" + (f" ({cached} of them cached there)" if cached else "")
    if placed.prefill is None:
        where = f"{placed.decode.name} computes {prompt} and the answer"
    else:
        where = f"{placed.prefill.name} computes {prompt}, {placed.decode.name} the answer"
    why = explanation.why if explanation is not None else placed.reason
    return f"{where}: {why}." if why else f"{where}."


def told_candidates(candidates: Iterable[CandidateReport]) -> list[CandidateReport]:
    """Return the cheapest candidates of each leg, and the chosen one."""
    told: list[CandidateReport] = []
    counts: dict[str, int] = {}
    for candidate in candidates:
        counts[candidate.leg] = counts.get(candidate.leg, 0) + 1
        if counts[candidate.leg] <= MAX_CANDIDATES or candidate.note == "chosen":
            told.append(candidate)
    return told[: 4 * MAX_CANDIDATES]


def candidate_row(candidate: CandidateReport) -> Row:
    return {
        "leg": cut(candidate.leg, MAX_NAME_CHARS),
        "worker": cut(candidate.worker, MAX_NAME_CHARS),
        "cost": candidate.cost,
        "cached": candidate.overlap_blocks[0],
        "queued": candidate.queued_tokens,
        "held": candidate.held_blocks,
        "requests": candidate.requests,
        "note": cut(candidate.note, MAX_NAME_CHARS),
    }
