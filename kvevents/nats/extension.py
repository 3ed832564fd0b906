"""Register NATS as a transport of KV events."""

from kvmesh.kvevents.nats.access import SCHEMES, USAGE
from kvmesh.kvevents.nats.links import NatsLinks
from kvmesh.kvevents.transport import EventTransport, Publisher
from kvmesh.protocol.ids import WorkerId


def open_publisher(url: str, worker_id: WorkerId, dp_rank: int) -> Publisher:
    from kvmesh.kvevents.nats.transport import NatsKvEventPublisher  # needs the package nats, so imported here

    return NatsKvEventPublisher(url, worker_id, dp_rank=dp_rank)


EXTENSION = EventTransport("nats", SCHEMES, USAGE, NatsLinks, open_publisher)
