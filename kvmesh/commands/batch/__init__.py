"""`kvmesh batch input.jsonl`: send a file of requests to a mesh and write their results in the order of the file."""
