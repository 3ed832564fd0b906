"""Plan a deployment from profiles and an SLO: `kvmesh profile plan`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from mesh.config import load
from profiler.deployment.chart import chart_values
from profiler.deployment.compose import compose_override
from profiler.deployment.deployment import Deployment, warnings_of
from profiler.deployment.planner_settings import planner_toml
from profiler.files import read_profiles, write_profile
from profiler.page import page_of
from profiler.picks import Goal, Option, Picks, pick
from profiler.picture import draw_front
from protocol.errors import ConfigError
from protocol.profile import Profile
from protocol.version import RELEASE

SHOWN_ROWS = 12


class PlanConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_PROFILE_PLAN_<NAME>`, that over the file of `--config`, that over the default."""

    profiles: Annotated[tuple[str, ...], Meta(description="profiles, or folders of them; repeat it")] = ("profiles",)
    prefill_profiles: Annotated[
        tuple[str, ...], Meta(description="only for prefill workers; default: --profiles that have a prefill table")
    ] = ()
    decode_profiles: Annotated[
        tuple[str, ...], Meta(description="only for decode workers; default: --profiles that have a decode table")
    ] = ()
    ttft_slo_s: Annotated[float, Meta(gt=0, description="TTFT to keep")] = 0.5
    itl_slo_s: Annotated[float, Meta(gt=0, description="gap between tokens to keep")] = 0.05
    isl: Annotated[int, Meta(ge=1, description="mean tokens of a prompt")] = 2048
    osl: Annotated[int, Meta(ge=1, description="mean tokens of an answer")] = 256
    hit_share: Annotated[float, Meta(ge=0, lt=1, description="share of prompt tokens that lie in a cache")] = 0.0
    gpus: Annotated[int, Meta(ge=1, description="most GPUs of all workers together; a CPU worker counts as one")] = 8
    rps: Annotated[float, Meta(ge=0, description="requests/s to carry; 0: as many as the GPUs can")] = 0.0
    target_utilization: Annotated[float, Meta(gt=0, le=1, description="share of a worker's capacity to use")] = 0.8
    pick: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="write the files of this option instead of the recommended one"),
    ] = None
    out_dir: Annotated[str, Meta(description="folder for the deployment, the page and the picture")] = "plan"
    png: Annotated[bool, Meta(description="draw the Pareto front")] = True
    json: Annotated[bool, Meta(description="the last line is one JSON object")] = False
    image: Annotated[str, Meta(description="container image")] = f"kvmesh/worker:{RELEASE}"
    model_path: Annotated[str, Meta(description="the model's folder in the containers")] = "/models/tiny"
    namespace: Annotated[str, Meta(description="namespace in Kubernetes")] = "default"
    connector: Annotated[str, Meta(description="connector in planner.toml")] = "compose"


def main(argv: list[str]) -> int:
    config = load(
        PlanConfig,
        argv,
        os.environ,
        prefix="KVMESH_PROFILE_PLAN_",
        prog="kvmesh profile plan",
        description="Say which mappings and how many workers of each keep an SLO, and write their deployment.",
        section="profile-plan",
    )
    prefill, decode = profiles_of(config)
    picks = pick(prefill, decode, goal_of(config))
    chosen = chosen_option(config, picks)
    out, console = Path(config.out_dir), Console(stderr=True, highlight=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(picks), indent=1) + b"\n")
        (out / "plan.html").write_text(page_of(picks, command_of(argv)))
        if config.png:
            draw(picks, out / "pareto.png", console)
        deployment = None if chosen is None else deployment_of(config, chosen, prefill, decode)
        if deployment is not None:
            write_deployment(deployment, out, config.connector)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}", hint="name another folder: --out-dir") from error
    tell(picks, deployment, out, console)
    if config.json:
        option = None if chosen is None else msgspec.to_builtins(chosen)
        print(msgspec.json.encode({"option": option, "reasons": picks.reasons, "folder": str(out)}).decode())
    return 0 if chosen is not None else 1


def draw(picks: Picks, path: Path, console: Console) -> None:
    """Draw the picture, or say why there is none: the other files do not need it."""
    try:
        draw_front(picks, path)
    except ConfigError as error:
        console.print(f"{path.name} is left out: {error}", soft_wrap=True, markup=False)


def profiles_of(config: PlanConfig) -> tuple[list[Profile], list[Profile]]:
    """Return the profiles with a prefill and with a decode table. Raise ConfigError if there are none."""
    both = [] if config.prefill_profiles and config.decode_profiles else read_profiles(config.profiles)
    prefill = read_profiles(config.prefill_profiles) if config.prefill_profiles else both
    decode = read_profiles(config.decode_profiles) if config.decode_profiles else both
    tables = {
        "prefill": [profile for profile in prefill if profile.prefill is not None],
        "decode": [profile for profile in decode if profile.decode is not None],
    }
    for role, found in tables.items():
        if not found:
            raise ConfigError(
                f"no profile has a {role} table", hint=f"`kvmesh profile measure --role {role}` makes one"
            )
        names = [profile.mapping for profile in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"several {role} profiles of {', '.join(sorted(twice))}",
                hint="name the files with --profiles, one each",
            )
    return tables["prefill"], tables["decode"]


