"""Write the first inputs of every surface: one sound example per kind of message. `python -m tests.fuzz.seeds FOLDER`.

The corpus in the repository began with these; what a fuzzer adds to them is kept beside them.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from kvmesh.kvevents.formats import encode_payload
from kvmesh.mesh.plane import frames
from kvmesh.protocol import messages
from kvmesh.protocol.events import Cleared, Removed, Stored
from kvmesh.protocol.ids import EngineHash
from tests.fuzz.surfaces.text import OPENERS
from tests.fuzz.surfaces.web import BODIES
from tests.fuzz.surfaces.wire import CARDS, KINDS

TEXTS = {
    b"hermes": '<think>hm</think>\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "}"}}\n</tool_call> done',
    b"python": "<|python_start|>[f(a=1, s='it\\'s', o={'k': [True, None]}), g()]<|python_end|>",
    b"tagged": "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>",
    b"headed": '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS][{"name": "g", "arguments": {}}]',
    b"harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so<|return|>",
    b"kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
}
REQUESTS = {
    b"get": b"GET /echo?a=b HTTP/1.1\r\nHost: x\r\nX-Some: thing \r\n\r\n",
    b"post": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET /p/a/b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"chunks": b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nX: y\r\n\r\n",
    b"upgrade": b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"continue": b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na",
    b"encoded": b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip, deflate\r\nContent-Length: 2\r\n\r\nxx",
    b"old": b"GET http://h:1/p/%41/%2e%2e HTTP/1.0\r\n\r\n",
}
TEMPLATES = {
    b"chat": "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    b"tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% set ns = namespace(a=1) %}{{ ns.a + n }}",
    b"macro": "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) }}{% generation %}{{ raise_exception('no') }}"
    "{% endgeneration %}",
}
GUIDES = (
    ("json", ""),
    ("json_schema", '{"type":"object","properties":{"a":{"enum":[1,2]},"b":{"type":"array",'
     '"items":{"$ref":"#/$defs/x"}}},'
     '"$defs":{"x":{"type":"string","pattern":"^a+$"}},"required":["a"]}'),
    ("regex", "(ab|c)*[0-9]{1,3}"),
    ("grammar", 'start: "a" (b | "c")+\nb: /[0-9]+/'),
    ("choice", '["yes","no"]'),
)  # fmt: skip


def sample(kind: inspect.Type) -> Any:
    """Return a plain value of a type, with something in every field."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields, array_like=array_like, tag_field=tag_field, tag=tag):
            values = {field.encode_name: sample(field.type) for field in fields}
            if array_like:
                return [*([tag] if tag is not None else []), *values.values()]
            return ({tag_field: tag} if tag is not None else {}) | values
        case inspect.UnionType(types=types):
            return sample(next((part for part in types if not isinstance(part, inspect.NoneType)), types[0]))
        case inspect.IntType(ge=least) | inspect.FloatType(ge=least):
            return least or 1
        case inspect.Metadata(type=inner):
            return sample(inner)
        case inspect.StrType(pattern=pattern):
            return "0" * 64 if pattern else "a"
        case inspect.BytesType():
            return b"\1\0\0\0"
        case inspect.BoolType():
            return True
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.TupleType(item_types=parts):
            return [sample(part) for part in parts]
        case inspect.VarTupleType(item_type=part) | inspect.ListType(item_type=part):
            return [sample(part)]
        case inspect.DictType(value_type=part):
            return {"a": sample(part)}
    return None


def seeds() -> dict[str, dict[bytes, bytes]]:
    """Return the first inputs by surface and name."""
    stored = Stored(
        (EngineHash(1), EngineHash(2**64 - 1)), EngineHash(7), (1, 300, 70_000, 2**32 - 1), 2, "l", "s", "CPU"
    )
    events = encode_payload([stored, Removed((EngineHash(1),)), Cleared()], 1.5)
    arrays = [1.5, [["BlockStored", [1, b"\1" * 32], None, [5, 6], 1, None, "GPU"], ["BlockRemoved", [-1]]], None]
    card = msgspec.msgpack.decode(messages.encode_card(messages.FrontendCard(name="a", url="u")))
    versions = {name: card[name] for name in ("protocol", "oldest_protocol", "release") if name in card}
    return {
        "plane_frames": {b"all": b"\7" + b"".join(map(frames.encode_frame, _frames()))},
        "mesh_messages": {
            kind.__name__.encode(): bytes([n]) + msgspec.msgpack.encode(sample(inspect.type_info(kind)))
            for n, kind in enumerate(KINDS)
        },
        "cards": {
            kind.__name__.encode(): bytes([n]) + msgspec.msgpack.encode(sample(inspect.type_info(kind)) | versions)
            for n, kind in enumerate(CARDS)
        },
        "kv_events": {b"maps": events, b"arrays": msgspec.msgpack.encode(arrays)},
        "payload": {b"maps": events, b"arrays": msgspec.msgpack.encode(arrays)},
        "token_lane": {b"tokens": messages.encode(messages.Delta((1, 200, 70_000)))},
        "http_requests": {name: b"\12" + text for name, text in REQUESTS.items()},
        "api_bodies": {
            kind.__name__.encode(): bytes([n]) + msgspec.json.encode(sample(inspect.type_info(kind)))
            for n, kind in enumerate(BODIES)
        },
        "parsers": {
            b"%b-%d" % (name, n): bytes([n, 3]) + text.encode()
            for name, text in TEXTS.items()
            for n in range(len(OPENERS))
        },
        "chat_templates": {name: text.encode() for name, text in TEMPLATES.items()},
        "config_files": {b"file": b'\0# x\nengine = "mock"\n[worker]\nblock_size = 16\n'},
        "config_flags": {b"flags": b"\0--block-size\x0016\0--engine=mock\0--no-kv-events"},
        "guides": {
            name.encode(): bytes([list(messages.GuideKind).index(messages.GuideKind(name))]) + text.encode()
            for name, text in GUIDES
        },
        "member_uris": {b"worker": b"spiffe://kvmesh/prod/worker/decode-0"},
        "key_files": {
            b"hashed": b'{"name":"a","sha256":"%b"}\n# x\n' % (b"0" * 64),
            b"plain": b"sk-secret-sk-secret\n",
        },
        "certificate_files": {b"cut": b"\1\50\0xx", b"other": b"\2\0\1-----BEGIN PRIVATE KEY-----\n"},
        "schemas": {b"unique": b'{"type":"array","uniqueItems":true,"items":{"enum":[1,"a",null]},"not":{"const":1}}'},
    }


def _frames() -> list[Any]:
    raw = msgspec.Raw(b"\x91\1")
    failure = messages.Failure(code="internal", message="no")
    return [
        frames.OUR_HELLO,
        frames.Open(1, "generate", 1.5, 8, raw),
        frames.Credit(1, 4),
        frames.Batch([(1, raw), (2, raw)], [(1, None), (2, failure)]),
        frames.Cancel(1),
        frames.Ping(),
        frames.Pong(),
    ]


def main() -> None:
    for surface, inputs in seeds().items():
        folder = Path(sys.argv[1]) / surface
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (folder / name.decode()).write_bytes(data)


if __name__ == "__main__":
    main()
