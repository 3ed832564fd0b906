"""Moving KV blocks between workers: one seam, two backends (nixl, shm)."""
