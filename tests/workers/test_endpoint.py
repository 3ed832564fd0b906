"""A worker tells gateways where it is reached: at its setting, or at the attached server itself."""

import socket

import pytest

from kvmesh.protocol.errors import ConfigError
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.endpoint import http_endpoint_of


def config(**fields: object) -> WorkerConfig:
    return WorkerConfig(model_path="/none", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "endpoint"),
    [
        ({}, ""),
        ({"http_endpoint": "10.0.0.1:8000"}, "10.0.0.1:8000"),
        ({"http_endpoint": "[::1]:8000"}, "[::1]:8000"),
        ({"engine": "attach", "attach_url": "http://10.0.0.1:8000"}, "10.0.0.1:8000"),
        ({"engine": "attach", "attach_url": "http://10.0.0.1"}, "10.0.0.1:80"),
        ({"engine": "attach", "attach_url": "http://10.0.0.1:8000", "http_endpoint": "10.0.0.2:9"}, "10.0.0.2:9"),
        ({"engine": "attach", "attach_url": "http://no-such-host.invalid:8000"}, ""),
    ],
)
def test_an_endpoint_is_an_address(fields: dict[str, object], endpoint: str) -> None:
    assert http_endpoint_of(config(**fields)) == endpoint


def test_names_are_resolved_before_others_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, 0, 0, "", ("::7", 80, 0, 0)), (socket.AF_INET, 0, 0, "", ("10.0.0.7", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert http_endpoint_of(config(http_endpoint="gpu-7:80")) == "10.0.0.7:80"


@pytest.mark.parametrize("text", ["gpu-1", "10.0.0.1:", ":8000", "10.0.0.1:99999", "no-such-host.invalid:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--http-endpoint"):
        http_endpoint_of(config(http_endpoint=text))
