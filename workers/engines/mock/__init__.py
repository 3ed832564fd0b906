"""An engine without a model: the real scheduler, block pool, KV events and transfer over invented tokens."""
