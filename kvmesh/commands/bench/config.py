"""Settings of `kvmesh bench serve`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Api = Literal["chat", "completions"]
Dataset = Literal["random", "sharegpt", "mooncake", "azure"]
Lengths = Literal["fixed", "uniform", "lognormal"]
Arrival = Literal["poisson", "constant"]
Driver = Literal["kvmesh", "aiperf"]

_Positive = Annotated[float, Meta(gt=0)]
_Share = Annotated[float, Meta(ge=0, lt=1)]


class ServeBenchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flag wins over `KVMESH_BENCH_<NAME>`, that over the TOML file of `--config`, that over the default."""

    endpoints: Annotated[tuple[str, ...], Meta(description="name=URL, several: each point asks them in turn")] = (
        "kvmesh=http://127.0.0.1:8000",
    )
    model: Annotated[str, Meta(description="default: the only model that an endpoint lists")] = ""
    api: Annotated[Api, Meta(description="/v1/chat/completions or /v1/completions")] = "chat"
    api_key: Annotated[str, Meta(description="sent as a bearer token; better in KVMESH_BENCH_API_KEY")] = ""
    tokenizer: Annotated[str, Meta(description="folder with tokenizer.json; default: sizes are measured")] = ""
    rate: Annotated[tuple[_Positive, ...], Meta(description="requests/s, open loop: a point of the sweep each")] = ()
    concurrency: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=20_000)], ...],
        Meta(description="clients that wait for their answers: a point of the sweep each"),
    ] = ()
    prefix_ratio: Annotated[tuple[_Share, ...], Meta(description="shared share of a prompt: a sweep each")] = (0.0,)
    prefix_groups: Annotated[int, Meta(ge=1, description="prompts share their prefix within so many groups")] = 4
    dataset: Annotated[Dataset, Meta(description="what is asked; all but random are read from --trace")] = "random"
    trace: Annotated[str, Meta(description="file of the dataset")] = ""
    trace_block_size: Annotated[int, Meta(ge=1, description="tokens of a block of a Mooncake trace")] = 512
    isl: Annotated[int, Meta(ge=1, description="prompt tokens, on average")] = 512
    osl: Annotated[int, Meta(ge=1, description="answer tokens, on average")] = 128
    lengths: Annotated[Lengths, Meta(description="distribution of both lengths")] = "fixed"
    spread: Annotated[float, Meta(ge=0, le=2, description="uniform: +- this share; lognormal: sigma")] = 0.5
    max_isl: Annotated[int, Meta(ge=1, description="longer prompts are left out or cut to it")] = 131_072
    max_osl: Annotated[int, Meta(ge=1, description="longer answers are cut to it")] = 131_072
    turns: Annotated[int, Meta(ge=1, le=100, description="of a conversation; each adds --isl tokens")] = 1
    think_s: Annotated[float, Meta(ge=0, description="a user's pause between turns")] = 0.0
    arrival: Annotated[Arrival, Meta(description="gaps between requests of a rate")] = "poisson"
    requests: Annotated[int, Meta(ge=0, description="conversations of a point; 0: rate x duration, or 8 a client")] = 0
    duration_s: Annotated[float, Meta(gt=0, description="so long a rate is sent")] = 30.0
    warmup: Annotated[int, Meta(ge=0, description="requests to each endpoint before its first point")] = 8
    rounds: Annotated[int, Meta(ge=1, le=100, description="each point is measured so often, endpoints in turn")] = 1
    ttft_slo_s: Annotated[float, Meta(gt=0, description="a good request has its first token within")] = 1.0
    itl_slo_s: Annotated[float, Meta(gt=0, description="and its mean time per output token within")] = 0.05
    e2e_slo_s: Annotated[float, Meta(ge=0, description="and its end within; 0: no limit")] = 0.0
    timeout_s: Annotated[float, Meta(gt=0, description="a client gives up then")] = 300.0
    ignore_eos: Annotated[bool, Meta(description="ask for answers of full length")] = True
    extra: Annotated[str, Meta(description="JSON object that is merged into each request")] = "{}"
    gpus: Annotated[float, Meta(gt=0, description="of an endpoint, for figures per GPU")] = 1.0
    seed: Annotated[int, Meta(ge=0, description="equal seeds, equal requests")] = 1
    driver: Annotated[Driver, Meta(description="who sends: kvmesh, or AIPerf where it is installed")] = "kvmesh"
    aiperf: Annotated[str, Meta(description="the command of AIPerf, for --driver aiperf")] = "aiperf"
    out: Annotated[str, Meta(description="folder for report.json, report.html and report.png; default: none")] = ""
    check_only: Annotated[bool, Meta(description="check the endpoints and stop")] = False
    png: Annotated[bool, Meta(description="draw report.png, which needs matplotlib")] = True
    json: Annotated[bool, Meta(description="the last line is one JSON object")] = False
