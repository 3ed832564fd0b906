"""Connections and memory that are short are taken from those that hold the most."""

from kvmesh.mesh.room import Room, Seat, who_leaves


def full_room(holdings: dict[str, list[int]], limit_bytes: int, peer_limit_bytes: int) -> Room[str]:
    """Return a room in which each peer's holders hold so much, since 0 s. The holder n of peer a is an."""
    room: Room[str] = Room(limit_bytes, peer_limit_bytes)
    for peer, sizes in holdings.items():
        for number, size in enumerate(sizes):
            room.hold(f"{peer}{number}", peer, size, 0.0, anew=False)
    return room


def test_within_the_limits_nobody_gives_way() -> None:
    assert full_room({"a": [50], "b": [50]}, 100, 60).who_gives_way("b", 1.0) is None


def test_the_peer_with_the_most_gives_way_first() -> None:
    room = full_room({"hoarder": [20, 20, 20], "honest": [50]}, 100, 100)
    assert room.who_gives_way("honest", 1.0) == "hoarder0"


def test_a_peer_above_its_own_limit_gives_way_itself() -> None:
    room = full_room({"a": [10], "b": [30, 31]}, 1000, 60)
    assert room.who_gives_way("b", 1.0) == "b1"
    assert room.who_gives_way("a", 1.0) is None


def test_a_quick_large_frame_outlives_a_slow_small_one() -> None:
    room = full_room({"a": [20]}, 1000, 60)
    room.hold("quick", "a", 45, 9.99, anew=False)
    assert room.who_gives_way("a", 10.0) == "a0"


def test_released_bytes_leave_room_for_others() -> None:
    room = full_room({"a": [60], "b": [60]}, 100, 100)
    room.release("a0")
    assert (room.who_gives_way("b", 1.0), room.held_bytes, len(room)) == (None, 60, 1)
    room.hold("b0", "b", 0, 2.0, anew=True)
    assert (room.held_bytes, len(room)) == (0, 0)


def test_only_what_is_held_for_too_long_is_overdue() -> None:
    room = full_room({"a": [10, 10]}, 100, 100)
    room.hold("a1", "a", 12, 5.0, anew=True)
    assert room.overdue(8.0, 7.0) == ["a0"]


def seat(
    name: str, peer: str = "a", *, busy: bool = False, greeted: bool = True, idle_since_s: float = 0.0
) -> Seat[str]:
    return Seat(name, peer, busy, greeted, idle_since_s)


def test_the_longest_idle_connection_leaves_for_a_new_one() -> None:
    seats = [seat("x", idle_since_s=5), seat("y", idle_since_s=3), newest := seat("new", idle_since_s=9)]
    assert who_leaves(seats, newest, 2, 9) == "y"
    assert who_leaves(seats, newest, 3, 9) is None


def test_a_connection_without_a_hello_leaves_first() -> None:
    seats = [seat("old"), seat("stranger", greeted=False, idle_since_s=8), newest := seat("new", greeted=False)]
    assert who_leaves(seats, newest, 2, 9) == "stranger"


def test_a_peer_with_few_connections_keeps_them() -> None:
    seats = [seat("b1", "b"), *(seat(f"a{n}", idle_since_s=n) for n in range(3)), newest := seat("b2", "b")]
    assert who_leaves(seats, newest, 4, 9) == "a0"


def test_where_all_are_busy_the_newest_leaves() -> None:
    seats = [seat("x", busy=True), seat("y", busy=True), newest := seat("new")]
    assert who_leaves(seats, newest, 2, 9) == "new"
    assert who_leaves(seats, newest, 9, 2) == "new"
