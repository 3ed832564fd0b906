"""The cases of a question: other fleets, caches and policies than those that were."""

import re
from collections.abc import Iterator
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.frontend.whatif.question import PastMesh, WhatIfQuestion
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.router.policies import POLICIES, Policy

MOST_CASES = 12
MOST_WORKERS = 4096
MOST_BLOCKS = 4 << 20  # of all workers together: their memory in the simulation is about 200 bytes each
ROLES = ("prefill", "decode", "aggregated")
_COUNT = re.compile(r"([+-]?)(\d{1,6})")
_TIMES = re.compile(r"x(\d{1,4}(?:\.\d{1,4})?)")


class FleetCounts(Struct, frozen=True):
    """Count the workers of each role."""

    prefill: int = 0
    decode: int = 0
    aggregated: int = 0

    def check(self) -> None:
        """Raise ConfigError for a fleet that cannot answer, or that the simulator does not know."""
        if not self.decode + self.aggregated:
            raise ConfigError(f"{self}: nobody answers", hint="keep a worker that decodes")
        if self.aggregated and (self.prefill or self.decode):
            raise ConfigError(
                f"{self}: fleets with aggregated and other workers are not simulated",
                hint="set --aggregated to 0, or --prefill and --decode",
            )
        if self.workers > MOST_WORKERS:
            raise ConfigError(f"{self}: more than {MOST_WORKERS} workers", hint="ask for fewer")

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.aggregated

    def __str__(self) -> str:
        counts = [(getattr(self, role), role) for role in ROLES]
        return " + ".join(f"{count} {role}" for count, role in counts if count) or "no workers"


class WhatIfCase(Struct, frozen=True):
    """One mesh to simulate."""

    name: str
    fleet: FleetCounts
    blocks: int  # of each worker
    policy: Policy


def fleet_of(mesh: PastMesh) -> FleetCounts:
    """Return the fleet as it was. Raise ConfigError if the simulator does not know such fleets."""
    count = {role: sum(worker.role is role for worker in mesh.workers) for role in Role}
    fleet = FleetCounts(count[Role.PREFILL], count[Role.DECODE], count[Role.AGGREGATED])
    fleet.check()
    return fleet


def cases_of(question: WhatIfQuestion, mesh: PastMesh) -> list[WhatIfCase]:
    """Return what is to be simulated besides the mesh as it was. Raise ConfigError."""
    fleet = fleet_of(mesh)
    asked = {role: texts_of(getattr(question, role)) for role in ROLES}
    others = {"blocks": texts_of(question.blocks), "policy": texts_of(question.policy)}
    if not any(asked.values()) and not any(others.values()):
        return list(one_more_or_less(mesh, fleet))
    given = {name: texts for name, texts in (asked | others).items() if texts}
    combinations = list(product(*given.values()))
    if len(combinations) > MOST_CASES:
        raise ConfigError(f"these are {len(combinations)} cases", hint=f"ask for at most {MOST_CASES} at a time")
    return [case_of(dict(zip(given, texts, strict=True)), mesh, fleet) for texts in combinations]


def texts_of(text: str) -> list[str]:
    """Return the values of a list. A plus that a URL has turned into a space is one again."""
    values = [value.replace(" ", "+", 1) if value.startswith(" ") else value for value in text.split(",")]
    return [value.strip() for value in values if value.strip()]


def one_more_or_less(mesh: PastMesh, fleet: FleetCounts) -> Iterator[WhatIfCase]:
    """Yield the cases with one worker more and one less of each role that there is."""
    for role in ROLES:
        count = getattr(fleet, role)
        for change in ("+1", "-1"):
            if count > (change == "-1"):
                yield case_of({role: change}, mesh, fleet)


def case_of(change: dict[str, str], mesh: PastMesh, fleet: FleetCounts) -> WhatIfCase:
    """Return one case. Raise ConfigError for values that cannot be."""
    counts = {role: count_of(role, getattr(fleet, role), change[role]) for role in ROLES if role in change}
    changed = replace(fleet, **counts)
    changed.check()
    blocks, policy = mesh.blocks, mesh.policy
    if "blocks" in change:
        blocks = blocks_of(mesh.blocks, change["blocks"])
    if "policy" in change:
        policy = policy_of(change["policy"])
    check_size(changed, blocks)
    name = ", ".join(f"{what} {value}" for what, value in change.items())
    return WhatIfCase(name, changed, blocks, policy)


def check_size(fleet: FleetCounts, blocks: int) -> None:
    """Raise ConfigError for more blocks than the simulation has memory for."""
    if (total := fleet.workers * blocks) > MOST_BLOCKS:
        raise ConfigError(
            f"{fleet} with {blocks} blocks each have {total} blocks together",
            hint=f"at most {MOST_BLOCKS} are simulated",
        )


def count_of(role: str, now: int, text: str) -> int:
    found = _COUNT.fullmatch(text)
    if found is None:
        raise ConfigError(f"--{role} is {text[:40]!r}", hint="write a count, or +1 or -1")
    sign, digits = found.groups()
    count = {"": 0, "+": now, "-": now}[sign] + (-int(digits) if sign == "-" else int(digits))
    if count < 0:
        raise ConfigError(f"--{role} is {text}, and there are {now}", hint="take fewer away")
    return count


def blocks_of(now: int, text: str) -> int:
    times, plain = _TIMES.fullmatch(text), _COUNT.fullmatch(text)
    if times is None and (plain is None or plain[1]):
        raise ConfigError(f"--blocks is {text[:40]!r}", hint="write a count, or x2 for twice as many")
    blocks = int(now * float(times[1])) if times is not None else int(text)
    if blocks < 2:
        raise ConfigError(f"--blocks makes {blocks} blocks", hint="at least 2 are needed")
    return blocks


def policy_of(text: str) -> Policy:
    if text not in POLICIES:
        raise ConfigError(f"there is no policy {text[:40]!r}", hint=f"one of {', '.join(sorted(POLICIES))}")
    return text
