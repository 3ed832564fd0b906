"""TensorRT-LLM's polls are read as KV events and statistics."""

import json
from typing import Any

import pytest

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.events import Removed, Stored
from kvmesh.workers.engines.trtllm.events import News, RankStats, TrtllmEventReader, read_stats

BIG = 9_622_824_665_191_806_685  # > 2**63


def event(data: dict[str, Any], event_id: int | None = None, **fields: object) -> dict[str, Any]:
    return {"event_id": event_id, "data": data} | fields


def stored(*blocks: tuple[int, list[int]], parent: int | None = None, **fields: object) -> dict[str, Any]:
    return {
        "type": "stored",
        "parent_hash": parent,
        "blocks": [
            {"block_hash": name, "tokens": [{"token_id": t, "token_extra_id": 0} for t in tokens], "priority": 35}
            | fields
            for name, tokens in blocks
        ],
    }


def read(*events: object) -> list[News]:
    reader = TrtllmEventReader(2)
    return [reader.read(one) for one in events]


def test_blocks_that_follow_each_other_are_stored_with_their_tokens() -> None:
    [news] = read(event(stored((BIG, [1, 2]), (7, [3, 4]), parent=5)))
    assert news.events == (Stored((BIG, 7), 5, (1, 2, 3, 4), 2),)  # type: ignore[arg-type]


def test_a_block_that_is_not_full_ends_what_is_told() -> None:
    [news, nothing] = read(event(stored((6, [1, 2]), (7, [3]), (8, [4, 5]))), event(stored((7, [3]))))
    assert news.events == (Stored((6,), None, (1, 2), 2),)  # type: ignore[arg-type]
    assert nothing.events == ()


def test_an_image_block_is_not_named_by_tokens() -> None:
    image = stored((6, [1, 2]))
    image["blocks"][0]["tokens"][1]["token_extra_id"] = 99
    assert [news.events for news in read(event(image), event(stored((6, [1, 2]), mm_keys=[{"hash": "x"}])))] == [(), ()]


def test_a_tenants_salt_goes_along() -> None:
    [news] = read(event(stored((6, [1, 2]), cache_salt="a")))
    [told] = news.events
    assert isinstance(told, Stored)
    assert told.salt == "a"


def test_removals_are_told_and_other_kinds_say_nothing() -> None:
    removed, created, updated, unknown = read(
        event({"type": "removed", "block_hashes": [BIG, 7]}),
        event({"type": "created", "num_blocks_per_cache_level": [2231, 0]}),
        event({"type": "updated", "block_hash": 7, "cache_level": {"old_value": 0, "new_value": 1}}),
        event({"type": "moved"}),
    )
    assert removed.events == (Removed((BIG, 7)),)  # type: ignore[arg-type]
    assert created.events == updated.events == unknown.events == ()


def test_of_several_window_sizes_the_largest_counts() -> None:
    reader = TrtllmEventReader(2)
    for size, blocks in ((512, 900), (4096, 100)):
        reader.read(event({"type": "created", "num_blocks_per_cache_level": [blocks, 0]}, window_size=size))
    assert reader.gpu_blocks == 100
    assert reader.read(event(stored((6, [1, 2])), window_size=512)).events == ()
    assert reader.read(event({"type": "removed", "block_hashes": [6]}, window_size=512)).events == ()
    assert reader.read(event(stored((6, [1, 2])), window_size=4096)).events


def test_a_missing_number_means_lost_events_on_that_rank() -> None:
    news = read(
        event(stored((6, [1, 2])), 3),
        event(stored((7, [1, 2])), 4),
        event(stored((8, [1, 2])), 9, attention_dp_rank=1),
        event(stored((9, [1, 2])), 6),
        event(stored((9, [1, 2])), 10, attention_dp_rank=1),
    )
    assert [(one.rank, one.lost) for one in news] == [(0, False), (0, False), (1, False), (0, True), (1, False)]


def test_json_of_older_releases_is_read_too() -> None:
    assert read(json.dumps(event(stored((6, [1, 2])))))[0].events


@pytest.mark.parametrize(
    "bad", [None, 7, "{", b"\xff", {}, {"data": {}}, {"data": {"type": "stored", "blocks": [{"block_hash": "x"}]}}]
)
def test_what_is_no_event_is_refused(bad: object) -> None:
    with pytest.raises(WireError):
        read(bad)


def test_a_block_of_more_tokens_than_agreed_is_refused() -> None:
    with pytest.raises(WireError, match="3 tokens"):
        read(event(stored((6, [1, 2, 3]))))


def test_statistics_tell_the_load_of_a_rank() -> None:
    told = {
        "iter": 4,
        "numActiveRequests": 3,
        "numQueuedRequests": 2,
        "kvCacheStats": {"usedNumBlocks": 40, "freeNumBlocks": 60, "maxNumBlocks": 100},
    }
    assert read_stats(told) == RankStats(rank=0, active=3, waiting=2, used_blocks=40, total_blocks=100)
    assert read_stats(json.dumps(told | {"attentionDpRank": 1})) == RankStats(1, 3, 2, 40, 100)
    assert read_stats({"iter": 1}) is None


@pytest.mark.parametrize("bad", ["{", 7, []])
def test_what_is_no_statistics_is_refused(bad: object) -> None:
    with pytest.raises(WireError):
        read_stats(bad)
