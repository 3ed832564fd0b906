"""One folder per engine that a worker can run; workers/backends.py opens them."""
