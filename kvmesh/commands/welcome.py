"""The text that `kvmesh up` prints when the mesh is ready: how to ask it, and what to try. Pure."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.commands.http_client import DEFAULT_URL
from kvmesh.frontend.config import FrontendConfig

# Longer than a KV block of 16 tokens, so that a second request finds blocks of it in a cache.
PROMPT = (
    "You are a friendly guide. Explain in simple words, one step after the other, so that a child can follow: "
    "what does the router of a mesh do, and why does it remember the beginning of a question?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMesh:
    """Facts about a mesh that is up."""

    url: str  # of the HTTP API
    model: str
    run_dir: Path
    control: str  # path of the control socket
    frontend: FrontendConfig
    pids: Mapping[str, int]  # of the workers, by name
    mesh_url: str = ""  # of the frontend for members of the mesh, where the processes talk over TLS
    operator_tls: str = ""  # folder with the certificate of an operator
    planner_record: str = ""  # file of the planner's decisions, "": there is no planner
    program: str = "kvmesh"  # as this shell can start it


def welcome(mesh: RunningMesh) -> str:
    key = ' -H "authorization: Bearer $KVMESH_API_KEY"' if mesh.frontend.api_keys_file else ""
    body = {"model": mesh.model, "stream": True, "max_tokens": 100, "stream_options": {"include_usage": True}}
    body["messages"] = [{"role": "user", "content": PROMPT}]
    tls = mesh.operator_tls
    certificate = f" (curl -k --cert {tls}/cert.pem --key {tls}/key.pem)" if mesh.mesh_url else ""
    lines = [
        *pages(mesh),
        "",
        *preparations(mesh.frontend),
        f"  curl -N {mesh.url}/v1/chat/completions -H 'content-type: application/json'{key} \\",
        f"    -d {shlex.quote(json.dumps(body))}",
        "",
        *python_client(mesh),
        "",
        "Things to try:",
        *things_to_try(mesh),
        "",
        f"  logs      {mesh.run_dir}/logs",
        f"  metrics   {mesh.mesh_url or mesh.url}/metrics{certificate}",
        f"  discovery file:{mesh.run_dir}/discovery (workers join with --discovery)",
    ]
    if mesh.planner_record:
        lines.append(f"  planner   {mesh.program} planner explain --changes --record-file {mesh.planner_record}")
    return "\n".join(lines)


def pages(mesh: RunningMesh) -> list[str]:
    """Return where a browser and a terminal see the mesh, and which processes run its workers."""
    page, url = live_page_of(mesh), "" if mesh.url == DEFAULT_URL else f" --url {mesh.url}"
    names = ", ".join(f"{name} {pid}" for name, pid in sorted(mesh.pids.items()))
    return [
        *([f"  live page {page}/ui, or in a terminal: {mesh.program} top{url}"] if page else []),
        f"  API       {mesh.url}/docs",
        f"  processes {names}",
    ]


def live_page_of(mesh: RunningMesh) -> str:
    """Return the URL in front of `/ui`, "" if the page is not served or its port is not known."""
    frontend = mesh.frontend
    if not frontend.ui or (mesh.mesh_url and not frontend.api_keys_file) or frontend.ui_port == 0:
        return ""
    if frontend.ui_port is None:
        return mesh.url
    return f"{mesh.url.rpartition(':')[0]}:{frontend.ui_port}"


def preparations(frontend: FrontendConfig) -> list[str]:
    """Return the shell lines that clients need before the first request: where to find certificate and key."""
    lines = []
    if frontend.tls_cert:
        lines += [f"  export SSL_CERT_FILE={frontend.tls_cert}  # curl and Python then trust this certificate"]
    if frontend.tls_client_ca:
        lines += [f"  # clients need a certificate that {frontend.tls_client_ca} has signed: curl --cert ... --key ..."]
    if frontend.api_keys_file:
        lines += [f"  export KVMESH_API_KEY=...  # one of the keys in {frontend.api_keys_file}"]
    return [*lines, ""] if lines else []


def python_client(mesh: RunningMesh) -> list[str]:
    has_keys = bool(mesh.frontend.api_keys_file)
    key = 'os.environ["KVMESH_API_KEY"]' if has_keys else '"none"'
    return [
        *(["  import os"] if has_keys else []),
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{mesh.url}/v1", api_key={key})',
        "  answer = client.chat.completions.create(",
        f'      model="{mesh.model}", max_tokens=100, messages=[{{"role": "user", "content": "Tell me a story."}}])',
    ]


def things_to_try(mesh: RunningMesh) -> Sequence[str]:
    control = f"--control {shlex.quote(mesh.control)}"
    member = f" --mesh-tls {mesh.operator_tls}" if mesh.mesh_url else ""
    lines = [
        "  cache     send the curl request twice: the second answer's usage has cached_tokens",
        f'  explain   {mesh.program} explain --url {mesh.mesh_url or mesh.url}{member} "{PROMPT}"',
        f"  workers   {mesh.program} workers {control}",
    ]
    if mesh.pids:
        name, pid = sorted(mesh.pids.items())[0]
        lines.append(f"  kill      kill -9 {pid}  # {name}: {after_a_kill(name, mesh.pids)}")
    if mesh.pids and not mesh.planner_record:
        role = name.rpartition("-")[0]
        fewer = sum(other.rpartition("-")[0] == role for other in mesh.pids) - 1
        lines.append(f"  drain     {mesh.program} scale {control} {role}={fewer}  # one {role} worker ends in order")
    return lines


def after_a_kill(name: str, workers: Iterable[str]) -> str:
    """Return what becomes of the requests of a worker that is killed. A prefill worker alone answers none."""
    if any(other != name and not other.startswith("prefill-") for other in workers):
        return "its requests continue on another worker"
    return "its requests wait until it has been started again"
