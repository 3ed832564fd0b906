"""Decide which requests are traced, and give their timelines to the exporter when they have ended.

Every request has a cheap record while traces are on. Spans are made of it only for the share that is sampled at the
beginning, and for requests that failed, missed the SLO or migrated. So nothing interesting is lost by sampling.
"""

from frontend.spans import Resource, TraceSpans
from frontend.timeline import RequestTimeline
from mesh.measure import locked_counter
from mesh.otlp import Exporter, encode_spans
from mesh.trace_context import SAMPLES, TraceContext, new_context, new_span_id

TRACES = locked_counter("kvmesh_frontend_traces_total")  # outcome: exported, dropped, failed


class Tracing:
    """Opens the trace of each request, and exports those that are wanted."""

    def __init__(self, endpoint: str, share: float, resource: Resource) -> None:
        """Begin. `share` of the traces that begin here are sampled. Raise ConfigError."""
        self._threshold = int(share * SAMPLES)
        self._resource = resource
        children = {outcome: TRACES.labels(outcome) for outcome in ("exported", "dropped", "failed")}
        self._exporter = Exporter[RequestTimeline](
            endpoint, self._encode, lambda outcome, count: children[outcome].inc(count)
        )

    def open(self, timeline: RequestTimeline, context: TraceContext | None) -> None:
        """Give a request its trace: the client's, or a new one. Implements frontend.timeline.Tracer."""
        if context is None:
            context = new_context(self._threshold)
        timeline.context, timeline.trace_id, timeline.span_id = context, context.trace_id, new_span_id()

    def ended(self, timeline: RequestTimeline) -> None:
        """Export a trace, if it is wanted. This is a look of frontend.timeline.Timelines."""
        if is_wanted(timeline):
            self._exporter.put(timeline)

    def close(self) -> None:
        """Send what waits. Blocks: call it off the event loop."""
        self._exporter.close()

    def _encode(self, timelines: list[RequestTimeline]) -> bytes:
        return encode_spans(
            [
                found
                for timeline in timelines
                if timeline.context is not None
                for found in TraceSpans(timeline, timeline.context, self._resource).made()
            ]
        )


def is_wanted(timeline: RequestTimeline) -> bool:
    """Return whether a request's trace is exported."""
    if timeline.context is None:
        return False
    if timeline.context.is_sampled or timeline.slo_missed:
        return True
    for answer in timeline.answers:  # this runs for every request: a generator would cost more than all of it
        for attempt in answer.attempts:
            if attempt.error:
                return True
    return False
