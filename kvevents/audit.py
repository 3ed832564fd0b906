"""Compare what a follower holds with what the worker holds, by digests at the same batch. Pure.

A question is open from `ask` to the verdict. Meanwhile `record` gets our digest after each applied batch, because the
worker answers for its own last batch, which may be before or after ours.
"""

from kvmesh.protocol.events import Digest

_MAX_RECORDS = 1024  # an answer for an older batch gets no verdict
_MAX_SKIPPED = 64


class Audit:
    """The verdicts are True (equal), False (different) or None (not known yet, or never)."""

    def __init__(self) -> None:
        self.asked_at: int | None = None  # our last batch when we asked; None: no question is open
        self.mismatches = 0  # in a row
        self._own: dict[int, Digest] = {}
        self._theirs: tuple[int, Digest] | None = None  # for a batch that is not applied yet
        self._skip = 0

    def is_due(self) -> bool:
        """Return whether to ask at this recheck: after mismatches in a row, only at every 2nd, 4th, 8th and so on."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def ask(self, seq: int, own: Digest) -> None:
        self.close()
        self.asked_at = seq
        self._own[seq] = own

    def record(self, seq: int, own: Digest) -> bool | None:
        """Record that our digest after batch `seq` is `own`; return the verdict."""
        if self.asked_at is None:
            return None
        self._own[seq] = own
        if len(self._own) > _MAX_RECORDS:
            del self._own[next(iter(self._own))]
        return self._verdict()

    def answer(self, seq: int, theirs: Digest) -> bool | None:
        """Record that the worker's digest after batch `seq` is `theirs`; return the verdict."""
        if self.asked_at is None:
            return None
        self._theirs = (seq, theirs)
        return self._verdict()

    def close(self) -> None:
        """Close the question: no verdict is wanted any more."""
        self.asked_at = None
        self._own.clear()
        self._theirs = None

    def _verdict(self) -> bool | None:
        if self._theirs is None or (own := self._own.get(self._theirs[0])) is None:
            return None
        equal = own == self._theirs[1]
        self.close()
        self.mismatches = 0 if equal else self.mismatches + 1
        self._skip = min(2 ** (self.mismatches - 1), _MAX_SKIPPED) - 1 if self.mismatches else 0
        return equal
