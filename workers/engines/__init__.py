"""One folder for each engine that a worker can run. workers/engines/registry.py lists them."""
