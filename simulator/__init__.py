"""A mesh in simulated time: the live router core, schedulers, block pools and planner core, driven by discrete events.

    requests = synthesize(diurnal(mean_rps=20), duration_s=7200, shape=Shape(isl_tokens=2000, osl_tokens=200), seed=7)
    report = simulate(requests, SimConfig(mode="disaggregated", workers=8, prefill_workers=4), hook)

- Speed: a fraction of a millisecond for each request and each KV block; blocks of 512 tokens (the default of both
  `SimConfig` and `synthesize`, which must agree) cost an eighth of what blocks of 64 do.
- `requests`: any iterable of `SimRequest`, in order of arrival; it is read as time goes by. `loads.py` makes them.
- `hook`: a `PlannerHook(decide, interval_s, traffic_s)`, or None. `decide(Observation) -> Decision` is asked every
  `interval_s`; `PlannerCore.decide` is one. Its counts are ordered at once: a worker takes requests `start_s` after its
  order, one that is taken away drains first, a flip drains, takes `flip_s` and keeps its cache. GPU-hours run from the
  order until a drained worker is gone. Without prefill workers (aggregated), counts of decode are those of all.
- `report`: a `SimReport`; equal input gives an equal report.
"""

from kvmesh.simulator.config import SimConfig
from kvmesh.simulator.hook import PlannerHook
from kvmesh.simulator.report import Sample, SimReport, Spread
from kvmesh.simulator.requests import SimRequest
from kvmesh.simulator.world import simulate

__all__ = ["PlannerHook", "Sample", "SimConfig", "SimReport", "SimRequest", "Spread", "simulate"]
