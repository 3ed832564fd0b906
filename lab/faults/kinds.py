"""List the kinds of fault, what each can hit, and how long it lasts."""

from collections.abc import Mapping
from dataclasses import dataclass

FRONTEND, ROUTER, PREFILL, DECODE = "frontend", "router", "prefill", "decode"
DISCOVERY, NATS, DISK, GUIDES, HOST = "discovery", "nats", "disk", "guides", "host"
PROCESSES = (FRONTEND, ROUTER, PREFILL, DECODE)
WORKERS = (PREFILL, DECODE)
PROXIED = (ROUTER, PREFILL, DECODE)  # the roles whose ports lie behind proxies
SHARED = (DISCOVERY, NATS, DISK, GUIDES, HOST)  # one of each, which all processes use


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault. Times are seconds."""

    name: str
    roles: tuple[str, ...]
    for_s: tuple[float, float]  # drawn between; (0, 0): it is over at once
    settles_s: float  # after its end its target does not count as well
    what: str  # in words, for people
    amount: tuple[float, float] = (0.0, 0.0)  # drawn between; each kind says what it means
    closed: bool = False  # only where ports are closed by TLS; twice as often there, because every other seed is so
    takes_s: float = 0.0  # to begin and to end it
    slows: bool = False  # its target works on, but slower: a wait during the fault is the fault's own length


_LIST = (
    FaultKind("kill", PROCESSES, (0, 0), 4.0, "SIGKILL; its owner starts the process again at the same address"),
    FaultKind("stop", PROCESSES, (0.3, 4.0), 1.0, "SIGSTOP, later SIGCONT"),
    FaultKind("memory_limit", WORKERS, (0.5, 3.0), 4.0, "the kernel kills it at the limit of its memory cgroup"),
    FaultKind("restart", PROCESSES, (0, 0), 10.0, "SIGTERM: it drains, ends, and starts again at the same address"),
    FaultKind("rolling", PROCESSES, (0, 0), 25.0, "all processes of a role are restarted, one after the other"),
    FaultKind("partition", PROXIED, (0.5, 5.0), 1.0, "nothing passes to and from its ports; connections stay open"),
    FaultKind("reset", PROXIED, (0, 0), 0.5, "all its connections are reset"),
    FaultKind("half_open", PROXIED, (0, 0), 1.0, "it loses its connections and the other side does not notice"),
    FaultKind("delay", PROXIED, (0.5, 4.0), 0.5, "its traffic arrives late", (0.01, 0.15), slows=True),
    FaultKind("loss", PROXIED, (0.5, 4.0), 0.5, "a share of its packets comes 0.2 s late", (0.01, 0.1), slows=True),
    FaultKind("cut", PROXIED, (0.5, 5.0), 1.0, "the kernel drops all packets to and from it"),
    FaultKind(
        "packets_lost", PROXIED, (0.5, 4.0), 1.0, "the kernel drops a share of its packets", (0.01, 0.05), slows=True
    ),
    FaultKind("refused", PROXIED, (0.3, 3.0), 0.5, "the kernel answers every packet to it with a reset"),
    FaultKind("events_lost", WORKERS, (0.5, 4.0), 0.0, "a share of its KV events is lost", (0.2, 1.0)),
    FaultKind("events_repeated", WORKERS, (0.5, 4.0), 0.0, "a share of its KV events comes twice", (0.2, 1.0)),
    FaultKind("events_reordered", WORKERS, (0.5, 4.0), 0.0, "a share of its KV events is overtaken", (0.2, 1.0)),
    FaultKind("events_flipped", WORKERS, (0.3, 2.0), 0.0, "a bit is flipped in a share of its KV events", (0.05, 0.3)),
    FaultKind("events_forged", WORKERS, (0.5, 4.0), 0.0, "a second publisher sends KV events that lie", (0.1, 0.6)),
    FaultKind("discovery_away", (DISCOVERY,), (0.5, 5.0), 1.0, "discovery does not answer"),
    FaultKind("discovery_empty", (DISCOVERY,), (0, 0), 3.0, "discovery has lost all that it knew"),
    FaultKind("discovery_full", (DISCOVERY,), (1.0, 4.0), 1.0, "discovery takes no writes"),
    FaultKind("nats_away", (NATS,), (0.5, 5.0), 1.0, "the NATS server does not run"),
    FaultKind("nats_empty", (NATS,), (0, 0), 2.0, "the NATS server has lost its streams"),
    FaultKind("disk_full", (DISK,), (1.0, 4.0), 0.5, "no file of the mesh can grow"),
    FaultKind("clock_jump", PROCESSES, (0.5, 5.0), 0.0, "its wall clock is off by so many seconds", (-7200, 7200)),
    FaultKind("engine_stall", WORKERS, (1.0, 5.0), 1.0, "its engine makes no step although its process answers"),
    FaultKind("engine_raise", WORKERS, (0, 0), 4.0, "its engine raises in a step"),
    FaultKind("engine_babble", WORKERS, (0.5, 4.0), 0.0, "its engine sends tokens after the end of an answer"),
    FaultKind("engine_blocks", WORKERS, (0.5, 2.5), 0.5, "its engine has no free KV block"),
    FaultKind(  # by a SIGKILL where the amount is above 0.5, else in order
        "other_weights", WORKERS, (5.0, 12.0), 4.0, "it comes back with other weights of its name", (0, 1), takes_s=20
    ),
    FaultKind("weights_in_place", WORKERS, (4.0, 10.0), 2.0, "its weights change while it sleeps", takes_s=12),
    FaultKind("orders", WORKERS, (0, 0), 2.0, "it is ordered to sleep, drain, change its role, and back", takes_s=12),
    FaultKind("guide_bombs", (GUIDES,), (0, 0), 1.0, "clients send guides that take minutes to compile", takes_s=12),
    FaultKind("run_dir_twice", (HOST,), (0, 0), 0.0, "a second mesh is started in a run directory in use", takes_s=15),
    FaultKind(
        "flipped", PROXIED, (0.5, 3.0), 1.0, "a bit is flipped in a share of its traffic", (0.02, 0.2), closed=True
    ),
    FaultKind("expired", (ROUTER, *WORKERS), (4.5, 7.0), 4.0, "its certificate has expired", closed=True),
)
KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in _LIST}
