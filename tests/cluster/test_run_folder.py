"""The folder of a mesh that was killed is removed by the next one, and no other folder."""

import subprocess
import sys
from pathlib import Path

from cluster.run_folder import OWNER, claim, let_go, remove_left_folders

HOLD = """
import sys
from pathlib import Path
from cluster.run_folder import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    (made / "logs").mkdir(parents=True)
    (made / "logs" / "worker.log").write_text("x")
    return made


def test_only_the_folder_of_a_killed_mesh_is_removed(tmp_path: Path) -> None:
    running, killed = folder(tmp_path, "kvmesh-a"), folder(tmp_path, "kvmesh-b")
    kept, other = folder(tmp_path, "kvmesh-kept"), folder(tmp_path, "other")
    (other / OWNER).touch()
    claim(running)
    claim(kept)
    let_go(kept, keep=True)  # a mesh that failed leaves its logs on purpose
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(killed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as mesh:
        assert mesh.stdout is not None and mesh.stdout.readline() == "held\n"
        assert remove_left_folders(tmp_path) == [], "both run"
        mesh.kill()
        mesh.wait()
    assert remove_left_folders(tmp_path) == [killed]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvmesh-a", "kvmesh-kept", "other"]
    let_go(running, keep=False)
    assert not running.exists() and remove_left_folders(tmp_path) == []
