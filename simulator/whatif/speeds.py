"""Find how fast the workers were, from requests that they have answered. Pure.

A step takes `step_s` and `token_s` for each new token of prompts, and, if it decodes, `decode_s` and `kv_token_s` for
each token of KV that the running requests hold. The first guess is a regression over the requests' times, with what is
known of their neighbours on the same worker; then both parts are scaled until the simulation takes as long as it took.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.protocol.profile import DecodeTable, PrefillTable, Profile
from kvmesh.protocol.timing import KV_BYTES_PER_TOKEN
from kvmesh.simulator.open_request import SimAnswer
from kvmesh.simulator.whatif.traffic import PastRequest

ROUNDS = 5  # simulations of the fitted half, at most
CLOSE = 0.02  # relative: scaling ends
MOST_SCALING = 2.0  # in one round
FEWEST = 8  # requests for a regression, where fewer are alone all count
OUTLIER = 3.0  # times the median residual
LONG_TOKENS = 1 << 20


class WorkerSpeeds(Struct, frozen=True, kw_only=True):
    """All in seconds."""

    step_s: float = 0.0  # of a step that computes prompts
    token_s: float = 0.0  # ... and for each of its new tokens
    decode_s: float = 0.0  # of a step that decodes
    kv_token_s: float = 0.0  # ... and for each token of KV that is held
    pull_token_s: float = 0.0  # of a token of KV, from a prefill to a decode worker
    hop_s: float = 0.0  # in the frontend, before the router is asked and behind the first token together: half of it

    @property
    def bandwidth_gbps(self) -> float:
        """Return the rate of pulls in the simulator's terms; 0: there were none, or they took no time."""
        return KV_BYTES_PER_TOKEN / self.pull_token_s / 1e9 if self.pull_token_s > 0 else 0.0

    def profile(self, blocks: int, block_size: int) -> Profile:
        """Return the speeds as a profile of workers with such caches."""
        kv_tokens = max(1, blocks * block_size)
        ends = [1, LONG_TOKENS]
        return Profile(
            model="measured",
            engine="as it ran",
            device="as it ran",
            provider="requests",
            prefill=PrefillTable(isl_tokens=ends, ttft_s=[self.step_s + self.token_s * end for end in ends]),
            decode=DecodeTable(
                kv_tokens=[0, kv_tokens],
                context_tokens=[1],
                itl_s=[[self.decode_s], [self.decode_s + self.kv_token_s * kv_tokens]],
            ),
            total_kv_tokens=kv_tokens,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        )

    def scaled(self, prefill: float, decode: float) -> "WorkerSpeeds":
        """Return these speeds with other times of prompts and of decoding."""
        return replace(
            self,
            step_s=self.step_s * prefill,
            token_s=self.token_s * prefill,
            decode_s=self.decode_s * decode,
            kv_token_s=self.kv_token_s * decode,
        )


class SeenTime(NamedTuple):
    """y = a * ones + b * x, with a and b to be found. Errors count relative to `scale`."""

    ones: float
    x: float
    y: float
    scale: float


def fit_line(seen: Sequence[SeenTime]) -> tuple[float, float]:
    """Return a and b, neither below 0, with the least squares. What is far off is left out in a second fit."""
    usable = [o for o in seen if o.scale > 0]
    if not usable:
        return 0.0, 0.0
    a, b = _least_squares(usable)
    residuals = [abs(o.y - a * o.ones - b * o.x) / o.scale for o in usable]
    most = OUTLIER * max(median(residuals), 1e-3)
    near = [o for o, residual in zip(usable, residuals, strict=True) if residual <= most]
    return _least_squares(near)


def _least_squares(seen: Iterable[SeenTime]) -> tuple[float, float]:
    rows = [(o.ones / o.scale, o.x / o.scale, o.y / o.scale) for o in seen]
    uu, uv, vv = sum(u * u for u, _, _ in rows), sum(u * v for u, v, _ in rows), sum(v * v for _, v, _ in rows)
    uy, vy = sum(u * y for u, _, y in rows), sum(v * y for _, v, y in rows)
    determinant = uu * vv - uv * uv
    if determinant > 1e-9 * uu * vv:
        a, b = (uy * vv - vy * uv) / determinant, (vy * uu - uy * uv) / determinant
        if a >= 0 and b >= 0:
            return a, b
    only_a, only_b = max(0.0, uy / uu) if uu else 0.0, max(0.0, vy / vv) if vv else 0.0
    error_a = sum((y - only_a * u) ** 2 for u, _, y in rows)
    error_b = sum((y - only_b * v) ** 2 for _, v, y in rows)
    return (only_a, 0.0) if error_a <= error_b else (0.0, only_b)


