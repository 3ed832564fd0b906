"""Write a mapping over GPUs in vLLM's own flags. Pure."""

from kvmesh.workers.engines.mapping import ParallelMapping


def mapping_flags(mapping: ParallelMapping, batch: int) -> list[str]:
    """Return vLLM's flags for one worker. The worker itself sets the ranks, from --dp-size.

    vLLM counts the sequences of one data-parallel rank.
    """
    flags = ["--tensor-parallel-size", str(1 if mapping.has_ranks else mapping.gpus)]
    flags += ["--enable-expert-parallel"] if mapping.has_experts_apart else []
    return flags + (["--max-num-seqs", str(mapping.share_of_a_rank(batch))] if batch else [])
