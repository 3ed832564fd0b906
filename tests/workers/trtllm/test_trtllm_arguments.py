"""Arguments of TensorRT-LLM: read from flags, completed by the worker, pruned to what a variant takes."""

from typing import Any

import pytest

from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.messages import Role
from kvmesh.workers.config import WorkerConfig
from kvmesh.workers.engines.trtllm.arguments import EVENT_BUFFER_SIZE, Variant, prune, read_arguments, read_given


def config(flags: str = "", **fields: object) -> WorkerConfig:
    return WorkerConfig(model_path="/models/m", engine_args=flags, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ("--max-batch-size 64", {"max_batch_size": 64}),
        ("--max-batch-size=64", {"max_batch_size": 64}),
        ("--enable-attention-dp", {"enable_attention_dp": True}),
        ("--no-enable-chunked-prefill --dtype auto", {"enable_chunked_prefill": False, "dtype": "auto"}),
        ("--tp_size 4 --ep-size=2", {"tensor_parallel_size": 4, "moe_expert_parallel_size": 2}),
        ("--enable-attention-dp False", {"enable_attention_dp": False}),
        ("--kv-cache-config.free-gpu-memory-fraction 0.8", {"kv_cache_config": {"free_gpu_memory_fraction": 0.8}}),
        ('--speculative-config {"decoding_type":"MTP"}', {"speculative_config": {"decoding_type": "MTP"}}),
    ],
)
def test_flags_are_read_as_nested_arguments(flags: str, given: dict[str, Any]) -> None:
    assert read_given(flags.split()) == given


@pytest.mark.parametrize("parts", [["64"], ["-x", "1"], ["--"], ["--a", "1", "--a.b", "2"]])
def test_what_is_no_flag_is_refused(parts: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_given(parts)


def test_the_worker_turns_reuse_events_and_statistics_on() -> None:
    arguments = read_arguments(config(block_size=32))
    assert arguments.variant is Variant.PYTORCH
    assert arguments.kwargs == {
        "model": "/models/m",
        "backend": "pytorch",
        "kv_cache_config": {
            "enable_block_reuse": True,
            "event_buffer_max_size": EVENT_BUFFER_SIZE,
            "tokens_per_block": 32,
        },
        "enable_iter_perf_stats": True,
    }
    assert arguments.tells_events


def test_given_arguments_are_laid_over_the_workers() -> None:
    arguments = read_arguments(config("--kv-cache-config.host-cache-size 1000000 --max-seq-len 4096"))
    assert arguments.kwargs["max_seq_len"] == 4096
    assert arguments.kwargs["kv_cache_config"]["host_cache_size"] == 1_000_000
    assert arguments.kwargs["kv_cache_config"]["enable_block_reuse"] is True


def test_without_reuse_there_are_no_events_to_tell() -> None:
    assert not read_arguments(config("--kv-cache-config.enable-block-reuse false")).tells_events
    assert not read_arguments(config("--kv-cache-config.event-buffer-max-size 0")).tells_events


def test_the_transceiver_keeps_blocks_for_the_offers_lease() -> None:
    arguments = read_arguments(config(role=Role.PREFILL, offer_lease_s=12.5))
    assert arguments.kwargs["cache_transceiver_config"] == {"backend": "DEFAULT", "kv_transfer_timeout_ms": 12_500}
    chosen = read_arguments(config("--cache-transceiver-config.backend NIXL", role=Role.DECODE))
    assert chosen.kwargs["cache_transceiver_config"]["backend"] == "NIXL"


def test_only_attention_dp_has_ranks_with_own_caches() -> None:
    assert read_arguments(config("--tensor-parallel-size 4")).ranks == 1
    assert read_arguments(config("--tensor-parallel-size 4 --enable-attention-dp")).ranks == 4


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ("--model /other", "--model-path"),
        ("--skip-tokenizer-init", "tokenizer"),
        ("--kv-cache-config.tokens-per-block 64", "--block-size"),
        ("--kv-cache-config.kv-events-config.endpoint x", "polls"),
        ("--cache-transceiver-config.backend UCX", "--role prefill"),
        ("--max-beam-width 4", "without beams"),
        ("--backend tensorrt", "pytorch or autodeploy"),
        ("--backend autodeploy --tensor-parallel-size 2", "--world-size"),
        ("--backend autodeploy --enable-attention-dp", "--world-size"),
    ],
)
def test_contradicting_flags_are_refused_with_a_remedy(flags: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        read_arguments(config(flags))


def test_block_sizes_that_are_no_powers_of_two_are_refused() -> None:
    with pytest.raises(ConfigError, match="powers of two"):
        read_arguments(config(block_size=48))


def test_a_variant_is_not_given_what_it_does_not_know() -> None:
    arguments = read_arguments(
        config("--backend autodeploy --scheduler-config.x 1 --compile-backend torch-opt --odd 1")
    )
    kept, removed = prune(arguments, {*arguments.kwargs} - {"odd"})
    assert sorted(removed) == ["odd", "scheduler_config"]
    assert kept["compile_backend"] == "torch-opt"


def test_where_its_fields_are_not_known_all_is_passed_on() -> None:
    arguments = read_arguments(config("--odd 1"))
    assert prune(arguments, ()) == (arguments.kwargs, [])
