"""Simulate a mesh's recent requests, as they were and with another fleet, cache or policy.

The speeds of the workers are fitted to the first half of the requests. The second half says how well the simulation
reproduces what really happened; the same requests are then simulated with what is asked about.
"""
