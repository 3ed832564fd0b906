"""The engines that a worker can run, a folder for each. workers/engines/registry.py lists them."""
