"""The KV benchmark chooses the length of its prompts by the speed of the machine, unless the settings say it."""

import pytest

from kvmesh.lab.bench.kv_engines import KvBenchConfig
from kvmesh.lab.bench.kv_pace import LEAST_ROUNDS, MOST_ROUNDS, cost_isl_tokens, is_paced, paced, sized
from kvmesh.protocol.errors import ConfigError


def test_a_fast_machine_has_long_prompts_and_all_rounds() -> None:
    found = paced(KvBenchConfig(), 0.0001)
    assert (found.isl_tokens, found.rounds) == (1024, MOST_ROUNDS)


def test_a_slow_machine_has_shorter_prompts_and_fewer_rounds() -> None:
    found = paced(KvBenchConfig(), 0.0025)
    assert (found.isl_tokens, found.rounds) == (512, 3)
    assert paced(KvBenchConfig(), 0.1).isl_tokens == 512
    assert paced(KvBenchConfig(), 0.1).rounds == LEAST_ROUNDS


def test_what_the_settings_say_is_held() -> None:
    given = KvBenchConfig(isl_tokens=2048, rounds=5)
    assert is_paced(given)
    assert paced(given, 1.0) == given
    assert paced(KvBenchConfig(rounds=5), 0.0001).isl_tokens == 1024


def test_prompts_too_short_for_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64"):
        paced(KvBenchConfig(isl_tokens=63, rounds=1), 0.0)


def test_tiers_have_room_for_what_is_asked_in_a_circle() -> None:
    config = KvBenchConfig(isl_tokens=1024, rounds=2, host_mib=2048, disk_mib=512)
    found = sized(config, 256 << 20)
    assert (found.host_mib, found.disk_mib) == (2048, 1536)


def test_prompts_asked_for_often_are_short_where_computing_is_slow() -> None:
    assert cost_isl_tokens(1024, 0.0001) == 512
    assert cost_isl_tokens(512, 0.003) == 100
    assert cost_isl_tokens(512, 1.0) == 64
