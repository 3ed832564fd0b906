"""The recorder (deploy/record_sglang_events.py) takes all that a server published, and reports a silent server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.kvevents.formats import decode_payload
from kvmesh.protocol.errors import PeerLostError
from kvmesh.protocol.events import Stored
from tests.support.fake_sglang import EventSockets, event_sockets
from tests.support.sglang_recording import recorder
from tests.support.toy_model import PagedCache


@pytest_asyncio.fixture
async def sockets(tmp_path: Path) -> AsyncIterator[EventSockets]:
    with event_sockets(tmp_path) as published:
        yield published


async def test_all_batches_are_taken_in_order_and_readable(sockets: EventSockets, tmp_path: Path) -> None:
    cache = PagedCache(num_blocks=100, block_size=4)
    for first in range(5):
        cache.store(list(range(first, first + 20)), None, None)
        sockets.publish(cache.take_news(), 4)
    frames = await recorder().fetch(f"ipc://{tmp_path}/replay")
    assert [int.from_bytes(seq, "big") for _, seq, _ in frames] == [0, 1, 2, 3, 4]
    events = [event for _, _, payload in frames for event in decode_payload(payload).events]
    stored = [name for event in events if isinstance(event, Stored) for name in event.hashes]
    assert len(stored) == 25
    assert all(0 <= name < 2**64 for name in stored), "SGLang's are signed"


async def test_a_socket_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder(), "PATIENCE_S", 0.05)
    with pytest.raises(PeerLostError, match="does not answer"):
        await recorder().fetch(f"ipc://{tmp_path}/nobody")
