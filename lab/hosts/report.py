"""Judge what a mesh on four hosts did under faults. Pure: measurements go in, a report comes out."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from kvmesh.lab.hosts.mesh import HostsAnswer

RESET_S = 0.3  # that a reset or refused connection may cost a request
SILENCE_S = 2.0  # that a silent host may cost a request
HEALED_S = 1.0  # that the first request after healing may take
MAX_ERROR_CHARS = 300
REPLUGGED_S = 2.0  # the same if a link was down: Linux asks for the address of a host's card once a second


class FaultResult(Struct, frozen=True, kw_only=True):
    """Hold what requests saw of one fault. Times of requests are beyond those of requests without a fault."""

    fault: str
    kind: str  # "cut", "unplugged", "reset", "loss", "delay" or "server"
    requests: int
    failed: int
    errors: list[str] = []  # what the failed requests got
    wrong_tokens: int
    worst_extra_s: float | None  # None: no request could be answered before the network healed
    usual_extra_s: float | None  # the median
    pulled: int  # requests whose KV came over the network all the same
    heal_first_request_s: float  # of a request that is sent when the network has healed
    refused: int = 0  # requests that were told at once that no worker can be reached
    waited_s: float = 0.0  # from the begin of healing until the requests that waited were answered
    tries: int = 1  # the times are those of the last one


class HostsReport(Struct, frozen=True, kw_only=True):
    """The JSON object of `kvmesh lab cluster-check`."""

    ok: bool
    problems: list[str]
    seed: int
    hosts: int
    requests: int
    wrong_tokens: int
    failed: int
    kv_bytes_link: int
    kv_bytes_pulled: int
    kv_transfer: str
    event_transports: list[str]
    usual_s: float
    reset_recovery_s: float
    partition_recovery_s: float
    heal_first_request_s: float
    replug_first_request_s: float
    waited_s: float
    etcd_restart_failed: int
    nats_restart_diverged: int
    nats_away_diverged: int  # while NATS was away: the comparison does see what a router does not know
    leftovers: int
    skipped: list[str]
    duration_s: float
    faults: list[FaultResult]


class Measured(Struct, kw_only=True):
    """Collects what a check has measured."""

    seed: int
    hosts: int = 0
    requests: int = 0
    kv_bytes_link: int = 0
    kv_bytes_pulled: int = 0
    kv_transfers: set[str] = set()
    event_transports: set[str] = set()
    usual_s: float = 0.0
    nats_restart_diverged: int = 0
    nats_away_diverged: int = 0
    leftovers: list[str] = []
    skipped: list[str] = []  # faults that cannot be made on this machine, and why
    duration_s: float = 0.0
    faults: list[FaultResult] = []


def wrong_tokens(right: Sequence[str], answer: HostsAnswer) -> int:
    """Return how many tokens of an answer are not those of an undisturbed worker. A failed request has none."""
    if answer.error:
        return 0
    differing = sum(one != other for one, other in zip(right, answer.tokens, strict=False))
    return differing + abs(len(right) - len(answer.tokens))


def result_of(
    fault: str,
    kind: str,
    answers: Sequence[tuple[int, HostsAnswer]],
    right: Mapping[int, Sequence[str]],
    usual_s: float,
    heal_s: float,
) -> FaultResult:
    """Return the result of the requests of one fault, given with the numbers of their prompts."""
    extras_s = sorted(answer.took_s - usual_s for _, answer in answers)
    return FaultResult(
        fault=fault,
        kind=kind,
        requests=len(answers),
        failed=sum(bool(answer.error) for _, answer in answers),
        errors=[answer.error[:MAX_ERROR_CHARS] for _, answer in answers if answer.error],
        wrong_tokens=sum(wrong_tokens(right[number], answer) for number, answer in answers),
        worst_extra_s=round(max(0.0, extras_s[-1]), 3),
        usual_extra_s=round(max(0.0, extras_s[len(extras_s) // 2]), 3),
        pulled=sum(answer.pulled_bytes > 0 for _, answer in answers),
        heal_first_request_s=round(heal_s, 3),
    )


def late(result: FaultResult, waited_s: float) -> FaultResult:
    """Return the result of a fault during which nobody could answer: how long it took is the fault's own time.

    Where connections are refused, a 503 `no_worker` is the right answer: nothing says that the worker will return.
    """
    refused = sum("no_worker" in error for error in result.errors) if result.kind == "reset" else 0
    return msgspec.structs.replace(
        result,
        failed=result.failed - refused,
        refused=refused,
        worst_extra_s=None,
        usual_extra_s=None,
        waited_s=round(waited_s, 3),
    )


def is_too_slow(result: FaultResult) -> bool:
    """Return whether a fault has cost more than is promised."""
    most_s = RESET_S if result.kind == "reset" else SILENCE_S
    healed_s = REPLUGGED_S if result.kind == "unplugged" else HEALED_S
    cost_s = result.worst_extra_s or 0.0
    return cost_s > most_s or result.waited_s > SILENCE_S or result.heal_first_request_s > healed_s


def tried_again(before: FaultResult, again: FaultResult) -> FaultResult:
    """Return the result of another try: its times, and what went wrong in any."""
    return msgspec.structs.replace(
        again,
        tries=before.tries + 1,
        requests=before.requests + again.requests,
        failed=before.failed + again.failed,
        errors=before.errors + again.errors,
        wrong_tokens=before.wrong_tokens + again.wrong_tokens,
        pulled=before.pulled + again.pulled,
    )


def worst(faults: Sequence[FaultResult], *kinds: str) -> float:
    """Return the most that a request lost to a fault of these kinds."""
    return max(
        (one.worst_extra_s for one in faults if one.kind in kinds and one.worst_extra_s is not None), default=0.0
    )


def worst_healing(faults: Iterable[FaultResult]) -> float:
    return max((one.heal_first_request_s for one in faults), default=0.0)


def judge(measured: Measured) -> HostsReport:
    """Return the report, with one problem for each promise that was not kept."""
    faults = measured.faults
    report = HostsReport(
        ok=True,
        problems=[],
        seed=measured.seed,
        hosts=measured.hosts,
        requests=measured.requests,
        wrong_tokens=sum(one.wrong_tokens for one in faults),
        failed=sum(one.failed for one in faults),
        kv_bytes_link=measured.kv_bytes_link,
        kv_bytes_pulled=measured.kv_bytes_pulled,
        kv_transfer=",".join(sorted(measured.kv_transfers)),
        event_transports=sorted(measured.event_transports, reverse=True),
        usual_s=round(measured.usual_s, 3),
        reset_recovery_s=worst(faults, "reset"),
        partition_recovery_s=worst(faults, "cut", "unplugged"),
        heal_first_request_s=worst_healing(one for one in faults if one.kind != "unplugged"),
        replug_first_request_s=worst_healing(one for one in faults if one.kind == "unplugged"),
        waited_s=max((one.waited_s for one in faults), default=0.0),
        etcd_restart_failed=sum(one.failed for one in faults if one.fault.startswith("etcd")),
        nats_restart_diverged=measured.nats_restart_diverged,
        nats_away_diverged=measured.nats_away_diverged,
        leftovers=len(measured.leftovers),
        skipped=measured.skipped,
        duration_s=round(measured.duration_s, 1),
        faults=faults,
    )
    report.problems.extend(problems_of(report, measured.leftovers))
    return msgspec.structs.replace(report, ok=not report.problems)


def problems_of(report: HostsReport, leftovers: Sequence[str]) -> list[str]:
    checks = [
        (report.wrong_tokens == 0, f"{report.wrong_tokens} tokens differ from those of one undisturbed worker"),
        (report.failed == 0, f"{report.failed} requests failed"),
        (report.kv_bytes_pulled > 0, "no KV was pulled"),
        (
            report.kv_bytes_link > report.kv_bytes_pulled,
            f"{report.kv_bytes_pulled} bytes of KV were pulled, but only {report.kv_bytes_link} crossed the link",
        ),
        (report.kv_transfer == "nixl", f"KV moved over {report.kv_transfer or 'nothing'}, not over nixl"),
        (
            report.event_transports == ["zmq", "nats"],
            f"caches are known over {report.event_transports}, not over zmq and nats",
        ),
        (report.reset_recovery_s <= RESET_S, f"a reset cost {report.reset_recovery_s} s, the limit is {RESET_S} s"),
        (
            report.partition_recovery_s <= SILENCE_S,
            f"silence cost {report.partition_recovery_s} s, the limit is {SILENCE_S} s",
        ),
        (
            report.heal_first_request_s <= HEALED_S,
            f"the first request after healing took {report.heal_first_request_s} s, the limit is {HEALED_S} s",
        ),
        (
            report.replug_first_request_s <= REPLUGGED_S,
            f"with a link up again, the first request took {report.replug_first_request_s} s, the limit is "
            f"{REPLUGGED_S} s",
        ),
        (
            report.waited_s <= SILENCE_S,
            f"a request that waited was answered {report.waited_s} s after healing, the limit is {SILENCE_S} s",
        ),
        (report.nats_restart_diverged == 0, f"{report.nats_restart_diverged} views of caches stay wrong after NATS"),
        (report.nats_away_diverged > 0, "with NATS away, no view was wrong: the comparison sees nothing"),
        (not leftovers, f"left behind: {', '.join(leftovers[:8])}"),
    ]
    return [problem for is_kept, problem in checks if not is_kept]
