"""The account of stored responses, against a model that recounts everything each time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.frontend.responses.retention import KeptEntry, Retention, StoreLimits
from tests.support.budget import examples

LIMITS = StoreLimits(max_count=4, max_bytes=100, ttl_s=10)
NAMES = st.sampled_from("abcdefg")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(0, 120)),
        st.tuples(st.just("use"), NAMES, st.just(0)),
        st.tuples(st.just("remove"), NAMES, st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 12)),
    ),
    max_size=60,
)


@settings(max_examples=examples(300), deadline=None)
@given(STEPS)
def test_the_account_is_within_its_limits_and_drops_the_least_recently_used(steps: list[tuple[str, str, int]]) -> None:
    kept = Retention(LIMITS)
    expected: dict[str, KeptEntry] = {}  # least recently used first
    now_s = 0.0
    for step, name, amount in steps:
        gone: list[str] = []
        match step:
            case "put":
                expected.pop(name, None)
                expected[name] = KeptEntry(name, amount, now_s)
                gone = kept.put(name, amount, now_s).names
            case "use":
                kept.use(name, now_s)
                if name in expected:
                    expected[name] = expected.pop(name)._replace(used_s=now_s)
            case "remove":
                kept.remove(name)
                expected.pop(name, None)
            case _:
                now_s += amount
                gone = kept.drop_old(now_s).names
        left = [name for name in expected if name not in gone]
        assert gone == list(expected)[: len(gone)], "the least recently used go first"
        expected = {name: expected[name] for name in left}
        assert (len(kept), kept.total_bytes) == (len(left), sum(entry.size_bytes for entry in expected.values()))
        assert kept.total_bytes <= LIMITS.max_bytes and len(kept) <= LIMITS.max_count
        if step in ("put", "wait"):
            assert all(now_s - entry.used_s <= LIMITS.ttl_s for entry in expected.values())


def test_entries_taken_from_elsewhere_are_ordered_by_their_use() -> None:
    kept = Retention(StoreLimits(max_count=2))
    kept.replace_all([KeptEntry("c", 1, 30), KeptEntry("a", 1, 10), KeptEntry("b", 1, 20)])
    assert kept.drop_old(40).crowded_out == ["a"]
