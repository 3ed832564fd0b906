"""Decide which blocks are copied below the device, which come back, and when. Pure: the copies are a thin shell's.

Host memory gets what the device would evict next; slower tiers get what a second prompt has asked for. The worker's
engine, the simulator and the tests drive this one object. Blocks are copied without being held: a block whose content
changed before its copy was complete is dropped, so a copy makes nobody wait for memory.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvmesh.kvcache.pool import BlockPool, CommittedBlock, PoolJournal
from kvmesh.kvcache.tiers.address import content_address, root_address
from kvmesh.kvcache.tiers.health import TierHealth
from kvmesh.kvcache.tiers.index import TierBlock, TierIndex
from kvmesh.kvcache.tiers.rates import ComputeRate, TierRates, blocks_to_load, tried_anyway
from kvmesh.kvcache.tiers.reuse import Reuse
from kvmesh.kvcache.tiers.twice import UsedTwice
from kvmesh.protocol.ids import SequenceHash
from kvmesh.protocol.tiers import Tier

Offload = Literal["ahead", "through"]
AHEAD_SHARE = 8  # one block in so many of those that can be allocated is kept ready to be evicted
BURSTS = 2  # and at least what so many of the largest allocations of one step would evict
MOST_LOOKED_AT = 1024  # blocks, unless bursts are larger: a large device is not searched in one go
BURST_FADE = 0.98  # what a step leaves of the largest allocation
WINDOW_REQUESTS = 1000  # of the hit rate
LATE_TIMES = 4.0  # a load that takes so many times as long as expected is late
LEAST_LATE_S = 0.25  # no load is late before


class Prefix(NamedTuple):
    """The full blocks of a prompt, as far as they need not be computed if they are found."""

    names: Sequence[SequenceHash]
    tokens_of: Callable[[int], Sequence[int]]  # of the block with this number
    lora: str | None
    salt: str | None


@dataclass(slots=True, eq=False)
class TierLevel:
    """One tier of a stack."""

    index: TierIndex
    rates: TierRates
    counts: Counter[str] = field(default_factory=Counter)
    health: TierHealth = field(default_factory=TierHealth)
    in_flight: set[bytes] = field(default_factory=set)  # addresses of blocks that are copied there
    keeps_salted: bool = True  # blocks of tenants with a salt of their own may go there

    @property
    def tier(self) -> Tier:
        return self.index.tier


class LoadPiece(NamedTuple):
    """One block that comes back."""

    level: TierLevel
    block: TierBlock


@dataclass(slots=True, eq=False)
class PlannedLoad:
    """Blocks of one prompt that come back, in order. They stay where they are until `load_ended`."""

    pieces: tuple[LoadPiece, ...]
    expected_s: float  # 0: nothing is known yet

    @property
    def slowest(self) -> TierLevel:
        """Return the slowest tier that it reads."""
        return max([piece.level for piece in self.pieces], key=lambda level: level.tier)

    @property
    def tier(self) -> Tier:
        return self.slowest.tier

    def parts(self, blocks: int) -> list[tuple[TierLevel, int]]:
        """Return how many of the first `blocks` blocks come from each tier."""
        parts: dict[Tier, tuple[TierLevel, int]] = {}
        for level, _ in self.pieces[:blocks]:
            parts[level.tier] = (level, parts.get(level.tier, (level, 0))[1] + 1)
        return list(parts.values())

    def limit_s(self, timeout_s: float) -> float:
        """Return after how long the load is late."""
        if not self.expected_s:
            return timeout_s
        return min(timeout_s, max(LEAST_LATE_S, LATE_TIMES * self.expected_s))


@dataclass(frozen=True, slots=True, eq=False)
class BlockSave:
    """A block of the device to copy."""

    source: CommittedBlock
    level: TierLevel
    block: TierBlock


class HitWindow:
    """The share of prompt blocks that was found, over the latest requests."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, int, int]] = deque(maxlen=WINDOW_REQUESTS)
        self.seen = 0

    def note(self, asked: int, on_device: int, below: int) -> None:
        self._requests.append((asked, on_device, below))
        self.seen += 1

    def shares(self) -> tuple[float, float]:
        """Return the share found on the device, and below it."""
        asked = sum([request[0] for request in self._requests])
        if not asked:
            return 0.0, 0.0
        on_device, below = (sum([request[i] for request in self._requests]) for i in (1, 2))
        return on_device / asked, below / asked


