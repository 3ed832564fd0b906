"""The memory service of a host: weights are loaded once and mapped by every worker (docs/memory-service.md)."""
