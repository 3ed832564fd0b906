"""Measuring: what the mesh costs and how fast an engine is beside what the machine could do."""
