"""Decide how many workers of each role there are, and have a connector start and stop them.

`core.py` decides (pure), `service.py` observes and applies, `connectors/` has one module per way to run workers.
docs/planner.md describes the computation, docs/planner-operations.md how to run it.
"""
