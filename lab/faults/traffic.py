"""Draw the requests of a run: a pure function of the seed and the request's number."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from kvmesh.protocol.errors import ConfigError

MODEL = "tiny"
LORAS = ("poet", "critic")
TENANTS = ("", "salt a", "salt b")
SHARED_PREFIXES = 6  # prompts begin with one of so many: caches are of use
WORDS = ("fox", "river", "seven", "why", "green", "house", "count", "to", "a", "the", "tell", "me", "of")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Ask(Struct, frozen=True, kw_only=True):
    """One request of a client, and what the client does with the answer."""

    number: int
    shape: str
    frontend: int
    max_tokens: int
    prompt: tuple[int, ...] = ()  # tokens; empty: `messages`
    messages: tuple[Mapping[str, str], ...] = ()
    tools: bool = False
    options: tuple[str, ...] = ()  # the answer is a JSON object that holds one of these
    stream: bool = True
    choices: int = 1
    lora: str | None = None
    salt: str = ""
    deadline_s: float = 30.0
    is_hurried: bool = False  # the deadline may come before the answer's end
    leave_after: int | None = None  # events
    pause_s: float = 0.0  # before each read
    stalls_s: float = 0.0  # again and again, with no room for what comes meanwhile
    split: bool | None = None  # over two workers; None: the router decides
    model: str = MODEL

    @property
    def path(self) -> str:
        return "/v1/completions" if self.prompt else "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        """Return the JSON that is sent."""
        body: dict[str, Any] = {"model": self.lora or self.model, "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": self.stream, "kvmesh": {"trace": True, "disaggregate": self.split}}
        if self.prompt:
            body |= {"prompt": list(self.prompt), "logprobs": 0}
        else:
            body |= {"messages": list(self.messages), "logprobs": True, "top_logprobs": 0}
        if self.tools:
            body["tools"] = [TOOL]
        if self.options:
            body["response_format"] = {"type": "json_schema", "json_schema": schema_of(self.options)}
            del body["ignore_eos"]
        if self.choices > 1:
            body |= {"n": self.choices, "temperature": 1.0}  # at 0 all are the same; the mock's are so in any case
        if self.salt:
            body["cache_salt"] = self.salt
        return body


Mood = Literal["usual", "leaves", "slow", "hurried", "stalls"]
STALLS_S = 0.7


class AskShape(Struct, frozen=True):
    """One kind of request. Pairs are drawn between."""

    name: str
    share: float
    prompt_tokens: tuple[int, int]  # (0, 0): a chat
    max_tokens: tuple[int, int]
    mood: Mood = "usual"
    stream: bool = True
    tools: bool = False
    guided: bool = False
    choices: int = 1
    lora: bool = False
    split: bool | None = None
    model: str = MODEL


SHAPES: Mapping[str, AskShape] = {
    shape.name: shape
    for shape in (
        AskShape("stream", 4, (8, 80), (20, 90)),
        AskShape("long", 3, (300, 1500), (8, 40), split=True),
        AskShape("whole", 2, (8, 200), (10, 60), stream=False),
        AskShape("cancel", 1, (8, 200), (60, 120), mood="leaves"),
        AskShape("slow", 1, (8, 40), (300, 600), mood="slow"),
        AskShape("stalled", 0, (8, 40), (5000, 6000), mood="stalls"),
        AskShape("deadline", 1, (8, 200), (40, 160), mood="hurried"),
        AskShape("tools", 1, (0, 0), (10, 40), tools=True),
        AskShape("chat", 1, (0, 0), (10, 60)),
        AskShape("guided", 1, (0, 0), (60, 60), guided=True),
        AskShape("choices", 1, (8, 80), (10, 40), choices=2),
        AskShape("adapter", 1, (8, 200), (10, 60), lora=True),
    )
}
REAL_MODEL = "real"
REAL_TOKENS = 24
REAL_PROMPTS = 5  # whose answers a run asks for before its first fault
TORCH = AskShape("torch", 1.5, (20, 120), (8, REAL_TOKENS), split=True, model=REAL_MODEL)


def ask(
    seed: int, number: int, frontends: int, shapes: Sequence[str] = (), deadline_s: float = 30.0, torch: bool = False
) -> Ask:
    """Return request `number`. Equal arguments give an equal request. Raises ConfigError for an unknown shape."""
    if unknown := [name for name in shapes if name not in SHAPES]:
        raise ConfigError(f"no shape of request {unknown[0]!r}", hint=f"there are: {', '.join(SHAPES)}")
    draw = random.Random(f"request {seed} {number}")
    among = [SHAPES[name] for name in shapes] if shapes else [*SHAPES.values(), *([TORCH] if torch else [])]
    shape = draw.choices(among, [one.share or bool(shapes) for one in among])[0]
    max_tokens = draw.randint(*shape.max_tokens)
    own_deadline_s = round(draw.uniform(0.4, 2.5), 2) if shape.mood == "hurried" else deadline_s
    is_chat = shape.prompt_tokens == (0, 0)
    return Ask(
        number=number,
        shape=shape.name,
        frontend=draw.randrange(frontends),
        max_tokens=max_tokens,
        prompt=_prompt_of(shape, draw),
        messages=chat(draw.randrange(CHATS)) if is_chat else (),
        tools=shape.tools,
        options=_options(draw) if shape.guided else (),
        stream=shape.stream,
        choices=shape.choices,
        lora=draw.choice(LORAS) if shape.lora else None,
        salt=draw.choice(TENANTS),
        deadline_s=own_deadline_s,
        is_hurried=shape.mood == "hurried",
        leave_after=draw.randint(0, 30) if shape.mood == "leaves" else None,
        pause_s=round(draw.uniform(0.005, 0.02), 4) if shape.mood == "slow" else 0.0,
        stalls_s=STALLS_S if shape.mood == "stalls" else 0.0,
        split=shape.split,
        model=shape.model,
    )


def _prompt_of(shape: AskShape, draw: random.Random) -> tuple[int, ...]:
    if shape.model == REAL_MODEL:
        return real_prompt(draw.randrange(REAL_PROMPTS))
    return () if shape.prompt_tokens == (0, 0) else _prompt(draw, draw.randint(*shape.prompt_tokens))


def real_prompt(number: int) -> tuple[int, ...]:
    """Return a prompt for the real model, of the few whose answers are known."""
    draw = random.Random(f"real {number}")
    return _prompt(draw, draw.randint(*TORCH.prompt_tokens))


def real_ask(number: int) -> Ask:
    """Return the request that learns the answer to a prompt."""
    prompt = real_prompt(number)
    return Ask(
        number=-1000 - number, shape="torch", frontend=0, max_tokens=REAL_TOKENS, prompt=prompt, model=REAL_MODEL
    )


OPTION = "option"


def _options(draw: random.Random) -> tuple[str, ...]:
    """Return what a guided answer may hold. They are new for each request: no worker has compiled them before."""
    return tuple(f"{word} {draw.randrange(1_000_000)}" for word in draw.sample(WORDS, 3))


def schema_of(options: Sequence[str]) -> Mapping[str, Any]:
    properties = {OPTION: {"type": "string", "enum": list(options)}}
    schema = {"type": "object", "properties": properties, "required": [OPTION], "additionalProperties": False}
    return {"name": OPTION, "strict": True, "schema": schema}


CHATS = 8  # whose tokens a run asks for before its first fault


def chat(number: int) -> tuple[Mapping[str, str], ...]:
    draw = random.Random(f"chat {number}")
    text = " ".join(draw.choices(WORDS, k=draw.randint(4, 60)))
    return ({"role": "system", "content": "Answer."}, {"role": "user", "content": f"{number}: {text}"})


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    first = draw.randrange(SHARED_PREFIXES)
    shared = length * 2 // 3
    prefix = [(31 * first + 7 * i) % 1900 + 10 for i in range(shared)]
    return (*prefix, *(draw.randrange(10, 1910) for _ in range(length - shared)))
