"""Discovery through etcd, for several hosts.

Two OS threads do the work, so that an overloaded event loop holds up neither a lease nor a watch. One keeps the lease
and writes our keys; it owns the connection. The other one reads the watch of that connection. Whatever goes wrong, on
either side, ends the connection. The next one, to the next endpoint, asks for the lease, writes our keys if the lease
is gone, lists all keys and watches from the revision of the list. Meanwhile watchers keep what they last saw.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import grpc
from aetcd import rpc

from kvmesh.mesh.discovery.board import Board, Change
from kvmesh.mesh.discovery.place import Contact, SearchPlace
from kvmesh.mesh.discovery.store import Registration
from kvmesh.mesh.discovery.view import KeyView
from kvmesh.protocol.errors import ConfigError, MeshError, UnreachableError

log = logging.getLogger(__name__)

DEFAULT_PREFIX = "kvmesh"
DEFAULT_LEASE_S = 10
LEAST_LEASE_S = 2
DEFAULT_PORT = 2379
CALL_TIMEOUT_S = 2.0
START_TIMEOUT_S = 10.0  # for the first answer of any endpoint
# etcd computes a slow hash for each login. While the services of a mesh start, they wait for each other.
LOGIN_TIMEOUT_S = 10.0
LOGIN_STARTS = 6  # times START_TIMEOUT_S, with a password
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0  # between connections that fail
TICK_S = 0.5
# etcd closes connections that ping more often than every 5 s.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.max_receive_message_length", 64 << 20),
)
USAGE = "etcd:<host:port,...>/<prefix>?lease-s=10&ca=FILE&cert=FILE&key=FILE&user=NAME&password-file=FILE"
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT}


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    endpoints: tuple[str, ...]
    prefix: str  # without slashes at its ends
    lease_s: int = DEFAULT_LEASE_S
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    has_tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)

    def etcd_key(self, key: str) -> bytes:
        return f"/{self.prefix}/{key}".encode()

    def shown(self) -> str:
        """Return endpoints and prefix. What stands before an @ could be a password, put there by mistake."""
        return f"etcd:{','.join(endpoint.rpartition('@')[2] for endpoint in self.endpoints)}/{self.prefix}"


def read_settings(rest: str) -> EtcdSettings:
    """Read what follows `etcd:`. Raises ConfigError."""
    place, _, query = rest.partition("?")
    hosts, _, prefix = place.removeprefix("//").partition("/")
    endpoints = tuple(with_port(host) for host in hosts.split(",") if host)
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not endpoints:
        raise ConfigError(f"no endpoint in etcd:{rest}", hint=USAGE)
    if unknown := sorted(options.keys() - {"lease-s", "tls", "ca", "cert", "key", "user", "password-file"}):
        raise ConfigError(f"unknown option of etcd: {', '.join(unknown)}", hint=USAGE)
    lease = options.get("lease-s", str(DEFAULT_LEASE_S))
    if not lease.isdigit() or int(lease) < LEAST_LEASE_S:
        raise ConfigError(f"lease-s={lease} of etcd", hint=f"whole seconds, at least {LEAST_LEASE_S}")
    if ("cert" in options) != ("key" in options):
        raise ConfigError("etcd has only one of cert and key", hint="a client certificate takes both")
    if ("user" in options) != ("password-file" in options):
        raise ConfigError("etcd has only one of user and password-file", hint="set both, or none")
    return EtcdSettings(
        endpoints=endpoints,
        prefix=prefix.strip("/") or DEFAULT_PREFIX,
        lease_s=int(lease),
        ca=read_file(options, "ca"),
        cert=read_file(options, "cert"),
        key=read_file(options, "key"),
        has_tls=any(name in options for name in ("tls", "ca", "cert")),
        user=options.get("user", ""),
        password=(read_file(options, "password-file") or b"").decode().strip(),
    )


def with_port(host: str) -> str:
    return host if ":" in host.rpartition("]")[2] else f"{host}:{DEFAULT_PORT}"


def read_file(options: dict[str, str], name: str) -> bytes | None:
    if name not in options:
        return None
    try:
        return Path(options[name]).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}={options[name]} of etcd: {error.strerror}", hint=USAGE) from error


class EtcdDiscovery:
    def __init__(self, rest: str) -> None:
        """Raises ConfigError for settings that cannot be used. Nothing is connected yet."""
        self._settings = read_settings(rest)
        self._board = Board()
        self._contact = Contact(self._settings.shown())
        self._keeper: _Keeper | None = None

    async def put(self, key: str, value: bytes) -> Registration:
        keeper = await self._started()
        await asyncio.wrap_future(keeper.write(key, value))
        return Registration(key, self._withdraw)

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        await self._started()
        async for change in self._board.watch(prefix):
            yield change

    async def _withdraw(self, key: str) -> None:
        if self._keeper is not None:
            await asyncio.wrap_future(self._keeper.write(key, b""))

    def where(self) -> SearchPlace:
        return self._contact.place

    async def close(self) -> None:
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.close)
        self._board.close()

    async def _started(self) -> "_Keeper":
        """Return the keeper when it has listed the keys once. Raises MeshError if no endpoint lets it."""
        if self._keeper is None:
            loop = asyncio.get_running_loop()

            def show(view: KeyView) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    loop.call_soon_threadsafe(self._board.show, view.present(), view.lapsed())

            self._keeper = _Keeper(self._settings, show, self._contact)
        await asyncio.wrap_future(self._keeper.listed)
        return self._keeper


class _Keeper:
    """Holds the lease, our keys and the view of all keys; runs the two threads."""

    def __init__(self, settings: EtcdSettings, show: Any, contact: Contact) -> None:
        self.listed = promise()
        self._settings = settings
        self._show = show
        self._contact = contact
        self._view = KeyView(settings.lease_s)
        self._lock = threading.Lock()  # guards the view and what is to be written
        self._own: dict[str, bytes] = {}
        self._unwritten: dict[str, list[Future[None]]] = {}
        self._lease_id = 0
        self._wake = threading.Event()
        self._is_closed = False
        self._has_ended = False
        self._is_away = False
        self._thread = threading.Thread(target=self._run_to_end, name="discovery", daemon=True)
        self._thread.start()

    def write(self, key: str, value: bytes) -> Future[None]:
        """Have a key written, or withdrawn if `value` is empty. While etcd is away the future is done at once.

        After the end nothing is written.
        """
        done = promise()
        with self._lock:
            if self._has_ended or not (value or key in self._own):
                done.set_result(None)
                return done
            if value:
                self._own[key] = value
            else:
                del self._own[key]
            self._unwritten.setdefault(key, []).append(done)
        self._wake.set()
        return done

    def close(self) -> None:
        for key in list(self._own):
            self.write(key, b"")
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    # --- the thread that owns the connection ----------------------------------------------------------

    def _run_to_end(self) -> None:
        """Run, then leave nobody waiting: neither for the first list nor for a write."""
        try:
            self._run()
        finally:
            with self._lock:
                self._has_ended = True
            self._release_writers()
            if not self.listed.done():
                self.listed.set_exception(UnreachableError("discovery was closed before etcd has answered"))

    def _run(self) -> None:
        started_s = time.monotonic()
        start_timeout_s = START_TIMEOUT_S * (LOGIN_STARTS if self._settings.user else 1)
        wait_s = FIRST_WAIT_S
        for endpoint in itertools.cycle(self._settings.endpoints):
            began_s = time.monotonic()
            try:
                with _Connection(endpoint, self._settings) as connection:
                    self._serve(connection)
                    return
            except _BrokenError as error:
                self._contact.on_failure(time.time())
                now_s = time.monotonic()
                if not self.listed.done() and (error.is_final or now_s - started_s > start_timeout_s):
                    self.listed.set_exception(self._no_start(error))
                    return
                is_told = error.is_final and self._refuse_writers(error)
                if self.listed.done() and not (self._is_away or is_told):
                    self._is_away = True
                    log.warning("etcd at %s is away, the last known services stay: %s", endpoint, error)
                self._release_writers()
                with self._lock:
                    self._view.on_away()
                wait_s = FIRST_WAIT_S if now_s - began_s > LONGEST_WAIT_S else min(2 * wait_s, LONGEST_WAIT_S)
                if self._is_closed:
                    return
                self._wake.wait(wait_s)
                self._wake.clear()

    def _no_start(self, error: "_BrokenError") -> MeshError:
        places = ", ".join(self._settings.endpoints)
        if error.is_final:
            return ConfigError(
                f"etcd at {places} refuses: {error}",
                hint=f"give the user read and write access to /{self._settings.prefix}/; {USAGE}",
            )
        return UnreachableError(f"no etcd answers at {places}: {error}", hint="start etcd, or set --discovery")

    def _serve(self, connection: "_Connection") -> None:
        """Keep lease, keys and watch until this object is closed. Raises _BrokenError."""
        self._renew(connection)
        revision = self._list(connection)
        watch = threading.Thread(target=self._watch, args=(connection, revision), name="discovery watch", daemon=True)
        watch.start()
        if not self.listed.done():
            self.listed.set_result(None)
        elif self._is_away:
            log.info("etcd at %s answers again", connection.endpoint)
        self._is_away = False
        renew_s = time.monotonic() + self._settings.lease_s / 3
        try:
            while True:
                self._write_all(connection)
                if self._is_closed:
                    self._revoke(connection)
                    return
                self._wake.wait(TICK_S)
                self._wake.clear()
                connection.check()
                if (now_s := time.monotonic()) >= renew_s:
                    self._renew(connection)
                    renew_s = now_s + self._settings.lease_s / 3
                self._let_lapse(now_s)
        finally:
            while watch.is_alive():  # it may not have begun to watch when it is told to end
                connection.end_watch()
                watch.join(0.1)

    def _let_lapse(self, now_s: float) -> None:
        with self._lock:
            before = self._view.present()
            self._view.on_time(now_s)
            if self._view.present() != before:
                self._show(self._view)

    def _list(self, connection: "_Connection") -> int:
        found, revision = connection.list_keys()
        with self._lock:
            self._view.on_list(found, time.monotonic())
            self._show(self._view)
        self._contact.on_read()
        return revision

    def _renew(self, connection: "_Connection") -> None:
        """Renew the lease. If it has ended, take a new one and have our keys written under it."""
        if not self._own:
            connection.ping()
            return
        if self._lease_id and connection.renew(self._lease_id):
            return
        self._lease_id = connection.grant(self._settings.lease_s)
        with self._lock:
            for key in self._own:
                self._unwritten.setdefault(key, [])

    def _write_all(self, connection: "_Connection") -> None:
        """Write what has changed. A key stays to be written until etcd has taken it."""
        while True:
            with self._lock:
                if not self._unwritten:
                    return
                key, waiting = next(iter(self._unwritten.items()))
                value = self._own.get(key, b"")
                told = len(waiting)
            if not self._lease_id:
                self._lease_id = connection.grant(self._settings.lease_s)
            if value:
                connection.put(key, value, self._lease_id)
            else:
                connection.put(key, b"", self._lease_id)  # tells watchers that this is no lapse
                connection.delete(key)
            with self._lock:
                if self._own.get(key, b"") == value:
                    del self._unwritten[key]
                    told = len(waiting)  # also those that asked for the same value meanwhile
                for future in waiting[:told]:
                    future.set_result(None)
                del waiting[:told]

    def _release_writers(self) -> None:
        """Let nobody wait for an etcd that is away: the keys are written when it is back."""
        with self._lock:
            for waiting in self._unwritten.values():
                for future in waiting:
                    future.set_result(None)
                waiting.clear()

    def _refuse_writers(self, error: "_BrokenError") -> bool:
        """Raise a refusal at those that wait for a key to be written, and give the key up. Return if there were any."""
        with self._lock:
            refused = {key: waiting for key, waiting in self._unwritten.items() if waiting}
            for key, waiting in refused.items():
                del self._unwritten[key]
                self._own.pop(key, None)
                for future in waiting:
                    future.set_exception(self._no_start(error))
        return bool(refused)

    def _revoke(self, connection: "_Connection") -> None:
        if self._lease_id:
            connection.revoke(self._lease_id)

    # --- the thread that reads the watch --------------------------------------------------------------

    def _watch(self, connection: "_Connection", revision: int) -> None:
        try:
            for events in connection.watch(revision + 1):
                with self._lock:
                    for key, value in events:
                        if value is None:
                            self._view.on_lapse(key)
                        else:
                            self._view.on_put(key, value)
                    self._show(self._view)
            connection.fail("the watch has ended")
        except _BrokenError as error:
            connection.fail(str(error))
        finally:
            self._wake.set()


def promise() -> Future[None]:
    """Return a future that a task which awaits it cannot cancel: others may wait too, and the thread will set it."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


