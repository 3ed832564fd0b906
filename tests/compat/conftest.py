"""The release before this one, as a tree of its own, and meshes whose processes are of both releases."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.etcd_server import WHY_NONE, EtcdProcess
from tests.support.services import ROOT, Release

# The release before this one. Without its tag, as in most clones of CI, the commit is taken.
PREVIOUS_TAG = "v0.2.0"
PREVIOUS_COMMIT = "22442c7c3fe4e6688988bafb62b1d2947ff9b5dc"


def previous_commit() -> str:
    """Return the commit of the previous release, or skip."""
    for name in (PREVIOUS_TAG, PREVIOUS_COMMIT):
        found = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if found.returncode == 0:
            commit = found.stdout.decode().strip()
            assert commit == PREVIOUS_COMMIT, f"the tag {PREVIOUS_TAG} is on {commit}, not on {PREVIOUS_COMMIT}"
            return commit
    pytest.skip(f"this clone does not have the commit of {PREVIOUS_TAG}: git fetch --unshallow")


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The previous release, in plain Python: its native code is not built."""
    try:
        commit = previous_commit()
    except FileNotFoundError:
        pytest.skip("there is no git, which has the previous release")
    folder = tmp_path_factory.mktemp("previous")
    archive = git("archive", commit)
    assert archive.returncode == 0, archive.stderr.decode()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return Release("old", folder=folder, environ={"PYTHONPATH": str(folder), "KVMESH_NATIVE": "0"})


@pytest.fixture(scope="module", params=["file", "etcd"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the place where services meet."""
    folder = tmp_path_factory.mktemp("place")
    if request.param == "file":
        yield f"file:{folder}"
        return
    if WHY_NONE:
        pytest.skip(WHY_NONE)
    etcd = EtcdProcess(folder)
    yield f"etcd:{etcd.endpoint}/mixed"
    etcd.stop()
