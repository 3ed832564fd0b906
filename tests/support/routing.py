"""A router's core with workers, prompts and caches, to try decisions on."""

from collections.abc import Sequence

from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.events import Stored
from kvmesh.protocol.hashing import pack_hashes, sequence_hashes
from kvmesh.protocol.ids import EngineHash, RequestId, WorkerId
from kvmesh.protocol.messages import Placed, Role, RouteRequest, WorkerCard
from kvmesh.router.core import Outcome, RouterState
from kvmesh.router.index import Holder
from kvmesh.router.load import Share
from kvmesh.router.rules import RouterRules, Saturation

BLOCK = 16
P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED


def card(worker_id: str, role: Role = D, **fields: object) -> WorkerCard:
    """Return the card of a worker that publishes KV events. Its name is its id without the digits."""
    values: dict[str, object] = {
        "worker_id": WorkerId(worker_id),
        "name": worker_id.rstrip("0123456789"),
        "role": role,
        "model": "m",
        "model_path": "/m",
        "address": f"{worker_id}:1",
        "block_size": BLOCK,
        "total_blocks": 1000,
        "context_tokens": 1 << 16,
        "kv_events": f"tcp://{worker_id}:2",
        "transfer": "shm",
    }
    return WorkerCard(**(values | fields))  # type: ignore[arg-type]


def router(*cards: WorkerCard, seed: int = 0, **rules: object) -> RouterState:
    """Return a router. All its workers are new, so none is held back."""
    state = RouterState(RouterRules(**rules), seed)  # type: ignore[arg-type]
    for one in cards:
        state.add_worker(one)
    return state


def prompt(number: int, blocks: int = 20) -> list[int]:
    """Prompts of different numbers have no block in common."""
    return [number * 1_000_000 + position for position in range(blocks * BLOCK)]


TOKENS = prompt(0)
ONE_AT_A_TIME = Saturation(queued_tokens=1)  # a worker that computes a prompt is given no other
NEVER: float = 1e9


def request(name: str = "r", tokens: Sequence[int] = TOKENS, **fields: object) -> RouteRequest:
    values: dict[str, object] = {
        "request_id": RequestId(name),
        "model": "m",
        "isl_tokens": len(tokens),
        "sequence_hashes": pack_hashes(sequence_hashes(tokens, BLOCK)),
    }
    return RouteRequest(**(values | fields))  # type: ignore[arg-type]


def holds(
    state: RouterState,
    worker: str,
    blocks: int,
    tokens: Sequence[int] = TOKENS,
    dp_rank: int = 0,
    medium: str = "GPU",
) -> None:
    """Let a worker report that it has the first `blocks` of a prompt."""
    names = tuple(EngineHash(name + 1) for name in sequence_hashes(tokens, BLOCK)[:blocks])
    stored = Stored(names, None, tuple(tokens[: blocks * BLOCK]), BLOCK, medium=medium)
    state.fleet.on_kv_events(WorkerId(worker), dp_rank, [stored])


def where(placed: Placed) -> tuple[str | None, str]:
    """Return the ids of the workers that prefill (None: the decode worker does) and decode."""
    return (placed.prefill.worker_id if placed.prefill else None, placed.decode.worker_id)


def results(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return where each request decodes, or the code of its error."""
    return {name: result.code if isinstance(result, MeshError) else where(result)[1] for name, result in outcomes}


def at(worker: str, dp_rank: int = 0) -> Holder:
    return Holder(WorkerId(worker), dp_rank)


def load_of(state: RouterState, worker: str) -> Share:
    return state.load.of(at(worker)).own


def place(state: RouterState, name: str, tokens: list[int] = TOKENS, now: float = 0.0, **fields: object) -> str:
    """Place a request; return where it decodes."""
    return where(state.place(request(name, tokens, **fields), now))[1]


def submit(state: RouterState, name: str, tokens: list[int] = TOKENS, now: float = 0.0, **fields: object) -> None:
    deadline_s = fields.pop("deadline_s", NEVER)
    state.submit(request(name, tokens, **fields), now, deadline_s)  # type: ignore[arg-type]


def end(state: RouterState, *names: str, now: float = 0.0, ok: bool = True) -> None:
    for name in names:
        state.free(RequestId(name), now, ok=ok)


def done(state: RouterState, *names: str, now: float = 0.0) -> None:
    """Report the first tokens of requests."""
    for name in names:
        state.prefill_done(RequestId(name), now)


def busy(state: RouterState, worker: str, number: int = 99, blocks: int = 20, now: float = 0.0) -> str:
    """Give a worker a prompt of its own to compute."""
    fields = {"pin": WorkerId(worker), "disaggregate": False}
    place(state, f"busy {worker} {number}", prompt(number, blocks), now, **fields)
    return f"busy {worker} {number}"


def order(state: RouterState, names: list[str]) -> list[str]:
    """Return the order in which requests go to a worker that computes one prompt at a time."""
    went: list[str] = []
    for _ in names:
        [(name, _)] = state.dispatch(1.0)
        went.append(name)
        end(state, name, now=1.0)
    return went
