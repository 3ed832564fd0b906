"""The load of a server's other callers, from its metrics and the worker's own count."""

from kvmesh.workers.engine import EngineReport
from kvmesh.workers.engines.attached.outside import STANDS_STILL_LOOKS, OutsideCallers
from kvmesh.workers.engines.attached.server import ServerLoad

BLOCKS = 100


def looked(*looks: tuple[ServerLoad, int, int]) -> list[EngineReport]:
    """Return the report after each look. A look: the metrics, most own requests since the last one, own requests."""
    callers = OutsideCallers()
    reports: list[EngineReport] = []
    for seen, most_own, own in looks:
        before = callers.report
        assert callers.look(seen, most_own, own, BLOCKS) == (callers.report != before)
        reports.append(callers.report)
    return reports


def test_requests_that_the_worker_did_not_send_are_of_other_callers() -> None:
    [report] = looked((ServerLoad(running=3, waiting=1, cache_usage=0.4), 1, 1))
    assert report == EngineReport(outside_requests=3, outside_blocks=30)


def test_a_worker_alone_with_its_server_reports_nothing() -> None:
    assert looked((ServerLoad(2, 1, 0.5), 3, 3), (ServerLoad(1, 0, 0.2), 3, 0)) == [EngineReport()] * 2


def test_requests_that_have_just_ended_are_not_of_other_callers() -> None:
    ended = [(ServerLoad(4, 0, 0.5), 4, 4), (ServerLoad(3, 0, 0.4), 4, 0)]
    assert looked(*ended) == [EngineReport()] * 2


def test_metrics_that_stay_as_they_were_are_compared_with_what_ran_then() -> None:
    """SGLang at rest: its last count stands in its metrics for half a minute."""
    stale = ServerLoad(4, 0, 0.5)
    assert looked((stale, 4, 4), (stale, 4, 0), *[(stale, 0, 0)] * 20) == [EngineReport()] * 22


def test_metrics_that_stand_still_for_long_are_true() -> None:
    steady = ServerLoad(4, 0, 0.5)
    reports = looked((steady, 4, 4), *[(steady, 0, 0)] * 3 * STANDS_STILL_LOOKS)
    assert (reports[STANDS_STILL_LOOKS - 1].outside_requests, reports[-1].outside_requests) == (0, 4)


def test_other_callers_are_seen_when_the_own_requests_have_ended() -> None:
    looks = [(ServerLoad(8, 0, 0.5), 5, 5), (ServerLoad(3, 0, 0.2), 5, 0), (ServerLoad(3, 0, 0.3), 0, 0)]
    assert [report.outside_requests for report in looked(*looks, (ServerLoad(3, 0, 0.31), 0, 0))] == [3, 0, 0, 3]


def test_other_callers_that_leave_are_forgotten() -> None:
    assert looked((ServerLoad(2, 0, 0.2), 0, 0), (ServerLoad(), 0, 0))[-1] == EngineReport()
