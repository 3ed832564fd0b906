"""A checked request, whatever the endpoint's spelling, and the ways an endpoint answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from frontend.generator import Hints
from frontend.parsers.events import Tool
from frontend.templates import ChatMessage
from protocol.errors import MeshError
from protocol.messages import FinishReason, Guide, SamplingParams

if TYPE_CHECKING:
    from frontend.answer import Part
    from frontend.pipeline import Job
    from frontend.whole import Whole


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"


class ToolChoice(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"  # at least one call
    NAMED = "named"  # one call, of this function


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions a model may call in its answer."""

    functions: tuple[Tool, ...]
    shown: tuple[Mapping[str, Any], ...]  # as chat templates get them, in OpenAI's shape
    choice: ToolChoice = ToolChoice.AUTO
    named: str = ""
    parallel: bool = True

    @property
    def is_free(self) -> bool:
        """The model decides whether it calls, and writes calls in its own format."""
        return self.choice is ToolChoice.AUTO


class Call(Struct, frozen=True, kw_only=True):  # of all that is made per request, by far the most fields
    """Exactly one of `messages` and `prompts` is given; a prompt is text or token ids."""

    endpoint: Endpoint
    model: str
    messages: Sequence[ChatMessage] | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    suffix: str = ""  # text that follows the answer
    echo: bool = False  # begin the answer with the prompt
    n: int = 1  # answers to each prompt
    best_of: int = 1  # >= n: of so many, the likeliest n
    stream: bool = False
    include_usage: bool = False
    is_usage_continuous: bool = False  # in every chunk
    sampling: SamplingParams = field(default_factory=SamplingParams)  # seed as asked for
    has_seed: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str | None = None
    guide: Guide | None = None
    tools: Tools | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)  # names that a chat template may read
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    hints: Hints = field(default_factory=Hints)
    trace: bool = False

    @property
    def prompt_param(self) -> str:
        """How the endpoint calls what the model reads."""
        if self.endpoint in (Endpoint.RESPONSES, Endpoint.EMBEDDINGS):
            return "input"
        return "prompt" if self.endpoint is Endpoint.COMPLETIONS else "messages"

    @property
    def format_param(self) -> str:
        """How the endpoint calls the format that the answer is held to."""
        names = {Endpoint.MESSAGES: "output_config.format", Endpoint.RESPONSES: "text.format"}
        return names.get(self.endpoint, "response_format")


class Heading(Struct, frozen=True):
    """What stands at the top of every chunk and of the whole answer."""

    id: str
    created: int  # unix seconds
    model: str


class TokenCounts(Struct, frozen=True):
    """Tokens of all prompts and answers of one request."""

    prompt: int
    completion: int
    cached: int  # of the prompt, that no worker had to compute

    @property
    def total(self) -> int:
        return self.prompt + self.completion


class StreamWriter(Protocol):
    """Makes the bytes of one streamed answer. `index`: of the answer, where a request has several."""

    def opening(self) -> bytes:
        """Before anything else; may be empty."""
        ...

    def part(self, index: int, part: "Part") -> bytes:
        """What is new in one answer; empty if there is nothing to say."""
        ...

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and behind the text, as the inside of a JSON string, of a part that is text alone; None
        if that is not always the same."""
        ...

    def finish(self, index: int, reason: FinishReason) -> bytes:
        """One answer is complete."""
        ...

    def end(self, counts: TokenCounts) -> bytes:
        """All are."""
        ...

    def error(self, error: MeshError, request_id: str) -> bytes:
        """It broke off. Nothing follows. `request_id`: as the headers told it."""
        ...


class Dialect(Protocol):
    """One endpoint's way to ask and to answer."""

    endpoint: Endpoint
    id_prefix: str

    def parse(self, body: bytes) -> Call:
        """Raises InvalidRequestError."""
        ...

    def whole(self, job: "Job", answers: "Sequence[Whole]", counts: TokenCounts) -> bytes:
        """The body of an answer that is not streamed; `answers` in the order of their index."""
        ...

    def writer(self, job: "Job") -> StreamWriter: ...

    def error_body(self, error: MeshError, request_id: str = "") -> bytes:
        """`request_id`: as the headers tell it; empty for what is refused before it has one."""
        ...
