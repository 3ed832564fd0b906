"""Run a real Envoy with an endpoint picker."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from kvmesh.protocol.errors import ConfigError, EngineError

ROOT = Path(__file__).absolute().parents[2]
START_S = 30.0
EXTENSIONS = "type.googleapis.com/envoy.extensions"
HOST = "127.0.0.1"
Mode = Literal["buffered", "duplex"]
PROCESSING: dict[Mode, dict[str, str]] = {
    "buffered": {"request_body_mode": "BUFFERED", "response_header_mode": "SEND", "response_body_mode": "NONE"},
    "duplex": {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    },
}


@dataclass(frozen=True, slots=True)
class EnvoyPort:
    """A port of Envoy, and how it asks the picker."""

    port: int
    mode: Mode
    message_timeout_s: float = 0.2
    max_message_timeout_s: float = 60.0
    fails_open: bool = False  # failure_mode_allow


def find_envoy() -> str | None:
    """Return the program: that of KVMESH_ENVOY, of `make test-envoy`, or on the PATH; None: there is none."""
    given = os.environ.get("KVMESH_ENVOY", "")
    ours = ROOT / ".venv-envoy" / "bin" / "envoy"
    return given or (str(ours) if ours.exists() else shutil.which("envoy"))


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    opened = [socket.socket() for _ in range(count)]
    try:
        for one in opened:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in opened]
    finally:
        for one in opened:
            one.close()


@contextmanager
def running_envoy(folder: Path, picker_port: int, listeners: Sequence[EnvoyPort]) -> Iterator[None]:
    """Run Envoy until the block ends. Raise ConfigError if there is none, EngineError if it does not start."""
    if (program := find_envoy()) is None:
        raise ConfigError("there is no envoy", hint="run `make test-envoy` once, or set KVMESH_ENVOY to the program")
    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(yaml.safe_dump(config_of(picker_port, listeners)))
    argv = [program, "-c", str(file), "--log-level", "warning", "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as out, subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL) as process:
        try:
            for listener in listeners:
                until_listening(process, listener.port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until somebody accepts connections. Raise EngineError with the end of the log."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.05)
    raise EngineError(f"{process.args!r} does not listen on {port}", hint=log.read_text(errors="replace")[-2000:])


def config_of(picker_port: int, listeners: Sequence[EnvoyPort]) -> dict[str, Any]:
    return {
        "static_resources": {
            "listeners": [_listener(listener) for listener in listeners],
            "clusters": [_picked_cluster(), _picker_cluster(picker_port)],
        }
    }


def _listener(listener: EnvoyPort) -> dict[str, Any]:
    router = {"@type": f"{EXTENSIONS}.filters.http.router.v3.Router"}
    filters = [
        {"name": "envoy.filters.http.ext_proc", "typed_config": _ext_proc(listener)},
        {"name": "envoy.filters.http.router", "typed_config": router},
    ]
    route = {"match": {"prefix": "/"}, "route": {"cluster": "picked", "timeout": "0s"}}
    manager = {
        "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": f"in-{listener.port}",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": filters,
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"address": _address(listener.port), "filter_chains": [chain]}


def _ext_proc(listener: EnvoyPort) -> dict[str, Any]:
    return {
        "@type": f"{EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": {"request_header_mode": "SEND", **PROCESSING[listener.mode]},
        "message_timeout": f"{listener.message_timeout_s}s",
        "max_message_timeout": f"{listener.max_message_timeout_s}s",
        "failure_mode_allow": listener.fails_open,
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }


def _picked_cluster() -> dict[str, Any]:
    """Return the cluster that follows the header of the picker."""
    return {
        "name": "picked",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }


def _picker_cluster(port: int) -> dict[str, Any]:
    http2 = {
        "@type": f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    return _static("picker", port) | {"typed_extension_protocol_options": options}


def _static(name: str, port: int) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address(port)}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}
