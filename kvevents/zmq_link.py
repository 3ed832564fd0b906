"""Follow one publisher over ZMQ: a SUB socket for live batches, a DEALER for each replay."""

import asyncio

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvmesh.kvevents.door import KeyPair, show_key
from kvmesh.kvevents.formats import MAX_PAYLOAD_BYTES
from kvmesh.kvevents.publisher import END_OF_REPLAY
from kvmesh.kvevents.sockets import Frames, LoopSocket, open_socket
from kvmesh.kvevents.transport import KvSource, Listener, TakeBatch
from kvmesh.protocol.card_checks import is_event_key
from kvmesh.protocol.errors import ConfigError

_QUEUED_BATCHES = 4096  # of one worker, kept while the loop is busy
_QUEUED_REPLAYS = 256
_SEQ_BYTES = 8


class ZmqLink:
    """Implements kvmesh.kvevents.transport.EventLink."""

    numbers_restart = True
    is_up = True  # ZMQ connects again by itself, and a worker that is away leaves the mesh

    def __init__(self, source: KvSource, listener: Listener, keys: KeyPair | None = None) -> None:
        """Follow a source; `keys` are the follower's own. Raises ConfigError, also for open events where keys count."""
        _check_keys(source, keys)
        self._keys = keys
        self._source = source
        self._listener = listener
        self._was_cut = False
        self.can_replay = bool(source.replay_endpoint)
        if self.can_replay:
            self._dealer().close()  # finds a bad address now
        sub = open_socket(zmq.SUB, receive=_QUEUED_BATCHES, max_bytes=MAX_PAYLOAD_BYTES)
        watch = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        sub.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        try:
            self._connect(sub, source.endpoint)
        except ConfigError:
            watch.close()
            raise
        self._watched = sub
        self._watch = LoopSocket(watch, self._on_connection)
        self._sub = LoopSocket(sub, self._on_batch)

    async def replay(self, start: int, take: TakeBatch, silence_s: float) -> None:
        replay = _ReplayReader(take, self._listener)
        dealer = LoopSocket(self._dealer(), replay.on_message)
        try:
            dealer.send((b"", start.to_bytes(_SEQ_BYTES, "big")))
            while not replay.ended:
                replay.heard.clear()
                async with asyncio.timeout(silence_s):
                    await replay.heard.wait()
        finally:
            dealer.close()

    def close(self) -> None:
        if not self._sub.closed:  # an event that nobody takes would block the thread of all sockets
            self._watched.disable_monitor()
        self._watch.close()
        self._sub.close()

    def _dealer(self) -> zmq.Socket[bytes]:
        socket = open_socket(zmq.DEALER, receive=_QUEUED_REPLAYS, max_bytes=MAX_PAYLOAD_BYTES)
        return self._connect(socket, self._source.replay_endpoint)

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
        if self._keys is not None:
            show_key(socket, self._keys, self._source.key)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            hint = "give it as tcp://host:port"
            raise ConfigError(f"cannot follow KV events at {endpoint!r}: {error}", hint=hint) from error
        return socket

    def _on_batch(self, frames: Frames) -> None:
        """Take a message `[topic, seq, payload]`."""
        if len(frames) != 3 or len(frames[1]) != _SEQ_BYTES:
            self._listener.on_unreadable(f"a message of {len(frames)} frames is no batch")
            return
        self._listener.on_live(int.from_bytes(frames[1], "big"), frames[2])

    def _on_connection(self, frames: Frames) -> None:
        """Take an event of the monitor: ZMQ reconnects by itself, and only the monitor shows it."""
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_DISCONNECTED:
            self._sub.read_all()  # messages that came before
            self._was_cut = True
            self._listener.on_disconnected()
        elif self._was_cut:
            self._was_cut = False
            self._listener.on_reconnected()


class _ReplayReader:
    def __init__(self, take: TakeBatch, listener: Listener) -> None:
        self._take = take
        self._listener = listener
        self.heard = asyncio.Event()
        self.ended = False

    def on_message(self, frames: Frames) -> None:
        """Take `[b"", topic, seq, payload]`, without the topic from older engines; the end has seq -1."""
        self.heard.set()
        if self.ended:
            return
        if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
            self._listener.on_unreadable(f"a replay of {len(frames)} frames is no batch")
            return
        seq, payload = frames[-2:]
        self.ended = seq == END_OF_REPLAY or not self._take(int.from_bytes(seq, "big"), payload)


def _check_keys(source: KvSource, keys: KeyPair | None) -> None:
    if source.key and not is_event_key(source.key):
        raise ConfigError("the key of the KV events is no key", hint="a key is 40 characters of Z85")
    if (keys is None) == bool(source.key):
        found, expected = ("closed", "open") if source.key else ("open", "closed")
        hint = "start all services with --mesh-tls, or none"
        raise ConfigError(f"its KV events are {found}, expected were {expected} ones", hint=hint)
