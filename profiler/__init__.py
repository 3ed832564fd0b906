"""`kvmesh profile`: how long prompts and steps take on a worker, measured or estimated, and what to deploy for it."""