class TierStack:
    """The tiers below one pool, the fastest first."""

    def __init__(
        self,
        pool: BlockPool,
        levels: Sequence[TierLevel],
        fingerprint: bytes,
        *,
        offload: Offload = "ahead",
        max_in_flight: int = 16,
    ) -> None:
        """Copy at most `max_in_flight` blocks to each tier at a time."""
        self.pool = pool
        self.levels = levels
        self.compute = ComputeRate()
        self.window = HitWindow()
        self.fingerprint = fingerprint
        self._offload = offload
        self._max_in_flight = max_in_flight
        self._host = levels[0] if levels[0].tier is Tier.HOST else None
        self._lower = {level.tier: UsedTwice(pool.num_blocks) for level in levels if level is not self._host}
        self._reuse = Reuse(levels[0].index.max_blocks, pool.num_blocks)
        self._addresses: dict[int, tuple[int, bytes]] = {}  # of blocks of the device, each of one version
        self._looked_at: int | None = None  # blocks that the pool had allocated then; None: look again
        self._burst = 0.0  # blocks allocated in one step: the most, lately
        self._allocated = pool.num_allocated  # when saves were planned last
        self._journal = pool.journal = PoolJournal()

    # --- coming back -----------------------------------------------------------------------------------

    def has(self, name: SequenceHash) -> bool:
        """Return whether a block of this name can be read from a tier. It need not be the one that is looked for."""
        return self._piece(name) is not None

    def plan_load(self, prefix: Prefix, first: int, backlog_tokens: int) -> PlannedLoad | None:
        """Return the load that brings blocks from number `first` on sooner than computing them would.

        `backlog_tokens`: prompt tokens to compute before this prompt's.
        """
        pieces = self._find(prefix, first)
        if not pieces:
            return None
        self._reuse.hit()
        borders: list[tuple[TierRates, int]] = []
        for piece in pieces:
            if borders and borders[-1][0] is piece.level.rates:
                borders[-1] = (piece.level.rates, borders[-1][1] + 1)
            else:
                borders.append((piece.level.rates, 1))
        count = blocks_to_load(borders, self.compute, self.pool.block_size, backlog_tokens)
        if not count:
            pieces[0].level.counts["refused"] += 1
            count = tried_anyway(pieces[0].level.rates, borders[0][1])
            if not count:
                return None
        load = PlannedLoad(tuple(pieces[:count]), self._expected_s(pieces[:count]))
        pieces[0].level.counts["loads"] += 1
        for level, block in load.pieces:
            level.index.pin((block,))
            level.rates.backlog_bytes += level.rates.block_bytes
        return load

    def asked_for(self, prefix: Prefix, first: int, loaded: int) -> None:
        """Take that a prompt was admitted: `first` of its blocks are on the device, and `loaded` come from tiers.

        What is asked for again is kept longer in slow tiers, and goes there if it is not there yet.
        """
        self.window.note(len(prefix.names), first, loaded)
        for level in self.levels:
            if (used := self._lower.get(level.tier)) is None or not level.health.is_writable:
                continue
            for name in used.ask(prefix.names):
                if name in level.index:
                    level.index.touch(name)
                elif level.keeps_salted or prefix.salt is None:
                    is_here = self.pool.block_of(name) is not None
                    level.counts["dropped_busy"] += used.want(name, on_device=is_here)
                else:
                    level.counts["dropped_salted"] += 1

    def load_ended(
        self,
        load: PlannedLoad,
        arrived: int,
        took_s: Mapping[Tier, float],
        *,
        copied: int | None = None,
        is_broken: bool = False,
    ) -> None:
        """Take that the first `arrived` blocks of a load have come. `is_broken`: the next one cannot be read.

        `took_s`: the time of the copies from each tier. `copied`: the blocks that took it, if some of them came too
        late. A load that was late counts as if it had gone on at its pace.
        """
        for number, (level, block) in enumerate(load.pieces):
            level.rates.backlog_bytes -= level.rates.block_bytes
            level.index.unpin((block,))
            if number < arrived:
                level.counts["loaded"] += 1
                level.index.touch(block.name)
        self._note_rates(load, arrived if copied is None else copied, took_s, is_broken=is_broken)
        if is_broken and arrived < len(load.pieces):
            level, block = load.pieces[arrived]
            level.counts["unreadable"] += 1
            level.index.drop(block)

    def _note_rates(self, load: PlannedLoad, copied: int, took_s: Mapping[Tier, float], *, is_broken: bool) -> None:
        came = {level.tier: blocks for level, blocks in load.parts(copied)}
        for level, planned in load.parts(len(load.pieces)):
            seconds, blocks = took_s.get(level.tier, 0.0), came.get(level.tier, 0)
            if not seconds:
                continue
            if blocks < planned and not is_broken:
                level.rates.note_late(planned, blocks, seconds)
            elif blocks:
                level.rates.line.note(blocks * level.rates.block_bytes, seconds)

    def _expected_s(self, pieces: Sequence[LoadPiece]) -> float:
        counted = Counter(piece.level.tier for piece in pieces)
        rates = {piece.level.tier: piece.level.rates for piece in pieces}
        if not all(one.line.count for one in rates.values()):
            return 0.0
        return sum([rates[tier].load_s(blocks) for tier, blocks in counted.items()])

    def _find(self, prefix: Prefix, first: int) -> list[LoadPiece]:
        """Return the blocks from number `first` on that lie below the device. A name alone is no hit."""
        names = prefix.names
        if first >= len(names):
            return []
        pieces: list[LoadPiece] = []
        for number in range(first, len(names)):
            piece = self._piece(names[number])
            if piece is None:
                break
            pieces.append(piece)
        if pieces:
            pieces = pieces[: self._equal(prefix, first, pieces)]
        for level in self.levels:
            mine = sum([piece.level is level for piece in pieces])
            level.counts["hit_blocks"] += mine
            level.counts["hits" if mine else "misses"] += 1
        if first + len(pieces) < len(names):
            self._reuse.missed(names[first + len(pieces)])
        return pieces

    def _piece(self, name: SequenceHash) -> LoadPiece | None:
        for level in self.levels:
            if level.health.takes_loads and (block := level.index.get(name)) is not None:
                return LoadPiece(level, block)
        return None

    def _equal(self, prefix: Prefix, first: int, pieces: Sequence[LoadPiece]) -> int:
        """Return how many of the blocks found by name have the prompt's tokens and address."""
        address = root_address(self.fingerprint, prefix.lora, prefix.salt)
        for number in range(first):
            address = content_address(address, prefix.tokens_of(number))
        for count, (level, block) in enumerate(pieces):
            tokens = prefix.tokens_of(first + count)
            address = content_address(address, tokens)
            if address != block.address or tuple(tokens) != block.tokens:
                level.counts["collisions"] += 1
                return count
        return len(pieces)

    # --- going down ------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Return how many blocks are being copied down."""
        return sum([len(level.in_flight) for level in self.levels])

    @property
    def has_durable_work(self) -> bool:
        """Return whether blocks are on their way to tiers that outlive the process, or are planned to go there."""
        return any(
            (level.in_flight or self._lower[level.tier].has_ready) and level.health.is_writable
            for level in self.levels
            if level.tier in self._lower
        )

    def plan_saves(self) -> list[BlockSave]:
        """Return the copies to make now. Call it after each step, and when a copy has ended."""
        self._note_losses()
        self._burst = max(self._burst * BURST_FADE, self.pool.num_allocated - self._allocated)
        self._allocated = self.pool.num_allocated
        committed, self._journal.committed = self._journal.committed, []
        saves = [] if self._host is None else self._host_saves(self._host, committed)
        for level in self.levels:
            if (used := self._lower.get(level.tier)) is not None and level.health.is_writable:
                saves += self._lower_saves(level, used, committed)
        return saves

    def saved(self, save: BlockSave, *, arrived: bool, is_sound: bool | None = None) -> None:
        """Take that a copy has ended. Its block counts only if the device's block was the same while it was read.

        `is_sound`: whether it was, if that was seen right after it was read; None: it has to be the same still.
        """
        save.level.in_flight.discard(save.block.address)
        counts, index = save.level.counts, save.level.index
        if not (self.pool.is_unchanged(save.source) if is_sound is None else is_sound):
            counts["dropped_overtaken"] += 1
            index.lost(save.block)
        elif not arrived:
            counts["dropped_failed"] += 1
            index.lost(save.block)
        elif index.arrived(save.block):
            counts["saved"] += 1
            if save.level is self._host:
                self._reuse.copied()

    def switch_off(self, level: TierLevel) -> None:
        """Use a tier no more, and have all who follow the cache told that it is empty."""
        level.health.switch_off()
        level.index.drop_all()

    def clear(self, tiers: Collection[Tier]) -> None:
        """Forget the blocks of some tiers. What leaves with the device is not announced, the rest is."""
        has_device = Tier.DEVICE in tiers
        for level in [level for level in self.levels if level.tier in tiers]:
            if has_device:
                level.index.clear()
            else:
                level.index.drop_all()
            if level is self._host:
                self._reuse.clear()
            else:
                self._lower[level.tier].clear()
        if has_device:
            self._addresses.clear()
            self._journal.committed.clear()
            self._journal.evicted.clear()
            self._looked_at = None

    def _host_saves(self, level: TierLevel, committed: Sequence[int]) -> list[BlockSave]:
        wanted = committed if self._offload == "through" else self._next_to_go()
        saves: list[BlockSave] = []
        for number, block_id in enumerate(wanted):
            for source in self._missing_chain(level, block_id):
                if len(level.in_flight) >= self._max_in_flight:
                    self._looked_at = None
                    if self._offload == "through":
                        level.counts["dropped_busy"] += len(wanted) - number
                    return saves
                if (save := self._admit(level, source)) is None:
                    break
                saves.append(save)
        return saves

    def _lower_saves(self, level: TierLevel, used: UsedTwice, committed: Sequence[int]) -> list[BlockSave]:
        for block_id in committed:
            if (source := self.pool.committed(block_id)) is not None:
                level.counts["dropped_busy"] += used.committed(source.name)
        saves: list[BlockSave] = []
        while len(level.in_flight) < self._max_in_flight and (name := used.next()) is not None:
            if (here := self.pool.block_of(name)) is None:
                level.counts["dropped_too_late"] += 1
                continue
            for source in self._missing_chain(level, here):
                if len(level.in_flight) >= self._max_in_flight:
                    used.put_back(name)
                    break
                if (save := self._admit(level, source)) is None:
                    break
                saves.append(save)
        return saves

    def _next_to_go(self) -> Sequence[int]:
        """Return the blocks that the next allocations would evict; nothing if that was looked at just now."""
        pool = self.pool
        bursts = min(pool.available_blocks, int(BURSTS * self._burst))
        window = max(pool.available_blocks // AHEAD_SHARE, bursts)
        victims = window - pool.free_blocks
        if victims <= 0 or not self._reuse.pays:
            return ()
        since = None if self._looked_at is None else pool.num_allocated - self._looked_at
        if since is not None and since < max(1, min(window, MOST_LOOKED_AT) // AHEAD_SHARE):
            return ()
        self._looked_at = pool.num_allocated
        return pool.next_victims(min(victims, max(MOST_LOOKED_AT, bursts)))

    def _missing_chain(self, level: TierLevel, block_id: int) -> Iterator[CommittedBlock]:
        """Yield the blocks up to this one that are not in a tier yet, parents first."""
        index, chain = level.index, list[CommittedBlock]()
        source = self.pool.committed(block_id)
        while source is not None and source.name not in index:
            chain.append(source)
            source = self._parent_of(source)
        return reversed(chain)

    def _parent_of(self, source: CommittedBlock) -> CommittedBlock | None:
        parent = None if source.parent is None else self.pool.block_of(source.parent)
        return None if parent is None else self.pool.committed(parent)

    def _admit(self, level: TierLevel, source: CommittedBlock) -> BlockSave | None:
        """Return the copy of a block, or None if there is no room or its name stands for something else there."""
        address = self._address_of(source)
        if address in level.in_flight:
            return None
        parent = self._parent_of(source)
        if parent is not None and not level.index.holds(parent.name, self._address_of(parent)):
            level.counts["collisions"] += 1
            return None
        block = TierBlock(source.name, source.parent, address, source.tokens, source.lora, source.salt)
        if not level.index.admit(block):
            level.counts["dropped_no_room"] += 1
            return None
        level.in_flight.add(address)
        return BlockSave(source, level, block)

    def _address_of(self, source: CommittedBlock) -> bytes:
        path: list[CommittedBlock] = []
        here: CommittedBlock | None = source
        address = b""
        while here is not None:
            known = self._addresses.get(here.block_id)
            if known is not None and known[0] == here.version:
                address = known[1]
                break
            path.append(here)
            here = self._parent_of(here)
        if here is None:
            address = root_address(self.fingerprint, source.lora, source.salt)
        for block in reversed(path):
            address = content_address(address, block.tokens)
            self._addresses[block.block_id] = (block.version, address)
        return address

    def _note_losses(self) -> None:
        """Count the blocks that left the device and are nowhere below."""
        evicted, self._journal.evicted = self._journal.evicted, []
        if self._host is None:
            return
        lost = [name for name in evicted if name not in self._host.index]
        if lost:
            self._host.counts["dropped_too_late" if self._reuse.pays else "dropped_no_reuse"] += len(lost)
            self._reuse.lost(lost)
