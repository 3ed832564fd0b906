"""Profile workers, and plan a deployment from their profiles: `kvmesh profile`.

A profile says how long prompts and decode steps take on one kind of worker. It is measured (measure.py) or estimated
(estimate.py). picks.py chooses mappings and counts, deployment/ writes their files, commands/ has the command line.
"""
