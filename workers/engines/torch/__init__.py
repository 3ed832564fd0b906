"""Computes Llama, Qwen2 and Qwen3 with plain torch, on a CPU or a CUDA GPU, over a paged KV cache.

Import `kvmesh.workers.engines.torch.executor` only where the torch engine is chosen: it imports torch.
"""
