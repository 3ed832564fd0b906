"""The text of `kvmesh up`: a request that can be copied, with TLS and keys as they are set."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.commands.welcome import PROMPT, RunningMesh, welcome
from kvmesh.frontend.config import FrontendConfig
from kvmesh.frontend.tokenizer import Tokenizer

MESH = RunningMesh(
    url="http://127.0.0.1:8000",
    model="tiny",
    run_dir=Path("/run"),
    control="/run/control/control.sock",
    frontend=FrontendConfig(),
    pids={"prefill-0": 3, "decode-0": 4, "decode-1": 5},
)


def command(text: str, name: str) -> list[str]:
    """Return the words of the line that begins with `name`, joined with the line it continues on."""
    [line] = [line for line in text.replace("\\\n", "").splitlines() if line.strip().startswith(name)]
    return shlex.split(line, comments=True)


def test_the_request_can_be_copied() -> None:
    words = command(welcome(MESH), "curl")
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "tiny"


def test_the_text_names_page_description_and_terminal() -> None:
    text = welcome(MESH)
    assert "http://127.0.0.1:8000/ui, or in a terminal: kvmesh top\n" in text
    assert "http://127.0.0.1:8000/docs" in text
    elsewhere = welcome(replace(MESH, url="http://127.0.0.1:9000", program=".venv/bin/kvmesh"))
    assert ".venv/bin/kvmesh top --url http://127.0.0.1:9000\n" in elsewhere


def test_a_page_that_is_not_served_is_not_named() -> None:
    hidden = [replace(MESH, frontend=FrontendConfig(ui=False)), replace(MESH, mesh_url="https://127.0.0.1:9")]
    for mesh in (*hidden, replace(MESH, frontend=FrontendConfig(ui_port=0))):
        assert "/ui" not in welcome(mesh)
    assert "http://127.0.0.1:8100/ui" in welcome(replace(MESH, frontend=FrontendConfig(ui_port=8100)))


def test_every_worker_is_named_with_its_process() -> None:
    assert "  processes decode-0 4, decode-1 5, prefill-0 3\n" in welcome(MESH)


def test_a_model_with_a_quote_in_its_name_makes_no_broken_command() -> None:
    words = command(welcome(replace(MESH, model="it's")), "curl")
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"


def test_the_prompt_is_longer_than_two_blocks() -> None:
    tokenizer = Tokenizer.load(str(CHECKPOINT_DIR), backend="hf", cache_bytes=0)
    assert len(tokenizer.encode_now(PROMPT)) // 4 > 2 * 16  # ids of four bytes


def test_one_worker_is_drained_and_another_killed() -> None:
    assert command(welcome(MESH), "kill")[1:] == ["kill", "-9", "4"]
    words = command(welcome(MESH), "drain")
    assert words[1:] == ["kvmesh", "scale", "--control", "/run/control/control.sock", "decode=1"]


def test_a_mesh_with_a_planner_is_not_scaled_by_hand() -> None:
    assert "kvmesh scale" not in welcome(replace(MESH, planner_record="planner.jsonl"))


def test_the_text_says_what_becomes_of_the_requests_of_a_killed_worker() -> None:
    assert "its requests continue on another worker" in welcome(MESH)
    for pids in ({"decode-0": 4}, {"prefill-0": 3, "decode-0": 4}, {"aggregated-0": 5}):
        assert "its requests wait until it has been started again" in welcome(replace(MESH, pids=pids))


def test_keys_and_certificates_are_named_but_never_shown(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("very-secret alice\n")
    frontend = FrontendConfig(api_keys_file=str(keys), tls_cert="/etc/cert.pem")
    text = welcome(replace(MESH, url="https://127.0.0.1:8000", frontend=frontend))
    assert str(keys) in text
    assert "very-secret" not in text
    assert "SSL_CERT_FILE=/etc/cert.pem" in text
    assert "authorization: Bearer $KVMESH_API_KEY" in text
    assert 'api_key="none"' not in text
