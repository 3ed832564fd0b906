"""The file of the access log has its fields and its limit, and its hashes link no two tenants."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.access_log import AccessLogFile
from kvmesh.protocol.errors import ConfigError
from kvmesh.simulator.access_log import read_access_log
from tests.frontend.whole_mesh import MODEL, whole_mesh

PROMPT = "The same long prompt, which fills several blocks of the cache. " * 8


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log of four requests: two of the tenant acme, one of ajax, and one that is refused."""
    folder = tmp_path_factory.mktemp("log")
    path, keys = folder / "access.jsonl", folder / "keys"
    keys.write_text("sk-acme acme\nsk-ajax ajax\n")
    settings = {"access_log_file": str(path), "api_keys_file": str(keys)}
    with whole_mesh(folder / "mesh", Path(CHECKPOINT_DIR), 1024, **settings) as url, httpx.Client(base_url=url) as http:
        for key in ("sk-acme", "sk-acme", "sk-ajax"):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
            http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
        http.post("/v1/completions", content=b"{", headers={"authorization": "Bearer sk-acme"})
    return path


def test_a_line_says_what_happened_to_the_request(log: Path) -> None:
    line, again, _, refused = [line for line in lines_of(log) if line.get("path") == "/v1/completions"]
    assert (line["model"], line["osl_tokens"], line["outcome"], line["status"]) == (MODEL, 4, "ok", 200)
    assert line["request_id"].startswith("cmpl-")
    assert line["isl_tokens"] > 64
    assert 0 < line["ttft_ms"] <= line["duration_ms"] + 5
    assert {"queue_ms", "prefill_ms", "pull_ms", "itl_ms", "worker", "reason", "overlap_tokens"} < line.keys()
    assert again["cached_tokens"] > 0
    assert (refused["outcome"], refused["status"], "isl_tokens" in refused) == ("invalid_request", 400, False)
    assert "long prompt" not in log.read_text()


def test_hashes_link_the_prompts_of_one_tenant_alone(log: Path) -> None:
    acme, acme_again, ajax = (set(names(request.names)) for request in read_access_log(log, 16, 4))
    assert len(acme) > 3
    assert acme == acme_again
    assert not acme & ajax


def names(packed: bytes) -> list[bytes]:
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


def test_the_log_never_exceeds_its_limit(tmp_path: Path) -> None:
    async def write() -> None:
        for _ in range(4):
            file = AccessLogFile(str(tmp_path / "log"), 1.0)
            for number in range(1000):
                file.write({"number": number, "padding": "x" * 400})
            await file.close()

    asyncio.run(write())
    kept, before = tmp_path / "log", tmp_path / "log.1"
    assert kept.stat().st_size + before.stat().st_size <= 1 << 20
    assert lines_of(kept)[-1]["number"] == 999


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose a writable file"):
        AccessLogFile(str(tmp_path / "none" / "log"), 1.0)
