"""Images of weights: one writer, others wait, a dead writer is followed, the least recently used image makes room."""

from kvmesh.workers.memory.shelf import (
    Cut,
    Finished,
    Free,
    HandOver,
    ImageShelf,
    LetWrite,
    Looked,
    MakeSpace,
    Refuse,
    Seal,
    Sealed,
    ShelfEffect,
    ShelfEvent,
    SpaceWanted,
    UserLeft,
    Wanted,
)

A, B, C = (bytes([number]) * 32 for number in range(3))


def shelf(limit_bytes: int = 100) -> ImageShelf:
    return ImageShelf(limit_bytes, writer_deadline_s=60.0)


def play(shelf: ImageShelf, *events: ShelfEvent, now_s: float = 0.0) -> list[ShelfEffect]:
    """Return what the last event leads to."""
    effects: list[ShelfEffect] = []
    for event in events:
        effects = shelf.on_event(event, now_s)
    return effects


def written(shelf: ImageShelf, user: int, key: bytes, num_bytes: int = 40, now_s: float = 0.0) -> list[ShelfEffect]:
    """Let a user write an image."""
    return play(shelf, Wanted(user, key, "m"), SpaceWanted(user, num_bytes), Finished(user), Sealed(key), now_s=now_s)


def test_the_first_writes_and_gets_the_sealed_image() -> None:
    one = shelf()
    assert play(one, Wanted(1, A, "m")) == [LetWrite(1)]
    assert play(one, SpaceWanted(1, 40)) == [MakeSpace(1, A, 40)]
    assert play(one, Finished(1)) == [Seal(A)]
    assert play(one, Sealed(A)) == [HandOver(1, A, 40)]
    assert play(one, Wanted(2, A, "m")) == [HandOver(2, A, 40)]
    assert [(image.state, image.users) for image in one.held()] == [("ready", 2)]


def test_others_wait_for_the_writer() -> None:
    one = shelf()
    assert play(one, Wanted(1, A, "m"), Wanted(2, A, "m")) == []
    assert one.held()[0].waiting == 1
    assert play(one, SpaceWanted(1, 40), Finished(1), Sealed(A)) == [HandOver(1, A, 40), HandOver(2, A, 40)]


def test_a_writer_that_dies_is_followed_by_one_that_waits() -> None:
    one = shelf()
    play(one, Wanted(1, A, "m"), Wanted(2, A, "m"), Wanted(3, A, "m"), SpaceWanted(1, 40))
    assert play(one, UserLeft(1)) == [Free(A, "abandoned"), LetWrite(2)]
    assert play(one, SpaceWanted(2, 50)) == [MakeSpace(2, A, 50)]
    assert play(one, Finished(2), Sealed(A)) == [HandOver(2, A, 50), HandOver(3, A, 50)]


def test_a_writer_that_dies_alone_leaves_nothing() -> None:
    one = shelf()
    assert play(one, Wanted(1, A, "m"), SpaceWanted(1, 40), UserLeft(1)) == [Free(A, "abandoned")]
    assert (one.held(), one.used_bytes) == ([], 0)


def test_one_that_waits_may_leave() -> None:
    one = shelf()
    play(one, Wanted(1, A, "m"), Wanted(2, A, "m"), UserLeft(2), SpaceWanted(1, 40), Finished(1))
    assert play(one, Sealed(A)) == [HandOver(1, A, 40)]


def test_a_writer_that_takes_too_long_is_cut_off() -> None:
    one = shelf()
    play(one, Wanted(1, A, "m"))
    assert play(one, Looked(), now_s=60.0) == []
    assert play(one, Looked(), now_s=60.1) == [Cut(1, "it took too long to write")]


def test_the_least_recently_used_image_without_users_makes_room() -> None:
    one = shelf()
    written(one, 1, A, now_s=1.0)
    written(one, 2, B, now_s=2.0)
    play(one, UserLeft(2), now_s=3.0)
    play(one, UserLeft(1), now_s=4.0)
    assert play(one, Wanted(3, C, "m"), SpaceWanted(3, 40), now_s=5.0) == [Free(B, "evicted"), MakeSpace(3, C, 40)]


def test_an_image_in_use_is_never_evicted() -> None:
    one = shelf()
    written(one, 1, A, 80)
    assert play(one, Wanted(2, B, "m"), Wanted(3, B, "m"), SpaceWanted(2, 40)) == [
        Refuse(2, "40 bytes are wanted, 80 of 100 are in use"),
        Refuse(3, "40 bytes are wanted, 80 of 100 are in use"),
    ]
    assert one.used_bytes == 80
    assert play(one, Wanted(2, B, "m")) == [LetWrite(2)], "a user that was refused may ask again"


def test_an_unused_image_stays_until_its_room_is_needed() -> None:
    one = shelf()
    written(one, 1, A)
    play(one, UserLeft(1))
    assert play(one, Wanted(2, A, "m")) == [HandOver(2, A, 40)]


def test_an_image_that_cannot_be_sealed_is_given_to_nobody() -> None:
    one = shelf()
    play(one, Wanted(1, A, "m"), Wanted(2, A, "m"), SpaceWanted(1, 40), Finished(1))
    assert play(one, Sealed(A, "still mapped")) == [
        Free(A, "abandoned"),
        Refuse(1, "still mapped"),
        Refuse(2, "still mapped"),
    ]


def test_who_breaks_the_rules_is_cut_off() -> None:
    one = shelf()
    assert play(one, SpaceWanted(1, 5)) == [Cut(1, "it wants space for what it does not write")]
    assert play(one, Finished(1)) == [Cut(1, "it finished what it did not write")]
    play(one, Wanted(2, A, "m"))
    assert play(one, Wanted(2, B, "m")) == [Cut(2, "it wants a second image")]
    play(one, SpaceWanted(2, 5))
    assert play(one, SpaceWanted(2, 5)) == [Cut(2, "it wants space for what it does not write")]
