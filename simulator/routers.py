"""The routers of a simulation: each is the live router's state, and hears of the others' placements a little later."""

from collections.abc import Mapping, Sequence

from kvmesh.protocol.events import KvEvent
from kvmesh.protocol.ids import WorkerId
from kvmesh.protocol.messages import LoadReport, WorkerCard
from kvmesh.router.admission import AdmissionRules
from kvmesh.router.core import RouterState
from kvmesh.router.index import Holder
from kvmesh.router.load import Share
from kvmesh.router.rules import RouterRules, Saturation
from kvmesh.simulator.agenda import Agenda
from kvmesh.simulator.config import SimConfig
from kvmesh.simulator.sequence import as_told
from kvmesh.simulator.worker import SimWorker

STILL_WAITING_S = 1.0  # between two looks of a router at the requests that wait


class SimRouters:
    def __init__(self, config: SimConfig, agenda: Agenda) -> None:
        self._config = config
        self._agenda = agenda
        limits = Saturation(queued_tokens=config.saturation_tokens) if config.saturation_tokens else None
        rules = RouterRules(
            policy=config.policy,
            saturation=limits,
            slo_itl_s=config.itl_slo_s if config.keeps_itl else 0.0,
            recompute_price=config.recompute_price,
            admission=AdmissionRules(is_on=config.admission),
        )
        self.states = [RouterState(rules, seed=config.seed + number) for number in range(config.routers)]
        self.touched = [False] * config.routers  # requests that wait in this router may go now
        self._is_watching_queue = False

    @property
    def waiting(self) -> int:
        """Return how many requests wait in all routers."""
        return sum(state.waiting for state in self.states)

    def add_worker(self, card: WorkerCard, since_s: float) -> None:
        for state in self.states:
            state.add_worker(card, since_s)
        self._touch_all()

    def remove_worker(self, worker_id: WorkerId) -> None:
        for state in self.states:
            state.remove_worker(worker_id, self._agenda.now)
        self._touch_all()

    def follow(self, worker: SimWorker) -> None:
        """Take a worker's events and its next wake-up. Call it after anything that was done to the worker."""
        if worker.wakes != worker.followed:
            worker.followed = worker.wakes
            self._agenda.at(worker.due_s, self._wake, worker, worker.wakes)
        self.tell(worker, worker.take_events())

    def _wake(self, worker: SimWorker, number: int) -> None:
        if number == worker.wakes:
            worker.wake()
            self.follow(worker)

    def tell(self, worker: SimWorker, events: Sequence[KvEvent]) -> None:
        """Let the routers know of a change in a worker's cache, after the lag of the events."""
        if events:
            self._agenda.later(self._config.event_lag_s, self._on_kv_events, worker, as_told(events))

    def _on_kv_events(self, worker: SimWorker, events: Sequence[KvEvent]) -> None:
        for state in self.states:
            state.fleet.on_kv_events(worker.worker_id, 0, events)

    def report_load(self, workers: Sequence[SimWorker]) -> None:
        """Let the workers report what they have to compute, after the lag of the events, at every interval."""
        reports = [(one.worker_id, LoadReport(queued_tokens=one.scheduler.certain_tokens)) for one in workers]
        self._agenda.later(self._config.event_lag_s, self._on_reports, reports)
        self._agenda.at(self._agenda.now + self._config.load_report_interval_s, self.report_load, workers)

    def _on_reports(self, reports: Sequence[tuple[WorkerId, LoadReport]]) -> None:
        for number, state in enumerate(self.states):
            state.reported.expire(self._agenda.now)
            for worker_id, report in reports:
                self.touched[number] |= state.reported.on_report(worker_id, report, self._agenda.now)

    def watch_queues(self) -> None:
        """Look again a little later at the requests that wait."""
        if not self._is_watching_queue:
            self._is_watching_queue = True
            self._agenda.at(self._agenda.now + STILL_WAITING_S, self._look_again)

    def _look_again(self) -> None:
        self._is_watching_queue = False
        self._touch_all()

    def gossip(self, number: int) -> None:
        """Tell the other routers what this one has placed by now, after the lag of the gossip."""
        if len(self.states) > 1 and (changed := self.states[number].load.take_own_changes()):
            self._agenda.later(self._config.gossip_lag_s, self._on_gossip, number, changed)

    def _on_gossip(self, number: int, changed: Mapping[Holder, Share]) -> None:
        for other, state in enumerate(self.states):
            if other != number:
                state.load.update_elsewhere(str(number), changed, self._agenda.now)
                self.touched[other] = True

    def _touch_all(self) -> None:
        self.touched = [True] * len(self.touched)
