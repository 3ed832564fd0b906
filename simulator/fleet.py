"""Keep account of the workers of a simulation: ordered, ready, drained, turned into another role, gone."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from msgspec.structs import replace

from kvmesh.kvcache.pool import BlockPool
from kvmesh.kvcache.tiers.peers import PeerPrefixes
from kvmesh.planner.model import RoleFleet, WorkerLoad
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import CardTier, Role, WorkerCard
from kvmesh.protocol.tiers import Tier
from kvmesh.simulator.config import SimConfig, pull_s_per_token_of, tier_block_s, timing_of
from kvmesh.simulator.tiers import SimStorage, SimTier, SimTiers
from kvmesh.simulator.worker import SimWorker, SimWorkerState
from kvmesh.workers.scheduler import KvPull, Limits, Output, Scheduler

MODEL = "simulated"
TRANSFER = "simulated"


class SimFleet:
    """Track role and state of each worker. Pure: the world tells the routers."""

    def __init__(
        self,
        config: SimConfig,
        on_outputs: Callable[[SimWorker, Sequence[Output], float], None],
        on_pull: Callable[[SimWorker, KvPull, float], None],
    ) -> None:
        self._config = config
        self._on_outputs = on_outputs
        self._on_pull = on_pull
        self._numbers = count()
        self._by_id: dict[WorkerId, SimWorker] = {}
        self._timings = {is_prefill: timing_of(config, is_prefill=is_prefill) for is_prefill in (False, True)}
        self._tiers = [
            SimTier(tier, blocks, tier_block_s(config, bandwidth_gbps))
            for tier, blocks, bandwidth_gbps in (
                (Tier.HOST, config.host_blocks, config.host_bandwidth_gbps),
                (Tier.DISK, config.disk_blocks, config.disk_bandwidth_gbps),
                (Tier.SHARED, config.shared_blocks, config.shared_bandwidth_gbps),
            )
            if blocks
        ]
        self._storage = SimStorage(config.shared_blocks) if config.shared_blocks else None
        self.workers: list[SimWorker] = []  # without workers that are gone
        self.decoding_role = Role.AGGREGATED if config.mode == "aggregated" else Role.DECODE
        self.gpu_seconds = self.worker_seconds = 0.0  # of workers that are gone

    def __getitem__(self, worker_id: WorkerId) -> SimWorker:
        return self._by_id[worker_id]

    def find(self, worker_id: WorkerId) -> SimWorker | None:
        """Return a worker, None if it is gone."""
        return self._by_id.get(worker_id)

    def order(self, role: Role, now: float) -> SimWorker:
        """Add a worker that starts."""
        config, number = self._config, next(self._numbers)
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            context_tokens=config.context_tokens,
            vocab_size=1,
            max_waiting=1 << 30,
        )
        pool = BlockPool(config.blocks, config.block_size)
        tiers = None
        if self._tiers:
            tiers = SimTiers(pool, self._tiers, config.block_size, self._storage)
        stack = None if tiers is None else tiers.stack
        peers = None
        if config.peers:  # addresses are compared by nobody here: equal names are equal blocks
            peers = PeerPrefixes(
                pool, lambda: b"simulated", config.block_size, None if stack is None else stack.compute
            )
        scheduler = Scheduler(pool, limits, (), stack, peers)
        timing = self._timings[role is Role.PREFILL]
        card = self._card(f"w{number:05d}", role)
        worker = SimWorker(card, scheduler, timing, self._on_outputs, self._on_pull, tiers)
        worker.ordered_s = now
        self.workers.append(worker)
        self._by_id[worker.worker_id] = worker
        return worker

    def turn(self, worker: SimWorker) -> None:
        """Give a drained worker its other role and a new id."""
        assert worker.turns_into is not None
        del self._by_id[worker.worker_id]
        worker.turns += 1
        worker_id = WorkerId(f"{worker.card.name}.{worker.turns}")
        worker.card = replace(worker.card, worker_id=worker_id, role=worker.turns_into)
        worker.turns_into = None
        worker.set_timing(self._timings[worker.role is Role.PREFILL])
        self._by_id[worker_id] = worker

    def end(self, worker: SimWorker, now: float) -> None:
        self.worker_seconds += now - worker.ordered_s
        self.gpu_seconds += (now - worker.ordered_s) * self._gpus(worker)
        worker.state = SimWorkerState.GONE
        self.workers.remove(worker)
        del self._by_id[worker.worker_id]

    def seconds_until(self, now: float) -> tuple[float, float]:
        """Return the worker seconds and the GPU seconds of all workers so far."""
        here = [(now - worker.ordered_s, self._gpus(worker)) for worker in self.workers]
        return (
            self.worker_seconds + sum(took_s for took_s, _ in here),
            self.gpu_seconds + sum(took_s * gpus for took_s, gpus in here),
        )

    def of(self, role: Role, *states: SimWorkerState) -> list[SimWorker]:
        return [worker for worker in self.workers if worker.role is role and worker.state in states]

    def count(self, role: Role) -> RoleFleet:
        turning = sum(worker.state is SimWorkerState.TURNING and worker.turns_into is role for worker in self.workers)
        return RoleFleet(
            ready=len(self.of(role, SimWorkerState.READY)),
            starting=len(self.of(role, SimWorkerState.STARTING)) + turning,
            draining=len(self.of(role, SimWorkerState.DRAINING)),
        )

    def least_loaded(self, role: Role) -> Iterator[SimWorker]:
        """Return the ready workers, least loaded first; of equals the smallest cache, then the newest."""
        ready = enumerate(self.of(role, SimWorkerState.READY))

        def cost(each: tuple[int, SimWorker]) -> tuple[int, int, int]:
            number, worker = each
            return worker.assigned, worker.pool.cached_blocks, -number

        return (worker for _, worker in sorted(ready, key=cost))

    def loads(self, role: Role, queued_in_router: int) -> tuple[WorkerLoad, ...]:
        """Return the loads of the ready workers. What waits in the routers counts in equal shares for each of them."""
        ready = self.of(role, SimWorkerState.READY)
        return tuple(self._load(worker, queued_in_router // len(ready)) for worker in ready)

    def _load(self, worker: SimWorker, queued_elsewhere: int) -> WorkerLoad:
        scheduler = worker.scheduler
        return WorkerLoad(
            name=worker.card.name,
            queued_tokens=scheduler.queued_tokens + queued_elsewhere,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_tokens=worker.pool.held_blocks * worker.pool.block_size,
            total_kv_tokens=worker.pool.num_blocks * worker.pool.block_size,
        )

    def _gpus(self, worker: SimWorker) -> float:
        is_prefill = worker.role is Role.PREFILL
        return self._config.gpus_per_prefill if is_prefill else self._config.gpus_per_decode

    def _card(self, name: str, role: Role) -> WorkerCard:
        config, timing = self._config, self._timings[role is Role.PREFILL]
        return WorkerCard(
            worker_id=WorkerId(name),
            name=name,
            role=role,
            model=MODEL,
            model_path="",
            address="",
            block_size=config.block_size,
            total_blocks=config.blocks,
            context_tokens=config.context_tokens,
            max_num_seqs=config.max_num_seqs,
            kv_events="simulated",
            transfer=TRANSFER,
            tiers=tuple(
                CardTier(tier=one.tier, blocks=one.blocks, block_s=max(one.block_s, 1e-9)) for one in self._tiers
            ),
            content_fingerprint="simulated",
            kv_print="simulated" if config.peers else "",
            pull_block_s=max(pull_s_per_token_of(config) * config.block_size, 1e-9) if config.peers else 0.0,
            pull_latency_s=2 * config.hop_s if config.peers else 0.0,
            prefill_token_s=timing.prefill_s(config.max_step_tokens) / config.max_step_tokens,
        )
