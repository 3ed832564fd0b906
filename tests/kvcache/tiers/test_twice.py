"""Slow tiers get what was asked for twice, and tiers that keep failing are left alone."""

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.health import MOST_FAILURES, TierHealth
from kvmesh.kvcache.tiers.index import TierIndex
from kvmesh.kvcache.tiers.rates import TierRates
from kvmesh.kvcache.tiers.stack import BlockSave, Prefix, TierLevel, TierStack
from kvmesh.kvcache.tiers.twice import UsedTwice
from kvmesh.protocol.events import Removed
from kvmesh.protocol.hashing import hash_seed, sequence_hashes
from kvmesh.protocol.ids import SequenceHash
from kvmesh.protocol.tiers import Tier

BLOCK = 2


class Device:
    """A stack of a disk alone, or below host memory, over a small device."""

    def __init__(self, device: int = 16, disk: int = 64, host: int = 0, *, keeps_salted: bool = False) -> None:
        self.pool = BlockPool(device, BLOCK)
        self.disk = TierLevel(TierIndex(Tier.DISK, disk, BLOCK, bool), TierRates(1000), keeps_salted=keeps_salted)
        levels = [TierLevel(TierIndex(Tier.HOST, host, BLOCK, bool), TierRates(1000))] if host else []
        self.stack = TierStack(self.pool, [*levels, self.disk], b"model", offload="through", max_in_flight=64)

    def ask(self, number: int, blocks: int = 4, salt: str | None = None) -> None:
        """Run a prompt through the device, and make all copies that are planned."""
        tokens = [number, *range(1, BLOCK * blocks)]
        names = sequence_hashes(tokens, BLOCK, hash_seed(None, salt))
        parts = [tokens[i * BLOCK : (i + 1) * BLOCK] for i in range(blocks)]
        table = self.pool.match(names)
        self.stack.asked_for(Prefix(names, parts.__getitem__, None, salt), len(table), 0)
        table += self.pool.allocate(blocks - len(table))
        for i, name in enumerate(names):
            previous = table[i - 1] if i else None
            table[i] = self.pool.commit(table[i], name, previous, parts[i], salt=salt)
        self.pool.release(table)
        self.save()

    def save(self) -> list[BlockSave]:
        made: list[BlockSave] = []
        while saves := self.stack.plan_saves():
            for save in saves:
                self.stack.saved(save, arrived=True)
            made += saves
        return made


def test_a_disk_gets_blocks_that_two_prompts_asked_for() -> None:
    device = Device()
    device.ask(100)
    assert len(device.disk.index) == 0
    device.ask(100)
    assert len(device.disk.index) == 4


def test_a_block_that_is_computed_again_was_used_twice() -> None:
    device = Device(device=8)
    device.ask(100)
    for number in range(200, 204):
        device.ask(number)
    device.ask(100)
    assert len(device.disk.index) == 4


def test_only_the_part_that_prompts_share_goes_to_the_disk() -> None:
    device = Device()
    device.ask(100, blocks=2)
    device.ask(100, blocks=6)
    assert len(device.disk.index) == 2


def test_blocks_of_tenants_with_a_salt_stay_in_memory_unless_allowed() -> None:
    device, allowed = Device(), Device(keeps_salted=True)
    for each in (device, allowed):
        each.ask(100, salt="tenant")
        each.ask(100, salt="tenant")
    assert (len(device.disk.index), len(allowed.disk.index)) == (0, 4)
    assert device.disk.counts["dropped_salted"] == 4


def test_host_memory_gets_all_blocks_and_the_disk_those_used_twice() -> None:
    device = Device(host=64)
    device.ask(100)
    device.ask(200)
    device.ask(100)
    host, disk = device.stack.levels
    assert (len(host.index), len(disk.index)) == (8, 4)


def test_a_block_that_left_the_device_before_its_copy_is_counted() -> None:
    device = Device(device=4)
    device.ask(100)
    device.stack._max_in_flight = 0
    device.ask(100)
    device.ask(200)
    device.stack._max_in_flight = 64
    device.save()
    assert device.disk.counts["dropped_too_late"] == 4
    assert len(device.disk.index) == 0


def test_a_tier_that_is_switched_off_is_told_to_be_empty() -> None:
    device = Device()
    device.ask(100)
    device.ask(100)
    device.disk.index.take_events()
    device.stack.switch_off(device.disk)
    events = device.disk.index.take_events()
    assert sum([len(event.hashes) for event in events if isinstance(event, Removed)]) == 4
    device.ask(100)
    assert (len(device.disk.index), device.disk.index.digest.blocks) == (0, 0)


def test_failures_one_after_the_other_switch_a_tier_off() -> None:
    health = TierHealth()
    for _ in range(5):
        assert [health.note_write(is_good=False) for _ in range(MOST_FAILURES - 1)] == [False] * (MOST_FAILURES - 1)
        health.note_write(is_good=True)
    assert [health.note_write(is_good=False) for _ in range(MOST_FAILURES)][-1]
    assert (health.is_readable, health.is_writable) == (True, False), "what lies there can still be read"
    assert [health.note_read(is_good=False) for _ in range(MOST_FAILURES)][-1]
    assert (health.is_readable, health.is_writable) == (False, False)
    assert not health.note_read(is_good=False), "it is said once"


def test_what_is_remembered_of_prompts_is_bounded() -> None:
    used = UsedTwice(most_ready=3, remembered=10)
    for number in range(100):
        assert used.ask([SequenceHash(number)]) == []
    assert used.ask([SequenceHash(number) for number in range(85, 95)]) == [SequenceHash(n) for n in range(90, 95)]
    given_up = sum([used.want(SequenceHash(number), on_device=number % 2 == 0) for number in range(20)])
    assert given_up == 14
    assert [used.next() for _ in range(4)] == [14, 16, 18, None]
    assert (used.committed(SequenceHash(19)), used.next()) == (0, 19)
