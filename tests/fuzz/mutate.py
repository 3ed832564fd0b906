"""Change inputs in ways that keep their form: values within msgpack and JSON, words of a language.

Decoders in C give a fuzzer no hint, so an input that is changed byte by byte seldom gets past them.
"""

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

Mutator = Callable[[bytes, random.Random], bytes]

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 15, 16, 127, 128, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1, 2**32, 2**53,
    2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 0.5, 1e300, -1e300, float("inf"), float("nan"), "", "a",
    "a\nb", "\0", "é漢🙂", "x" * 300, "../../etc/passwd", b"", b"\0" * 8, b"\xff" * 9,
    [], [[]], {}, {"type": "BlockStored"}, [0, 1, 2],
]  # fmt: skip
_LENGTH = struct.Struct("<I")


def changed_value(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return `value` with one part replaced, removed, repeated or added."""
    if depth > 12 or rng.random() < 0.25:
        return _replaced(value, rng)
    match value:
        case list() if value:
            at = rng.randrange(len(value))
            return _changed_list(value, at, rng, depth)
        case dict() if value:
            key = rng.choice(list(value))
            match rng.randrange(5):
                case 0:
                    return {name: part for name, part in value.items() if name != key}
                case 1:
                    return {**value, rng.choice(["type", "x", *map(str, value)]): rng.choice(ODD)}
            return {**value, key: changed_value(value[key], rng, depth + 1)}
    return _replaced(value, rng)


def _changed_list(value: list[Any], at: int, rng: random.Random, depth: int) -> list[Any]:
    match rng.randrange(6):
        case 0:
            return [*value[:at], *value[at + 1 :]]
        case 1:
            return [*value[:at], value[at], *value[at:]]
        case 2:
            return [*value[:at], rng.choice(ODD), *value[at:]]
    return [*value[:at], changed_value(value[at], rng, depth + 1), *value[at + 1 :]]


def _replaced(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return max(-(2**63), min(2**64 - 1, value + rng.choice([-1, 1, 2, -2, 1 << rng.randrange(40)])))
    if isinstance(value, str) and rng.random() < 0.4:
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(["\n", "\0", "'", '"', "x", "é", "\ud7ff", " " * 40]) + value[at:]
    return rng.choice(ODD)


def msgpack(data: bytes, rng: random.Random) -> bytes:
    """Change a value of msgpack; other bytes stay as they are."""
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        return data
    return _written(msgspec.msgpack.encode, value, data, rng)


def json(data: bytes, rng: random.Random) -> bytes:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data
    return _written(msgspec.json.encode, value, data, rng)


def _written(encode: Callable[[Any], bytes], value: Any, data: bytes, rng: random.Random) -> bytes:
    try:
        return encode(changed_value(value, rng))
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError, ValueError):
        return data


def after(prefix_bytes: int, mutate: Mutator) -> Mutator:
    """Return a mutator that leaves the first bytes, which choose what the input is for, nearly always as they are."""

    def mutated(data: bytes, rng: random.Random) -> bytes:
        prefix, rest = data[:prefix_bytes], data[prefix_bytes:]
        if rng.random() < 0.1:
            prefix = rng.randbytes(prefix_bytes)
        return prefix + mutate(rest, rng)

    return mutated


def framed(data: bytes, rng: random.Random) -> bytes:
    """Change one frame of the request plane, repeat it, leave it out, or announce another length."""
    frames, at = [], 0
    while len(data) - at >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(data, at)
        frames.append(data[at + _LENGTH.size : at + _LENGTH.size + size])
        at += _LENGTH.size + size
    if not frames:
        return data
    chosen = rng.randrange(len(frames))
    match rng.randrange(8):
        case 0:
            frames.insert(chosen, frames[chosen])
        case 1:
            del frames[chosen]
        case 2:
            wrong = _LENGTH.pack(max(0, len(frames[chosen]) + rng.choice([-1, 1, 5, 1 << 20, 1 << 30])))
            return b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames[:chosen]) + wrong + frames[chosen]
        case _:
            frames[chosen] = msgpack(frames[chosen], rng)
    return b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)


def words(*known: bytes) -> Mutator:
    """Return a mutator that puts one of the words in, doubles a part, or takes one out."""

    def mutated(data: bytes, rng: random.Random) -> bytes:
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                end = min(len(data), at + rng.randrange(40))
                return data[:end] + data[at:]
            case 1:
                return data[:at] + data[at + rng.randrange(1, 20) :]
        return data[:at] + rng.choice(known) + data[at:]

    return mutated
