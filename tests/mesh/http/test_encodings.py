"""Test request bodies with a content encoding: what is read, what is refused, and what a bomb costs."""

import asyncio
import gzip
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.mesh.http.encodings import MOST_MEMBERS, SLICE_OUT_BYTES, decoded, read_encodings
from kvmesh.mesh.http.errors import BodyTooLargeError, UnsupportedEncodingError
from kvmesh.mesh.http.request import Request, json_reply, utf8_text
from kvmesh.mesh.http.server import App, HttpLimits, Route, listening
from kvmesh.protocol.errors import InvalidRequestError
from tests.mesh.http.raw import CLOSE, Site, get, post, read_replies, serving
from tests.support.patience import PATIENCE_S

LIMIT = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def in_members(data: bytes) -> bytes:
    return b"".join(gzip.compress(data[at : at + 100]) for at in range(0, max(1, len(data)), 100)) + bytes(10)


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "several members and padding": ("gzip", in_members),
    "zlib": ("deflate", zlib.compress),
    "bare deflate": ("deflate", raw_deflate),
    "identity": ("identity", bytes),
    "list": ("deflate, identity, gzip", lambda data: gzip.compress(zlib.compress(data))),
}


def read(data: bytes, header: str, limit: int = LIMIT) -> bytes:
    return b"".join(decoded(data, read_encodings(header), limit))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving(HttpLimits(max_body_bytes=LIMIT, max_bodies_bytes=3 * LIMIT)) as site:
        yield site


def seen(body: bytes) -> Any:
    return json.loads(body)


# --- what is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKERS)
@given(data=st.binary(max_size=2000), repeats=st.sampled_from([1, 7]))
def test_what_was_packed_is_read(name: str, data: bytes, repeats: int) -> None:
    header, pack = PACKERS[name]
    assert read(pack(data * repeats), header) == data * repeats


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("size", [SLICE_OUT_BYTES - 1, SLICE_OUT_BYTES, 2 * SLICE_OUT_BYTES, LIMIT])
def test_long_bodies_come_in_bounded_pieces(name: str, size: int) -> None:
    header, pack = PACKERS[name]
    if name == "several members and padding":
        size = min(size, 100 * MOST_MEMBERS)
    pieces = list(decoded(pack(b"x" * size), read_encodings(header), LIMIT))
    assert sum(map(len, pieces)) == size
    assert max(map(len, pieces)) <= SLICE_OUT_BYTES


@pytest.mark.parametrize("name", PACKERS)
async def test_a_handler_gets_the_body_without_its_encoding(site: Site, name: str) -> None:
    header, pack = PACKERS[name]
    body = json.dumps({"text": "x" * 1000}).encode()
    reply, after = await site.ask(post("/echo", pack(body), f"Content-Encoding: {header}") + get("/echo", CLOSE))
    assert (reply.status, after.status) == (200, 200)
    assert seen(reply.body)["body"].encode() == body
    await site.until_clean()


async def test_encodings_may_stand_in_several_headers(site: Site) -> None:
    packed = gzip.compress(zlib.compress(b"body"))
    [reply] = await site.ask(post("/echo", packed, "Content-Encoding: deflate", "Content-Encoding: gzip", CLOSE))
    assert seen(reply.body)["body"] == "body"


async def test_an_empty_body_has_no_encoding(site: Site) -> None:
    replies = await site.ask(get("/echo", "Content-Encoding: gzip") + get("/echo", "Content-Encoding: ", CLOSE))
    assert [reply.status for reply in replies] == [200, 200]


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["br", "zstd", "compress", "gzip, br", "gzip;q=1", "gzip, gzip, gzip"])
async def test_other_encodings_are_refused_before_the_body_comes(site: Site, header: str) -> None:
    [reply] = await site.ask(post("/echo", b"body", f"Content-Encoding: {header}")[:-4])
    assert (reply.status, reply.headers["accept-encoding"]) == (415, "gzip, deflate")
    error = seen(reply.body)["error"]
    assert error["code"] == "unsupported_encoding"
    assert "gzip" in error["message"] or "2 at most" in error["message"]


