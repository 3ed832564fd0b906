"""Run `kvmesh doctor`: check this machine and report what a mesh finds on it, with advice."""

import asyncio
import errno
import importlib.metadata
import importlib.util
import mmap
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.commands.doctor_cluster import examine_cluster, show_cluster
from kvmesh.commands.doctor_shared import check_storage
from kvmesh.commands.nixl_probe import NixlProbe
from kvmesh.mesh.config import load
from kvmesh.mesh.discovery import DiscoveryUrl, Put, open_discovery
from kvmesh.mesh.discovery.answers import NOT_ASKED
from kvmesh.mesh.identity.credentials import Credentials, MeshTls, open_credentials
from kvmesh.protocol.errors import MeshError, WireError
from kvmesh.protocol.messages import Card, decode
from kvmesh.protocol.version import PROTOCOL_VERSION, RELEASE, VersionError, common_version, release_name
from kvmesh.workers.engines.registry import ENGINES
from kvmesh.workers.engines.torch.cpu import bfloat16_by, cpu_flags
from kvmesh.workers.weights_service import weights_service

OLDEST_PYTHON = (3, 11)
SMALL_SHM_BYTES = 128 * 2**20
LITTLE_MEMORY_BYTES = 2 * 2**30
PROBE_TIMEOUT_S = 60.0
ASKED_TIMEOUT_S = 3.0  # for all addresses of a list
CARDS_TIMEOUT_S = 0.7  # for the next card of discovery
MAX_CARDS = 4096
MAX_TOLD = 4  # services that are named
KINDS_OF_CARDS = ("workers", "routers", "frontends", "planners")

Status = Literal["ok", "warn", "fail"]


class DoctorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_DOCTOR_<NAME>`, that over the TOML file of `--config`, that over the default."""

    json: Annotated[bool, Meta(description="print one JSON object")] = False
    host: Annotated[str, Meta(description="address the HTTP API is to have")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="port the HTTP API is to have")] = 8000
    discovery: DiscoveryUrl = "file:.run/discovery"
    mesh_tls: MeshTls = ""
    kv_shared: Annotated[str, Meta(description="storage for KV of several workers, to be checked too")] = ""
    weights_service: Annotated[str, Meta(description="socket of a memory service that is to answer; empty: none")] = ""
    cluster: Annotated[bool, Meta(description="look at a running mesh instead: all pairs of its services")] = False
    pairs: Annotated[int, Meta(ge=1, le=10_000, description="cluster: pairs to measure, at most")] = 64


class Finding(Struct, frozen=True):
    """Hold the result of one check. `fail`: no mesh can run here. `warn`: a mesh runs, but lacks something."""

    name: str
    status: Status
    found: str
    advice: str = ""


class TorchProbe(Struct, frozen=True):
    version: str  # "" if it is not installed
    cuda: str = ""  # the CUDA it is built for, "" for a CPU build
    gpus: int = 0  # that it can use
    problem: str = ""  # why it does not import


def main(argv: list[str]) -> int:
    """Return 0 if a mesh can run here, else 1."""
    config = load(
        DoctorConfig,
        argv,
        os.environ,
        prefix="KVMESH_DOCTOR_",
        prog="kvmesh doctor",
        description="Look at this machine and say what a mesh finds on it, and what to do about it.",
        section="doctor",
    )
    if config.cluster:
        return look_at_cluster(config)
    with Console(stderr=True).status("looking at this machine"):
        findings = examine(config)
    failed = any(finding.status == "fail" for finding in findings)
    if config.json:
        print(msgspec.json.encode({"ok": not failed, "findings": findings}).decode())
    else:
        show(findings, Console(highlight=False))
    return 1 if failed else 0


def look_at_cluster(config: DoctorConfig) -> int:
    """Return 0 if all services and pairs are well, else 1. Raises MeshError if discovery cannot be read."""
    with Console(stderr=True).status("having the services probe each other"):
        report = asyncio.run(examine_cluster(config.discovery, config.pairs, open_credentials(config.mesh_tls)))
    if config.json:
        print(msgspec.json.encode(report).decode())
    else:
        show_cluster(report, Console(highlight=False))
    return 0 if report.ok else 1


def examine(config: DoctorConfig) -> list[Finding]:
    torch, nixl, memfd = probe_torch(), probe_nixl(), memfd_problem()
    credentials = open_credentials(config.mesh_tls)
    discovery = check_discovery(config.discovery, credentials)
    return [
        check_python(sys.version_info[:3]),
        check_packages(requirements()),
        check_uvloop(version_of("uvloop")),
        check_torch(torch),
        check_gpu(list_gpus(), torch),
        check_dtype(bfloat16_by(cpu_flags())),
        check_engines({kind.package: kind.distributions for kind in ENGINES.values() if kind.package}),
        check_nixl(nixl),
        check_shared_memory(memfd, shm_bytes()),
        check_kv_transfer(not nixl.problem, not memfd),
        *([check_shared_storage(config.kv_shared)] if config.kv_shared else []),
        check_port(config.host, config.port),
        discovery,
        *([] if discovery.status == "fail" else [check_versions(config.discovery, credentials)]),
        *([check_memory_service(config.weights_service)] if config.weights_service else []),
        check_capacity(len(os.sched_getaffinity(0)), psutil.virtual_memory().available),
    ]


def show(findings: Sequence[Finding], console: Console) -> None:
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        text = f"{finding.found}\n-> {finding.advice}" if finding.advice else finding.found
        table.add_row(Text(finding.status, colours[finding.status]), Text(finding.name), Text(text))
    console.print(table)
    fails, warns = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    verdict = f"{fails} to mend before a mesh runs here, {warns} to know about" if fails or warns else "all is well"
    console.print(f"\n{verdict}; next: make demo" if not fails else f"\n{verdict}")


# --- Python and packages ------------------------------------------------------------------------------


def check_python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if version[:2] >= OLDEST_PYTHON:
        return Finding("Python", "ok", f"{found}, {sys.executable}")
    return Finding("Python", "fail", found, "install Python 3.11 or newer, then: make install PYTHON=<that python>")


def requirements() -> list[str] | None:
    """Return the packages that kvmesh always needs, from its metadata; None if kvmesh is not installed."""
    try:
        lines = importlib.metadata.requires("kvmesh") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def check_packages(names: Iterable[str] | None) -> Finding:
    if names is None:
        return Finding("packages", "warn", "kvmesh runs from a folder, it is not installed", "make install")
    versions = {name: version_of(name) for name in names}
    if missing := [name for name, version in versions.items() if not version]:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", "make install")
    return Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def version_of(*distributions: str) -> str:
    """Return the version of the first installed distribution, "" if none is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def check_uvloop(version: str) -> Finding:
    if version:
        return Finding("event loop", "ok", f"uvloop {version}")
    return Finding("event loop", "warn", "asyncio's own, which is slower", "pip install -c constraints.txt uvloop")


# --- what computes ------------------------------------------------------------------------------------


def probe_torch() -> TorchProbe:
    if importlib.util.find_spec("torch") is None:
        return TorchProbe("")
    try:
        import torch
    except Exception as error:  # a torch that does not fit this machine raises OSError, ImportError, RuntimeError ...
        return TorchProbe(version_of("torch"), problem=f"{type(error).__name__}: {error}")
    return TorchProbe(str(torch.__version__), torch.version.cuda or "", torch.cuda.device_count())


def check_torch(torch: TorchProbe) -> Finding:
    if not torch.version:
        return Finding("torch", "warn", "not installed: only the mock engine can run here", "make install")
    if torch.problem:
        return Finding("torch", "fail", f"{torch.version} does not import: {torch.problem}", "make clean install")
    return Finding("torch", "ok", f"{torch.version}, {f'built for CUDA {torch.cuda}' if torch.cuda else 'for the CPU'}")


def check_dtype(bfloat16: str) -> Finding:
    """`bfloat16`: the instructions that multiply it; "" if the processor has none."""
    if bfloat16:
        return Finding("dtype", "ok", f"auto is bfloat16 for models stored so, but small ones: the CPU has {bfloat16}")
    return Finding("dtype", "ok", "auto is float32: the CPU has no instructions for bfloat16")


def list_gpus() -> list[str]:
    """Return the GPUs that the driver knows, one line each."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def check_gpu(gpus: Sequence[str], torch: TorchProbe) -> Finding:
    if not gpus and not torch.gpus:
        return Finding("GPU", "ok", "none: the torch engine computes on the CPU")
    found = "; ".join(gpus) or f"{torch.gpus} by torch's count"
    if torch.gpus or not torch.version:
        return Finding("GPU", "ok", found)
    if not torch.cuda:
        return Finding("GPU", "warn", f"{found}; this torch cannot use it", "make install TORCH=cuda")
    return Finding("GPU", "warn", f"{found}; torch finds none", "check driver and CUDA_VISIBLE_DEVICES: nvidia-smi")


def check_memory_service(path: str) -> Finding:
    try:
        return Finding("memory service", "ok", weights_service().describe(path))
    except MeshError as error:
        return Finding(
            "memory service", "warn", error.message, "workers load their own weights; kvmesh memory starts one"
        )


def check_engines(engines: Mapping[str, Sequence[str]]) -> Finding:
    """Look for packages without importing them: an import would take seconds, gigabytes and the GPU."""
    here = [f"{name} {version_of(*dists)}".strip() for name, dists in engines.items() if importlib.util.find_spec(name)]
    absent = [name for name in engines if not importlib.util.find_spec(name)]
    found = ", ".join([*here, "mock"]) + (f"; not installed: {', '.join(absent)}" if absent else "")
    return Finding("engines", "ok", found)


# --- how KV moves -------------------------------------------------------------------------------------


def probe_nixl() -> NixlProbe:
    """Start a real NIXL agent, in a process of its own."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "kvmesh.commands.nixl_probe"],
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        return msgspec.json.decode(process.stdout, type=NixlProbe)
    except subprocess.TimeoutExpired:
        return NixlProbe(f"it did not start within {PROBE_TIMEOUT_S:.0f} s")
    except msgspec.DecodeError:
        return NixlProbe(f"it ended its process with exit code {process.returncode}")


def check_nixl(probe: NixlProbe) -> Finding:
    if probe.problem:
        advice = "make install; without NIXL, KV moves only between workers on one host, on the CPU"
        return Finding("NIXL", "warn", probe.problem, advice)
    lacking = f"; cannot start here: {', '.join(probe.unusable)}" if probe.unusable else ""
    return Finding("NIXL", "ok", f"{probe.version}, starts {', '.join(probe.usable)}{lacking}")


def memfd_problem() -> str:
    """Return why the shm transfer cannot get memory on this machine, "" if it can."""
    try:
        fd = os.memfd_create("kvmesh-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            mmap.mmap(fd, mmap.PAGESIZE).close()
        finally:
            os.close(fd)
    except (AttributeError, OSError, ValueError) as error:
        return str(error)
    return ""


def shm_bytes() -> int:
    """Return the size of /dev/shm, 0 if there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def check_shared_memory(problem: str, size_bytes: int) -> Finding:
    if problem:
        return Finding("shared memory", "warn", f"no memfd: {problem}", "NIXL is then the only way to move KV")
    found = f"memfd works, /dev/shm has {size_bytes / 2**20:,.0f} MiB"
    if size_bytes >= SMALL_SHM_BYTES:
        return Finding("shared memory", "ok", found)
    return Finding("shared memory", "warn", found, "NIXL may want more: docker run --shm-size=1g, or --ipc=host")


def check_kv_transfer(nixl_works: bool, shm_works: bool) -> Finding:
    """Report which transfer `--kv-transfer auto` chooses."""
    if nixl_works:
        return Finding("KV transfer", "ok", "over NIXL")
    if shm_works:
        return Finding("KV transfer", "ok", "through shared memory, between workers on this host")
    return Finding("KV transfer", "fail", "neither NIXL nor shared memory works", "mend one of the two above")


def check_shared_storage(place: str) -> Finding:
    """Report whether workers with this `--kv-shared` could use it. They serve without it if not."""
    found, problem = check_storage(place)
    if problem:
        return Finding("shared KV", "warn", f"{place}: {problem}", "workers would serve without --kv-shared")
    return Finding("shared KV", "ok", f"{place} {found}")


# --- where services meet ------------------------------------------------------------------------------


def check_port(host: str, port: int) -> Finding:
    name = f"port {port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            reason = "taken: by a mesh that runs already?" if taken else f"cannot be had on {host}: {error.strerror}"
            return Finding(name, "warn", reason, f"choose another: kvmesh up --port {min(port + 1, 65535)}")
    return Finding(name, "ok", f"free on {host}")


def check_discovery(url: str, credentials: Credentials | None = None) -> Finding:
    """Check that files can be made in the directory, or where it will be; or that another backend answers."""
    scheme, _, path = url.partition(":")
    if scheme == "static":
        return asyncio.run(check_listed_services(url, credentials))
    if scheme != "file" or not path:
        return asyncio.run(check_discovery_server(url, credentials))
    directory = nearest_directory(Path(path).absolute())
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".tmp-kvmesh-doctor-"):
            return Finding("discovery", "ok", f"{path} can be written to")
    except OSError as error:
        advice = "set --discovery file:<a directory you may write to>"
        return Finding("discovery", "fail", f"cannot write to {directory}: {error.strerror}", advice)


async def check_discovery_server(url: str, credentials: Credentials | None = None) -> Finding:
    """Put a key and withdraw it again."""
    try:
        discovery = open_discovery(url, credentials)
    except MeshError as error:
        return Finding("discovery", "fail", error.message, error.hint)
    try:
        registration = await discovery.put(f"doctor/{secrets.token_hex(8)}", b"here")
        await registration.withdraw()
    except MeshError as error:
        return Finding("discovery", "fail", error.message, error.hint)
    finally:
        await discovery.close()
    return Finding("discovery", "ok", f"{url.partition('?')[0]} answers and can be written to")


async def check_listed_services(url: str, credentials: Credentials | None = None) -> Finding:
    """Ask each address of the list what it shows."""
    try:
        discovery = open_discovery(url, credentials)
    except MeshError as error:
        return Finding("discovery", "fail", error.message, error.hint)
    watching = asyncio.ensure_future(anext(discovery.watch("")))
    try:
        async with asyncio.timeout(ASKED_TIMEOUT_S):
            while not (asked := discovery.where().asked) or any(said == NOT_ASKED for _, said in asked):
                if watching.done():
                    watching.result()
                await asyncio.sleep(0.05)
    except TimeoutError:
        asked = discovery.where().asked
    except MeshError as error:
        return Finding("discovery", "fail", error.message, error.hint)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await discovery.close()
    silent = [f"{address}: {said}" for address, said in asked if not said.startswith("answers")]
    place = f"{len(asked) - len(silent)} of {len(asked)} addresses of {url.partition('?')[0]} answer"
    if not silent:
        return Finding("discovery", "ok", place)
    more = f"; and {len(silent) - MAX_TOLD} more" if len(silent) > MAX_TOLD else ""
    text = f"{place}; {'; '.join(silent[:MAX_TOLD])}{more}"
    return Finding("discovery", "warn", text, "start the services there with --port and the same --discovery")


def check_versions(url: str, credentials: Credentials | None = None) -> Finding:
    """Look for registered services that cannot work with this release."""
    ours = f"{release_name(RELEASE)}, protocol {PROTOCOL_VERSION}"
    scheme, _, path = url.partition(":")
    found = {} if scheme == "file" and not Path(path).is_dir() else asyncio.run(registered_cards(url, credentials))
    refused = []
    for key, card in found.items():
        try:
            common_version(card.versions)
        except VersionError as error:
            refused.append(f"{key}: {error.message}")
    if refused:
        more = f"; and {len(refused) - MAX_TOLD} more" if len(refused) > MAX_TOLD else ""
        text = f"{ours}; {'; '.join(refused[:MAX_TOLD])}{more}"
        return Finding("versions", "warn", text, "run releases together that are next to each other")
    counts = Counter(release_name(card.release) for card in found.values())
    there = ", ".join(f"{count} of {release}" for release, count in sorted(counts.items())) or "none"
    return Finding("versions", "ok", f"{ours}; registered services: {there}")


async def registered_cards(url: str, credentials: Credentials | None = None) -> dict[str, Card]:
    """Return what the cards in discovery say of their versions; nothing if discovery cannot be read."""
    found: dict[str, Card] = {}
    try:
        discovery = open_discovery(url, credentials)
    except MeshError:
        return found
    try:
        changes = discovery.watch("")
        while len(found) < MAX_CARDS:
            change = await asyncio.wait_for(anext(changes), CARDS_TIMEOUT_S)
            if isinstance(change, Put) and change.key.partition("/")[0] in KINDS_OF_CARDS:
                with suppress(WireError):
                    found[change.key] = decode(change.value, Card)
    except (TimeoutError, StopAsyncIteration, MeshError):
        pass
    finally:
        await discovery.close()
    return found


def nearest_directory(path: Path) -> Path:
    """Return `path`, or the closest directory above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.is_dir())


def check_capacity(cores: int, available_bytes: int) -> Finding:
    found = f"{cores} cores, {available_bytes / 2**30:.1f} GiB of memory free"
    if available_bytes >= LITTLE_MEMORY_BYTES:
        return Finding("machine", "ok", found)
    return Finding("machine", "warn", found, "end something else, or start fewer workers: kvmesh up --decode 1")
