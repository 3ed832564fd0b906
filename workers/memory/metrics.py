"""All metrics of the memory service."""

from collections import Counter
from collections.abc import Iterator

from kvmesh.mesh.measure import AtScrape, Reading, locked_counter
from kvmesh.workers.memory.shelf import ImageShelf

_P = "kvmesh_memory_"
ANSWERS = locked_counter(_P + "answers_total")  # mapped, write, refused, cut
FREED = locked_counter(_P + "freed_images_total")  # abandoned, evicted
HELD = AtScrape([_P + name for name in ("images", "image_bytes", "limit_bytes", "users", "waiting")])


def read_shelf(shelf: ImageShelf) -> Iterator[Reading]:
    held = shelf.held()
    images, num_bytes = Counter[str](), Counter[str]()
    for image in held:
        images[image.state] += 1
        num_bytes[image.state] += image.num_bytes
    for state in ("writing", "ready"):
        yield Reading(_P + "images", (state,), images[state])
        yield Reading(_P + "image_bytes", (state,), num_bytes[state])
    yield Reading(_P + "limit_bytes", (), shelf.limit_bytes)
    yield Reading(_P + "users", (), sum([image.users for image in held]))
    yield Reading(_P + "waiting", (), sum([image.waiting for image in held]))
