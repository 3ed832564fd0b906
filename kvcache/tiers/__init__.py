"""KV blocks that outlive the device: the tiers below it, what goes there, and when it comes back."""