class _BrokenError(Exception):
    """Ends a connection. `is_final`: another try would be refused too."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class _Connection:
    """A gRPC channel to one endpoint. Every method raises _BrokenError if etcd does not answer as it should."""

    def __init__(self, endpoint: str, settings: EtcdSettings) -> None:
        self.endpoint = endpoint
        self._settings = settings
        self._failure = ""
        self._watching: Any = None
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._channel = open_channel(endpoint, settings)
        self._kv = rpc.KVStub(self._channel)
        self._leases = rpc.LeaseStub(self._channel)

    def __enter__(self) -> "_Connection":
        if self._settings.user:
            asked = rpc.AuthenticateRequest(name=self._settings.user, password=self._settings.password)
            answer = self._ask(rpc.AuthStub(self._channel).Authenticate, asked, LOGIN_TIMEOUT_S)
            self._metadata = (("token", answer.token),)
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def check(self) -> None:
        if self._failure:
            raise _BrokenError(self._failure)

    def fail(self, reason: str) -> None:
        self._failure = self._failure or reason

    def _ask(self, method: Any, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise broken(error, is_first=not self._metadata) from error

    def ping(self) -> None:
        self._ask(self._kv.Range, rpc.RangeRequest(key=self._settings.etcd_key(""), count_only=True))

    def list_keys(self) -> tuple[dict[str, bytes], int]:
        """Return all keys with their values, and the revision that they are of."""
        first = self._settings.etcd_key("")
        answer = self._ask(self._kv.Range, rpc.RangeRequest(key=first, range_end=after(first)))
        return {self._name(kv.key): kv.value for kv in answer.kvs}, answer.header.revision

    def _name(self, key: bytes) -> str:
        return key[len(self._settings.etcd_key("")) :].decode(errors="replace")

    def grant(self, lease_s: int) -> int:
        return int(self._ask(self._leases.LeaseGrant, rpc.LeaseGrantRequest(TTL=lease_s)).ID)

    def renew(self, lease_id: int) -> bool:
        """Return whether the lease still lives."""
        try:
            request = iter([rpc.LeaseKeepAliveRequest(ID=lease_id)])
            answers = self._leases.LeaseKeepAlive(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
            return int(next(answers).TTL) > 0
        except grpc.RpcError as error:
            raise broken(error) from error
        except StopIteration:
            raise _BrokenError("a lease was not renewed") from None

    def revoke(self, lease_id: int) -> None:
        with contextlib.suppress(_BrokenError):  # it ends by itself
            self._ask(self._leases.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease_id))

    def put(self, key: str, value: bytes, lease_id: int) -> None:
        self._ask(self._kv.Put, rpc.PutRequest(key=self._settings.etcd_key(key), value=value, lease=lease_id))

    def delete(self, key: str) -> None:
        self._ask(self._kv.DeleteRange, rpc.DeleteRangeRequest(key=self._settings.etcd_key(key)))

    def watch(self, revision: int) -> Iterator[list[tuple[str, bytes | None]]]:
        """Yield the changes from a revision on: keys with their values, None for a key that has gone."""
        first = self._settings.etcd_key("")
        create = rpc.WatchCreateRequest(key=first, range_end=after(first), start_revision=revision)
        open_end = threading.Event()

        def requests() -> Iterator[Any]:
            yield rpc.WatchRequest(create_request=create)
            open_end.wait()

        self._watching = rpc.WatchStub(self._channel).Watch(requests(), metadata=self._metadata)
        try:
            for answer in self._watching:
                if answer.compact_revision or answer.canceled:
                    raise _BrokenError(answer.cancel_reason or f"compacted at revision {answer.compact_revision}")
                if answer.events:
                    yield [(self._name(e.kv.key), None if e.type == e.DELETE else e.kv.value) for e in answer.events]
        except grpc.RpcError as error:
            raise broken(error) from error
        finally:
            open_end.set()

    def end_watch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()


def open_channel(endpoint: str, settings: EtcdSettings, more: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """Open a channel. `more`: further options of gRPC."""
    options = (*CHANNEL_OPTIONS, *more)
    if not settings.has_tls:
        return grpc.insecure_channel(endpoint, options)
    credentials = grpc.ssl_channel_credentials(settings.ca, settings.key, settings.cert)
    return grpc.secure_channel(endpoint, credentials, options)


def broken(error: grpc.RpcError, is_first: bool = False) -> _BrokenError:
    """Return why a call has failed. A token that has expired is no refusal: the next connection asks for another."""
    code, details = error.code(), error.details()
    is_final = code in REFUSED and (is_first or "invalid auth token" not in str(details))
    return _BrokenError(f"{details} ({code.name})", is_final)


def after(prefix: bytes) -> bytes:
    """Return the end of the range of all keys with a prefix. Its last byte is a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
