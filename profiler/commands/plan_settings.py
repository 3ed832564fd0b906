"""Define the settings of `kvmesh profile plan`."""

from typing import Annotated

from msgspec import Meta, Struct


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
    image: Annotated[str, Meta(description="container image of the workers; default: ours that has the engine")] = ""
    model_path: Annotated[str, Meta(description="the model's folder in the containers")] = "/models/tiny"
    namespace: Annotated[str, Meta(description="namespace in Kubernetes")] = "default"
    connector: Annotated[str, Meta(description="connector in planner.toml")] = "compose"
    apply: Annotated[
        str,
        Meta(description="TOML file with SLO, traffic and profiles: plan, start and watch the deployment"),
    ] = ""
    watch_s: Annotated[float, Meta(ge=0, description="--apply, local: stop after this time; 0: at Ctrl-C")] = 0.0
