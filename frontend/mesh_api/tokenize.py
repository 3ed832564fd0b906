"""POST /tokenize and /detokenize: what the mesh makes of a text, without asking a worker."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvmesh.frontend.bodies import decode_body
from kvmesh.frontend.callers import model_for, salt_for, visiting
from kvmesh.frontend.endpoint import Endpoint, Services, identified
from kvmesh.frontend.models import Model
from kvmesh.frontend.openai.parameters import CHAT_NAMES, declared, message_of
from kvmesh.frontend.openai.shapes import Message, ToolSpec
from kvmesh.frontend.operation import OWN_FAILURES, Operation, ShapeNotes
from kvmesh.frontend.parameters import ToolWish, template_options, tools_of
from kvmesh.frontend.prompts import chat_prompt, check_length, check_token_ids
from kvmesh.frontend.request import ParsedRequest
from kvmesh.frontend.shapes import MAX_MESSAGES, MAX_TOOLS, ModelName, Strict, TokenId
from kvmesh.mesh.http.request import Reply, Request, json_reply
from kvmesh.protocol.errors import ContextLengthError, InvalidRequestError
from kvmesh.protocol.messages import unpack_tokens

LONG_TOKENS = 4096  # from here on a thread costs less than the pause of the event loop would
T = TypeVar("T")


class TokenizeRequest(Strict, frozen=True):
    """Either a prompt or messages."""

    model: ModelName
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None  # default: of a prompt yes; a rendered chat holds its own
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class TokenizeReply(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Strict, frozen=True):
    model: ModelName
    tokens: list[TokenId]


class DetokenizeReply(Struct, frozen=True):
    prompt: str


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Raises InvalidRequestError."""
    request = decode_body(body, _tokenize_decoder)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("send either 'prompt' or 'messages'", param="prompt")
    return request


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises InvalidRequestError."""
    return decode_body(body, _detokenize_decoder)


async def tokenize(request: TokenizeRequest, model: Model, salt: str | None = None) -> TokenizeReply:
    """Raises InvalidRequestError, ContextLengthError."""
    tokens = unpack_tokens(await _tokens(request, model, salt))
    texts = None
    if request.return_token_strs:
        texts = await off_loop_if_long(tokens, lambda: [_shown(token, model) for token in tokens])
    return TokenizeReply(len(tokens), model.context_tokens, tokens, texts)


def _shown(token: int, model: Model) -> str:
    return model.tokenizer.token_bytes(token).decode(errors="replace")


async def off_loop_if_long(tokens: Sequence[int], work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if len(tokens) > LONG_TOKENS else work()


async def _tokens(request: TokenizeRequest, model: Model, salt: str | None) -> bytes:
    if request.prompt is not None:
        check_length([request.prompt], model, "prompt")
        with_special = request.add_special_tokens is not False
        return await model.tokenizer.encode_packed(request.prompt, add_special_tokens=with_special, salt=salt or "")
    chat = ParsedRequest(
        names=CHAT_NAMES,
        model=model.name,
        messages=[message_of(message, n) for n, message in enumerate(request.messages or ())],
        tools=tools_of(declared(request.tools or ()), ToolWish(), parallel=True),
        template_options=template_options(request.chat_template_kwargs, None),
        add_generation_prompt=request.add_generation_prompt,
        cache_salt=salt,
    )
    return (await chat_prompt(chat, model)).tokens


async def detokenize(request: DetokenizeRequest, model: Model) -> DetokenizeReply:
    """Special tokens show by their names. Raises InvalidRequestError."""
    check_token_ids(request.tokens, model, "tokens")
    if len(request.tokens) > model.context_tokens:
        raise ContextLengthError(
            f"{len(request.tokens)} tokens are more than the context of {model.name}, {model.context_tokens}",
            hint="send fewer",
            param="tokens",
        )
    decode = partial(model.tokenizer.decode, request.tokens, shown=model.tokenizer.special_tokens)
    return DetokenizeReply(await off_loop_if_long(request.tokens, decode))


async def answer_tokenize(services: Services, request: Request) -> Reply:
    asked = parse_tokenize(request.body)
    async with visiting(request):
        model = await model_for(request, services.models, asked.model)
        return json_reply(await tokenize(asked, model, salt_for(request, None)))


async def answer_detokenize(services: Services, request: Request) -> Reply:
    asked = parse_detokenize(request.body)
    async with visiting(request):
        return json_reply(await detokenize(asked, await model_for(request, services.models, asked.model)))


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=identified(answer_tokenize, "tokenize"),
        operation=Operation(
            summary="The tokens of a text or of a chat",
            request=(TokenizeRequest,),
            reply=TokenizeReply,
            failures=OWN_FAILURES,
            notes=ShapeNotes(examples={(TokenizeRequest, "prompt"): "Once upon a time"}),
        ),
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=identified(answer_detokenize, "detokenize"),
        operation=Operation(
            summary="The text of tokens",
            request=(DetokenizeRequest,),
            reply=DetokenizeReply,
            failures=OWN_FAILURES,
            notes=ShapeNotes(examples={(DetokenizeRequest, "tokens"): [16, 17, 18]}),
        ),
    ),
)
