"""Make the record of an answer that nobody followed, of the notes on its placements.

Most traces are not sampled, and nearly all of their records would be thrown away. Many of the times here are those of
the event loop, which has whole milliseconds and stands still within a turn: none may lie before the one it follows.
Pure.
"""

from kvmesh.frontend.generator import PlacingNotes, Trace
from kvmesh.frontend.timeline import AnswerRecord, Attempt, LegRecord, with_attempt
from kvmesh.protocol.messages import Delta, TimedDelta, WorkerTimes


def times_in(delta: Delta | None) -> WorkerTimes | None:
    """Return how a worker spent its time, if it tells with this delta."""
    return delta.times if isinstance(delta, TimedDelta) else None


def attempt_of(trace: Trace, notes: PlacingNotes, ended: float, error: str = "", not_before: float = 0.0) -> Attempt:
    """Return the record of an answer's present placement, which ends now; `error`: the code of its failure."""
    route, placed, placed_at = notes.route, trace.placed, notes.placed_at
    asked = max(notes.asked, not_before)
    attempt = Attempt(asked, route.isl_tokens, notes.block_size, route.sequence_hashes, ended=ended, error=error)
    if placed is None or placed_at is None:
        return attempt
    attempt.placed, attempt.placed_at = placed, (sent := max(asked, placed_at))
    if (target := placed.prefill) is not None:
        done = notes.handed_over
        attempt.prefill = LegRecord(
            target.name, target.dp_rank, sent, ended=ended if done is None else done, times=times_in(notes.prefilled)
        )
        if done is None:
            return attempt
        sent = max(sent, done)
    target, first = placed.decode, None if notes.first is None else max(sent, notes.first)
    attempt.decode = LegRecord(
        target.name, target.dp_rank, sent, first, ended, pull=notes.pull, times=times_in(notes.last)
    )
    return attempt


def note_failed(trace: Trace, ended: float, error: str) -> None:
    """Keep the record of a placement that has failed. The next one begins with nothing."""
    if trace.placing is not None:
        trace.failed = with_attempt(trace.failed, attempt_of(trace, trace.placing, ended, error))
        trace.placing = None


def complete(answer: AnswerRecord, trace: Trace, ended: float, not_before: float | None) -> None:
    """Add the placements of an answer that ended at `ended`. None of them began before `not_before`."""
    answer.attempts = list(trace.failed)
    if trace.placing is not None:
        last = attempt_of(trace, trace.placing, ended, not_before=not_before or 0.0)
        answer.attempts = with_attempt(answer.attempts, last)
