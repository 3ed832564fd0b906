"""Decide when a tier is switched off. Pure."""

from dataclasses import dataclass

MOST_FAILURES = 3  # one after the other


@dataclass(slots=True)
class TierHealth:
    """Track whether a tier can be read and written. What was switched off stays off until the worker starts again."""

    is_readable: bool = True
    is_writable: bool = True
    hanging: int = 0  # copies up that others were late for, and that have not ended
    _failed_reads: int = 0
    _failed_writes: int = 0

    @property
    def takes_loads(self) -> bool:
        """Return whether blocks can be read now: nobody queues behind a copy that hangs."""
        return self.is_readable and not self.hanging

    def note_read(self, *, is_good: bool) -> bool:
        """Take how a read went. Return whether the tier is switched off by it."""
        self._failed_reads = 0 if is_good else self._failed_reads + 1
        if self._failed_reads < MOST_FAILURES or not self.is_readable:
            return False
        self.is_readable = self.is_writable = False
        return True

    def note_write(self, *, is_good: bool) -> bool:
        """Take how a write went. Return whether the tier takes no more blocks because of it."""
        self._failed_writes = 0 if is_good else self._failed_writes + 1
        if self._failed_writes < MOST_FAILURES or not self.is_writable:
            return False
        self.is_writable = False
        return True

    def stop_writes(self) -> bool:
        """Write no more, for example because a write hangs. Return whether that is new."""
        was_writable, self.is_writable = self.is_writable, False
        return was_writable

    def switch_off(self) -> None:
        """Use the tier no more: it could not be opened, or it hangs."""
        self.is_readable = self.is_writable = False