def goal_of(config: PlanConfig) -> Goal:
    return Goal(
        ttft_slo_s=config.ttft_slo_s,
        itl_slo_s=config.itl_slo_s,
        isl_tokens=config.isl,
        osl_tokens=config.osl,
        gpus=config.gpus,
        hit_share=config.hit_share,
        utilization=config.target_utilization,
        rps=config.rps,
    )


def chosen_option(config: PlanConfig, picks: Picks) -> Option | None:
    """Return the picked or recommended option. Raise ConfigError for a number that no option has."""
    if config.pick is None:
        return None if picks.recommended is None else picks.options[picks.recommended]
    if config.pick >= len(picks.options):
        raise ConfigError(
            f"no option {config.pick}, there are {len(picks.options)}", hint="use a number from plan.html of this plan"
        )
    return picks.options[config.pick]


def deployment_of(config: PlanConfig, option: Option, prefill: list[Profile], decode: list[Profile]) -> Deployment:
    return Deployment(
        option=option,
        prefill=next(profile for profile in prefill if profile.mapping == option.prefill_mapping),
        decode=next(profile for profile in decode if profile.mapping == option.decode_mapping),
        goal=goal_of(config),
        image=config.image,
        model_path=config.model_path,
        namespace=config.namespace,
    )


def write_deployment(deployment: Deployment, out: Path, connector: str) -> None:
    (out / "compose.override.yml").write_text(compose_override(deployment))
    (out / "values.yaml").write_text(chart_values(deployment))
    (out / "planner.toml").write_text(planner_toml(deployment, str(out.resolve()), connector))
    write_profile(deployment.prefill, out / "prefill.json")
    write_profile(deployment.decode, out / "decode.json")


def command_of(argv: list[str]) -> str:
    """Return this command without --pick, for the page."""
    kept = list(argv)
    for i, word in enumerate(argv):
        if word == "--pick":
            kept = argv[:i] + argv[i + 2 :]
        elif word.startswith("--pick="):
            kept = argv[:i] + argv[i + 1 :]
    return shlex.join(["kvmesh", "profile", "plan", *kept])


def tell(picks: Picks, deployment: Deployment | None, out: Path, console: Console) -> None:
    if picks.front:
        console.print(table_of(picks))
    if deployment is None:
        console.print("[bold]nothing keeps the SLO[/bold]")
    elif picks.recommended is None or deployment.option != picks.options[picks.recommended]:
        console.print(f"[bold]picked:[/bold] {deployment.option.title}")
    for reason in [*picks.reasons, *([] if deployment is None else warnings_of(deployment))]:
        console.print(f"  {reason.code}: {reason.text}", soft_wrap=True, markup=False)
    files = sorted(path.name for path in out.iterdir() if path.is_file())
    console.print(f"in {out}: {', '.join(files)}", soft_wrap=True, markup=False)


def table_of(picks: Picks) -> Table:
    table = Table(
        title="Pareto front, TTFT kept (times in ms, tokens/s)", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    for column in ("pick", "prefill + decode", "GPUs", "batch", "req/s", "TTFT", "ITL", "per GPU", "per user"):
        table.add_column(column, justify="left" if "+" in column else "right", no_wrap=True)
    for i in thinned(picks):
        option = picks.options[i]
        table.add_row(
            f"{i}{' *' if i == picks.recommended else ''}",
            f"{option.prefill_workers} {option.prefill_mapping} + {option.decode_workers} {option.decode_mapping}",
            str(option.gpus),
            str(option.batch),
            f"{option.rps:.2f}",
            f"{1e3 * option.ttft_s:.0f}",
            f"{1e3 * option.itl_s:.1f}",
            f"{option.tokens_s_gpu:.0f}",
            f"{option.tokens_s_user:.1f}",
            style="bold" if i == picks.recommended else "" if option.meets else "dim",
        )
    return table


def thinned(picks: Picks) -> list[int]:
    """Return options at even steps of the front, both ends, and the recommended option."""
    last = len(picks.front) - 1
    rows = min(SHOWN_ROWS, len(picks.front))
    even = {picks.front[round(i * last / max(1, rows - 1))] for i in range(rows)}
    if picks.recommended is not None:
        even.add(picks.recommended)
    return sorted(even, key=lambda i: picks.options[i].tokens_s_user)
