"""Promises about what operators and callers hand over: settings, grammars, schemas of answers."""

import asyncio
import os
import tempfile
from functools import cache
from pathlib import Path

from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError, InvalidRequestError
from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.guides import Guides, Matcher, open_guides
from kvmesh.workers.schemas import SchemaFault, held_text
from tests.fuzz.surfaces.short import must_be_short

SERVICES = (WorkerConfig, FrontendConfig, RouterConfig)
CHECKPOINT = Path(__file__).parents[3] / "cluster" / "tiny_model" / "checkpoint"


@cache
def _file() -> str:
    return tempfile.mkstemp(prefix="kvmesh-fuzz-", suffix=".toml")[1]


def config_files(data: bytes) -> None:
    """A file of settings is read, or refused by ConfigError."""
    if not data:
        return
    path = _file()
    Path(path).write_bytes(data[1:])
    try:
        load(SERVICES[data[0] % 3], ["--config", path], {}, prefix="KVMESH_FUZZ_", prog="fuzz")
    except ConfigError as error:
        must_be_short(error, 5000)


def config_flags(data: bytes) -> None:
    """Flags are read, or refused by ConfigError."""
    if not data:
        return
    words = [os.fsdecode(word) for word in data[1:].split(b"\0")]
    if any(word in ("-h", "--help") or word.startswith("--config") for word in words):
        return
    try:
        load(SERVICES[data[0] % 3], words, {}, prefix="KVMESH_FUZZ_", prog="fuzz")
    except ConfigError as error:
        must_be_short(error, 5000 + 2 * len(data))


@cache
def _guides() -> tuple[asyncio.AbstractEventLoop, Guides]:
    guides = open_guides(CHECKPOINT, 4096, [0])
    assert guides is not None
    return asyncio.new_event_loop(), guides


def guides(data: bytes) -> None:
    """A guide is refused by InvalidRequestError, or the answer that takes its first allowed tokens follows it."""
    if not data:
        return
    kinds = list(GuideKind)
    guide = Guide(kinds[data[0] % len(kinds)], data[1:].decode("utf-8", "replace"))
    loop, known = _guides()
    try:
        matcher = loop.run_until_complete(known.open(guide))
    except InvalidRequestError as error:
        must_be_short(error, 2000)
        return
    try:
        _follow(matcher, loop)
    finally:
        loop.run_until_complete(_closed(matcher))


def _follow(matcher: Matcher, loop: asyncio.AbstractEventLoop) -> None:
    for _ in range(8):
        allowed = matcher.allowed()
        if allowed is None:
            assert matcher.failure
            return
        assert allowed.any()
        if matcher.is_complete:
            return
        loop.run_until_complete(_taken(matcher, int(allowed.argmax())))
    assert not matcher.is_complete or matcher.failure == ""


async def _closed(matcher: Matcher) -> None:
    matcher.close()


async def _taken(matcher: Matcher, token_id: int) -> None:
    if (answer := matcher.take(token_id)) is not None:
        await asyncio.wait([answer])


def schemas(data: bytes) -> None:
    """A JSON schema is prepared for the compiler, or refused by SchemaFault; what was prepared stays as it is."""
    text = data.decode("utf-8", "replace")
    try:
        held = held_text(text)
    except SchemaFault as fault:
        must_be_short(fault, 1000)
        return
    assert len(held) < 1000 * len(text) + (64 << 20)
