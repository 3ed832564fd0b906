"""Follow what an engine caches by its KV events, and announce it under our names. Pure: no clock, no I/O.

This serves engines that report which blocks they store and remove, but not which they hold. Such an engine counts
differently from `kvcache.pool`: a block that two requests compute at once is stored twice, and later removed once for
each copy, and the engine may drop a block before its followers. Here a block is announced under its sequence hash
(protocol.hashing) while a copy of it and of every block before it is present. Invariants, checked by the property test:

1. The announced blocks are a set of whole prefixes, each once: stored and removed events of a block alternate.
2. The announced events, replayed, give the content of `snapshot`, and `digest` is the digest of that content.
3. A removed block is remembered only while one of its followers is present, so that both can be announced again.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from protocol.errors import WireError
from protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from protocol.hashing import block_hashes, digest_term, extend_chain, hash_seed
from protocol.ids import BlockHash, EngineHash, SequenceHash

MAX_BLOCKS = 1 << 22

_U64 = 0xFFFF_FFFF_FFFF_FFFF
_DEVICE = "GPU"  # the engine cannot reuse blocks in other media at once, so they do not count


@dataclass(slots=True, eq=False)
class _EngineBlock:
    key: EngineHash
    name: SequenceHash
    parent: "_EngineBlock | None"
    tokens: tuple[int, ...]
    lora: str | None
    salt: str | None
    copies: int = 0
    is_reachable: bool = False  # the block and all blocks before it are present
    children: dict[EngineHash, "_EngineBlock"] = field(default_factory=dict)


class CacheMirror:
    """Follows one data-parallel rank of an engine, whose blocks hold `block_size` tokens.

    `stats` counts reported blocks that were left out: unknown_parents, unknown_removals, without_tokens, over_limit.
    """

    def __init__(self, block_size: int, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size = block_size
        self.stats: Counter[str] = Counter()
        self._max_blocks = max_blocks
        self._blocks: dict[EngineHash, _EngineBlock] = {}
        self._roots: dict[EngineHash, _EngineBlock] = {}
        self._announced: dict[SequenceHash, int] = {}  # number of reachable blocks of that name; an engine may have two
        self._digest = 0  # sum of the terms of _announced; taken mod 2**64 where it is read
        self._news = _Announcement(block_size)

    def __contains__(self, name: SequenceHash) -> bool:
        return name in self._announced

    @property
    def digest(self) -> Digest:
        """The digest of all announced blocks."""
        return Digest(len(self._announced), self._digest & _U64)

    def apply(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Apply the engine's events; return the events to announce, in order.

        Raises WireError for blocks of another size. The events before them are applied, and the next call announces
        their effect.
        """
        for event in events:
            match event:
                case Stored():
                    self._on_stored(event)
                case Removed():
                    self._on_removed(event)
                case Cleared():
                    self._forget_all()
        return self._news.take()

    def clear(self) -> list[KvEvent]:
        """Forget everything, because the content of the engine is no longer known."""
        return self.apply([Cleared()])

    def snapshot(self) -> list[KvEvent]:
        """Return events that rebuild the announced content, parents before children."""
        told: set[SequenceHash] = set()
        snapshot = _Announcement(self.block_size)
        pending = list(reversed(self._roots.values()))
        while pending:
            block = pending.pop()
            if not block.is_reachable:
                continue
            if block.name not in told:
                told.add(block.name)
                snapshot.stored(block)
            pending.extend(reversed(block.children.values()))
        return snapshot.take()

    def _on_stored(self, event: Stored) -> None:
        if event.medium != _DEVICE:
            return
        if event.block_size != self.block_size:
            raise WireError(
                f"the engine stores blocks of {event.block_size} tokens, it began with {self.block_size}",
                hint="one engine keeps one block size: restart it and its worker",
            )
        parent = None if event.parent is None else self._blocks.get(event.parent)
        if event.parent is not None and parent is None:
            self.stats["unknown_parents"] += len(event.hashes)
            return
        lora, salt = (event.lora, event.salt) if parent is None else (parent.lora, parent.salt)
        names = block_hashes(event.token_ids, self.block_size, hash_seed(lora, salt))
        for number, key in enumerate(event.hashes):
            block = self._blocks.get(key)
            if block is None:
                block = self._new_block(key, parent, event, number, names, (lora, salt))
                if block is None:
                    return
            block.copies += 1
            if block.copies == 1:
                self._show(block)
            parent = block

    def _new_block(
        self,
        key: EngineHash,
        parent: _EngineBlock | None,
        event: Stored,
        number: int,
        names: Sequence[BlockHash],
        adapter_and_salt: tuple[str | None, str | None],
    ) -> _EngineBlock | None:
        """Add block `number` of the event. If it cannot be named or kept, count it and all after it; return None."""
        left_out = len(event.hashes) - number
        if number >= len(names):
            self.stats["without_tokens"] += left_out
            return None
        if len(self._blocks) >= self._max_blocks:
            self.stats["over_limit"] += left_out
            return None
        [name] = extend_chain(None if parent is None else parent.name, [names[number]])
        tokens = event.token_ids[number * self.block_size : (number + 1) * self.block_size]
        lora, salt = adapter_and_salt
        block = _EngineBlock(key, name, parent, tokens, lora, salt)
        self._blocks[key] = block
        (self._roots if parent is None else parent.children)[key] = block
        return block

    def _on_removed(self, event: Removed) -> None:
        if event.medium != _DEVICE:
            return
        for key in event.hashes:
            block = self._blocks.get(key)
            if block is None or not block.copies:
                self.stats["unknown_removals"] += 1
                continue
            block.copies -= 1
            if not block.copies:
                self._hide(block)
                self._forget_if_useless(block)

    def _show(self, block: _EngineBlock) -> None:
        """Announce a present block, and its followers, if all blocks before it are present."""
        pending = [block]
        while pending:
            block = pending.pop()
            if not block.copies or not (block.parent is None or block.parent.is_reachable):
                continue
            block.is_reachable = True
            count = self._announced[block.name] = self._announced.get(block.name, 0) + 1
            if count == 1:
                self._digest += digest_term(block.name)
                self._news.stored(block)
            pending.extend(reversed(block.children.values()))

    def _hide(self, block: _EngineBlock) -> None:
        """Withdraw a removed block and its followers. Children are announced as removed before parents."""
        hidden: list[_EngineBlock] = []
        pending = [block]
        while pending:
            block = pending.pop()
            if block.is_reachable:
                block.is_reachable = False
                hidden.append(block)
                pending.extend(block.children.values())
        for block in reversed(hidden):
            left = self._announced[block.name] - 1
            if left:
                self._announced[block.name] = left
                continue
            del self._announced[block.name]
            self._digest -= digest_term(block.name)
            self._news.removed(block)

    def _forget_if_useless(self, block: _EngineBlock | None) -> None:
        while block is not None and not block.copies and not block.children:
            del self._blocks[block.key]
            del (self._roots if block.parent is None else block.parent.children)[block.key]
            block = block.parent

    def _forget_all(self) -> None:
        self._blocks.clear()
        self._roots.clear()
        self._announced.clear()
        self._digest = 0
        self._news.cleared()


class _Announcement:
    """Collects events under our names. Stored blocks that follow each other become one event, and so do removals."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KvEvent] = []
        self._run: list[_EngineBlock] = []
        self._gone: list[EngineHash] = []

    def stored(self, block: _EngineBlock) -> None:
        if self._gone or (self._run and (block.parent is None or block.parent.name != self._run[-1].name)):
            self._flush()
        self._run.append(block)

    def removed(self, block: _EngineBlock) -> None:
        if self._run:
            self._flush()
        self._gone.append(EngineHash(block.name))

    def cleared(self) -> None:
        """Announce that all is gone. Earlier events are dropped, because they no longer matter."""
        self._run, self._gone = [], []
        self._events = [Cleared()]

    def take(self) -> list[KvEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._run:
            first = self._run[0]
            self._events.append(
                Stored(
                    hashes=tuple(EngineHash(block.name) for block in self._run),
                    parent=None if first.parent is None else EngineHash(first.parent.name),
                    token_ids=tuple(chain.from_iterable(block.tokens for block in self._run)),
                    block_size=self._block_size,
                    lora=first.lora,
                    salt=first.salt,
                )
            )
            self._run = []
        if self._gone:
            self._events.append(Removed(tuple(self._gone)))
            self._gone = []
