"""Servers that nobody changed, as workers of the mesh: their HTTP API and their KV events are enough."""
