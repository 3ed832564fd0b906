"""The messages between a worker and the processes that follow guides for it."""

from typing import Literal

import msgspec

from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.schemas import GuideWhitespace

XgrammarForm = Literal["", "vllm", "sglang"]  # how an engine gives guides to xgrammar; "": it does not use xgrammar


class GuideSetup(msgspec.Struct, frozen=True, array_like=True):
    """Say what the processes of one worker share."""

    tokenizer: str  # path of tokenizer.json
    vocab_size: int  # 0: as the tokenizer says
    eos_token_ids: tuple[int, ...]
    whitespace: GuideWhitespace
    xgrammar: XgrammarForm = ""


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compile the guide of this process. The first message to it."""

    guide: Guide


class BeginAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin an answer, or continue one that has tokens."""

    number: int
    generated: tuple[int, ...] = ()


class Take(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Continue an answer with this token."""

    number: int
    token_id: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End an answer."""

    number: int


class Standing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say where an answer stands in its guide."""

    mask: bytes = b""  # the tokens that may come next, one bit each; empty after a failure
    is_complete: bool = False  # no token may follow
    failure: str = ""  # why the answer cannot continue
    grown_bytes: int = 0  # memory of the process beyond what it began with, as last measured


class GuideRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Refuse a guide, or the tokens generated so far."""

    message: str
    hint: str
    param: str


Job = Compile | BeginAnswer | Take | Close
Reply = Standing | GuideRefused
job_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def guide_name(guide: Guide) -> str:
    """Return what the kind of a guide is called in errors."""
    return {
        GuideKind.JSON: "JSON guide",
        GuideKind.JSON_SCHEMA: "JSON schema",
        GuideKind.REGEX: "regular expression",
        GuideKind.GRAMMAR: "grammar",
        GuideKind.CHOICE: "list of choices",
    }[guide.kind]
