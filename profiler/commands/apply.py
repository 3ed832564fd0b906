"""Carry a deployment request out: plan, write the deployment, start it, and watch it: `kvmesh profile plan --apply`."""

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from kvmesh.cluster.config import ClusterConfig, UpConfig
from kvmesh.cluster.running import running_cluster
from kvmesh.mesh.lifecycle import run, unless_stopped
from kvmesh.planner.config import ServiceConfig
from kvmesh.planner.record import Record, read_records
from kvmesh.profiler.commands.plan_settings import PlanConfig
from kvmesh.profiler.deployment.chart import CHART
from kvmesh.profiler.deployment.deployment import Deployment
from kvmesh.profiler.deployment.kept import DeploymentJudge, corrected_profile
from kvmesh.profiler.deployment.request import DeploymentRequest
from kvmesh.profiler.picks import pick
from kvmesh.protocol.errors import ConfigError

LOOK_S = 1.0
RECORDS = 64  # that are read at a look; a planner writes one in some seconds
START_TIMEOUT_S = 900.0

Tell = Callable[[str], None]
Write = Callable[[Deployment, Path], None]


def settings_of(request: DeploymentRequest, config: PlanConfig) -> PlanConfig:
    """Return the settings of the plan that the request asks for."""
    statements, traffic = request.statements, request.traffic
    config = replace(config, model_path=request.model_path) if request.model_path else config
    return replace(
        config,
        profiles=request.profiles,
        ttft_slo_s=statements["ttft"].limit_s,
        itl_slo_s=statements["itl"].limit_s,
        isl=traffic.isl,
        osl=traffic.osl,
        hit_share=traffic.hit_share,
        rps=traffic.rps,
        gpus=request.gpus,
        connector=request.connector,
    )


def apply(request: DeploymentRequest, deployment: Deployment, out: Path, watch_s: float, write: Write) -> int:
    """Start the deployment. Return 0 if it was started and, where it is watched, kept its SLO at the end."""
    console = Console(highlight=False)

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    out = out.resolve()
    if request.connector == "local":
        for name in ("planner.jsonl", "planner.jsonl.1"):
            (out / name).unlink(missing_ok=True)
        return run(lambda stop: _run_here(request, deployment, out, watch_s, write, tell, stop))
    command = start_command(request, out)
    tell(f"starting: {shlex.join(command)}")
    return run(lambda _: _start_elsewhere(command, tell))


# --- compose and Kubernetes ---------------------------------------------------------------------------


def start_command(request: DeploymentRequest, out: Path) -> list[str]:
    """Return the command that starts the deployment of `out` in containers or in a cluster."""
    if request.connector == "compose":
        files = ["-f", "docker-compose.yml", "-f", str(out / "compose.override.yml")]
        return [*shlex.split(request.compose_command), *files, "up", "--detach"]
    flags = ["upgrade", "--install", "kvmesh", str(CHART), "-f", str(out / "values.yaml")]
    return [*shlex.split(request.helm_command), *flags]


async def _start_elsewhere(command: list[str], tell: Tell) -> int:
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}", hint="see the request's command") from error
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    tell("started; `kvmesh planner explain` there shows whether the SLO is kept" if not code else f"ended with {code}")
    return 1 if code else 0


# --- this host ----------------------------------------------------------------------------------------


def mesh_of(request: DeploymentRequest, deployment: Deployment, out: Path) -> tuple[ClusterConfig, ServiceConfig]:
    """Return the mesh of the deployment, and its planner."""
    option, decode = deployment.option, deployment.decode
    engine = request.engine or decode.engine
    up = UpConfig(engine=engine, port=request.port, prefill=option.prefill_workers, decode=option.decode_workers)
    up = replace(up, model_path=request.model_path) if request.model_path else up
    sizes = {"max_num_seqs": min(option.batch, decode.max_num_seqs), "max_step_tokens": decode.max_step_tokens}
    goal = deployment.goal
    given = {
        "slo": request.slo,
        "aim": request.aim,
        "max_gpus": goal.gpus,
        "target_utilization": goal.utilization,
        "prefill_profile": str(out / "prefill.json"),
        "decode_profile": str(out / "decode.json"),
        "record_file": str(out / "planner.jsonl"),
        "connector": "local",
    }
    start_s = max(deployment.prefill.start_s, decode.start_s)
    given |= deployment.peak_settings | ({"start_s": start_s} if start_s else {})
    planner = ServiceConfig(**(given | request.planner))
    return ClusterConfig(up, worker=sizes | request.worker), planner


async def _run_here(
    request: DeploymentRequest,
    deployment: Deployment,
    out: Path,
    watch_s: float,
    write: Write,
    tell: Tell,
    stop: asyncio.Event,
) -> int:
    up, planner = mesh_of(request, deployment, out)
    async with running_cluster(up, tell, planner=planner) as cluster:
        await cluster.until_ready(tell)
        tell(f"deployed: {deployment.option.title} at {cluster.url}")
        judge = DeploymentJudge()
        watching = watch(judge, deployment, out, write, tell)
        limited = asyncio.wait_for(watching, watch_s) if watch_s else watching
        try:
            await unless_stopped(limited, stop)
        except TimeoutError:
            tell(f"watched for {watch_s:g} s: {'the SLO is kept' if judge.has_kept_all else 'the SLO is not kept'}")
            return 0 if judge.has_kept_all else 1
    return 0


async def watch(judge: DeploymentJudge, deployment: Deployment, out: Path, write: Write, tell: Tell) -> None:
    """Tell when an SLO is kept or missed, and plan again when the profiles prove wrong."""
    number = 0
    while True:
        await asyncio.sleep(LOOK_S)
        for line in judge.hear(await asyncio.to_thread(read_there, out / "planner.jsonl")):
            tell(line)
        if judge.error is None:
            continue
        number += 1
        folder = out / f"replan-{number}"
        again = replanned(deployment, judge)
        judge.error = None
        if again is None:
            tell("planned again: no counts of these workers keep the SLO within the GPUs; the fleet stays")
            continue
        await asyncio.to_thread(write, again, folder)
        tell(f"planned again with the observed times: {again.option.title} (was {deployment.option.title}); {folder}")


def read_there(path: Path) -> list[Record]:
    """Return the last records; none if the planner has not begun."""
    return read_records(path, RECORDS) if path.exists() else []


def replanned(deployment: Deployment, judge: DeploymentJudge) -> Deployment | None:
    """Return the deployment with profiles that have the observed times; None if nothing keeps the SLO then."""
    assert judge.error is not None
    prefill, decode = (corrected_profile(each, judge.error) for each in (deployment.prefill, deployment.decode))
    picks = pick([prefill], [decode], deployment.goal)
    if picks.recommended is None:
        return None
    return replace(deployment, prefill=prefill, decode=decode, option=picks.options[picks.recommended])
