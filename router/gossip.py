"""Report to other routers how much this router has placed on each worker. Pure; the time is a parameter.

Messages carry state, not events: the sums of the holders whose sums have changed, or of all holders. They replace what
was known of that router. So the next message about a holder makes a lost one good, at the latest the next message with
all sums, and nothing can leak. A router with nothing in flight has said so, and is silent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Message, decode
from kvmesh.router.index import Holder
from kvmesh.router.load import NOTHING, ActiveLoad, Share

COALESCE_S = 0.002  # changes of so long go into one message
REPEAT_S = 1.0  # between messages with all sums, as long as there are any
LAST_WORDS = 2  # messages without any sums, before a router falls silent
SILENCE_S = 5.0  # the load of a router that has been silent for so long is forgotten

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class HolderShare(msgspec.Struct, frozen=True, array_like=True):
    """The kvmesh.router.load.Share of one holder."""

    worker_id: WorkerId
    dp_rank: int
    queued_tokens: _Count
    held_blocks: _Count
    requests: _Count


class LoadNews(Message, frozen=True):
    """A report of what one router has placed."""

    router: str
    generation: int  # of its process: a later one has a greater one
    seq: int
    is_whole: bool  # then holders that are not in it have nothing; otherwise they are as they were
    shares: tuple[HolderShare, ...]


def decode_news(data: bytes) -> LoadNews:
    """Raises WireError."""
    try:
        return decode(data, LoadNews)
    except (ValueError, RecursionError) as error:
        raise WireError(f"unreadable LoadNews: {error}") from error


class GossipSender:
    """Decides when this router reports to the others, and what. Ask it at `next_s` and after changes of the load."""

    def __init__(self, load: ActiveLoad, router: str, generation: int) -> None:
        self._load = load
        self._router = router
        self._generation = generation
        self._seq = 0
        self._changes_at: float | None = None
        self._all_at: float | None = None
        self._last_words = 0

    def next_s(self) -> float | None:
        """Return when the next report is due, or None."""
        return min((at for at in (self._changes_at, self._all_at) if at is not None), default=None)

    def on_change(self, now: float) -> None:
        """Plan a report, because the load may have changed."""
        if self._changes_at is None:
            self._changes_at = now + COALESCE_S

    def on_listener(self, now: float) -> None:
        """Plan a full report for a new listener."""
        self._all_at = now

    def on_alone(self) -> None:
        """Cancel all reports, because nobody listens any more."""
        self._changes_at = self._all_at = None

    def tell(self, now: float) -> LoadNews | None:
        """Return the report that is due, or None."""
        if self._all_at is not None and self._all_at <= now:
            return self._tell_all(now)
        if self._changes_at is None or self._changes_at > now:
            return None
        self._changes_at = None
        if not (changed := self._load.take_own_changes()):
            return None
        self._last_words = LAST_WORDS
        if self._all_at is None:
            self._all_at = now + REPEAT_S
        return self._news(changed, is_whole=False)

    def _tell_all(self, now: float) -> LoadNews:
        self._changes_at = None
        self._load.take_own_changes()
        shares = self._load.shares()
        self._last_words = LAST_WORDS if shares else self._last_words - 1
        self._all_at = now + REPEAT_S if self._last_words > 0 else None
        return self._news(shares, is_whole=True)

    def _news(self, shares: Mapping[Holder, Share], is_whole: bool) -> LoadNews:
        self._seq += 1
        rows = tuple(
            HolderShare(holder.worker_id, holder.dp_rank, int(share.queued_tokens), share.held_blocks, share.requests)
            for holder, share in shares.items()
        )
        return LoadNews(router=self._router, generation=self._generation, seq=self._seq, is_whole=is_whole, shares=rows)


@dataclass(slots=True)
class _Known:
    generation: int
    seq: int
    heard_s: float
    loaded: set[Holder] = field(default_factory=set)


class GossipReceiver:
    """Keeps in `load` what the other routers have reported.

    The caller passes on only news of routers that exist. That bounds what is remembered.
    """

    def __init__(self, load: ActiveLoad) -> None:
        self._load = load
        self._known: dict[str, _Known] = {}

    def on_news(self, news: LoadNews, now: float) -> bool:
        """Apply a report; return whether it was new. Reports of a replaced process, and overtaken reports, are not."""
        known = self._known.get(news.router)
        if known is not None and (news.generation, news.seq) <= (known.generation, known.seq):
            return False
        if known is None or known.generation != news.generation:
            known = self._known[news.router] = _Known(news.generation, news.seq, now)
            replaces_all = True
        else:
            known.seq, known.heard_s = news.seq, now
            replaces_all = news.is_whole
        shares = _by_holder(news.shares)
        if replaces_all:
            self._load.set_elsewhere(news.router, shares, now)
            known.loaded = set()
        else:
            self._load.update_elsewhere(news.router, shares, now)
        known.loaded -= shares.keys()
        known.loaded |= {holder for holder, share in shares.items() if share != NOTHING}
        return True

    def forget(self, router: str, now: float) -> bool:
        """Forget a router that has left. Return whether it had something in flight."""
        known = self._known.pop(router, None)
        if known is None or not known.loaded:
            return False
        self._load.set_elsewhere(router, {}, now)
        return True

    def expire(self, now: float) -> list[str]:
        """Forget the routers that have something in flight but have been silent for too long. Return their names."""
        silent = [router for router, known in self._known.items() if known.loaded and known.heard_s + SILENCE_S <= now]
        for router in silent:
            self.forget(router, now)
        return silent

    def next_s(self) -> float | None:
        """Return when to call `expire` next, or None."""
        heard = (known.heard_s for known in self._known.values() if known.loaded)
        return min((at + SILENCE_S for at in heard), default=None)


def _by_holder(rows: Iterable[HolderShare]) -> dict[Holder, Share]:
    return {Holder(row.worker_id, row.dp_rank): Share(row.queued_tokens, row.held_blocks, row.requests) for row in rows}
