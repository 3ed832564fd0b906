"""Make the spans of a request from its timeline, after it has ended. Pure.

One request is one trace: the spans of the frontend, and those of the workers, which report with the last token how they
spent their time. A worker's clock is never compared with ours: its times are durations, set into the time of our call.
"""

from collections.abc import Mapping, Sequence

from kvmesh.frontend.timeline import EMBEDDINGS, AnswerRecord, Attempt, LegRecord, RequestTimeline
from kvmesh.mesh.otlp import CLIENT, FAILED, INTERNAL, SERVER, Attributes, Span, SpanEvent, SpanStatus, attributes_of
from kvmesh.mesh.trace_context import new_span_id
from kvmesh.protocol.messages import Explanation, Placed, WorkerTimes

MAX_CANDIDATES = 4  # of an explanation, the cheapest ones of each leg

Resource = Mapping[str, str]


class TraceSpans:
    """Collects the spans of one request, by the process whose they are."""

    def __init__(self, timeline: RequestTimeline, frontend: Resource) -> None:
        self._timeline = timeline
        self._trace_id = timeline.trace_id
        self._frontend = frontend
        self._worker: dict[str, list[Span]] = {}
        self._spans: list[Span] = []
        self._last = timeline.ended or timeline.started
        self._unix_s = timeline.started_unix_s - timeline.started

    def made(self) -> list[tuple[Resource, Sequence[Span]]]:
        """Return the spans of each process."""
        timeline = self._timeline
        self._add_root()
        began = timeline.started
        for name, at in (("parse", timeline.parsed), ("template", timeline.rendered), ("tokenize", timeline.tokenized)):
            if at is not None:
                self._add(name, INTERNAL, began, at, timeline.span_id)
                began = max(began, at)
        for answer in timeline.answers:
            for number, attempt in enumerate(answer.attempts):
                self._add_attempt(answer, attempt, number)
        workers = [
            ({**self._frontend, "service.name": "kvmesh-worker", "service.instance.id": name}, spans)
            for name, spans in self._worker.items()
        ]
        return [(self._frontend, self._spans), *workers]

    def _add_root(self) -> None:
        timeline, parent = self._timeline, self._timeline.parent
        values: Attributes = {
            "kvmesh.request_id": timeline.request_id,
            "kvmesh.endpoint": timeline.endpoint,
            "kvmesh.outcome": timeline.outcome,
            "kvmesh.slo_missed": timeline.slo_missed or None,
            "gen_ai.request.model": timeline.model or None,
            "gen_ai.usage.input_tokens": timeline.isl_tokens,
            "gen_ai.usage.output_tokens": timeline.osl_tokens,
            "kvmesh.cached_tokens": timeline.cached_tokens,
            "kvmesh.ttft_s": timeline.ttft_s,
            "kvmesh.itl_s": timeline.itl_s,
        }
        root = self._span(timeline.endpoint, SERVER, timeline.started, self._last, values)
        root.span_id, root.trace_state = timeline.span_id, timeline.tracestate
        root.parent_span_id = "" if parent is None else parent.parent_id
        if timeline.outcome != "ok":
            root.status = SpanStatus(FAILED, timeline.outcome)
        self._spans.append(root)

    def _add_attempt(self, answer: AnswerRecord, attempt: Attempt, number: int) -> None:
        parent = self._timeline.span_id
        if number:
            values: Attributes = {"kvmesh.attempt": number, "kvmesh.answer": answer.index}
            parent = self._add(
                "migration", INTERNAL, attempt.asked, attempt.ended or self._last, parent, values
            ).span_id
        placed_at = attempt.placed_at or attempt.ended or self._last
        route = self._add("route", INTERNAL, attempt.asked, placed_at, parent, _decision(attempt))
        if attempt.placed is None:
            route.status = SpanStatus(FAILED, "not placed")
        for leg in (attempt.prefill, attempt.decode):
            if leg is not None:
                self._add_leg(answer, attempt, leg, parent)

    def _add_leg(self, answer: AnswerRecord, attempt: Attempt, leg: LegRecord, parent: str) -> None:
        timeline, ended = self._timeline, leg.ended or self._last
        is_prefill = leg is attempt.prefill
        values: Attributes = {"kvmesh.worker": leg.worker, "kvmesh.dp_rank": leg.dp_rank, "kvmesh.answer": answer.index}
        is_embedding = timeline.endpoint == EMBEDDINGS
        name = "embed" if is_embedding else "prefill" if is_prefill else "decode"
        call = self._span(f"call {name}", CLIENT, leg.sent, ended, values)
        call.span_id, call.parent_span_id = leg.span_id if timeline.is_sampled else call.span_id, parent
        is_last = leg is attempt.decode or attempt.decode is None
        if attempt.error and is_last:
            call.status = SpanStatus(FAILED, attempt.error)
        self._spans.append(call)
        times = leg.times or WorkerTimes(first_s=(leg.first or ended) - leg.sent, total_s=ended - leg.sent)
        came = leg.sent + max(0.0, ended - leg.sent - times.total_s) / 2  # as long on the way there as back
        begun, first, done = (min(came + s, ended) for s in (times.queued_s, times.first_s, times.total_s))

        def add(name: str, start: float, end: float, more: Attributes) -> Span:
            span = self._span(name, INTERNAL, start, end, more)
            span.parent_span_id = call.span_id
            self._worker.setdefault(leg.worker, []).append(span)
            return span

        if leg.times is not None:
            add("wait", came, begun, {})
        if is_prefill or attempt.prefill is None:
            computing = "embed" if is_embedding else "prefill"
            add(computing, begun, done if is_prefill else first, {"kvmesh.isl_tokens": attempt.isl_tokens})
        elif (pull := leg.pull) is not None:
            begun = begun if leg.times is not None else max(came, first - pull.duration_s)
            pulled = add("pull", begun, min(begun + pull.duration_s, first), {
                "kvmesh.backend": pull.backend, "kvmesh.bytes": pull.num_bytes, "kvmesh.blocks": pull.num_blocks,
                "kvmesh.error": pull.error or None,
            })  # fmt: skip
            if pull.error:
                pulled.status = SpanStatus(FAILED, pull.error)
            begun = min(begun + pull.duration_s, first)
        if not is_prefill and leg.first is not None:
            start = first if attempt.prefill is None else begun
            decode = add("decode", start, done, {
                "kvmesh.osl_tokens": answer.osl_tokens if attempt is answer.attempts[-1] else None,
                "kvmesh.preemptions": times.preemptions,
            })  # fmt: skip
            decode.events = [SpanEvent("first token", self._unix_ns(first))]

    # --- spans ------------------------------------------------------------------------------------------

    def _add(
        self, name: str, kind: int, start: float, end: float, parent: str, values: Attributes | None = None
    ) -> Span:
        span = self._span(name, kind, start, end, values or {})
        span.parent_span_id = parent
        self._spans.append(span)
        return span

    def _span(self, name: str, kind: int, start: float, end: float, values: Attributes) -> Span:
        start = max(start, self._timeline.started)
        return Span(
            trace_id=self._trace_id,
            span_id=new_span_id(),
            name=name,
            kind=kind,
            start_time_unix_nano=self._unix_ns(start),
            end_time_unix_nano=self._unix_ns(max(start, min(end, self._last))),
            attributes=attributes_of(values),
        )

    def _unix_ns(self, at: float) -> str:
        return str(int((self._unix_s + at) * 1e9))


