"""Distribute the tests over the parallel workers.

A file is never split, because its fixtures would start once in each worker. Files that share running meshes stay
together for the same reason.
"""

from xdist.scheduler import LoadScopeScheduling

SHARE_MESHES = {
    "tests/e2e/test_commands.py": "tests/e2e",
    "tests/e2e/test_conversation.py": "tests/e2e",
    "tests/e2e/test_openai_client.py": "tests/e2e",
    "tests/e2e/test_tokens.py": "tests/e2e",
}


class ByFile(LoadScopeScheduling):
    """Give each worker that is free the next file, in the order in which pytest has collected them."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return "tests/faults" if path.startswith("tests/faults/") else SHARE_MESHES.get(path, path)