BROKEN = {
    "gzip: JSON": b"{}",
    "gzip: cut off": gzip.compress(b"body")[:-1],
    "gzip: wrong sum": gzip.compress(b"body")[:-8] + bytes(8),
    "gzip: more behind": gzip.compress(b"body") + b"more",
    "gzip: zlib's": zlib.compress(b"body"),
    "deflate: JSON": b"{}",
    "deflate: one byte": b"x",
    "deflate: cut off": zlib.compress(b"body")[:-1],
    "deflate: more behind": zlib.compress(b"body") + b"more",
    "deflate: bare and cut off": raw_deflate(b"body" * 100)[:-1],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_body_is_a_400_and_the_connection_is_kept(site: Site, name: str) -> None:
    header = name.partition(":")[0]
    data = post("/echo", BROKEN[name], f"Content-Encoding: {header}") + get("/echo", CLOSE)
    reply, after = await site.ask(data)
    assert (reply.status, after.status) == (400, 200)
    assert header in seen(reply.body)["error"]["message"]
    await site.until_clean()


@pytest.mark.parametrize("header", ["gzip", "deflate", "gzip, gzip"])
async def test_a_bomb_is_refused_without_inflating_it(site: Site, header: str) -> None:
    packer = zlib.compressobj(9, wbits=31 if "gzip" in header else 15)
    bomb = b"".join([packer.compress(bytes(1 << 20)) for _ in range(96)]) + packer.flush()
    sent = gzip.compress(bomb) if header == "gzip, gzip" else bomb
    began = time.process_time()
    [reply] = await site.ask(post("/echo", sent, f"Content-Encoding: {header}", CLOSE))
    assert reply.status == 413
    assert f"more than {LIMIT} bytes" in seen(reply.body)["error"]["message"]
    took_s, began = time.process_time() - began, time.process_time()
    unpacker = zlib.decompressobj(wbits=47)
    while bomb:
        unpacker.decompress(bomb, 1 << 20)
        bomb = unpacker.unconsumed_tail
    assert took_s < (time.process_time() - began) / 2, "inflating all of it takes longer"
    await site.until_clean()


def test_an_inner_layer_is_bounded_too() -> None:
    """The outer layer inflates to empty blocks without end, which give no byte."""
    empty_blocks = b"\x00\x00\x00\xff\xff" * (4 << 20)
    with pytest.raises(BodyTooLargeError):
        read(gzip.compress(empty_blocks), "deflate, gzip")


def test_many_tiny_members_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="members"):
        read(gzip.compress(b"") * (MOST_MEMBERS + 1), "gzip")


def test_a_long_name_is_shortened() -> None:
    with pytest.raises(UnsupportedEncodingError) as refused:
        read_encodings("x" * 10_000)
    assert len(str(refused.value)) < 200


async def test_inflated_bodies_count_against_the_memory_of_all(site: Site) -> None:
    packed = post("/wait", gzip.compress(bytes(LIMIT)), "Content-Encoding: gzip", CLOSE)
    held = [await site.open(packed) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        while site.server.body_bytes < 2 * LIMIT:
            await asyncio.sleep(0.001)
        assert [reply.status for reply in await site.ask(packed)] == [429]
        site.handlers.gate.set()
        for reader, writer in held:
            assert read_replies(await reader.read())[0].body == str(LIMIT).encode()
            writer.close()
    await site.until_clean()


async def test_others_are_served_while_a_large_body_inflates(site: Site) -> None:
    turns: list[int] = []

    async def count(request: Request) -> Any:
        turns.append(len(request.body))
        return json_reply(None)

    limits = HttpLimits(max_body_bytes=64 << 20)
    async with listening(App([Route("POST", "/", count)], limits), "127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2])
        large = post("/", gzip.compress(bytes(48 << 20)), "Content-Encoding: gzip", CLOSE)
        first, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(large)
        await asyncio.sleep(0.01)
        second, other = await asyncio.open_connection("127.0.0.1", port)
        other.write(post("/", b"1", CLOSE))
        async with asyncio.timeout(PATIENCE_S):
            for reader in (second, first):
                assert read_replies(await reader.read())[0].status == 200
        assert turns == [1, 48 << 20]
        writer.close()
        other.close()


# --- text ---------------------------------------------------------------------------------------------


async def test_json_may_begin_with_a_byte_order_mark() -> None:
    async def answer(request: Request) -> Any:
        return json_reply(request.json(dict[str, int]))

    async with listening(App([Route("POST", "/", answer)]), "127.0.0.1", 0) as url:
        replies = []
        for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(post("/", '{"a": 1}'.encode(encoding), CLOSE))
            replies += read_replies(await reader.read())
            writer.close()
    assert [reply.status for reply in replies] == [200, *[400] * 5]
    assert all("UTF-16" in seen(reply.body)["error"]["message"] for reply in replies[1:])


def test_a_mark_is_taken_away_once() -> None:
    marks = b"\xef\xbb\xbf" * 2 + b"{}"
    assert utf8_text(marks) is marks  # no JSON, with or without its first mark
    assert utf8_text(b"{") == b"{"
