"""A batch whose worker is killed, and which is killed itself, has every right result once, in the input's order."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh, until
from tests.support.streams import mock_answer

COUNT, TOKENS = 80, 60


def written(path: Path) -> Path:
    lines = [
        {
            "custom_id": f"request {number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": prompt_of(20 + number, number), "max_tokens": TOKENS, "logprobs": 0},
        }
        for number in range(COUNT)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def batch(mesh: Mesh, path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "kvmesh", "batch", str(path), "--url", mesh.url, "--concurrency", "8", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_batch_that_ends_in_the_middle_continues(mesh: Mesh, tmp_path: Path, number: signal.Signals) -> None:
    path, output = written(tmp_path / "in.jsonl"), tmp_path / "in.results.jsonl"
    part = tmp_path / "in.results.jsonl.part"
    first = batch(mesh, path)
    until(lambda: len(results(part)) > 4, what="the first results")
    killed = mesh.kill("decode-0")
    until(lambda: len(results(part)) > 12, what="results after the kill")
    first.send_signal(number)
    first.communicate(timeout=60)
    assert first.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    done = len(results(part))
    assert done < COUNT
    assert not output.exists()
    second = batch(mesh, path)
    said, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    summary = json.loads(said)
    assert (summary["kept"], summary["failed"]) == (done, 0)
    lines = [json.loads(line) for line in results(output)]
    assert [line["custom_id"] for line in lines] == [f"request {number}" for number in range(COUNT)]
    for number, line in enumerate(lines):
        tokens = line["response"]["body"]["choices"][0]["logprobs"]["tokens"]
        assert tokens == mock_answer(prompt_of(20 + number, number), TOKENS), number
    mesh.until_replaced("decode-0", killed)
