"""The access log: what the line of a request says beside its HTTP, and the file for such lines.

`kvmesh replay`, `whatif` and `bench planner` read these lines. There is no text in them; docs/security.md says what the
hashes of a prompt's blocks tell.
"""

import time
from base64 import b64encode
from pathlib import Path

import msgspec

from kvmesh.frontend.timeline import EMBEDDINGS, AnswerRecord, RequestTimeline
from kvmesh.mesh.line_file import LineFile

MAX_LOGGED_BLOCKS = 4096  # of a prompt; what follows is taken for shared with nobody
_ACCESS_ENCODER = msgspec.json.Encoder()


def access_fields(timeline: RequestTimeline) -> dict[str, object]:
    """Return the fields of a request that has ended. A field that does not apply is left out."""
    fields: dict[str, object] = {"endpoint": timeline.endpoint, "outcome": timeline.outcome}
    if timeline.trace_id:
        fields["trace_id"] = timeline.trace_id
    if not timeline.answers:
        return fields
    fields |= {
        "model": timeline.model,
        "isl_tokens": timeline.isl_tokens,
        "osl_tokens": timeline.osl_tokens,
        "cached_tokens": timeline.cached_tokens,
        "ttft_ms": _ms(timeline.ttft_s),
        "itl_ms": _ms(timeline.itl_s),
    }
    if len(timeline.answers) > 1 and timeline.endpoint != EMBEDDINGS:
        fields["answers"] = len(timeline.answers)
    return fields | _decision(timeline, timeline.answers[0])


def _decision(timeline: RequestTimeline, answer: AnswerRecord) -> dict[str, object]:
    """Return where the first answer ran and why, and how long its stages took. Stages of all attempts are added."""
    queue_s = prefill_s = pull_s = 0.0
    ended = timeline.ended or timeline.started
    for attempt in answer.attempts:
        queue_s += (attempt.placed_at or ended) - attempt.asked
        computing = attempt.prefill or attempt.decode
        if computing is not None:
            done = computing.ended if attempt.prefill is not None else computing.first
            prefill_s += (done or computing.ended or ended) - computing.sent
        if attempt.decode is not None and attempt.decode.pull is not None:
            pull_s += attempt.decode.pull.duration_s
    fields: dict[str, object] = {"queue_ms": _ms(queue_s), "prefill_ms": _ms(prefill_s), "pull_ms": _ms(pull_s)}
    if not answer.attempts:
        return fields
    first, last = answer.attempts[0], answer.attempts[-1]
    if (placed := last.placed) is not None:
        fields |= {
            "worker": placed.decode.name,
            "prefill_worker": None if placed.prefill is None else placed.prefill.name,
            "reason": placed.reason,
        }
    if first.placed is not None:
        overlap_blocks = (first.placed.prefill or first.placed.decode).overlap_blocks
        fields["overlap_tokens"] = min(first.isl_tokens, overlap_blocks * first.block_size)
    if migrations := sum([1 for attempt in answer.attempts if attempt.error]):
        fields["migrations"] = migrations
    blocks = b64encode(first.block_hashes[: 8 * MAX_LOGGED_BLOCKS]).decode()
    return fields | {"block_size": first.block_size, "blocks": blocks}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def timestamp(unix_s: float) -> str:
    """Return a time as lines have it, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s)) + f".{int(unix_s % 1 * 1e3):03d}Z"


class AccessLogFile:
    """Writes the access log to a file of its own, one JSON object a line."""

    def __init__(self, path: str, max_mib: float) -> None:
        """Open the file; `max_mib` is its size with the one before. Raise ConfigError."""
        self._file = LineFile(Path(path), int(max_mib * 2**19))

    def write(self, fields: dict[str, object]) -> None:
        self._file.put(_ACCESS_ENCODER.encode({"ts": timestamp(time.time()), **fields}))

    async def close(self) -> None:
        await self._file.close()
