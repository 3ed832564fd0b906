"""Write a mapping over GPUs in TensorRT-LLM's own flags. Pure."""

from kvmesh.workers.engines.mapping import ParallelMapping


def mapping_flags(mapping: ParallelMapping, batch: int) -> list[str]:
    """Return TensorRT-LLM's flags for one worker. TensorRT-LLM counts the sequences of one data-parallel rank."""
    gpus = str(mapping.gpus)
    flags = ["--tensor-parallel-size", gpus]
    flags += ["--moe-expert-parallel-size", gpus] if mapping.has_experts_apart else []
    flags += ["--enable-attention-dp", "true"] if mapping.has_ranks else []
    return flags + (["--max-batch-size", str(mapping.share_of_a_rank(batch))] if batch else [])
