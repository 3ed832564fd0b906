"""docs/networking.md lists every port that a service can open, with its default."""

import re

import msgspec
import pytest

from kvmesh.frontend.config import FrontendConfig
from kvmesh.planner.config import ServiceConfig
from kvmesh.router.config import RouterConfig
from kvmesh.workers.config import WorkerConfig
from tests.support.guide import section_of

CONFIGS: dict[str, type[msgspec.Struct]] = {
    "frontend": FrontendConfig,
    "worker": WorkerConfig,
    "router": RouterConfig,
    "planner": ServiceConfig,
}
_ROW = re.compile(r"^\| (\w+) \| `(--[\w-]+)` \| (\w+) \|", re.MULTILINE)
_SHOWN = {0: "any", "": "any", None: "none"}


def ports_of(service: str) -> dict[str, str]:
    """Return the options of a service that name ports it listens on, with their defaults as the guide shows them."""
    return {
        "--" + field.name.replace("_", "-"): str(_SHOWN.get(field.default, field.default))
        for field in msgspec.structs.fields(CONFIGS[service])
        if re.fullmatch(r"(\w+_)?ports?", field.name)
    }


@pytest.mark.parametrize("service", CONFIGS)
def test_the_guide_has_every_port_with_its_default(service: str) -> None:
    rows = _ROW.findall(section_of("networking.md", "Ports"))
    assert {option: default for name, option, default in rows if name == service} == ports_of(service)


def test_ports_are_found_in_the_settings() -> None:
    assert ports_of("frontend") == {
        "--port": "8000",
        "--limits-port": "any",
        "--mesh-port": "any",
        "--ui-port": "none",
    }
    assert "--kv-events-ports" in ports_of("worker")
