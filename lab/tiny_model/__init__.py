"""The training of the tiny model: `python -m kvmesh.lab.tiny_model.make`."""