class PastPrompt(NamedTuple):
    """A prompt on the worker that computed it."""

    begin_s: float
    end_s: float
    steps: int
    tokens: int


class PastDecode(NamedTuple):
    """An answer on the worker that decoded it."""

    begin_s: float
    end_s: float
    isl_tokens: int
    osl_tokens: int


class WorkerPast:
    """Keep what one worker did, and when."""

    def __init__(self, prompts: Iterable[PastPrompt], decodes: Iterable[PastDecode]) -> None:
        self._prompts = sorted(prompts, key=lambda prompt: prompt.end_s)
        self._ends = [prompt.end_s for prompt in self._prompts]
        self._longest_prompt_s = max((p.end_s - p.begin_s for p in self._prompts), default=0.0)
        self._decodes = sorted(decodes)
        self._begins = [decode.begin_s for decode in self._decodes]
        self._longest_s = max((d.end_s - d.begin_s for d in self._decodes), default=0.0)

    def kv_tokens(self, at_s: float) -> int:
        """Return how many tokens the answers in progress held."""
        first = bisect_left(self._begins, at_s - self._longest_s)
        last = bisect_right(self._begins, at_s)
        held = 0.0
        for begin_s, end_s, isl_tokens, osl_tokens in self._decodes[first:last]:
            if end_s >= at_s and end_s > begin_s:
                held += isl_tokens + osl_tokens * (at_s - begin_s) / (end_s - begin_s)
        return int(held)

    def is_alone(self, prompt: PastPrompt) -> bool:
        """Tell whether no other prompt was there at the same time."""
        first = bisect_right(self._ends, prompt.begin_s)
        last = bisect_right(self._ends, prompt.end_s + self._longest_prompt_s)
        others = self._prompts[first:last]
        return sum(other.begin_s < prompt.end_s for other in others) <= 1

    def prompts_in(self, begin_s: float, end_s: float) -> tuple[int, int]:
        """Return steps and tokens of the prompts that ended in between."""
        ended = self._prompts[bisect_right(self._ends, begin_s) : bisect_right(self._ends, end_s)]
        return sum(prompt.steps for prompt in ended), sum(prompt.tokens for prompt in ended)


def past_of(requests: Sequence[PastRequest], max_step_tokens: int) -> dict[str, WorkerPast]:
    prompts: dict[str, list[PastPrompt]] = defaultdict(list)
    decodes: dict[str, list[PastDecode]] = defaultdict(list)
    for one in requests:
        prompts[one.computed_on].append(prompt_of(one, max_step_tokens))
        facts, end_s = one.request, one.first_s + one.decoded_s
        decodes[one.answered_on].append(PastDecode(one.first_s, end_s, facts.isl_tokens, facts.osl_tokens))
    return {name: WorkerPast(prompts[name], decodes[name]) for name in {*prompts, *decodes}}


