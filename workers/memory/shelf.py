"""Decide who writes an image of weights, who waits, who maps it and which one makes room. Pure; time is in the events.

An image is identified by its key, a fingerprint of everything that its bytes depend on. The first worker that wants a
key becomes its writer; others wait for it. A writer that dies, or takes too long, is followed by the next one that
waits. A complete image is kept while somebody uses it, and afterwards until its room is needed: the least recently used
one goes first.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvmesh.workers.memory.messages import MAX_IMAGES, Held

UserId = int  # a connection
Outcome = Literal["mapped", "refused", "abandoned", "evicted"]


# --- what happens


@dataclass(frozen=True, slots=True)
class Wanted:
    user: UserId
    key: bytes
    label: str


@dataclass(frozen=True, slots=True)
class SpaceWanted:
    user: UserId
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The writer says that the image is complete."""

    user: UserId


@dataclass(frozen=True, slots=True)
class Sealed:
    """Nobody can write to the image any more; `problem` says why that failed."""

    key: bytes
    problem: str = ""


@dataclass(frozen=True, slots=True)
class UserLeft:
    user: UserId


@dataclass(frozen=True, slots=True)
class Looked:
    """Time has passed."""


ShelfEvent = Wanted | SpaceWanted | Finished | Sealed | UserLeft | Looked


# --- what is to be done


@dataclass(frozen=True, slots=True)
class LetWrite:
    user: UserId


@dataclass(frozen=True, slots=True)
class MakeSpace:
    """Make memory for a key and hand it to its writer."""

    user: UserId
    key: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Seal:
    key: bytes


@dataclass(frozen=True, slots=True)
class HandOver:
    user: UserId
    key: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    user: UserId
    reason: str


@dataclass(frozen=True, slots=True)
class Free:
    key: bytes
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Cut:
    """End the connection: the user broke the rules, or took too long."""

    user: UserId
    reason: str


ShelfEffect = LetWrite | MakeSpace | Seal | HandOver | Refuse | Free | Cut


@dataclass(slots=True)
class _Image:
    key: bytes
    label: str
    writer: UserId | None  # None: the image is ready
    since_s: float  # when its writer began, or somebody last used it
    num_bytes: int = 0  # 0: its writer does not know yet
    users: set[UserId] = field(default_factory=set)
    waiting: list[UserId] = field(default_factory=list)


class ImageShelf:
    """Tracks images, their users and those who wait. Every user has one image at most."""

    def __init__(self, limit_bytes: int, writer_deadline_s: float) -> None:
        self.limit_bytes = limit_bytes
        self._writer_deadline_s = writer_deadline_s
        self._images: dict[bytes, _Image] = {}
        self._of_user: dict[UserId, bytes] = {}

    @property
    def used_bytes(self) -> int:
        return sum([image.num_bytes for image in list(self._images.values())])

    def held(self) -> list[Held]:
        return [
            Held(
                label=image.label,
                state="ready" if image.writer is None else "writing",
                num_bytes=image.num_bytes,
                users=len(image.users),
                waiting=len(image.waiting),
            )
            for image in list(self._images.values())
        ]

    def on_event(self, event: ShelfEvent, now_s: float) -> list[ShelfEffect]:
        match event:
            case Wanted():
                return list(self._wanted(event, now_s))
            case SpaceWanted(user, num_bytes):
                return list(self._space_wanted(user, num_bytes))
            case Finished(user):
                image = self._written_by(user)
                return [Cut(user, "it finished what it did not write")] if image is None else [Seal(image.key)]
            case Sealed(key, problem):
                return list(self._sealed(key, problem, now_s))
            case UserLeft(user):
                return list(self._left(user, now_s))
            case Looked():
                late = [image for image in self._images.values() if image.writer is not None]
                late = [image for image in late if now_s - image.since_s > self._writer_deadline_s]
                return [Cut(image.writer, "it took too long to write") for image in late if image.writer is not None]

    def _wanted(self, event: Wanted, now_s: float) -> Iterator[ShelfEffect]:
        if event.user in self._of_user:
            yield Cut(event.user, "it wants a second image")
            return
        image = self._images.get(event.key)
        if image is None and len(self._images) >= MAX_IMAGES and not (yield from self._evict_one()):
            yield Refuse(event.user, f"{MAX_IMAGES} images are in use")
            return
        self._of_user[event.user] = event.key
        if image is None:
            self._images[event.key] = _Image(event.key, event.label, event.user, now_s)
            yield LetWrite(event.user)
        elif image.writer is None:
            yield self._share(image, event.user, now_s)
        else:
            image.waiting.append(event.user)

    def _space_wanted(self, user: UserId, num_bytes: int) -> Iterator[ShelfEffect]:
        image = self._written_by(user)
        if image is None or image.num_bytes:
            yield Cut(user, "it wants space for what it does not write")
            return
        while self.used_bytes + num_bytes > self.limit_bytes:
            if not (yield from self._evict_one()):
                reason = f"{num_bytes} bytes are wanted, {self.used_bytes} of {self.limit_bytes} are in use"
                yield from self._refuse_all(image, reason)
                return
        image.num_bytes = num_bytes
        yield MakeSpace(user, image.key, num_bytes)

    def _sealed(self, key: bytes, problem: str, now_s: float) -> Iterator[ShelfEffect]:
        image = self._images.get(key)
        if image is None or image.writer is None:
            return
        if problem:
            if image.num_bytes:
                yield Free(key, "abandoned")
            yield from self._refuse_all(image, problem)
            return
        waiting, image.waiting = [image.writer, *image.waiting], []
        image.writer = None
        for user in waiting:
            yield self._share(image, user, now_s)

    def _left(self, user: UserId, now_s: float) -> Iterator[ShelfEffect]:
        image = self._images.get(self._of_user.pop(user, b""))
        if image is None:
            return
        if image.writer == user:
            yield from self._without_writer(image, now_s)
        elif user in image.users:
            image.users.discard(user)
            image.since_s = now_s
        else:
            image.waiting.remove(user)

    def _without_writer(self, image: _Image, now_s: float) -> Iterator[ShelfEffect]:
        """Drop what the writer left behind; the next one that waits begins anew."""
        if image.num_bytes:
            yield Free(image.key, "abandoned")
        if not image.waiting:
            del self._images[image.key]
            return
        image.writer, image.num_bytes, image.since_s = image.waiting.pop(0), 0, now_s
        yield LetWrite(image.writer)

    def _share(self, image: _Image, user: UserId, now_s: float) -> ShelfEffect:
        image.users.add(user)
        image.since_s = now_s
        return HandOver(user, image.key, image.num_bytes)

    def _refuse_all(self, image: _Image, reason: str) -> Iterator[ShelfEffect]:
        """Tell writer and waiters to load by themselves: a next writer would meet the same problem."""
        del self._images[image.key]
        for user in (*(() if image.writer is None else (image.writer,)), *image.waiting):
            del self._of_user[user]
            yield Refuse(user, reason)

    def _evict_one(self) -> Generator[ShelfEffect, None, bool]:
        """Free the image that has been unused for longest. Return whether there was one."""
        unused = [image for image in self._images.values() if image.writer is None and not image.users]
        if not unused:
            return False
        oldest = min(unused, key=lambda image: image.since_s)
        del self._images[oldest.key]
        yield Free(oldest.key, "evicted")
        return True

    def _written_by(self, user: UserId) -> _Image | None:
        image = self._images.get(self._of_user.get(user, b""))
        return image if image is not None and image.writer == user else None
