"""Follow what an engine caches by its KV events, and announce it under our names. Pure: no clock, no I/O.

This serves engines that report which blocks they store and remove, but not which they hold. Such an engine counts
differently from `kvcache.pool`: a block that two requests compute at once is stored twice, and later removed once for
each copy, and the engine may drop a block before its followers. Here a block is announced under its sequence hash
(protocol.hashing) in each tier that has a copy of it, while every block before it is present in some tier. Tiers below
the device count because engines that offload load from there by themselves. Invariants, checked by the property test:

1. The announced blocks are a set of whole prefixes, each once in a tier: stored and removed events of a block there
   alternate.
2. The announced events, replayed, give the content of `snapshot`, and `digest` is the digest of that content.
3. A removed block is remembered only while one of its followers is present, so that both can be announced again.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Cleared, Digest, KvEvent, Removed, Stored
from kvmesh.protocol.hashing import block_hashes, digest_term, extend_chain, hash_seed
from kvmesh.protocol.ids import BlockHash, EngineHash, SequenceHash
from kvmesh.protocol.tiers import MEDIA, Tier, tier_of

MAX_BLOCKS = 1 << 22

_U64 = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True, eq=False)
class _EngineBlock:
    key: EngineHash
    name: SequenceHash
    parent: "_EngineBlock | None"
    tokens: tuple[int, ...]
    lora: str | None
    salt: str | None
    copies: dict[Tier, int] = field(default_factory=dict)  # all > 0
    is_reachable: bool = False  # the block and all blocks before it are present
    children: dict[EngineHash, "_EngineBlock"] = field(default_factory=dict)


class CacheMirror:
    """Follows one data-parallel rank of an engine, whose blocks hold `block_size` tokens.

    `stats` counts reported blocks that were left out: unknown_parents, unknown_removals, without_tokens, over_limit,
    and other_sizes of blocks below the device.
    """

    def __init__(self, block_size: int, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size = block_size
        self.stats: Counter[str] = Counter()
        self._max_blocks = max_blocks
        self._blocks: dict[EngineHash, _EngineBlock] = {}
        self._roots: dict[EngineHash, _EngineBlock] = {}
        # How many reachable blocks have that name and a copy in that tier: an engine may have two.
        self._announced: dict[tuple[SequenceHash, Tier], int] = {}
        self._digest = 0  # sum of the terms of _announced; taken mod 2**64 where it is read
        self._news = _Announcement(block_size)

    @property
    def digest(self) -> Digest:
        """The digest of all announced blocks, in each tier."""
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

    def forget_adapter(self, name: str) -> list[KvEvent]:
        """Forget the blocks of the adapter `name`; return the events to announce. Later news of them is left out."""
        pending = [block for block in self._roots.values() if block.lora == name]
        for block in pending:
            self._hide(block)
            del self._roots[block.key]
        while pending:
            block = pending.pop()
            del self._blocks[block.key]
            pending.extend(block.children.values())
        return self._news.take()

    def snapshot(self) -> list[KvEvent]:
        """Return events that rebuild the announced content, parents before children."""
        told: set[tuple[SequenceHash, Tier]] = set()
        snapshot = _Announcement(self.block_size)
        pending = list(reversed(self._roots.values()))
        while pending:
            block = pending.pop()
            if not block.is_reachable:
                continue
            for tier in block.copies:
                if (block.name, tier) not in told:
                    told.add((block.name, tier))
                    snapshot.stored(block, tier)
            pending.extend(reversed(block.children.values()))
        return snapshot.take()

    def _on_stored(self, event: Stored) -> None:
        tier = tier_of(event.medium)
        if tier is not Tier.DEVICE and not event.token_ids:
            self._copy_known(event.hashes, tier)
            return
        if event.block_size != self.block_size:
            if tier is not Tier.DEVICE:  # some engines offload several blocks as one
                self.stats["other_sizes"] += len(event.hashes)
                return
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
            self._add_copy(block, tier)
            parent = block

    def _copy_known(self, keys: Sequence[EngineHash], tier: Tier) -> None:
        """Take that blocks are in a tier whose events name them alone."""
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                self.stats["without_tokens"] += 1
            else:
                self._add_copy(block, tier)

    def _add_copy(self, block: _EngineBlock, tier: Tier) -> None:
        block.copies[tier] = block.copies.get(tier, 0) + 1
        if block.copies[tier] > 1:
            return
        if block.is_reachable:
            self._announce(block, tier)
        else:
            self._show(block)

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
        tier = tier_of(event.medium)
        for key in event.hashes:
            block = self._blocks.get(key)
            if block is None or tier not in block.copies:
                self.stats["unknown_removals"] += 1
                continue
            block.copies[tier] -= 1
            if block.copies[tier]:
                continue
            if len(block.copies) == 1:
                self._hide(block)
            elif block.is_reachable:
                self._withdraw(block, tier)
            del block.copies[tier]
            self._forget_if_useless(block)

    def _show(self, block: _EngineBlock) -> None:
        """Announce a present block, and its followers, if all blocks before it are present."""
        pending = [block]
        while pending:
            block = pending.pop()
            if not block.copies or not (block.parent is None or block.parent.is_reachable):
                continue
            block.is_reachable = True
            for tier in block.copies:
                self._announce(block, tier)
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
            for tier in block.copies:
                self._withdraw(block, tier)

    def _announce(self, block: _EngineBlock, tier: Tier) -> None:
        count = self._announced[block.name, tier] = self._announced.get((block.name, tier), 0) + 1
        if count == 1:
            self._digest += digest_term(block.name, tier)
            self._news.stored(block, tier)

    def _withdraw(self, block: _EngineBlock, tier: Tier) -> None:
        left = self._announced[block.name, tier] - 1
        if left:
            self._announced[block.name, tier] = left
            return
        del self._announced[block.name, tier]
        self._digest -= digest_term(block.name, tier)
        self._news.removed(block, tier)

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
    """Collects events under our names. Stored blocks that follow each other in one tier become one event.

    Removals of one tier do so too. Events are told in the order in which they were begun, so the parent of a stored
    block is always told before it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KvEvent] = []
        self._runs: dict[Tier, list[_EngineBlock]] = {}
        self._gone: dict[Tier, list[EngineHash]] = {}

    def stored(self, block: _EngineBlock, tier: Tier) -> None:
        run = self._runs.get(tier)
        is_next = run is None or (block.parent is not None and block.parent.name == run[-1].name)
        if self._gone or not is_next:
            self._flush()
        self._runs.setdefault(tier, []).append(block)

    def removed(self, block: _EngineBlock, tier: Tier) -> None:
        if self._runs:
            self._flush()
        self._gone.setdefault(tier, []).append(EngineHash(block.name))

    def cleared(self) -> None:
        """Announce that all is gone. Earlier events are dropped, because they no longer matter."""
        self._runs.clear()
        self._gone.clear()
        self._events = [Cleared()]

    def take(self) -> list[KvEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        for tier, run in self._runs.items():
            first = run[0]
            self._events.append(
                Stored(
                    hashes=tuple(EngineHash(block.name) for block in run),
                    parent=None if first.parent is None else EngineHash(first.parent.name),
                    token_ids=tuple(chain.from_iterable(block.tokens for block in run)),
                    block_size=self._block_size,
                    lora=first.lora,
                    salt=first.salt,
                    medium=MEDIA[tier],
                )
            )
        for tier, gone in self._gone.items():
            self._events.append(Removed(tuple(gone), MEDIA[tier]))
        self._runs.clear()
        self._gone.clear()
