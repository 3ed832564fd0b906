"""Write a mapping over GPUs in SGLang's own flags. Pure."""

from kvmesh.workers.engines.mapping import ParallelMapping


def mapping_flags(mapping: ParallelMapping, batch: int) -> list[str]:
    """Return SGLang's flags for one worker. SGLang counts the GPUs and the sequences of all ranks together."""
    gpus = str(mapping.gpus)
    flags = ["--tp-size", gpus] + (["--ep-size", gpus] if mapping.has_experts_apart else [])
    flags += ["--dp-size", gpus, "--enable-dp-attention"] if mapping.has_ranks else []
    return flags + (["--max-running-requests", str(batch)] if batch else [])