def _decision(attempt: Attempt) -> Attributes:
    """Return the router's decision as attributes, with its reasons where it was asked for them."""
    values: dict[str, str | int | float | bool | None] = {"kvmesh.isl_tokens": attempt.isl_tokens}
    if (placed := attempt.placed) is not None:
        values |= _placed(placed, attempt.block_size)
    if placed is not None and (why := placed.explanation) is not None:
        values |= {
            "kvmesh.policy": why.policy,
            "kvmesh.why": why.why,
            "kvmesh.waited_s": why.waited_s,
            "kvmesh.recompute_price": why.recompute_price,
            "kvmesh.busy_share": why.busy_share,
            "kvmesh.candidates": _candidates(why),
        }
    return values


def _placed(placed: Placed, block_size: int) -> Attributes:
    computing = placed.prefill or placed.decode
    return {
        "kvmesh.worker": placed.decode.name,
        "kvmesh.prefill_worker": None if placed.prefill is None else placed.prefill.name,
        "kvmesh.reason": placed.reason,
        "kvmesh.overlap_tokens": computing.overlap_blocks * block_size,
    }


def _candidates(why: Explanation) -> str:
    """Return the cheapest candidates of each leg, as text."""
    shown: list[str] = []
    for leg in ("whole", "prefill", "decode"):
        of_leg = [found for found in why.candidates if found.leg == leg]
        shown += [
            f"{leg} {found.worker}: cost {found.cost:.1f}, {found.note or 'not chosen'}"
            for found in of_leg[:MAX_CANDIDATES]
        ]
    return "; ".join(shown)
