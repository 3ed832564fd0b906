"""Measure what a mesh of mock workers with real timing answers in time when it is asked for more than it can do."""
