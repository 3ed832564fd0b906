"""A router's core with workers, prompts and caches, to try decisions on."""

from collections.abc import Sequence

from protocol.errors import MeshError
from protocol.events import Stored
from protocol.hashing import pack_hashes, sequence_hashes
from protocol.ids import EngineHash, RequestId, WorkerId
from protocol.messages import Placed, Role, RouteRequest, WorkerCard
from router.core import Outcome, RouterState
from router.rules import RouterRules

BLOCK = 16
P, D, A = Role.PREFILL, Role.DECODE, Role.AGGREGATED


def card(worker_id: str, role: Role = D, **fields: object) -> WorkerCard:
    """It publishes KV events; its name is its id without the digits."""
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
    """All its workers are settled, as they are all new."""
    state = RouterState(RouterRules(**rules), seed)  # type: ignore[arg-type]
    for one in cards:
        state.add_worker(one)
    return state


def prompt(number: int, blocks: int = 20) -> list[int]:
    """Prompts of different numbers have no block in common."""
    return [number * 1_000_000 + position for position in range(blocks * BLOCK)]


TOKENS = prompt(0)


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
    """It says that it has the first `blocks` of a prompt."""
    names = tuple(EngineHash(name + 1) for name in sequence_hashes(tokens, BLOCK)[:blocks])
    stored = Stored(names, None, tuple(tokens[: blocks * BLOCK]), BLOCK, medium=medium)
    state.fleet.on_kv_events(WorkerId(worker), dp_rank, [stored])


def where(placed: Placed) -> tuple[str | None, str]:
    """The ids of the workers that prefill (None: the other one does) and decode."""
    return (placed.prefill.worker_id if placed.prefill else None, placed.decode.worker_id)


def results(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Where each request decodes, or the code of its error."""
    return {name: result.code if isinstance(result, MeshError) else where(result)[1] for name, result in outcomes}
