"""Decide which requests are traced, and give their timelines to the exporter when they have ended.

Every request has a cheap record while traces are on. Spans are made of it only for the share that is sampled at the
beginning, and for requests that failed, missed the SLO or migrated. So nothing interesting is lost by sampling.
"""

from kvmesh.frontend.spans import Resource, TraceSpans
from kvmesh.frontend.timeline import RequestTimeline
from kvmesh.mesh.measure import locked_counter
from kvmesh.mesh.otlp import Exporter, encode_spans
from kvmesh.mesh.trace_context import TraceContext, TraceStarts, new_span_id

TRACES = locked_counter("kvmesh_frontend_traces_total")  # outcome: exported, dropped, failed
REJECTED_SPANS = locked_counter("kvmesh_frontend_rejected_spans_total")


class Tracing:
    """Opens the trace of each request, and exports those that are wanted."""

    def __init__(self, endpoint: str, share: float, resource: Resource) -> None:
        """Begin. `share` of the traces that begin here are sampled. Raise ConfigError."""
        self._begin = TraceStarts(share).begin
        self._resource = resource
        children = {outcome: TRACES.labels(outcome) for outcome in ("exported", "dropped", "failed")}
        children["rejected"] = REJECTED_SPANS
        self._exporter = Exporter[RequestTimeline](
            endpoint, self._encode, lambda outcome, count: children[outcome].inc(count)
        )

    def begin(self, parent: TraceContext | None) -> tuple[str, bool]:
        """Implements kvmesh.frontend.timeline.Tracer."""
        return self._begin() if parent is None else (parent.header(new_span_id()), parent.is_sampled)

    def ended(self, timeline: RequestTimeline) -> bool:
        """Implements kvmesh.frontend.timeline.Tracer."""
        return is_wanted(timeline) and self._exporter.put(timeline)

    def close(self) -> None:
        """Send what waits. Blocks: call it off the event loop."""
        self._exporter.close()

    def _encode(self, timelines: list[RequestTimeline]) -> bytes:
        return encode_spans([found for timeline in timelines for found in TraceSpans(timeline, self._resource).made()])


def is_wanted(timeline: RequestTimeline) -> bool:
    """Return whether a request's trace is exported."""
    return timeline.is_sampled or timeline.slo_missed != "" or timeline.has_migrated
