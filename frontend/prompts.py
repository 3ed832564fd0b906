"""Turn prompts into the tokens that the model reads: render the chat template, tokenize, check the length."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import msgspec

from kvmesh.frontend.control_tokens import Chat, parts_of, unused_mark
from kvmesh.frontend.errors import PromptTooLongError
from kvmesh.frontend.models import Model
from kvmesh.frontend.request import ParsedRequest
from kvmesh.frontend.template_probes import fitted
from kvmesh.frontend.templates import ChatTemplate
from kvmesh.frontend.tokenizer import TooManyTokensError
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import pack_tokens

PROMPTS_AT_ONCE = 16  # tokenized in one turn of the event loop
LONG_TURNS = 512  # messages and calls in them; rendering more in the event loop would hold it up for milliseconds
LONG_CHAT_BYTES = 64 << 10  # likewise, of its texts, tools and options
PROMPT_TAIL_CHARS = 64  # of a rendered chat, to see whether it opens thoughts
BETWEEN_PARTS = "\0"  # in the tail: what a message spells opens no thoughts
INFILL_TOKENS = (  # before the prompt, before the suffix, before the answer: in Qwen's, StarCoder's, DeepSeek's words
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)

ReadT = TypeVar("ReadT")


class TokenizedPrompt(msgspec.Struct):
    """A prompt as the model reads it, for one or more answers."""

    tokens: bytes  # u32 little endian
    tail: str = ""  # of a rendered chat
    text: str = ""  # for the echo
    rendered: float | None = None  # when its chat template was, by time.monotonic

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


async def read_prompts(parsed: ParsedRequest, model: Model) -> list[TokenizedPrompt]:
    """Return the prompts of a request as tokens. Raise InvalidRequestError, PromptTooLongError."""
    if parsed.messages is not None:
        prompts = [await chat_prompt(parsed, model)]
    else:
        prompts = await in_turns(parsed.prompts, lambda prompt: completion_prompt(parsed, model, prompt))
    for read in prompts:
        if not read.tokens:
            refuse_empty(parsed.names.prompt)
    return prompts


async def in_turns(
    prompts: Sequence[str | Sequence[int]], read: Callable[[str | Sequence[int]], Awaitable[ReadT]]
) -> list[ReadT]:
    """Return what `read` makes of each prompt. Short ones are tokenized without a pause, and there may be thousands."""
    found: list[ReadT] = []
    for number, prompt in enumerate(prompts, 1):
        found.append(await read(prompt))
        if number % PROMPTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return found


async def chat_prompt(parsed: ParsedRequest, model: Model) -> TokenizedPrompt:
    """Render and tokenize a chat; the template alone writes control tokens."""
    assert parsed.messages is not None
    parts = await asyncio.to_thread(render, parsed, model) if is_long_chat(parsed) else render(parsed, model)
    rendered = time.monotonic()
    check_length(parts, model, parsed.names.prompt)
    encode = partial(model.tokenizer.encode_parts, parts, salt=parsed.cache_salt or "")
    tokens = await _within_context(encode, model, parsed.names.prompt)
    tail = BETWEEN_PARTS.join(parts[-PROMPT_TAIL_CHARS:])[-PROMPT_TAIL_CHARS:]
    return TokenizedPrompt(tokens, tail, rendered=rendered)


def is_long_chat(parsed: ParsedRequest) -> bool:
    """Return whether rendering a chat may take milliseconds: for its turns, or its text with all tools and options."""
    messages = parsed.messages or ()
    if sum([1 + len(message.get("tool_calls") or ()) for message in messages]) > LONG_TURNS:
        return True
    plain = sum([len(text) for message in messages if isinstance(text := message.get("content"), str)])
    return plain > LONG_CHAT_BYTES or len(msgspec.json.encode(_beside_plain(parsed))) > LONG_CHAT_BYTES - plain


def _beside_plain(parsed: ParsedRequest) -> object:
    """Return what a template renders beside contents that are plain strings: all else of messages, tools, options."""
    rest = [value for message in parsed.messages or () for value in message.values() if type(value) is not str]
    return rest, parsed.tools.shown if parsed.tools is not None else (), parsed.template_options


def render(parsed: ParsedRequest, model: Model) -> list[str]:
    """Return the chat as text, in parts: it is cut within control tokens that its messages and tools spell.

    Raise InvalidRequestError if the template refuses it.
    """
    assert parsed.messages is not None
    shown = parsed.tools.shown if parsed.tools is not None else None
    template = model.chat_template()
    chat = Chat(fitted(parsed.messages, template.traits), shown, parsed.template_options)
    if model.control is None or not model.control.are_in(chat):
        return [_rendered(template, chat, parsed)]
    mark = unused_mark(chat, template.source)
    try:
        chat = model.control.marked(chat, mark)
    except RecursionError as error:
        raise InvalidRequestError("the messages are nested too deep", param=parsed.names.prompt) from error
    return parts_of(_rendered(template, chat, parsed), mark)


def _rendered(template: ChatTemplate, chat: Chat, parsed: ParsedRequest) -> str:
    return template.render(
        chat.messages,
        tools=chat.tools,
        add_generation_prompt=parsed.add_generation_prompt,
        continue_final_message=parsed.continue_final_message,
        options=chat.options,
        param=parsed.names.prompt,
    )


async def completion_prompt(parsed: ParsedRequest, model: Model, prompt: str | Sequence[int]) -> TokenizedPrompt:
    """Return the prompt of a text completion. Raise InvalidRequestError, PromptTooLongError."""
    if not isinstance(prompt, str):
        answer_limit(parsed, model.context_tokens, len(prompt))  # first: what cannot fit is neither packed nor decoded
        tokens = given_tokens(prompt, model, parsed.names.prompt)
        if parsed.suffix:
            raise InvalidRequestError("'suffix' needs a prompt of text", param="suffix")
        return TokenizedPrompt(tokens, text=model.tokenizer.decode(list(prompt)) if parsed.echo else "")
    text = with_suffix(prompt, parsed.suffix, model) if parsed.suffix else prompt
    tokens = await text_tokens(text, model, parsed.names.prompt, parsed.cache_salt)
    return TokenizedPrompt(tokens, text=prompt if parsed.echo else "")


def given_tokens(token_ids: Sequence[int], model: Model, param: str) -> bytes:
    """Return the tokens that the client has sent. Raise InvalidRequestError if the model does not have one of them."""
    check_token_ids(token_ids, model, param)
    return pack_tokens(token_ids)


async def text_tokens(text: str, model: Model, param: str, salt: str | None) -> bytes:
    """Return the tokens of a raw text, with the special tokens that the tokenizer adds. Raise PromptTooLongError."""
    check_length([text], model, param)
    encode = partial(model.tokenizer.encode_packed, text, add_special_tokens=True, salt=salt or "")
    return await _within_context(encode, model, param)


async def _within_context(encode: Callable[..., Awaitable[bytes]], model: Model, param: str) -> bytes:
    """Return the tokens that `encode(most_tokens=...)` finds. Raise PromptTooLongError once they exceed the context."""
    most = model.context_tokens
    try:
        return await encode(most_tokens=most)
    except TooManyTokensError as error:
        least = error.num_tokens
        raise PromptTooLongError(f"at least {least} tokens", least, most, param) from error


def with_suffix(prompt: str, suffix: str, model: Model) -> str:
    """Return the prompt of a model that was trained to fill a gap. Raise InvalidRequestError for other models."""
    for prefix_token, suffix_token, middle_token in INFILL_TOKENS:
        tokens = (prefix_token, suffix_token, middle_token)
        if all(model.tokenizer.special_token_id(token) is not None for token in tokens):
            return f"{prefix_token}{prompt}{suffix_token}{suffix}{middle_token}"
    raise InvalidRequestError(
        f"The parameter 'suffix' is not supported by {model.name!r}: its tokenizer has no tokens for filling a gap",
        hint="leave it out",
        param="suffix",
    )


# --- checks -------------------------------------------------------------------------------------------


def refuse_empty(param: str) -> NoReturn:
    raise InvalidRequestError("the prompt is empty", param=param)


def check_token_ids(token_ids: Sequence[int], model: Model, param: str) -> None:
    """Raise InvalidRequestError for a token that the vocabulary does not have."""
    if token_ids and (largest := max(token_ids)) >= model.tokenizer.vocab_size:
        raise InvalidRequestError(
            f"{param} holds the token {largest}, which does not exist",
            hint=f"the vocabulary of {model.name} has {model.tokenizer.vocab_size} tokens",
            param=param,
        )


def check_each_token(token_ids: Sequence[int], model: Model, param: str) -> None:
    """Raise InvalidRequestError that names the place of the first token that the vocabulary does not have."""
    vocab_size = model.tokenizer.vocab_size
    for n, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            check_token_ids((token_id,), model, f"{param}[{n}]")


def check_length(parts: Sequence[str], model: Model, param: str) -> None:
    """Refuse what cannot fit before tokenizing it, which would take seconds and gigabytes. Raise PromptTooLongError."""
    chars = sum(map(len, parts))
    least_tokens = max(-(-chars // model.tokenizer.longest_token_chars), len(parts) - 1)
    if least_tokens >= model.context_tokens:
        raise PromptTooLongError(
            f"{chars} characters, at least {least_tokens} tokens", least_tokens, model.context_tokens, param
        )


def answer_limit(parsed: ParsedRequest, context_tokens: int, prompt_tokens: int) -> int:
    """Return how many tokens the answer may have: what was asked for, cut to what the context leaves.

    Raise PromptTooLongError if the prompt alone fills the context.
    """
    left = context_tokens - prompt_tokens
    if left <= 0:
        raise PromptTooLongError(f"{prompt_tokens} tokens", prompt_tokens, context_tokens, parsed.names.prompt)
    return left if parsed.max_tokens is None else min(parsed.max_tokens, left)
