"""Describe a deployment: one option of a plan, with the profiles and the settings that its files need. Pure."""

from msgspec import Struct

from kvmesh.planner.model import Reason
from kvmesh.planner.slo import Aim
from kvmesh.profiler.picks import Goal, Option
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.profile import Profile
from kvmesh.protocol.version import RELEASE
from kvmesh.workers.engines.mapping import parse_mapping
from kvmesh.workers.engines.registry import ENGINES, STARTED

BUILT_IN_MODEL = "/models/tiny"  # in our image
IN_THE_IMAGE = {kind.name for kind in ENGINES.values() if kind.is_bundled}
OUR_IMAGE, VLLM_IMAGE = f"kvmesh/worker:{RELEASE}", f"kvmesh/vllm:{RELEASE}"  # deploy/Dockerfile
MAX_RANKS = 64  # the most that `kvmesh worker --dp-size` takes


class Deployment(Struct, frozen=True, kw_only=True):
    option: Option
    prefill: Profile
    decode: Profile
    goal: Goal
    image: str = ""  # default: ours that has the engines
    model_path: str = BUILT_IN_MODEL  # in the container
    namespace: str = "default"
    slo: tuple[str, ...] = ()  # statements for the planner, instead of the goal's limits alone
    aim: Aim = "price"
    is_for_peak: bool = False  # the goal's requests/s are the highest that are expected

    @property
    def peak_settings(self) -> dict[str, int]:
        """Return the planner's settings of the highest expected load, none if it is not known."""
        if not self.is_for_peak:
            return {}
        return {"peak_prefill": self.option.prefill_workers, "peak_decode": self.option.decode_workers}

    def profile(self, role: str) -> Profile:
        return self.prefill if role == "prefill" else self.decode

    def engine(self, role: str) -> str:
        """Return the engine. Raise ConfigError if workers cannot start it: the measured server did not name it."""
        if (engine := self.profile(role).engine) not in STARTED:
            raise ConfigError(
                f"the {role} profile is of the engine {engine!r}, workers have {', '.join(STARTED)}",
                hint="name the engine when you measure: `kvmesh profile measure --url ... --engine vllm`",
            )
        return engine

    def worker_image(self) -> str:
        """Return the image of the workers. Raise ConfigError if it is not named, and none of ours has the engines."""
        foreign = {self.engine("prefill"), self.engine("decode")} - IN_THE_IMAGE
        if not self.image and foreign - {"vllm"}:
            raise ConfigError(
                f"no image of kvmesh has the engine {', '.join(sorted(foreign))}",
                hint="build one, as deploy/Dockerfile does for vllm, and name it with --image",
            )
        return self.image or (VLLM_IMAGE if foreign else OUR_IMAGE)

    def workers(self, role: str) -> int:
        return self.option.prefill_workers if role == "prefill" else self.option.decode_workers


def warnings_of(deployment: Deployment) -> list[Reason]:
    """Return what the files alone cannot achieve."""
    found = []
    if deployment.model_path == BUILT_IN_MODEL and {deployment.prefill.engine, deployment.decode.engine} - IN_THE_IMAGE:
        found.append(
            Reason(
                code="model",
                text=f"the containers serve {BUILT_IN_MODEL} with {deployment.decode.engine}: name the "
                "model's folder with --model-path",
            )
        )
    for role in ("prefill", "decode"):
        profile = deployment.profile(role)
        kind = ENGINES.get(profile.engine)
        if kind is not None and kind.has_ranks and parse_mapping(profile.mapping).ranks > MAX_RANKS:
            found.append(
                Reason(
                    code="dep",
                    text=f"{profile.mapping}: `kvmesh worker --engine {kind.name}` has at most {MAX_RANKS}"
                    f" data-parallel ranks; start the {role} servers yourself and attach them, docs/attach.md",
                )
            )
        if profile.provider != "measured":
            found.append(
                Reason(
                    code="estimate",
                    text=f"the {role} profile is an estimate ({profile.provider}): measure one worker before you "
                    "rely on the plan",
                )
            )
    return found


def worker_flags(deployment: Deployment, role: str) -> list[str]:
    """Return the flags of `kvmesh worker`, without its name, its addresses and discovery."""
    profile = deployment.profile(role)
    flags = ["--role", role, "--engine", deployment.engine(role), "--model-path", deployment.model_path]
    flags += ["--model", profile.model, "--host", "0.0.0.0", "--metrics-port", "9100"]
    return flags + ["--log-format", "json", *sizing_flags(profile, deployment.option.batch if role == "decode" else 0)]


def sizing_flags(profile: Profile, batch: int) -> list[str]:
    """Return the flags that make a worker the one of the profile. `batch`: sequences at once; 0: the engine decides."""
    kind, mapping = ENGINES[profile.engine], parse_mapping(profile.mapping)
    flags = ["--dp-size", str(mapping.ranks)] if kind.has_ranks and mapping.has_ranks else []
    if kind.mapping_flags is not None:
        return [*flags, f"--engine-args={' '.join(kind.mapping_flags(mapping, batch))}"]
    most = min(batch, profile.max_num_seqs) if batch else profile.max_num_seqs
    return [*flags, "--max-num-seqs", str(most), "--max-step-tokens", str(profile.max_step_tokens)]


def title_of(deployment: Deployment) -> str:
    """Return the first comment of a file."""
    return f"# {deployment.option.title}: {deployment.option.rps:.2f} requests/s by its profiles."
