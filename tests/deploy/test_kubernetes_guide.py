"""The guide's commands for Kubernetes are accepted by the real helm and kubectl, and name what the chart installs."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from kvmesh.frontend.openai.shapes import ChatRequest
from tests.support.chart import CHART, INSTALL, LOADER, ROOT, Object, find_tool, needs_helm
from tests.support.guide import commands_of

pytestmark = [needs_helm, pytest.mark.skipif(not find_tool("kubectl"), reason=f"no kubectl; {INSTALL}")]

NOWHERE = "http://127.0.0.1:9"  # nobody listens on the port of the discard protocol
COMMANDS = commands_of("cluster.md", "Kubernetes")


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    program, *flags = shlex.split(command)
    environ = os.environ | {"KUBECONFIG": os.devnull, "HOME": str(folder)}
    return subprocess.run(
        [find_tool(program), *flags], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the guide names."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "keys.txt").write_text("sk-1\n")
    for name in ("prefill.json", "decode.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def installed(folder: Path) -> dict[str, list[Object]]:
    """Return what each `helm install` of the guide would install, by release."""
    found = {}
    for command in COMMANDS:
        if command.startswith("helm install "):
            done = run(folder, f"{command} --dry-run=client")
            assert done.returncode == 0, done.stderr
            text = done.stdout.split("\nNOTES:\n")[0].split("MANIFEST:\n")[1]
            found[command.split()[2]] = [one for one in yaml.load_all(text, LOADER) if one]
    return found


def test_releases_install_what_other_commands_name(folder: Path) -> None:
    releases = installed(folder)
    assert releases.keys() == {"demo", "llama"}
    present = {f"{one['kind'].lower()}/{one['metadata']['name']}" for objects in releases.values() for one in objects}
    asked = [word for command in COMMANDS for word in command.split() if word.startswith(("deployment/", "service/"))]
    assert len(asked) == 3 and set(asked) <= present


def test_what_the_guide_creates_is_what_pods_mount(folder: Path) -> None:
    created = {}
    for command in COMMANDS:
        if command.startswith("kubectl") and " create " in command:
            done = run(folder, f"{command} --dry-run=client --output=yaml")
            assert done.returncode == 0, done.stderr
            one = yaml.safe_load(done.stdout)
            created[one["kind"], one["metadata"]["name"]] = one.get("data", {}).keys()
    mounted = str(installed(folder)["llama"])
    assert created == {
        ("Namespace", "llm"): set(),
        ("Secret", "api-keys"): {"keys"},
        ("ConfigMap", "llama-8b-profiles"): {"prefill.json", "decode.json"},
    }
    assert all(
        text in mounted for text in ("'api-keys'", "'llama-8b-profiles'", "/profiles/prefill.json", "/api-keys/keys")
    )


def test_kubectl_knows_every_flag(folder: Path) -> None:
    """Without a cluster kubectl gets as far as the connection, and no further."""
    asked = [command for command in COMMANDS if command.startswith("kubectl") and " create " not in command]
    assert len(asked) == 4
    for command in asked:
        done = run(folder, f"{command.removesuffix(' &')} --server={NOWHERE}")
        assert "was refused" in done.stderr and "unknown" not in done.stderr, done.stderr


def test_requests_of_guide_and_notes_name_the_model_and_the_port(folder: Path) -> None:
    curls = [shlex.split(command) for command in COMMANDS if command.startswith("curl")]
    ask, health = curls
    model = yaml.safe_load((CHART / "values.yaml").read_text())["model"]["name"]
    body = yaml.safe_load(ask[-1])
    assert body["model"] == model and body.keys() <= set(ChatRequest.__struct_fields__)
    assert ask[1].startswith("http://127.0.0.1:8000/") and health[1] == "http://127.0.0.1:8000/health"
    notes = run(folder, f"{COMMANDS[0]} --dry-run=client").stdout.split("\nNOTES:\n")[1]
    assert ask[-1] in notes and "port-forward service/demo-frontend 8000:8000" in notes
