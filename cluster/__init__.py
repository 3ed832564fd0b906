"""Runs a whole mesh on one host as processes: the services, their supervisor, the control socket, the tiny model."""
