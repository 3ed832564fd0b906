"""The picture of the mesh: what viewers are sent first, and what afterwards."""

import msgspec
from msgspec.structs import replace

from kvmesh.frontend.live.fold import ShownMesh, read_message
from kvmesh.frontend.live.picture import (
    MAX_DECISIONS,
    MAX_EVENTS,
    MAX_STREAMS,
    MAX_WORKERS,
    MeshTotals,
    Picture,
    Sighting,
    WorkerLook,
)
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import Role
from tests.frontend import tiny


def picture(*names: str) -> Picture:
    found = Picture({"frontend": "f"})
    for name in names:
        found.join(tiny.card(name, Role.DECODE), 1.0)
    return found


def look(n: int, requests: int = 0, state: str = "ok") -> WorkerLook:
    return WorkerLook(n, state, requests, 0, 0, 0)


def kinds(found: Picture) -> list[tuple[str, str]]:
    return [(event["kind"], event["who"]) for event in found.whole(2.0)["events"]]


def test_only_workers_whose_load_has_changed_are_sent_again() -> None:
    found = picture("a", "b")
    first = found.advance(Sighting(at_s=1.0, looks=[look(1), look(2)]))
    second = found.advance(Sighting(at_s=1.5, looks=[look(1), look(2, requests=3)]))
    assert [worker["name"] for worker in first["workers"]] == ["a", "b"]
    assert second["loads"] == [look(2, requests=3)]
    assert "workers" not in second and "streams" not in second


def test_what_does_not_change_is_not_sent() -> None:
    found = picture("a")
    found.advance(Sighting(at_s=1.0, looks=[look(1)]))
    assert set(found.advance(Sighting(at_s=1.5, looks=[look(1)]))) == {"t"}


def test_the_messages_give_a_viewer_what_the_picture_is() -> None:
    found, late, early = picture("a", "b"), ShownMesh(), ShownMesh()

    def tell(kind: str, message: object, *viewers: ShownMesh) -> None:
        for viewer in viewers:
            viewer.take(kind, read_message(msgspec.json.encode(message)))

    tell("whole", found.whole(1.0), early)
    for number in range(30):
        if number == 9:
            found.join(tiny.card("c", Role.PREFILL), 5.0)
        if number == 12:
            found.leave(WorkerId("a"), 6.0, "it died")
        row = {"id": f"r{number % 7}", "model": "m", "at": 1.0, "isl": 3, "osl": number, "most": 99, "phase": "decode"}
        seen = Sighting(at_s=number / 2, looks=[look(2, number % 3)], streams=[row], totals=MeshTotals(inflight=number))
        tell("change", found.advance(seen), early)
    tell("whole", found.whole(20.0), late)
    assert early.workers == late.workers and {w.name for w in late.workers.values()} == {"b", "c"}
    assert early.streams == late.streams
    assert early.events == late.events
    assert early.totals == late.totals


def test_a_worker_that_comes_back_is_told_apart_from_a_new_one() -> None:
    found = picture("a")
    found.leave(WorkerId("a"), 2.0, "its lease has ended")
    found.join(replace(tiny.card("a-2", Role.DECODE), name="a"), 3.0)
    assert kinds(found) == [("joined", "a"), ("died", "a"), ("returned", "a")]


def test_a_successor_may_come_before_its_worker_is_lost() -> None:
    found = picture("a")
    found.join(replace(tiny.card("a-2", Role.DECODE), name="a"), 3.0)
    assert kinds(found)[-1] == ("returned", "a")


def test_all_lists_have_limits() -> None:
    found = picture()
    for number in range(MAX_WORKERS + 10):
        found.join(tiny.card(f"w{number}", Role.DECODE), 1.0)
    rows = [{"id": f"r{number}", "outcome": "ok"} for number in range(3 * MAX_STREAMS)]
    decisions = [{"id": str(number)} for number in range(3 * MAX_DECISIONS)]
    found.advance(Sighting(at_s=1.0, streams=rows, decisions=decisions))
    whole = found.whole(1.0)
    assert len(whole["workers"]) == MAX_WORKERS
    assert len(whole["streams"]) == MAX_STREAMS
    assert len(whole["decisions"]) == MAX_DECISIONS
    assert len(whole["events"]) == MAX_EVENTS


def test_requests_in_flight_are_kept_before_those_that_have_ended() -> None:
    found = picture()
    rows = [{"id": f"r{number}", "outcome": "" if number < 5 else "ok"} for number in range(2 * MAX_STREAMS)]
    found.advance(Sighting(at_s=1.0, streams=rows))
    assert {"r0", "r1", "r2", "r3", "r4"} <= {row["id"] for row in found.whole(1.0)["streams"]}


def test_names_from_the_mesh_are_cut_and_can_be_written() -> None:
    found = picture()
    found.join(replace(tiny.card("a", Role.DECODE), name="\ud800" + "x" * 10_000), 1.0)
    name = found.whole(1.0)["workers"][0]["name"]
    assert len(name) <= 80
    msgspec.json.encode(found.whole(1.0))
