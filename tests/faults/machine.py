"""Run `kvmesh lab faults` as a user would."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

MUST_BE_ZERO = (
    "hung", "empty_200", "wrong_tokens", "refused", "truncated", "leaked", "diverged", "crashed", "failed_checks",
)  # fmt: skip


def run_faults(*flags: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """Return the report. The exit status has to fit it."""
    with tempfile.TemporaryDirectory() as folder:  # a run that was not clean leaves its logs
        done = subprocess.run(
            [sys.executable, "-m", "kvmesh", "faults", "--json", *flags],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=os.environ | {"TMPDIR": folder, "KVMESH_WITHOUT": ""},
        )
    print(done.stderr)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    return report


def counts(report: dict[str, Any]) -> dict[str, int]:
    """Return the fields that have to be 0."""
    return {name: report[name] for name in MUST_BE_ZERO}
