"""Report what happened to a request on its way through the mesh: under `kvmesh` in the answer, or as headers."""

import re

import msgspec

from kvmesh.frontend.generator import Trace
from kvmesh.frontend.job import Job
from kvmesh.frontend.shapes import TraceReport
from kvmesh.router.api import explained

MAX_HEADER_CHARS = 512
PLACEMENT_HEADERS = (
    "x-kvmesh-worker",
    "x-kvmesh-prefill-worker",
    "x-kvmesh-overlap-tokens",
    "x-kvmesh-route-reason",
)
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")


def trace_report(job: Job) -> TraceReport | None:
    """Return what happened to the request (to its first answer, where it has several), if the caller wants to know
    it."""
    explain = job.parsed.hints.explain
    if not (job.parsed.trace or explain):
        return None
    branch = job.branches[0]
    trace = branch.trace
    return TraceReport(
        prefill_worker=trace.prefill_worker,
        decode_worker=trace.decode_worker,
        transfer=trace.transfer,
        kv_bytes_pulled=trace.kv_bytes_pulled,
        overlap_tokens=trace.overlap_tokens,
        cached_tokens=trace.cached_tokens,
        waited_ms=round(trace.waited_s * 1000, 3),
        ttft_ms=_ms(branch.timing.ttft_s),
        itl_ms=_ms(branch.timing.itl_s(branch.answer.completion_tokens)),
        route_reason=trace.placed.reason if trace.placed else "",
        migrations=trace.migrations,
        pull_error=trace.pull_error,
        explanations=[explained(e) for e in trace.explanations] if explain else msgspec.UNSET,
    )


def placement_headers(trace: Trace) -> dict[str, str]:
    """The last placement, as headers of the reply."""
    if (placed := trace.placed) is None:
        return {}
    headers = {
        "x-kvmesh-worker": placed.decode.name,
        "x-kvmesh-overlap-tokens": str(trace.overlap_tokens),
        "x-kvmesh-route-reason": placed.reason,
    }
    if placed.prefill is not None:
        headers["x-kvmesh-prefill-worker"] = placed.prefill.name
    return {name: _NOT_PRINTABLE.sub("?", text)[:MAX_HEADER_CHARS] for name, text in headers.items()}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
