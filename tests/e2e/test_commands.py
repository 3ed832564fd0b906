"""Tests of the commands that a user starts from a shell: `kvmesh up` and `kvmesh demo`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.kvcache.transfer.nixl import why_unavailable
from tests.support import mesh_tls
from tests.support.mesh import START_S, Mesh, running_mesh, until
from tests.support.patience import PATIENCE_S

NAMED = ("explain", "workers", "drain  ")  # commands in the list of things to try


def kvmesh(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmesh", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env)


def test_the_demo_shows_what_a_mesh_does_and_leaves_nothing(tmp_path: Path) -> None:
    done = kvmesh("demo", "--json", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["prefill_worker"] == "prefill-0"
    assert report["decode_worker"] in ("decode-0", "decode-1")
    assert report["transfer"] == ("shm" if why_unavailable() else "nixl")
    assert report["kv_bytes_pulled"] > 0
    assert report["matches_aggregated"]
    assert report["cached_tokens_second_turn"] > 0
    assert report["ttft_ms"] > 0
    assert report["itl_ms"] > 0
    assert report["text"]
    assert list(tmp_path.glob("kvmesh-*")) == []


@dataclass(frozen=True, slots=True)
class Life:
    """A mesh that was started as a user does, answered once and was ended with Ctrl-C."""

    run_dir: Path
    to_first_token_s: float
    processes: list[psutil.Process]


def live(run_dir: Path) -> Life:
    started = time.monotonic()
    with running_mesh(run_dir) as mesh:
        mesh.complete("Once upon a time", max_tokens=1)
        return Life(run_dir, time.monotonic() - started, mesh.processes())


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    return live(tmp_path_factory.mktemp("life"))


def test_the_first_token_comes_soon_after_the_start(life: Life, tmp_path: Path) -> None:
    """The fastest of some starts counts: a slow one may be the machine's fault."""
    assert life.to_first_token_s < 45 or any(live(tmp_path / name).to_first_token_s < 45 for name in "ab")


def test_ctrl_c_leaves_no_process_and_no_file(life: Life) -> None:
    assert len(life.processes) == 5
    assert [p for p in life.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert list((life.run_dir / "discovery").iterdir()) == []


def test_a_killed_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    flags = ["--engine", "mock", "--kv-transfer", "shm"]
    with pytest.raises(AssertionError), running_mesh(tmp_path, *flags) as mesh:
        children = mesh.processes()[1:]
        mesh.process.kill()
        until(lambda: not any(p.is_running() for p in children), what="the children to end")


@pytest.mark.skipif(mesh_tls.IS_ON, reason="the commands of a closed mesh are another text: test_welcome.py")
def test_every_command_that_up_prints_works(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w+") as said:
        flags = ["--port", "0", "--engine", "mock", "--kv-transfer", "shm", "--run-dir", str(tmp_path / "run")]
        mesh = subprocess.Popen([sys.executable, "-m", "kvmesh", "up", *flags], stdout=said, stderr=said)
        try:
            until(lambda: "discovery file:" in (tmp_path / "said").read_text(), START_S, what="the text of `up`")
            text = (tmp_path / "said").read_text().replace("\\\n", "")
            commands = [line.strip() for line in text.splitlines() if line.startswith("  curl")]
            commands += [line[len("  explain   ") :] for line in text.splitlines() if line[2:9] in NAMED]
            commands += [line.partition("terminal: ")[2] + " --once" for line in text.splitlines() if "/ui, or" in line]
            assert len(commands) == 5, text
            *looks, drain = sorted(commands, key=lambda command: " scale " in command)
            for at_once in (looks, [drain]):
                ran = [subprocess.Popen(line, shell=True, stdout=PIPE, stderr=PIPE, text=True) for line in at_once]
                for command in ran:
                    out, err = command.communicate(timeout=PATIENCE_S)
                    assert command.returncode == 0 and out, (command.args, out, err)
        finally:
            mesh.send_signal(signal.SIGINT)
            assert mesh.wait(PATIENCE_S) == 0


def test_an_idle_mesh_costs_under_3_percent_of_a_core(nixl_mesh: Mesh) -> None:
    """The quietest of some periods counts."""
    nixl_mesh.complete("Once upon a time", max_tokens=8)
    time.sleep(0.5)

    def cpu_s() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in nixl_mesh.processes())

    def share() -> float:
        before, started = cpu_s(), time.monotonic()
        time.sleep(4)
        return (cpu_s() - before) / (time.monotonic() - started)

    shares: list[float] = []
    while not shares or (min(shares) >= 0.03 and len(shares) < 3):
        shares.append(share())
    assert min(shares) < 0.03, f"{100 * min(shares):.1f} % of a core"


def test_a_port_that_is_taken_is_said_plainly(nixl_mesh: Mesh) -> None:
    port = nixl_mesh.url.rpartition(":")[2]
    done = kvmesh("up", "--port", port, "--engine", "mock", "--kv-transfer", "shm")
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stdout + done.stderr


def test_a_model_that_is_not_there_is_said_plainly() -> None:
    done = kvmesh("up", "--port", "0", "--model-path", "/nonexistent", "--kv-transfer", "shm")
    assert done.returncode == 2
    assert "/nonexistent" in done.stderr


def test_a_tokenizer_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINT_DIR, tmp_path / "model")
    (folder / "tokenizer.json").write_text("broken")
    one = ("--prefill", "0", "--decode", "0", "--aggregated", "1")
    done = kvmesh("up", "--port", "0", "--engine", "mock", "--model-path", str(folder), "--kv-transfer", "shm", *one)
    assert done.returncode == 2
    assert "tokenizer.json is no tokenizer" in done.stderr.splitlines()[-1]
    assert "The mesh is up" not in done.stdout


