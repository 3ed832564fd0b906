"""Discovery through a list of addresses in a file, for sites that have neither etcd nor a shared directory.

Each address is a request plane of the mesh. A watcher keeps a call open to each; over it the service reports the keys
that it shows. A service that only shows keys, such as a worker, reads no file.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl

from kvmesh.mesh.address import split_address
from kvmesh.mesh.discovery.answers import LEASE_S, Answers, is_address, read_addresses
from kvmesh.mesh.discovery.board import Board, Change
from kvmesh.mesh.discovery.own_keys import METHOD, KeysNews, OwnKeys
from kvmesh.mesh.discovery.place import Contact, SearchPlace
from kvmesh.mesh.discovery.store import Registration
from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.plane.client import PlaneClient
from kvmesh.mesh.plane.server import Handler, PlaneServer
from kvmesh.protocol.errors import ConfigError, DeadlineExceededError, InvalidRequestError, MeshError, UnreachableError

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the file; a change counts when the next look finds no other one
CALL_S = 86_400.0  # a call that is older is opened again
USAGE = "static:<file>?listen=host:port"


@dataclass(frozen=True, slots=True)
class StaticSettings:
    path: Path
    listen: str = ""  # where a service without a request plane of its own shows its keys; "": nowhere


def read_settings(rest: str) -> StaticSettings:
    """Read what follows `static:`. Raises ConfigError."""
    path, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not path:
        raise ConfigError(f"no file in static:{rest}", hint=USAGE)
    if unknown := sorted(options.keys() - {"listen"}):
        raise ConfigError(f"unknown option of static: {', '.join(unknown)}", hint=USAGE)
    listen = options.get("listen", "")
    if "listen" in options and not is_address(listen):
        raise ConfigError(f"listen={listen} of static: is no address", hint=USAGE)
    return StaticSettings(Path(path), listen)


class StaticDiscovery:
    def __init__(self, rest: str, lease_s: float = LEASE_S, credentials: Credentials | None = None) -> None:
        """Raises ConfigError for settings that cannot be used. Nothing is read or opened yet."""
        self._settings = read_settings(rest)
        self._list = _ListFile(self._settings.path)
        self._lease_s = lease_s
        self._answers = Answers(lease_s)
        self._board = Board()
        self._contact = Contact(f"static:{self._settings.path.absolute()}")
        self._own = OwnKeys()
        self._is_shown = False  # others can ask this process for its keys
        self._credentials = credentials
        self._plane = PlaneClient(credentials)
        self._server: PlaneServer | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None

    def calls(self) -> Mapping[str, Handler]:
        """Return the calls that a request plane of this process has to answer, so that others see its keys."""
        self._is_shown = True
        return {METHOD: self._own.answer}

    async def put(self, key: str, value: bytes) -> Registration:
        await self._listen()
        if not self._is_shown:
            log.info("nobody can ask this process for %s; others see it with --discovery %s", key, USAGE)
        self._own.put(key, value)
        self._answers.on_own(key, value)
        self._show()
        return Registration(key, self._withdraw)

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        await self._follow()
        async for change in self._board.watch(prefix):
            yield change

    async def _withdraw(self, key: str) -> None:
        self._own.withdraw(key)
        self._answers.on_own(key, b"")
        self._show()

    def where(self) -> SearchPlace:
        return replace(self._contact.place, asked=self._answers.said())

    async def close(self) -> None:
        for key in self._own.values():
            await self._withdraw(key)
        tasks = [*self._asking.values(), *([self._following] if self._following is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._plane.close()
        if self._server is not None:
            await asyncio.sleep(0)  # those that ask hear that the keys are withdrawn
            await self._server.close()
        self._board.close()

    async def _listen(self) -> None:
        """Answer at the address of the settings, if there is one. Raises ConfigError."""
        if not self._settings.listen or self._server is not None:
            return
        self._server = PlaneServer({}, standing=self.calls(), credentials=self._credentials)
        await self._server.start(*split_address(self._settings.listen))

    # --- asking ---------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Begin to ask, if this is the first watch. Raises ConfigError if the list cannot be read."""
        if self._following is not None:
            return
        addresses = await asyncio.to_thread(self._list.read)
        if self._following is None:
            self._ask_at(addresses)
            self._following = asyncio.create_task(self._follow_list(), name="discovery: follow the list")
            self._following.add_done_callback(self._on_end)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        """End the watches if a task of this object has failed: a stale view would misroute in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("static discovery has failed", exc_info=error)
            self._board.close()

    async def _follow_list(self) -> None:
        """Read the list again when it changes. A list that cannot be used changes nothing; the log says so once."""
        complaint = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                addresses = await asyncio.to_thread(self._list.read_if_changed)
            except ConfigError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("%s; the addresses that were read before are asked on", error)
                continue
            complaint = ""
            if addresses is not None:
                log.info("static discovery asks %d addresses now", len(addresses))
                self._ask_at(addresses)

    def _ask_at(self, addresses: list[str]) -> None:
        """Ask at these addresses from now on, and nowhere else."""
        self._answers.on_addresses(addresses)
        for address in self._asking.keys() - set(addresses):
            self._asking.pop(address).cancel()
        for address in addresses:
            if address not in self._asking:
                task = asyncio.create_task(self._ask_on(address), name=f"discovery: ask {address}")
                self._asking[address] = task
                task.add_done_callback(self._on_end)
        self._show()

    async def _ask_on(self, address: str) -> None:
        """Follow the keys of an address until cancelled."""
        while True:
            is_foreign = is_gone = False
            try:
                await self._hear(address)
                why = "it ends the call"
            except DeadlineExceededError:
                continue
            except TimeoutError:
                why = f"it has been silent for {self._lease_s:.0f} s"
                self._plane.suspect(address, why)
            except MeshError as error:
                is_gone = isinstance(error.__cause__, ConnectionRefusedError)
                is_foreign = not (isinstance(error, UnreachableError) or self._answers.has_answered(address))
                why = explained(error, is_foreign)
            now_s = time.monotonic()
            self._answers.on_silence(address, why, now_s, is_gone=is_gone)
            self._show()
            await asyncio.sleep(self._answers.retry_s(address, now_s, is_foreign=is_foreign))

    async def _hear(self, address: str) -> None:
        """Take the messages of an address. Raises TimeoutError after a silence, and MeshError."""
        async with self._plane.open(address, METHOD, None, CALL_S) as stream:
            messages = stream.messages(KeysNews)
            while True:
                async with asyncio.timeout(self._lease_s):
                    news = await anext(messages, None)
                if news is None:
                    return
                self._answers.on_news(address, news.process, news.keys, time.monotonic())
                if news.keys is not None:
                    self._show()

    def _show(self) -> None:
        if self._answers.num_answering:
            self._contact.on_read()
        elif self._answers.is_all_silent:
            self._contact.on_failure(time.time())
        self._board.show(self._answers.present(), self._answers.lapsed())


def explained(error: MeshError, is_foreign: bool) -> str:
    """Return why an address does not answer, for an operator."""
    if isinstance(error, InvalidRequestError):
        return "a kvmesh service that is not started with --discovery static:"
    return f"it seems to be no kvmesh service: {error.message}" if is_foreign else error.message


class _ListFile:
    """Reads the list of addresses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, ...] = ()  # the version that was taken
        self._seen: tuple[int, ...] = ()  # the version of the last look

    def read(self) -> list[str]:
        """Raises ConfigError."""
        self._read = self._seen = self._version()
        return self._addresses()

    def read_if_changed(self) -> list[str] | None:
        """Return the addresses if they have changed, and stay the same for two looks: a writer may be at work."""
        before, self._seen = self._seen, self._version()
        if self._seen != before or self._seen == self._read:
            return None
        addresses = self._addresses()
        self._read = self._seen
        return addresses

    def _version(self) -> tuple[int, ...]:
        with self._readable():
            status = os.stat(self._path)
            return (status.st_ino, status.st_mtime_ns, status.st_size)

    def _addresses(self) -> list[str]:
        with self._readable():
            data = self._path.read_bytes()
        return read_addresses(data, str(self._path))

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the list of addresses {self._path} cannot be read: {error.strerror}",
                hint="write host:port of a service in each line, or set another --discovery",
            ) from error
