"""The items of an answer as they grow, and the events that tell of it.

A message and a thought have one part of content each. What is new in an item is sent as bytes of which all but the
text is prepared when the item begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from msgspec import UNSET, UnsetType

from kvmesh.frontend.openai.shapes import ChatLogprob
from kvmesh.frontend.responses.item_ids import output_id
from kvmesh.frontend.responses.shapes import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    StreamEvent,
    TextDelta,
    TextDone,
)
from kvmesh.frontend.shapes import encode


def sse(event: StreamEvent) -> bytes:
    """The event as a server sends it."""
    return b"event: %b\ndata: %b\n\n" % (str(type(event).__struct_config__.tag).encode(), encode(event))


class GrowingItem(ABC):
    """An item as it grows; `output_index` is its place among the items of the answer."""

    prefix: ClassVar[str]  # of its id

    def __init__(self, response_id: str, output_index: int) -> None:
        self.output_index = output_index
        self.id = output_id(self.prefix, response_id, output_index)
        self.fragments: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.fragments)

    def delta(self, fragment: str, sequence_number: int) -> bytes:
        """Return an event with more of the item."""
        self.fragments.append(fragment)
        head, middle, tail = self._prepared
        return head + b"%d" % sequence_number + middle + encode(fragment) + tail

    @cached_property
    def _prepared(self) -> tuple[bytes, bytes, bytes]:
        """Return what stands in a delta before its number, before its text, and after its text."""
        head, number, rest = sse(self._empty_delta()).partition(b'"sequence_number":')
        middle, text, tail = rest.partition(b'"delta":')
        return head + number, middle.removeprefix(b"0") + text, tail.removeprefix(b'""')

    @abstractmethod
    def _empty_delta(self) -> StreamEvent: ...

    @abstractmethod
    def begun(self) -> Sequence[StreamEvent]: ...

    @abstractmethod
    def done(self, status: ItemStatus) -> Sequence[StreamEvent]: ...

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as far as it has grown."""


class GrowingMessage(GrowingItem):
    prefix = "msg"

    def __init__(self, response_id: str, output_index: int) -> None:
        super().__init__(response_id, output_index)
        self.logprobs: list[ChatLogprob] = []

    def delta_with_logprobs(self, fragment: str, logprobs: Sequence[ChatLogprob], sequence_number: int) -> bytes:
        self.fragments.append(fragment)
        self.logprobs.extend(logprobs)
        event = TextDelta(
            sequence_number=sequence_number,
            item_id=self.id,
            output_index=self.output_index,
            delta=fragment,
            logprobs=list(logprobs),
        )
        return sse(event)

    def _empty_delta(self) -> TextDelta:
        return TextDelta(item_id=self.id, output_index=self.output_index, delta="", logprobs=[])

    def begun(self) -> Sequence[StreamEvent]:
        item = OutputMessage(self.id, "in_progress", [])
        return (
            ItemAdded(output_index=self.output_index, item=item),
            PartAdded(item_id=self.id, output_index=self.output_index, part=OutputText("", [])),
        )

    def done(self, status: ItemStatus) -> Sequence[StreamEvent]:
        item = self.item(status)
        [part] = item.content
        return (
            TextDone(item_id=self.id, output_index=self.output_index, text=part.text, logprobs=part.logprobs),
            PartDone(item_id=self.id, output_index=self.output_index, part=part),
            ItemDone(output_index=self.output_index, item=item),
        )

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self.id, status, [OutputText(self.text, self.logprobs)])


class GrowingReasoning(GrowingItem):
    prefix = "rs"

    def _empty_delta(self) -> ReasoningDelta:
        return ReasoningDelta(item_id=self.id, output_index=self.output_index, delta="")

    def begun(self) -> Sequence[StreamEvent]:
        item = OutputReasoning(self.id, "in_progress", [])
        return (
            ItemAdded(output_index=self.output_index, item=item),
            PartAdded(item_id=self.id, output_index=self.output_index, part=ReasoningText("")),
        )

    def done(self, status: ItemStatus) -> Sequence[StreamEvent]:
        item = self.item(status)
        [part] = item.content
        return (
            ReasoningDone(item_id=self.id, output_index=self.output_index, text=part.text),
            PartDone(item_id=self.id, output_index=self.output_index, part=part),
            ItemDone(output_index=self.output_index, item=item),
        )

    def item(self, status: ItemStatus) -> OutputReasoning:
        return OutputReasoning(self.id, status, [ReasoningText(self.text)])


class GrowingCall(GrowingItem):
    prefix = "fc"

    def __init__(
        self, response_id: str, output_index: int, call_id: str, name: str, namespace: str | UnsetType = UNSET
    ) -> None:
        super().__init__(response_id, output_index)
        self._call_id = call_id
        self._name = name
        self._namespace = namespace

    def _empty_delta(self) -> ArgumentsDelta:
        return ArgumentsDelta(item_id=self.id, output_index=self.output_index, delta="")

    def begun(self) -> Sequence[StreamEvent]:
        return (ItemAdded(output_index=self.output_index, item=self.item("in_progress")),)

    def done(self, status: ItemStatus) -> Sequence[StreamEvent]:
        item = self.item(status)
        return (
            ArgumentsDone(item_id=self.id, output_index=self.output_index, arguments=item.arguments),
            ItemDone(output_index=self.output_index, item=item),
        )

    def item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(self.id, status, self._call_id, self._name, self.text, self._namespace)
