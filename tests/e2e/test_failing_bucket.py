"""A worker whose shared storage fails while it is used answers every request, and ends when it is told to."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.failing_s3 import CREDENTIALS, FailingS3, Trouble
from tests.support.mesh import running_mesh, until

pytest.importorskip("obstore")

PULL_TIMEOUT_S = 0.5
SLOWEST_S = 8.0  # of a request: far more than a few late loads
ENDS_S = 30.0
DRAW = random.Random(1)
PROMPTS = [[DRAW.randrange(10, 1900) for _ in range(600)] for _ in range(6)]
FLAGS = ("--engine", "mock", "--mock-speedup", "0", "--prefill", "0", "--decode", "0", "--aggregated", "1",
         "--num-blocks", "96", "--pull-timeout-s", str(PULL_TIMEOUT_S))  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("trouble", ["silent", "half"])
def test_a_worker_answers_although_its_bucket_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with FailingS3() as bucket:
        shared = ("--kv-shared", bucket.place(), "--kv-shared-endpoint", bucket.endpoint)
        with running_mesh(tmp_path / "run", *FLAGS, *shared) as mesh, mesh.http as http:

            def answer(prompt: list[int]) -> str:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
                began_s = time.monotonic()
                response = http.post("/v1/completions", json=body)
                assert time.monotonic() - began_s < SLOWEST_S
                assert response.status_code == 200, response.text
                text: str = response.json()["choices"][0]["text"]
                return text

            right = [answer(prompt) for prompt in PROMPTS]
            assert [answer(prompt) for prompt in PROMPTS] == right
            until(lambda: len(bucket.objects) > 4, what="blocks in the bucket")
            bucket.trouble = trouble
            for _ in range(3):
                assert [answer(prompt) for prompt in PROMPTS] == right
            mesh.process.send_signal(signal.SIGTERM)
            assert mesh.process.wait(ENDS_S) == 0
