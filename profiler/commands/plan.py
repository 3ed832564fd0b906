"""Plan a deployment from profiles and an SLO: `kvmesh profile plan`."""

import os
import shlex
from functools import partial
from pathlib import Path
from string import Template

import msgspec
from rich.console import Console
from rich.table import Table

from kvmesh.mesh.config import load
from kvmesh.profiler.commands.apply import apply, settings_of
from kvmesh.profiler.commands.plan_settings import PlanConfig
from kvmesh.profiler.deployment.chart import chart_values
from kvmesh.profiler.deployment.compose import compose_override
from kvmesh.profiler.deployment.deployment import Deployment, warnings_of
from kvmesh.profiler.deployment.planner_settings import planner_toml
from kvmesh.profiler.deployment.request import DeploymentRequest, read_request
from kvmesh.profiler.files import read_profiles, write_profile
from kvmesh.profiler.picks import Goal, Option, Picks, pick
from kvmesh.profiler.picture import draw_front
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile

MAX_POINTS = 2000
_TEMPLATE = Path(__file__).parents[1] / "page.html"


def page_of(picks: Picks, command: str) -> str:
    """Return the page. `command` made these picks; with `--pick <number>` it writes the files of another option."""
    shown = sorted({*picks.front, *_recommended(picks), *range(min(MAX_POINTS, len(picks.options)))})
    data = {
        "goal": picks.goal,
        "points": [{"number": i, "title": picks.options[i].title, "option": picks.options[i]} for i in shown],
        "front": picks.front,
        "recommended": picks.recommended,
        "reasons": picks.reasons,
        "command": command,
    }
    return Template(_TEMPLATE.read_text()).substitute(data=_in_script(msgspec.json.encode(data).decode()))


def _recommended(picks: Picks) -> list[int]:
    return [] if picks.recommended is None else [picks.recommended]


def _in_script(json: str) -> str:
    """Escape characters, so that no name can end the script in which it stands."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")


SHOWN_ROWS = 12


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
    request = read_request(Path(config.apply)) if config.apply else None
    if request is not None:
        config = settings_of(request, config)
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
        deployment = None if chosen is None else deployment_of(config, chosen, prefill, decode, request)
        if deployment is not None:
            write_deployment(deployment, out, config.connector)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}", hint="name another folder: --out-dir") from error
    tell(picks, deployment, out, console)
    if request is not None and deployment is not None:
        return apply(request, deployment, out, config.watch_s, partial(write_deployment, connector=config.connector))
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


def deployment_of(
    config: PlanConfig,
    option: Option,
    prefill: list[Profile],
    decode: list[Profile],
    request: DeploymentRequest | None = None,
) -> Deployment:
    return Deployment(
        option=option,
        prefill=next(profile for profile in prefill if profile.mapping == option.prefill_mapping),
        decode=next(profile for profile in decode if profile.mapping == option.decode_mapping),
        goal=goal_of(config),
        image=config.image,
        model_path=config.model_path,
        namespace=config.namespace,
        slo=request.slo if request is not None else (),
        aim=request.aim if request is not None else "price",
        is_for_peak=request is not None and request.traffic.is_peak,
    )


def write_deployment(deployment: Deployment, out: Path, connector: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
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