def prompt_of(one: PastRequest, max_step_tokens: int) -> PastPrompt:
    steps = -(-one.new_tokens // max_step_tokens)
    return PastPrompt(one.first_s - one.prefill_s, one.first_s, steps, one.new_tokens)


def first_guess(requests: Sequence[PastRequest], max_step_tokens: int) -> WorkerSpeeds:
    """Return speeds from the times of the requests alone."""
    past = past_of(requests, max_step_tokens)
    before_s = [max(0.0, one.ttft_s - one.queue_s - one.prefill_s) for one in requests]
    pulled = [(one.pull_s, one.request.isl_tokens) for one in requests if one.pull_s > 0]
    speeds = WorkerSpeeds(
        hop_s=median(before_s) / 2, pull_token_s=median(pull_s / tokens for pull_s, tokens in pulled) if pulled else 0.0
    )
    for _ in range(2):  # each part disturbs the other where a worker does both
        speeds = with_prompts(speeds, requests, past, max_step_tokens)
        speeds = with_decode(speeds, requests, past)
    return speeds


def with_prompts(
    speeds: WorkerSpeeds, requests: Sequence[PastRequest], past: dict[str, WorkerPast], max_step_tokens: int
) -> WorkerSpeeds:
    """Fit the time of prompts to those that were alone on their worker, or to all where these are few."""
    seen: dict[bool, list[SeenTime]] = {True: [], False: []}
    for one in requests:
        worker, prompt = past[one.computed_on], prompt_of(one, max_step_tokens)
        if prompt.tokens == 1:  # the step of a prompt that was cached but for its last token is one that decodes
            continue
        y = one.prefill_s
        if kv_tokens := worker.kv_tokens(prompt.begin_s):  # half a step until it begins, and its steps decode too
            y -= (0.5 + prompt.steps) * (speeds.decode_s + speeds.kv_token_s * kv_tokens)
        observation = SeenTime(prompt.steps, prompt.tokens, max(y, 0.0), one.prefill_s)
        seen[worker.is_alone(prompt)].append(observation)
    alone, others = seen[True], seen[False]
    step_s, token_s = fit_line(alone if len(alone) >= FEWEST else [*alone, *others])
    return replace(speeds, step_s=step_s, token_s=token_s)


def with_decode(speeds: WorkerSpeeds, requests: Sequence[PastRequest], past: dict[str, WorkerPast]) -> WorkerSpeeds:
    """Fit the time of a step that decodes, without the prompts that were computed in between."""
    seen: list[SeenTime] = []
    for one in requests:
        gaps = one.request.osl_tokens - 1
        if one.itl_s is None or not one.decoded_s:
            continue
        worker, begin_s, took_s = past[one.answered_on], one.first_s, one.decoded_s
        steps, tokens = worker.prompts_in(begin_s, begin_s + took_s)
        disturbed_s = speeds.step_s * steps + speeds.token_s * tokens + one.pull_s
        y = max(took_s - disturbed_s, 0.0) / gaps
        held = [worker.kv_tokens(begin_s + took_s * share) for share in (1 / 6, 1 / 2, 5 / 6)]
        seen.append(SeenTime(1.0, sum(held) / len(held), y, one.itl_s))
    if not seen:
        return speeds
    decode_s, kv_token_s = fit_line(seen)
    return replace(speeds, decode_s=decode_s, kv_token_s=kv_token_s)


def calibrated(
    speeds: WorkerSpeeds,
    requests: Sequence[PastRequest],
    simulated: Callable[[WorkerSpeeds], Sequence[SimAnswer]],
) -> WorkerSpeeds:
    """Scale the two parts until the simulation of the requests takes as long as it took; return the closest."""
    best, least = speeds, math.inf
    for _ in range(ROUNDS):
        prefill, decode = ratios(requests, simulated(speeds), speeds)
        error = max(abs(math.log(prefill)), abs(math.log(decode)))
        if error < least:
            best, least = speeds, error
        if error < CLOSE:
            break
        speeds = speeds.scaled(bounded(prefill), bounded(decode))
    return best


def bounded(ratio: float) -> float:
    return min(MOST_SCALING, max(1 / MOST_SCALING, ratio))


def ratios(requests: Sequence[PastRequest], answers: Sequence[SimAnswer], speeds: WorkerSpeeds) -> tuple[float, float]:
    """Return how many times as long it took as simulated: to the first token, and from there on."""
    alike: list[float] = []  # where the simulated cache held about what the real one did
    all_of_them: list[float] = []
    itl: list[float] = []
    for answer in answers:
        one = requests[answer.number]
        least_s = 1e-6
        ratio = max(least_s, one.ttft_s - 2 * speeds.hop_s) / max(least_s, answer.ttft_s - 2 * speeds.hop_s)
        all_of_them.append(ratio)
        if abs(answer.cached_tokens - one.cached_tokens) <= one.request.isl_tokens / 10:
            alike.append(ratio)
        if one.itl_s and answer.itl_s:
            itl.append(one.itl_s / answer.itl_s)
    prefill = alike if len(alike) >= FEWEST else all_of_them
    return median(prefill) if prefill else 1.0, median(itl) if itl else 1.0
