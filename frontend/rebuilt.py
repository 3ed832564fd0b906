"""Make the record of an answer that nobody followed, of what the answer keeps anyway.

Most traces are not sampled, and nearly all of their records would be thrown away. Many of the times here are those of
the event loop, which has whole milliseconds and stands still within a turn: none may lie before the one it follows.
Pure.
"""

from frontend.generator import Trace
from frontend.timeline import AnswerRecord, Attempt, LegRecord, with_attempt


def attempt_of(trace: Trace, ended: float, error: str = "", not_before: float = 0.0) -> Attempt:
    """Return the record of an answer's present placement, which ends now; `error`: the code of its failure."""
    route, placed, placed_at = trace.route, trace.placed, trace.placed_at
    assert route is not None, "a router was asked"
    asked = max(trace.asked, not_before)
    attempt = Attempt(asked, route.isl_tokens, trace.block_size, route.sequence_hashes, ended=ended, error=error)
    if placed is None or placed_at is None:
        return attempt
    attempt.placed, attempt.placed_at = placed, (sent := max(asked, placed_at))
    if (target := placed.prefill) is not None:
        done = trace.handed_over
        attempt.prefill = LegRecord(
            target.name, target.dp_rank, sent, ended=ended if done is None else done, times=trace.prefill_times
        )
        if done is None:
            return attempt
        sent = max(sent, done)
    first = None if trace.first is None else max(sent, trace.first)
    attempt.decode = LegRecord(
        placed.decode.name, placed.decode.dp_rank, sent, first, ended, pull=trace.pull, times=trace.times
    )
    return attempt


def note_failed(trace: Trace, ended: float, error: str) -> None:
    """Keep the record of a placement that has failed. The next one begins with nothing."""
    if trace.route is not None:
        trace.failed = with_attempt(trace.failed, attempt_of(trace, ended, error))
    trace.route = trace.handed_over = trace.first = trace.pull = trace.prefill_times = trace.times = None


def complete(answer: AnswerRecord, trace: Trace, ended: float, not_before: float | None) -> None:
    """Add the placements of an answer that ended at `ended`. None of them began before `not_before`."""
    answer.attempts = list(trace.failed)
    if trace.route is not None:
        answer.attempts = with_attempt(answer.attempts, attempt_of(trace, ended, not_before=not_before or 0.0))
