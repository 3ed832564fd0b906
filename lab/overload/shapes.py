"""Plan the requests of an overload run: when each is sent, what it asks for, how long its client waits. Pure."""

import json
import random
from array import array
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from msgspec import Struct, structs

VOCABULARY = range(10, 1900)  # of the tiny model's tokens, plain ones
SHARED_TOKENS = 768  # of a prefix that a prompt shares with others
ShapeName = Literal[
    "mix",
    "long-prompts",
    "heavy-tails",
    "prefixes",
    "bursts",
    "deadlines",
    "tight-deadlines",
    "no-deadline",
    "cancels",
    "text",
]
SHAPES: tuple[ShapeName, ...] = get_args(ShapeName)


class PlannedRequest(Struct, frozen=True, kw_only=True):
    """Describe a request. An answer with `stops` ends after a random number of tokens, the others at `max_tokens`."""

    at_s: float = 0.0
    isl_tokens: int
    max_tokens: int
    stops: int = 0  # tokens of the vocabulary that end the answer
    seed: int = 0  # of the prompt, and of the answer's length
    deadline_s: float = 10.0  # 0: the client names none
    leaves_s: float = 0.0  # after so long the client leaves; 0: it does not
    prefix: int = 0  # number of the prefix that it shares with others; 0: none
    is_text: bool = False

    @property
    def osl_tokens(self) -> int:
        """Return the length of the answer in a simulation. Live, any token may be one of the `stops`."""
        if not self.stops:
            return self.max_tokens
        share = self.stops / len(VOCABULARY)
        return min(self.max_tokens, 1 + int(random.Random(f"answer {self.seed}").expovariate(share)))


class Segment(Struct, frozen=True):
    """A part of a run with one rate of arrivals."""

    rate: float  # requests per second
    seconds: float


_Draw = Callable[[random.Random], PlannedRequest]


def _mix(rng: random.Random, **more: object) -> PlannedRequest:
    isl_tokens, max_tokens = rng.choice((20, 60, 150, 400)), rng.choice((16, 40, 80, 160))
    stops = 0 if rng.random() < 0.6 else 24
    seed = rng.getrandbits(48)
    most = 400 if stops else max_tokens
    return PlannedRequest(isl_tokens=isl_tokens, max_tokens=most, stops=stops, seed=seed, **more)  # type: ignore[arg-type]


def _long_prompts(rng: random.Random) -> PlannedRequest:
    isl_tokens, max_tokens = rng.choice((1500, 3000, 6000)), rng.choice((8, 24))
    return PlannedRequest(isl_tokens=isl_tokens, max_tokens=max_tokens, seed=rng.getrandbits(48))


def _heavy_tails(rng: random.Random) -> PlannedRequest:
    isl_tokens = min(6000, 8 + int(rng.lognormvariate(4.6, 1.2)))
    stops = rng.choice((96, 48, 24, 12, 6))  # answers of 20 to 320 tokens on average
    seed = rng.getrandbits(48)
    return PlannedRequest(isl_tokens=isl_tokens, max_tokens=1000, stops=stops, seed=seed, deadline_s=30.0)


def _prefixes(rng: random.Random) -> PlannedRequest:
    one = _mix(rng, prefix=1 + int(16 * rng.random() ** 2))
    return structs.replace(one, isl_tokens=SHARED_TOKENS + one.isl_tokens)


def _deadlines(rng: random.Random) -> PlannedRequest:
    return _mix(rng, deadline_s=rng.choice((2.0, 5.0, 10.0, 30.0, 60.0)))


def _tight_deadlines(rng: random.Random) -> PlannedRequest:
    return _mix(rng, deadline_s=rng.choice((2.0, 10.0, 60.0)))


def _no_deadline(rng: random.Random) -> PlannedRequest:
    return _mix(rng, deadline_s=0.0)


def _cancels(rng: random.Random) -> PlannedRequest:
    return _mix(rng, leaves_s=rng.uniform(0.05, 2.0) if rng.random() < 0.3 else 0.0)


def _text(rng: random.Random) -> PlannedRequest:
    return _mix(rng, is_text=True)


_KINDS: dict[ShapeName, _Draw] = {
    "mix": _mix,
    "long-prompts": _long_prompts,
    "heavy-tails": _heavy_tails,
    "prefixes": _prefixes,
    "bursts": _mix,
    "deadlines": _deadlines,
    "tight-deadlines": _tight_deadlines,
    "no-deadline": _no_deadline,
    "cancels": _cancels,
    "text": _text,
}


def planned(shape: ShapeName, segments: list[Segment], seed: int) -> list[PlannedRequest]:
    """Return the requests of the segments, one after the other, in the order of time."""
    rng = random.Random(f"{shape} {seed}")
    found, begins_s = list[PlannedRequest](), 0.0
    for segment in segments:
        for at_s in _arrivals(shape, segment, rng):
            found.append(structs.replace(_KINDS[shape](rng), at_s=begins_s + at_s))
        begins_s += segment.seconds
    return found


def samples(shape: ShapeName, count: int, seed: int) -> list[PlannedRequest]:
    """Return requests without times and deadlines, for a closed loop."""
    rng = random.Random(f"{shape} {seed} closed")
    return [structs.replace(_KINDS[shape](rng), deadline_s=0.0, leaves_s=0.0) for _ in range(count)]


class WrittenRequest(Struct, frozen=True):
    """A planned request with what is sent for it."""

    planned: PlannedRequest
    path: str
    body: bytes


def written(planned: PlannedRequest, model: str) -> WrittenRequest:
    """Write a request. Only prompts of the same prefix begin alike."""
    rng = random.Random(f"prompt {planned.seed}")
    prompt = [rng.choice(VOCABULARY) for _ in range(planned.isl_tokens)]
    if planned.prefix:
        prompt[:SHARED_TOKENS] = random.Random(f"prefix {planned.prefix}").choices(VOCABULARY, k=SHARED_TOKENS)
    body: dict[str, object] = {"model": model, "max_tokens": planned.max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    if planned.stops:
        body["stop_token_ids"] = rng.sample(VOCABULARY, planned.stops)
    else:
        body["ignore_eos"] = True
    if planned.is_text:
        body["messages"] = [{"role": "user", "content": " ".join(f"word{token}" for token in prompt)}]
        return WrittenRequest(planned, "/v1/chat/completions", json.dumps(body).encode())
    body["prompt"] = prompt
    return WrittenRequest(planned, "/v1/completions", json.dumps(body).encode())


def block_names(planned: PlannedRequest, block_size: int) -> bytes:
    """Return a name for each full block of a prompt, u64 packed, as the simulator knows them."""
    own = array("Q", [planned.seed << 12 | number for number in range(planned.isl_tokens // block_size)])
    shared = SHARED_TOKENS // block_size if planned.prefix else 0
    own[:shared] = array("Q", [planned.prefix << 12 | number for number in range(shared)])
    return own.tobytes()


def _arrivals(shape: ShapeName, segment: Segment, rng: random.Random) -> Iterator[float]:
    """Yield the times of arrivals: a Poisson process, or bursts of it of one fifth of the time."""
    now = rng.expovariate(segment.rate)
    if shape != "bursts":
        while now < segment.seconds:
            yield now
            now += rng.expovariate(segment.rate)
        return
    while now < segment.seconds:  # the same number, pressed into the first fifth of each 2 s
        yield now - now % 2.0 + (now % 2.0) / 5
        now += rng.expovariate(segment.rate)
