"""Record a simulation in bounded memory: sums, spreads and a time line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.planner.model import Action, RoleFleet, ScalingDecision, Traffic
from kvmesh.protocol.messages import Role
from kvmesh.simulator.config import SimConfig
from kvmesh.simulator.report import PlannerChange, Sample, SimReport, Spread
from kvmesh.simulator.requests import SimRequest
from kvmesh.simulator.tally import PercentileTally
from kvmesh.simulator.worker import SimWorker

SLO_WINDOW_S = 300.0
SLO_PERCENTILE = 0.95
MOST_SAMPLES = 2048
MOST_CHANGES = 4096


class RecordedRequest(Protocol):
    """A request as the records see it, in any world."""

    request: SimRequest
    arrival_s: float
    placed_s: float
    first_s: float
    cached_tokens: int
    predicted_tokens: int


class CountedFleet(Protocol):
    """A fleet whose workers can be counted."""

    decoding_role: Role

    def count(self, role: Role) -> RoleFleet: ...


@dataclass(slots=True)
class _Window:
    """Hold sums since a time."""

    since_s: float = 0.0
    requests: int = 0
    isl_tokens: int = 0
    began: int = 0
    ttft_s: float = 0.0
    prompt_tokens: int = 0  # of requests that began
    cached_tokens: int = 0
    predicted_tokens: int = 0
    ended: int = 0
    failed: int = 0  # of these
    good: int = 0
    osl_tokens: int = 0
    with_itl: int = 0
    itl_s: float = 0.0


class WindowShares:
    """Counts in how many windows enough requests kept the TTFT, and the ITL. A request counts where it ended."""

    def __init__(self) -> None:
        self._windows = self._ttft_kept = self._itl_kept = 0
        self._number = 0  # of the window that is open
        self._requests = self._prompt = self._smooth = 0

    def add(self, now: float, *, is_prompt: bool, is_smooth: bool) -> None:
        if (number := int(now // SLO_WINDOW_S)) > self._number:
            self._close()
            self._number = number
        self._requests += 1
        self._prompt += is_prompt
        self._smooth += is_smooth

    def shares(self) -> tuple[float, float]:
        """Return the share of windows that kept the TTFT, and of those that kept the ITL; 1 without any request."""
        self._close()
        windows = max(1, self._windows)
        return (self._ttft_kept / windows, self._itl_kept / windows) if self._windows else (1.0, 1.0)

    def _close(self) -> None:
        if self._requests:
            self._windows += 1
            self._ttft_kept += self._prompt >= SLO_PERCENTILE * self._requests
            self._itl_kept += self._smooth >= SLO_PERCENTILE * self._requests
        self._requests = self._prompt = self._smooth = 0


class Records:
    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self._ttft, self._itl, self._e2e = PercentileTally(), PercentileTally(), PercentileTally()
        self._window, self._traffic = _Window(), _Window()  # of the time line, of the planner
        self._requests = self._failed = self._good = self._ttft_good = self._itl_good = 0
        self._shares = WindowShares()
        self._isl_tokens = self._osl_tokens = self._cached_tokens = self._predicted_tokens = 0
        self._waited_s = 0.0
        self._samples: list[Sample] = []
        self._sample_s = config.sample_s
        self._changes: list[PlannerChange] = []
        self._changes_left_out = 0
        self._preemptions_of_gone = 0
        self._busy_s_of_gone = 0.0
        self.started = self.stopped = self.flipped = 0

    # --- requests ----------------------------------------------------------------------------------------

    def arrived(self, request: RecordedRequest) -> None:
        self._requests += 1
        for window in (self._window, self._traffic):
            window.requests += 1
            window.isl_tokens += request.request.isl_tokens

    def failed(self, request: RecordedRequest) -> None:
        self._failed += 1
        self._shares.add(request.arrival_s, is_prompt=False, is_smooth=False)
        for window in (self._window, self._traffic):
            window.ended += 1
            window.failed += 1

    def began(self, request: RecordedRequest, now: float) -> None:
        isl_tokens, ttft_s = request.request.isl_tokens, now - request.arrival_s
        self._ttft.add(ttft_s)
        self._waited_s += request.placed_s - request.arrival_s
        self._isl_tokens += isl_tokens
        self._cached_tokens += request.cached_tokens
        predicted_tokens = min(isl_tokens, request.predicted_tokens)
        self._predicted_tokens += predicted_tokens
        for window in (self._window, self._traffic):
            window.began += 1
            window.ttft_s += ttft_s
            window.prompt_tokens += isl_tokens
            window.cached_tokens += request.cached_tokens
            window.predicted_tokens += predicted_tokens

    def ended(self, request: RecordedRequest, now: float) -> None:
        osl_tokens = max(1, request.request.osl_tokens)
        first_s = request.first_s + self._config.hop_s
        self._e2e.add(now - request.arrival_s)
        self._osl_tokens += osl_tokens
        itl_s = (now - first_s) / (osl_tokens - 1) if osl_tokens > 1 else None
        if itl_s is not None:
            self._itl.add(itl_s)
        is_prompt = first_s - request.arrival_s <= self._config.ttft_slo_s
        is_smooth = itl_s is None or itl_s <= self._config.itl_slo_s
        is_good = is_prompt and is_smooth
        self._shares.add(now, is_prompt=is_prompt, is_smooth=is_smooth)
        self._ttft_good += is_prompt
        self._itl_good += is_smooth
        self._good += is_good
        for window in (self._window, self._traffic):
            window.ended += 1
            window.good += is_good
            window.osl_tokens += osl_tokens
            if itl_s is not None:
                window.with_itl += 1
                window.itl_s += itl_s

    # --- the planner -------------------------------------------------------------------------------------

    def take_traffic(self, now: float) -> Traffic:
        """Return the traffic since the last call."""
        window, self._traffic = self._traffic, _Window(now)
        return Traffic(
            start_s=window.since_s,
            end_s=now,
            requests=window.requests,
            isl_tokens=_mean(window.isl_tokens, window.requests),
            osl_tokens=_mean(window.osl_tokens, window.ended - window.failed),
            hit_share=_mean(window.cached_tokens, window.prompt_tokens),
            ttft_s=_mean(window.ttft_s, window.began),
            itl_s=_mean(window.itl_s, window.with_itl),
            answered=window.ended - window.failed,
        )

    def decided(self, decision: ScalingDecision) -> None:
        if decision.action is Action.HOLD:
            return
        if len(self._changes) >= MOST_CHANGES:
            self._changes_left_out += 1
            return
        flip = "" if decision.flip is None else f"{decision.flip.count} to {decision.flip.to_role}"
        why = "; ".join(reason.text for reason in decision.reasons)
        self._changes.append(
            PlannerChange(at_s=decision.at_s, prefill=decision.prefill, decode=decision.decode, flip=flip, why=why)
        )

    def gone(self, worker: SimWorker) -> None:
        self._preemptions_of_gone += worker.scheduler.num_preempted
        self._busy_s_of_gone += worker.busy_s

    # --- the time line -----------------------------------------------------------------------------------

    def sample(self, now: float, fleet: CountedFleet, waiting: int) -> float:
        """Add a sample. Return when the next one is due."""
        window, self._window = self._window, _Window(now)
        prefill, decode = fleet.count(Role.PREFILL), fleet.count(fleet.decoding_role)
        self._samples.append(
            Sample(
                at_s=now,
                requests=window.requests,
                ended=window.ended,
                good=window.good,
                ttft_s=_mean(window.ttft_s, window.began) or 0.0,
                itl_s=_mean(window.itl_s, window.with_itl) or 0.0,
                prefill_ready=prefill.ready,
                prefill_starting=prefill.starting,
                decode_ready=decode.ready,
                decode_starting=decode.starting,
                draining=prefill.draining + decode.draining,
                waiting=waiting,
                prompt_tokens=window.prompt_tokens,
                cached_tokens=window.cached_tokens,
                predicted_tokens=window.predicted_tokens,
            )
        )
        if len(self._samples) >= MOST_SAMPLES:
            self._samples = [_joined(*self._samples[i : i + 2]) for i in range(0, MOST_SAMPLES, 2)]
            self._sample_s *= 2
        return now + self._sample_s

    # --- the end -----------------------------------------------------------------------------------------

    def report(self, now: float, worker_s: float, gpu_s: float, workers: Sequence[SimWorker]) -> SimReport:
        computed = [
            worker.computed_tokens for worker in workers if not worker.ordered_s and worker.role is not Role.DECODE
        ]
        busy_s = self._busy_s_of_gone + sum(worker.busy_s for worker in workers)
        ended = max(1, self._requests)
        ttft_windows_kept, itl_windows_kept = self._shares.shares()
        return SimReport(
            requests=self._requests,
            failed=self._failed,
            duration_s=now,
            hit_share=self._cached_tokens / max(1, self._isl_tokens),
            predicted_hit_share=self._predicted_tokens / max(1, self._isl_tokens),
            ttft_s=_spread(self._ttft),
            itl_s=_spread(self._itl),
            e2e_s=_spread(self._e2e),
            queue_mean_s=self._waited_s / max(1, self._ttft.count),
            attainment=self._good / ended,
            ttft_attainment=self._ttft_good / ended,
            itl_attainment=self._itl_good / ended,
            ttft_windows_kept=ttft_windows_kept,
            itl_windows_kept=itl_windows_kept,
            goodput_rps=self._good / max(1e-9, now),
            output_tokens_per_s=self._osl_tokens / max(1e-9, now),
            preemptions=self._preemptions_of_gone + sum(worker.scheduler.num_preempted for worker in workers),
            balance=max(computed, default=0) * len(computed) / max(1, sum(computed)),
            busy_share=busy_s / max(1e-9, worker_s),
            gpu_hours=gpu_s / 3600,
            worker_hours=worker_s / 3600,
            started=self.started,
            stopped=self.stopped,
            flipped=self.flipped,
            timeline=tuple(self._samples),
            changes=tuple(self._changes),
            changes_left_out=self._changes_left_out,
        )


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _spread(tally: PercentileTally) -> Spread:
    p50, p90, p95, p99 = (tally.percentile(share) for share in (0.5, 0.9, 0.95, 0.99))
    return Spread(mean=tally.mean, p50=p50, p90=p90, p95=p95, p99=p99, max=tally.largest)


def _joined(first: Sample, second: Sample) -> Sample:
    """Join two intervals."""
    ended, requests = first.ended + second.ended, first.requests + second.requests
    return Sample(
        at_s=second.at_s,
        requests=requests,
        ended=ended,
        good=first.good + second.good,
        ttft_s=(first.ttft_s * first.requests + second.ttft_s * second.requests) / max(1, requests),
        itl_s=(first.itl_s * first.ended + second.itl_s * second.ended) / max(1, ended),
        prefill_ready=second.prefill_ready,
        prefill_starting=second.prefill_starting,
        decode_ready=second.decode_ready,
        decode_starting=second.decode_starting,
        draining=second.draining,
        waiting=second.waiting,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        predicted_tokens=first.predicted_tokens + second.predicted_tokens,
    )