def test_the_router_reads_its_table_of_ups_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('[up]\nengine = "mock"\n[router]\npolicy = "nonsense"\n')
    done = kvmesh(
        "up", "--port", "0", "--kv-transfer", "shm", "--run-dir", str(tmp_path / "run"), "--config", str(file)
    )
    assert done.returncode == 2
    assert "policy" in done.stderr


def test_a_mesh_that_could_not_answer_is_refused() -> None:
    done = kvmesh("up", "--decode", "0")
    assert done.returncode == 2
    assert "--aggregated" in done.stderr


def test_more_workers_than_a_host_takes_are_refused() -> None:
    done = kvmesh("up", "--decode", "100000")
    assert done.returncode == 2
    assert "--decode is '100000'" in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--num-blocks", "999999999999", "--num-blocks is '999999999999'"),
        ("--host", "", "--host is ''"),
        ("--mesh-tls", "nowhere", "there is no CA in --mesh-tls nowhere"),
        ("--model-path", "/nonexistent", "there is no /nonexistent/tokenizer.json"),
        ("--run-dir", "/proc/x", "cannot write to the run directory /proc/x"),
    ],
)
def test_an_absurd_setting_is_one_line_and_leaves_nothing(flag: str, value: str, words: str, tmp_path: Path) -> None:
    done = kvmesh("up", "--engine", "mock", "--port", "0", flag, value, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_option_names_the_right_one() -> None:
    done = kvmesh("up", "--prefil", "2")
    assert done.returncode == 2
    assert "--prefill" in done.stderr


def test_a_router_by_itself_serves_too(tmp_path: Path) -> None:
    with running_mesh(tmp_path, "--router", "remote", "--engine", "mock", "--kv-transfer", "shm") as mesh:
        answer = mesh.complete(list(range(10, 110)), max_tokens=6)
        assert answer["usage"]["completion_tokens"] == 6
        assert answer["kvmesh"]["prefill_worker"] == "prefill-0"


def test_a_mesh_with_tls_and_keys_says_that_it_is_up(tmp_path: Path) -> None:
    cert, key, keys = (tmp_path / name for name in ("cert.pem", "key.pem", "keys.txt"))
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=mesh", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", "-x509", *kind, *name, *files], check=True, capture_output=True)
    keys.write_text("right-key alice\n")
    keys.chmod(0o600)
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--api-keys-file", str(keys), "--engine", "mock"]
    with running_mesh(tmp_path / "run", *flags, "--kv-transfer", "shm") as mesh:
        assert mesh.url.startswith("https://")
        asked = ["explain", "--url", mesh.url, "--ca-file", str(cert), "Tell me a story."]
        if mesh_tls.IS_ON:  # then placements are for members of the mesh, whatever their key
            asked[2] = mesh.observed(mesh.url)
        else:
            assert "set KVMESH_API_KEY" in kvmesh(*asked).stderr
        answered = kvmesh(*asked, KVMESH_API_KEY="right-key")
        assert "prompt tokens for tiny" in answered.stdout, answered.stderr


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = kvmesh("up", "--run-dir", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "--run-dir" in line
