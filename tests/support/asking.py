"""Requests for an engine behind the seam: greedy, each with an id of its own."""

import itertools
from collections.abc import Sequence
from typing import Any

from kvmesh.protocol.ids import RequestId
from kvmesh.protocol.messages import GenerateRequest, SamplingParams, StopConditions, pack_tokens

_numbers = itertools.count()


def asked(
    tokens: Sequence[int] | bytes, max_tokens: int = 12, *, ignore_eos: bool = True, **fields: Any
) -> GenerateRequest:
    """`tokens`: the prompt, packed or not. `fields` go before what is said here."""
    return GenerateRequest(
        **{
            "request_id": RequestId(f"r{next(_numbers)}"),
            "model": "tiny",
            "prompt": tokens if isinstance(tokens, bytes) else pack_tokens(tokens),
            "sampling": SamplingParams(temperature=0),
            "stop": StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
            **fields,
        }
    )


def prompt_tokens(length: int, first: int = 11) -> list[int]:
    """Ordinary tokens of the tiny model; another `first` is another prompt."""
    return [(first + 37 * i) % 1900 + 50 for i in range(length)]
