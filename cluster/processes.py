"""The processes of a mesh on one host: which there are, and with which flags. Pure, but for a planner's profile."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvmesh.cluster.config import ClusterConfig
from kvmesh.cluster.tiny_model import CHECKPOINT_DIR, PROFILE
from kvmesh.frontend.config import FrontendConfig
from kvmesh.mesh.config import environ_of, flags_of, load, to_flags
from kvmesh.mesh.identity.credentials import issued_folder
from kvmesh.mesh.identity.names import MeshRole
from kvmesh.mesh.supervisor import ProcessSpec
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.profiles import polynomial_profile
from kvmesh.protocol.messages import Role
from kvmesh.protocol.profile import Profile, read_profile
from kvmesh.workers.engines.registry import ENGINES

PLANNER = "planner"  # name of its process
MEMORY = "memory"  # name of the process that keeps weights
TLS = "tls"  # folder of the certificates in the run directory


def discovery_of(run_dir: Path) -> str:
    return f"file:{run_dir / 'discovery'}"


def tls_folder(config: ClusterConfig, run_dir: Path, role: MeshRole, name: str = "") -> str:
    """Return the folder with the certificate of a process, "" in an open mesh. `name` is the role's by default."""
    return str(issued_folder(ca_folder(config, run_dir), role, name or role.value)) if config.up.mesh_tls else ""


def ca_folder(config: ClusterConfig, run_dir: Path) -> Path:
    """Return the folder of the CA that signs the processes of a closed mesh."""
    return run_dir / TLS if config.up.mesh_tls == "auto" else Path(config.up.mesh_tls).resolve()


def process_specs(config: ClusterConfig, run_dir: Path, config_file: str = "") -> list[ProcessSpec]:
    """Return the memory service if there is one, the frontend, the router if it has its own process, then the workers.

    Frontend and router read the tables [frontend] and [router] of `config_file`; what is set here wins.
    """
    up = config.up
    common = ["--discovery", discovery_of(run_dir), "--namespace", up.namespace, "--log-level", up.log_level]

    def closed(role: MeshRole) -> list[str]:
        return ["--mesh-tls", tls_folder(config, run_dir, role)]

    common += ["--config", str(Path(config_file).resolve())] if config_file else []
    router_environ = environ_of(config.router, "KVMESH_ROUTER_")  # an embedded router has no flags
    specs = [
        ProcessSpec(
            "frontend",
            ["-m", "kvmesh.frontend", *frontend_flags(config), *common, *closed(MeshRole.FRONTEND)],
            router_environ,
        )
    ]
    if socket := memory_socket(config, run_dir):
        own = ["--socket", socket, "--limit-gib", str(up.memory_gib), "--namespace", up.namespace]
        specs.insert(0, ProcessSpec(MEMORY, ["-m", "kvmesh.workers.memory", *own, "--log-level", up.log_level]))
    if up.router == "remote":
        specs.append(ProcessSpec("router", ["-m", "kvmesh.router", *common, *closed(MeshRole.ROUTER)], router_environ))
    return specs + [worker_spec(config, role, name, run_dir) for name, role in config.first_workers().items()]


def frontend_flags(config: ClusterConfig) -> list[str]:
    up = config.up
    flags = ["--host", up.host, "--port", str(up.port), "--router", up.router]
    flags += ["--drain-timeout-s", str(up.drain_timeout_s)]
    if "drain_notice_s" not in config.frontend:  # nobody is left to go to
        flags += ["--drain-notice-s", "0"]
    return flags + flags_of(FrontendConfig, config.frontend)


def read_frontend(config: ClusterConfig, config_file: str, environ: Mapping[str, str]) -> FrontendConfig:
    """Return the settings that the frontend's process will find. Raises ConfigError."""
    flags = frontend_argv(config, config_file)
    return load(FrontendConfig, flags, environ, prefix="KVMESH_FRONTEND_", prog="kvmesh frontend", section="frontend")


def frontend_argv(config: ClusterConfig, config_file: str) -> list[str]:
    """Return the frontend's own flags, and the one that names the file with its table."""
    return [*frontend_flags(config), *(["--config", config_file] if config_file else [])]


def worker_spec(config: ClusterConfig, role: Role, name: str, run_dir: Path) -> ProcessSpec:
    folder = tls_folder(config, run_dir, MeshRole.WORKER, name.rpartition("-")[0])
    worker = config.worker_config(role, name, discovery_of(run_dir), folder, memory_socket(config, run_dir))
    return ProcessSpec(name, ["-m", "kvmesh.workers", *to_flags(worker)])


def memory_socket(config: ClusterConfig, run_dir: Path) -> str:
    """Return where this mesh's own memory service listens, "" if it has none."""
    return str(run_dir / "memory.sock") if config.up.memory_gib else ""


def planner_spec(config: ClusterConfig, planner: ServiceConfig, run_dir: Path, control: str) -> ProcessSpec:
    """Return the planner's process: settings as in `planner`, but it acts on this mesh.

    For mock workers and the tiny model it gets their profile, which is written into the run directory.
    """
    if not planner.prefill_profile and (profile := own_profile(config, planner.start_s)) is not None:
        path = run_dir / "profile.json"
        path.write_bytes(msgspec.json.encode(profile))
        planner = replace(planner, prefill_profile=str(path))
    settings = replace(
        planner,
        flips=planner.flips and ENGINES[config.up.engine].flips,
        local_control=control,
        discovery=discovery_of(run_dir),
        record_file=record_file_of(planner, run_dir),
        mesh_tls=tls_folder(config, run_dir, MeshRole.PLANNER),
        namespace=config.up.namespace,
        log_level=config.up.log_level,
    )
    return ProcessSpec(PLANNER, ["-m", "kvmesh.planner", *to_flags(settings)])


def record_file_of(planner: ServiceConfig, run_dir: Path) -> str:
    is_default = planner.record_file == ServiceConfig().record_file
    return str(run_dir / "planner.jsonl") if is_default else planner.record_file


def own_profile(config: ClusterConfig, start_s: float) -> Profile | None:
    """Return the profile of the mesh's workers, None where none is known. Raise ConfigError."""
    if config.up.engine == "mock":
        return mock_profile(config, start_s)
    if config.up.engine != "torch" or Path(config.up.model_path) != CHECKPOINT_DIR:
        return None
    worker = config.worker_config(Role.DECODE, "", "")
    return replace(
        read_profile(PROFILE),
        total_kv_tokens=worker.num_blocks * worker.block_size,
        max_num_seqs=worker.max_num_seqs,
        max_step_tokens=worker.max_step_tokens,
    )


def mock_profile(config: ClusterConfig, start_s: float) -> Profile:
    worker = config.worker_config(Role.DECODE, "", "")
    if worker.mock_profile:
        return read_profile(Path(worker.mock_profile))
    profile = polynomial_profile(
        worker.num_blocks * worker.block_size,
        worker.max_num_seqs,
        worker.max_step_tokens,
        worker.mock_speedup or 1.0,
        worker.mock_itl_ms / 1000,
    )
    return replace(profile, start_s=start_s)
