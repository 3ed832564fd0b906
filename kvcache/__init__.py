"""KV blocks themselves: the pool that owns them and the transfer that moves them between workers."""
