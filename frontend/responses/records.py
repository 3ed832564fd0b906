"""Make what is stored of what was asked and answered, and the other way round. Pure."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.frontend.responses.item_ids import input_id
from kvmesh.frontend.responses.shapes import (
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    KeptItem,
    KeptMessage,
    KeptOutput,
    KeptReasoning,
    KeptText,
    MessageItem,
    OutputCall,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from kvmesh.frontend.responses.store import StoredResponse

KeptPart = OutputText | KeptText


class _Answered(Struct):
    """The part of a stored answer that a conversation continues from."""

    output: list[dict[str, Any]]


def kept_items(items: Sequence[InputItem], response_id: str) -> list[KeptItem]:
    """Return the input items in full. An item that has no id, or one that was there before, gets one."""
    taken: set[str] = set()
    kept: list[KeptItem] = []
    for n, item in enumerate(items):
        item_id = item.id if item.id and item.id not in taken else input_id(_PREFIXES[type(item)], response_id, n)
        taken.add(item_id)
        kept.append(_kept(item, item_id))
    return kept


_PREFIXES = {MessageItem: "msg", FunctionCallItem: "fc", FunctionOutputItem: "fco", ReasoningItem: "rs"}


def _kept(item: InputItem, item_id: str) -> KeptItem:
    match item:
        case MessageItem(role=role, content=content):
            return KeptMessage(item_id, role, _parts(content, is_output=role == "assistant"))
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments, namespace=namespace):
            return OutputCall(item_id, "completed", call_id, name, arguments, namespace or msgspec.UNSET)
        case FunctionOutputItem(call_id=call_id, output=output):
            return KeptOutput(item_id, call_id, output if isinstance(output, str) else _parts(output, is_output=False))
        case ReasoningItem(content=content, summary=summary, encrypted_content=encrypted):
            thoughts = [ReasoningText(part.text) for part in content or ()]
            return KeptReasoning(
                item_id, thoughts, [SummaryText(part.text) for part in summary or ()], encrypted or msgspec.UNSET
            )


def _parts(content: str | list[ContentPart], *, is_output: bool) -> list[KeptPart]:
    texts = [content] if isinstance(content, str) else [part.text or "" for part in content]
    return [OutputText(text, []) for text in texts] if is_output else [KeptText(text) for text in texts]


def conversation_of(chain: Sequence[StoredResponse]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the items of a conversation, input and output, by response."""
    return [(record.id, [*msgspec.json.decode(record.input), *_output(record)]) for record in chain]


def items_with(ids: Collection[str], record: StoredResponse) -> dict[str, dict[str, Any]]:
    """Return the items of a response that have one of these ids, by id. The input is read only if the output lacks
    one: it may be long."""
    found = {item["id"]: item for item in _output(record) if item["id"] in ids}
    if len(found) < len(ids):
        found |= {item["id"]: item for item in msgspec.json.decode(record.input) if item["id"] in ids}
    return found


def _output(record: StoredResponse) -> list[dict[str, Any]]:
    return msgspec.json.decode(record.response, type=_Answered).output
