"""An answer put together for a reply that is not streamed."""

import secrets
from dataclasses import dataclass, field

from kvmesh.frontend.answer import Part, PlacedLogprob
from kvmesh.frontend.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning
from kvmesh.protocol.messages import FinishReason


@dataclass(slots=True)
class WholeCall:
    id: str
    name: str
    fragments: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON text, as far as the model kept to it."""
        return "".join(self.fragments)


class WholeAnswer:
    """Collects the parts of one answer."""

    __slots__ = ("_content", "_reasoning", "calls", "finish_reason", "index", "logprobs")

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls: list[WholeCall] = []
        self.logprobs: list[PlacedLogprob] = []
        self.finish_reason = FinishReason.STOP
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def add(self, part: Part) -> None:
        for event in part.events:
            self._add(event)
        self.logprobs.extend(part.logprobs)

    def _add(self, event: Event) -> None:
        match event:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case CallBegun(_, name, call_id):
                self.calls.append(WholeCall(call_id or new_call_id(), name))
            case CallArguments(_, fragment):
                self.calls[-1].fragments.append(fragment)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def mean_logprob(self) -> float:
        """Return the mean logprob of the generated tokens; for choosing between answers."""
        logprobs = [placed.entry.logprob for placed in self.logprobs if not placed.of_prompt]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
