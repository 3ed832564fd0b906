"""Settings of the router."""

import pytest

from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import load
from kvmesh.protocol.errors import ConfigError
from kvmesh.router.config import RouterConfig, rules_of
from kvmesh.router.queue import QueueRules
from kvmesh.router.rules import DEFAULT_SLO_ITL_S, RouterRules


def read(*flags: str) -> RouterConfig:
    return load(RouterConfig, flags, {}, prefix="KVMESH_ROUTER_", prog="kvmesh router")


def test_the_defaults_are_those_of_the_rules() -> None:
    assert rules_of(RouterConfig()) == RouterRules()


def test_every_setting_reaches_the_rules() -> None:
    rules = rules_of(
        read(
            "--policy=power-of-two", "--recompute-price=3", "--temperature=0.1", "--local-prefill-max-tokens=7",
            "--saturation-tokens=9", "--saturation-requests-share=2", "--saturation-blocks-share=0.9",
            "--queue-max-requests=5", "--queue-max-tokens=50", "--slo-itl-s=0.03", "--affinity-ttl-s=60",
            "--lease-s=30", "--ramp-s=0",
        )
    )  # fmt: skip
    assert (rules.policy, rules.recompute_price, rules.temperature) == ("power-of-two", 3, 0.1)
    assert rules.local_prefill.max_tokens == 7
    assert rules.saturation is not None
    assert (rules.saturation.queued_tokens, rules.saturation.requests_share) == (9, 2)
    assert rules.saturation.blocks_share == 0.9
    assert rules.queue == QueueRules(order="wspt", max_requests=5, max_tokens=50)
    assert rules.slo_itl_s == 0.03
    assert (rules.affinity_ttl_s, rules.lease_s, rules.ramp_s) == (60, 30, 0)


def test_a_router_keeps_no_slo_that_nobody_has_stated() -> None:
    assert FrontendConfig().slo_itl_s == DEFAULT_SLO_ITL_S
    assert rules_of(RouterConfig()).slo_itl_s == RouterRules().slo_itl_s == 0


def test_an_slo_of_0_is_kept() -> None:
    assert rules_of(read("--slo-itl-s=0")).slo_itl_s == 0


def test_a_limit_of_0_is_none() -> None:
    one = rules_of(read("--saturation-tokens=0")).saturation
    assert one is not None
    assert (one.queued_tokens > 10**15, one.requests_share) == (True, 1)
    off = ("--saturation-tokens=0", "--saturation-requests-share=0", "--saturation-blocks-share=0")
    assert rules_of(read(*off)).saturation is None


@pytest.mark.parametrize("flag", ["--policy=best", "--lease-s=0", "--name=", "--http-port=70000", "--slo-itl-s=-1"])
def test_what_makes_no_sense_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        read(flag)
