"""Refuse guides that are too large, and the obvious ones that would be too costly to compile. Pure.

What stands here is a shortcut: the limits of time and memory under which a guide is compiled refuse the same guides,
only later.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Guide, GuideKind
from kvmesh.workers.guide_messages import guide_name
from kvmesh.workers.schemas import Path, SchemaFault, children

MAX_GUIDE_BYTES = {  # an object of any shape has no value at all
    GuideKind.JSON: 0,
    GuideKind.JSON_SCHEMA: 1 << 20,
    GuideKind.CHOICE: 64 << 10,
    GuideKind.GRAMMAR: 16 << 10,
    GuideKind.REGEX: 8 << 10,
}
SMALL_SCHEMA_BYTES = 8 << 10
# Keywords that stand for automata, which may be large although the schema is small.
_AUTOMATA = re.compile(r'"(?:multipleOf|allOf|pattern|patternProperties|format|not|uniqueItems)"')
# The states of an automaton for multiples are the remainders; powers of 2 and 5 are seen in a number's last digits.
# 1,000,000 remainders take 7 to 18 s and 393 MiB.
MAX_REMAINDERS = 1_000_000
MAX_DIVISOR = (1 << 32) - 1  # the compiler refuses larger ones itself


def check_guide(guide: Guide) -> None:
    """Raise InvalidRequestError for a guide that is too large, or certain to be too costly."""
    num_bytes, most = len(guide.value.encode(errors="surrogatepass")), MAX_GUIDE_BYTES[guide.kind]
    if num_bytes > most:
        raise InvalidRequestError(
            f"the {guide_name(guide)} has {num_bytes} bytes, at most {most} are taken", param="guide"
        )
    check_certain_cost(guide)


def check_certain_cost(guide: Guide) -> None:
    """Raise InvalidRequestError for a guide that is certain to be too costly."""
    if guide.kind is GuideKind.JSON_SCHEMA and '"multipleOf"' in guide.value:
        try:
            check_cost(json.loads(guide.value))
        except SchemaFault as fault:
            raise InvalidRequestError(str(fault), param=f"guide#{fault.pointer}") from fault
        except (ValueError, RecursionError):  # no JSON, or nested too deeply: whoever compiles it says so
            return


def may_be_costly(guide: Guide) -> bool:
    """Return False for guides that compile in an instant: most are such."""
    match guide.kind:
        case GuideKind.JSON | GuideKind.CHOICE:
            return False
        case GuideKind.JSON_SCHEMA:
            return len(guide.value) > SMALL_SCHEMA_BYTES or _AUTOMATA.search(guide.value) is not None
    return True


def check_cost(schema: Any) -> None:
    """Raise SchemaFault for the first part of a schema that is certain to be too costly."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        if path[-2:-1] != ("allOf",):  # else it is checked together with its parent
            num_remainders = _num_remainders(part)
            if num_remainders >= MAX_REMAINDERS:
                raise SchemaFault(
                    path,
                    f"'multipleOf' is too costly here: an automaton needs at least {num_remainders} states, fewer than "
                    f"{MAX_REMAINDERS} are supported; use a divisor with more factors 2 and 5, or a smaller one",
                )
        waiting += [(path + place, child) for place, child in children(part)]


def _num_remainders(schema: dict[str, Any]) -> int:
    """Return the least common multiple of all divisors that hold for a value; larger ones stop the count."""
    common, waiting = 1, [schema]
    while waiting and common < MAX_REMAINDERS:
        one = waiting.pop()
        if isinstance(one, dict):
            common = math.lcm(common, _divisor(one.get("multipleOf")))
            if isinstance(parts := one.get("allOf"), list):
                waiting += parts
    return common


def _divisor(value: Any) -> int:
    """Return the digits of a divisor as a number without the factors 2 and 5; 1 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_DIVISOR:
        return 1
    numerator, _ = Decimal(repr(value)).as_integer_ratio()  # only factors 2 and 5 are lost
    for factor in (2, 5):
        while numerator % factor == 0:
            numerator //= factor
    return numerator
