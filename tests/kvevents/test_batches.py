"""Large steps are cut into batches that everybody accepts, without a change of what they say."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvevents.batches import in_parts
from kvmesh.kvevents.formats import encode_payload
from kvmesh.protocol.events import Cleared, KvEvent, Removed, Stored
from kvmesh.protocol.ids import EngineHash


def names(count: int, first: int = 2**63) -> tuple[EngineHash, ...]:
    return tuple(EngineHash(first + number) for number in range(count))


def effects(events: list[KvEvent]) -> list[object]:
    """Return the fields of each block, one by one."""
    told: list[object] = []
    for event in events:
        match event:
            case Stored():
                parents = (event.parent, *event.hashes)
                for i, (name, parent) in enumerate(zip(event.hashes, parents, strict=False)):
                    tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                    told.append((name, parent, tokens, event.block_size, event.lora, event.salt, event.medium))
            case Removed():
                told += [(name, event.medium) for name in event.hashes]
            case Cleared():
                told.append("cleared")
    return told


stored_events = st.builds(
    lambda count, size, parent, token, lora, salt: Stored(
        names(count), parent, (token,) * (count * size), size, lora, salt
    ),
    st.integers(1, 60),
    st.integers(1, 16),
    st.none() | st.just(EngineHash(5)),
    st.sampled_from([1, 2**32 - 1]),
    st.none() | st.text(min_size=1, max_size=20),
    st.none() | st.text(min_size=1, max_size=20),
)
removed_events = st.builds(lambda count: Removed(names(count), "CPU"), st.integers(1, 400))


@given(st.lists(stored_events | removed_events | st.just(Cleared()), max_size=6), st.integers(800, 5000))
def test_the_parts_say_the_same_and_none_is_too_large(events: list[KvEvent], max_bytes: int) -> None:
    parts = [list(part) for part in in_parts(events, max_bytes)]
    assert effects([event for part in parts for event in part]) == effects(events)
    assert all(len(encode_payload(part, 1e9, 7)) <= max_bytes for part in parts)


def test_small_steps_stay_one_batch() -> None:
    events = [Stored(names(4), None, tuple(range(64)), 16), Removed(names(2)), Cleared()]
    assert list(in_parts(events)) == [events]


def test_no_events_are_a_batch_too() -> None:
    assert list(in_parts([])) == [[]]


def test_a_block_is_never_cut() -> None:
    event = Stored(names(2), None, tuple(range(2000)), 1000)
    assert [len(part) for part in in_parts([event], 100)] == [1, 1]
