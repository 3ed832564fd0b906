"""`kvmesh bench serve`: load any OpenAI-compatible endpoint and report what its users would see."""
