"""Describe how long prompts and steps take on one kind of worker, as measured or estimated. Pure.

The profiler writes profiles; the mock engine, the simulator and the planner read them. One file describes one mapping
(how an engine is spread over its GPUs) of one model; prefill and decode workers may have different files.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import UNREADABLE

MAX_PROFILE_BYTES = 16 << 20

_Seconds = Annotated[float, Meta(ge=0)]
_Axis = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=4096)]


class PrefillTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a prompt alone on the worker: `ttft_s[i]` for `isl_tokens[i]` uncached tokens. The axis increases."""

    isl_tokens: _Axis
    ttft_s: list[_Seconds]


class DecodeTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one step: `itl_s[i][j]` while `kv_tokens[i]` are held in sequences of `context_tokens[j]` each.

    Both axes increase. The batch of a cell is kv_tokens / context_tokens.
    """

    kv_tokens: _Axis
    context_tokens: _Axis
    itl_s: list[list[_Seconds]]


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Literal["kvmesh-profile-1"] = "kvmesh-profile-1"
    model: str
    engine: str  # torch, mock, vllm, ...
    device: str  # as the engine or the data sheet names it
    mapping: str = "tp1"  # e.g. tp4, tep8, dep16
    gpus: Annotated[int, Meta(ge=0)] = 1  # of one worker; 0: it runs on CPUs
    dp_size: Annotated[int, Meta(ge=1)] = 1  # ranks; ttft_s was taken while each of them computed a prompt
    provider: str = "measured"  # measured, polynomial, roofline, aiconfigurator
    notes: str = ""  # how the profile was obtained: versions, seeds, dates
    prefill: PrefillTable | None = None  # None: not profiled as a prefill worker
    decode: DecodeTable | None = None
    total_kv_tokens: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    max_step_tokens: Annotated[int, Meta(ge=1)] = 8192
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] = 0  # of one token in all layers; 0: unknown
    start_s: _Seconds = 0.0  # from the order until the worker takes requests
    capacity: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # speed against the other kinds of workers of its role

    def __deepcopy__(self, memo: object) -> "Profile":
        """Return the profile itself: nobody changes one, and its tables are large."""
        return self

    def prefill_s(self, isl_tokens: float) -> float:
        """Linear between the points and, by the nearest two, beyond them; never below 0. 0 for no token."""
        if self.prefill is None or isl_tokens <= 0:
            return 0.0
        return max(0.0, _Place.of(self.prefill.isl_tokens, isl_tokens).in_row(self.prefill.ttft_s))

    def decode_s(self, kv_tokens: float, context_tokens: float) -> float:
        """Bilinear; outside the measured range the value at its edge."""
        if self.decode is None:
            return 0.0
        table = self.decode
        kv = _Place.within(table.kv_tokens, kv_tokens)
        context = _Place.within(table.context_tokens, context_tokens)
        low, high = context.in_row(table.itl_s[kv.left]), context.in_row(table.itl_s[kv.right])
        return low + kv.share * (high - low)


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError for a file that is no profile."""
    try:
        if (size := path.stat().st_size) > MAX_PROFILE_BYTES:
            raise ConfigError(f"{path} has {size} bytes, a profile has at most {MAX_PROFILE_BYTES}")
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"no profile at {path}: {error.strerror}", hint="write one with `kvmesh profile`") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is no profile: {error}", hint="write one with `kvmesh profile`") from error
    check_profile(profile, str(path))
    return profile


def check_profile(profile: Profile, where: str) -> None:
    """Check what the types cannot say: sizes of tables and order of axes. Raises ConfigError."""
    tables: list[tuple[str, Sequence[int], int]] = []
    if profile.prefill is not None:
        tables.append(("prefill.isl_tokens", profile.prefill.isl_tokens, len(profile.prefill.ttft_s)))
    if profile.decode is not None:
        decode = profile.decode
        tables.append(("decode.kv_tokens", decode.kv_tokens, len(decode.itl_s)))
        tables += [("decode.context_tokens", decode.context_tokens, len(row)) for row in decode.itl_s]
    for name, axis, count in tables:
        if len(axis) != count:
            raise ConfigError(f"{where}: {name} has {len(axis)} points, its table {count}")
        if any(later <= earlier for earlier, later in pairwise(axis)):
            raise ConfigError(f"{where}: {name} does not increase")


class _Place(NamedTuple):
    """A place on an axis: `share` of the way from point `left` to point `right`; outside of them below 0 or above 1."""

    left: int
    right: int
    share: float

    @classmethod
    def of(cls, axis: Sequence[int], at: float) -> "_Place":
        if len(axis) == 1:
            return cls(0, 0, 0.0)
        right = min(max(bisect_right(axis, at), 1), len(axis) - 1)
        low, high = axis[right - 1], axis[right]
        return cls(right - 1, right, (at - low) / (high - low))

    @classmethod
    def within(cls, axis: Sequence[int], at: float) -> "_Place":
        """Return the place of `at`, or the nearest end of the axis."""
        return cls.of(axis, min(max(at, axis[0]), axis[-1]))

    def in_row(self, values: Sequence[float]) -> float:
        return values[self.left] + self.share * (values[self.right] - values[self.left])
