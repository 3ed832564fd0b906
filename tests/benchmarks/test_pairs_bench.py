"""Two settings of the frontend are compared in pairs: the order, the ratio, and that it runs."""

import json
import time
from collections import Counter
from itertools import pairwise

import psutil
import pytest

from kvmesh.lab.bench.__main__ import main
from kvmesh.lab.bench.load import used_s
from kvmesh.lab.bench.pairs import BASE, CHANGED, CONTROL, in_turn, ratio_of, settings_in
from kvmesh.protocol.errors import ConfigError

SIDES = [BASE, CHANGED, CONTROL]


def test_each_side_comes_first_and_after_each_other_as_often() -> None:
    orders = [in_turn(SIDES, pair) for pair in range(6)]
    assert Counter(order[0] for order in orders) == dict.fromkeys(SIDES, 2)
    assert Counter(order[2] for order in orders) == dict.fromkeys(SIDES, 2)
    after = Counter((one, other) for order in orders for one, other in pairwise(order))
    assert set(after.values()) == {2}


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    base_s = [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    ours_s = [1.1, 2.2, 4.4, 8.8, 1.1, 1.1, 1.1, 9.0, 0.5]
    found = ratio_of(ours_s, base_s)
    assert (found.median, found.low, found.high) == (1.1, 1.1, 1.1)
    assert found.quartiles == (1.1, 1.1)


def test_few_pairs_that_differ_say_little() -> None:
    found = ratio_of([0.9, 0.95, 1.0, 1.05, 1.1, 1.2], [1.0] * 6)
    assert (found.low, found.high) == (0.9, 1.2)


def test_cpu_time_is_that_of_the_scheduler() -> None:
    before_s, ends = used_s(psutil.Process()), time.process_time() + 0.004
    while time.process_time() < ends:
        pass
    assert 0.002 < used_s(psutil.Process()) - before_s < 5


def test_settings_are_those_of_kvmesh_up() -> None:
    found = settings_in("--trace-share 0.5 --num-blocks 64")
    assert (found.frontend, found.worker) == ({"trace_share": 0.5}, {"num_blocks": 64})
    for wrong in ("--trace-shares 1", "--name 'x"):
        with pytest.raises(ConfigError):
            settings_in(wrong)


def test_a_running_server_is_compared_only_with_its_process() -> None:
    with pytest.raises(ConfigError, match="--pid"):
        main(["pairs", "--url", "http://127.0.0.1:1"])


@pytest.mark.e2e
@pytest.mark.long
def test_equal_frontends_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs", "--pairs", "6", "--requests", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["errors"], found["pairs"]) == (0, 6)
    assert 0.2 < found["changed"]["median"] < 5
