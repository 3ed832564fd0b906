"""Settings of `kvmesh lab faults`."""

from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.lab.faults.kinds import KINDS
from kvmesh.lab.settings import LabConfig
from kvmesh.mesh.safeguards import SAFEGUARDS
from kvmesh.protocol.errors import ConfigError


class FaultsConfig(LabConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_FAULTS_<NAME>`, that over the TOML file of `--config`, that over the default."""

    seed: Annotated[int, Meta(ge=0, description="of the schedule; 0: a new one, which is printed")] = 0
    seconds: Annotated[float, Meta(gt=0, le=86400, description="time in which faults begin and requests are sent")] = (
        120.0
    )
    only: Annotated[str, Meta(description=f"kinds of fault, comma-separated: {', '.join(KINDS)}")] = ""
    schedule: Annotated[str, Meta(description="file of a schedule to run, in place of --seed, --seconds, --only")] = ""
    without: Annotated[
        str,
        Meta(description=f"a safeguard to switch off, one of {', '.join(SAFEGUARDS)}; runs its drill unless told else"),
    ] = ""
    drill: Annotated[str, Meta(description="run the drill of a safeguard, and leave the safeguard on")] = ""
    clients: Annotated[int, Meta(ge=1, le=256, description="requests at once")] = 8
    tls: Annotated[
        Literal["", "on", "off"], Meta(description="closed ports, --mesh-tls; default: for seeds that are odd numbers")
    ] = ""
    torch: Annotated[
        bool, Meta(description="besides, a prefill and a decode worker with a real model, whose KV moves over NIXL")
    ] = False
    shrink: Annotated[
        bool,
        Meta(description="if the run is not clean, run again with fewer and fewer faults; print the shortest list"),
    ] = False
    shrink_runs: Annotated[int, Meta(ge=1, le=10_000, description="runs that --shrink makes at most")] = 60
    keep_logs: Annotated[bool, Meta(description="keep the folder of the run, also when it was clean")] = False

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown safeguard."""
        for flag, name in (("--without", self.without), ("--drill", self.drill)):
            if name and name not in SAFEGUARDS:
                raise ConfigError(f"{flag} {name}: no such safeguard", hint=f"there are: {', '.join(SAFEGUARDS)}")

    def kinds(self) -> list[str]:
        """Return the kinds that are asked for; none: all. Raises ConfigError for an unknown one."""
        names = [name.strip() for name in self.only.split(",") if name.strip()]
        if unknown := [name for name in names if name not in KINDS]:
            raise ConfigError(f"--only {unknown[0]}: no such kind of fault", hint=f"there are: {', '.join(KINDS)}")
        return names
