"""List the surfaces: what takes bytes from outside, each by a function of one input that fails if a promise does not
hold."""

from collections.abc import Callable

from tests.fuzz import mutate
from tests.fuzz.mutate import Mutator
from tests.fuzz.names import PYTHON_NAMES
from tests.fuzz.surfaces import doors, settings, text, web, wire

PYTHON: dict[str, Callable[[bytes], None]] = {
    "plane_frames": wire.plane_frames,
    "mesh_messages": wire.mesh_messages,
    "cards": wire.cards,
    "kv_events": wire.kv_events,
    "index_snapshots": wire.index_snapshots,
    "token_lane": wire.token_lane,
    "packed_tokens": wire.packed_tokens,
    "http_requests": web.http_requests,
    "api_bodies": web.api_bodies,
    "queries": web.queries,
    "parsers": text.parsers,
    "chat_templates": text.chat_templates,
    "config_files": settings.config_files,
    "config_flags": settings.config_flags,
    "guides": settings.guides,
    "schemas": settings.schemas,
    "member_uris": doors.member_uris,
    "certificate_files": doors.certificate_files,
    "key_files": doors.key_files,
}
_HTTP_WORDS = (
    b"\r\n", b"\r\n\r\n", b" HTTP/1.1", b"Host: y\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n",
    b"transfer-encoding: identity\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"0\r\n\r\n", b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n", b"GET /echo", b"POST /echo",
    b"OPTIONS *", b"\n", b" ", b"\t", b"%00", b"x-request-id: a\r\n", b"\xff", b"\0", b":", b"3\r\nabc\r\n",
    b"CONNECT h:1", b"http://h/",
)  # fmt: skip
_TEXT_WORDS = (
    *(marker.encode() for marker in text.MARKERS), b'{"name": "f", "arguments": {', b'"a": 1', b'"s": "', b"}", b"]",
    b"[", b"f", b"g", b"f(", b"a=", b")", b"\\", b"'", b'"', b"\n", b"```json", b"functions.f:0", b"<function=",
    b"<parameter=a>", b"</parameter>", b"</function>", b" to=functions.f", b"analysis", b"final",
    "\u00e9\U0001f642".encode(), b"1.5e3", b"null",
)  # fmt: skip
_TEMPLATE_WORDS = (
    b"{% for m in messages %}", b"{% endfor %}", b"{% if ", b"%}", b"{% endif %}", b"{{ ", b" }}", b"messages",
    b"tools", b"n", b"{% set x = ", b"{% set ns = namespace(x=", b"{% set ns.x = ", b"range(100000)", b" * 1000000",
    b" ** 99999", b" ~ ", b" + ", b"|tojson(indent=9999999)", b"|join(", b"|list", b"|center(99999999)",
    b"|indent(9999999)", b"|batch(9)", b"|string", b"'%99999999d' % 1", b"'{:99999999}'.format(1)", b"'a' * 9999999",
    b".replace('', 'aaaa')", b".__class__", b"|attr('__class__')", b"{% macro f(x) %}", b"{% endmacro %}", b"f(1)",
    b"loop", b"cycler", b"lipsum(9999999)", b"joiner", b"{% break %}", b"{% generation %}", b"{% endgeneration %}",
    b"raise_exception(", b"strftime_now('%Y')", b"(", b")", b"[", b"]", b"'a'", b"1",
)  # fmt: skip
_GRAMMAR_WORDS = (
    b"start: ", b"a: ", b"b", b"|", b"(", b")", b"*", b"+", b"?", b"{1,99}", b"{9999}", b"[a-z]", b"[^a]", b".",
    b"\\d", b"\\b", b"(?=a)", b'"a"', b"/[0-9]+/", b"\n", b"%json {}", b"%ignore / /", b"%import common.INT",
    b'{"type": "object"}', b'"$ref": "#"', b'"anyOf": [', b'"pattern": "(a*)*b"', b'"minLength": 99999',
    b'"uniqueItems": true', b"[]", b"{}", b",", b'["a"]',
)  # fmt: skip
MUTATORS: dict[str, Mutator] = {  # of surfaces whose inputs have a form that changes of bytes destroy
    "plane_frames": mutate.after(1, mutate.framed),
    "mesh_messages": mutate.after(1, mutate.msgpack),
    "cards": mutate.after(1, mutate.msgpack),
    "kv_events": mutate.msgpack,
    "token_lane": mutate.msgpack,
    "http_requests": mutate.after(1, mutate.words(*_HTTP_WORDS)),
    "api_bodies": mutate.after(1, mutate.json),
    "parsers": mutate.after(2, mutate.words(*_TEXT_WORDS)),
    "chat_templates": mutate.words(*_TEMPLATE_WORDS),
    "guides": mutate.after(1, mutate.words(*_GRAMMAR_WORDS)),
    "schemas": mutate.json,
    "member_uris": mutate.words(
        b"spiffe://kvmesh/", b"/", b"worker", b"operator", b"a", b".", b"-", b"%2f", b"\n", b"\0"
    ),
    "key_files": mutate.words(
        b'{"name":"a","sha256":"',
        b"0" * 64,
        b'","tenant":"t"}',
        b"\n",
        b"sk-secret-sk-secret-sk-secret",
        b"#",
        b'"models":["*"]',
        b'"max_priority":3,',
        b'"expires":"2030-01-01"',
        b"\r",
        b"\x85",
        b",",
    ),
}
assert tuple(PYTHON) == PYTHON_NAMES
