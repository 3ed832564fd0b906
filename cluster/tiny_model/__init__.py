"""A chat model of 2 million weights, trained from text this repository owns, for demos and tests.

`CHECKPOINT_DIR` is a Hugging Face folder (Qwen3 architecture, 4 MB): any engine that reads Qwen3 can serve it.
`python -m kvmesh.lab.tiny_model.make` makes it again. Importing this package loads nothing heavy.
"""

from pathlib import Path

CHECKPOINT_DIR: Path = Path(__file__).parent / "checkpoint"
PROFILE: Path = Path(__file__).parent / "profile.json"  # of a worker on two cores, for `kvmesh up --planner`
