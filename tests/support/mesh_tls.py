"""Close the meshes of all tests if KVMESH_TEST_MESH_TLS is 1: one CA, and a certificate for each role.

Every service that a test starts then finds its certificate in its environment, however it is started.
"""

import atexit
import os
import shutil
import ssl
import tempfile
from functools import cache
from pathlib import Path

from kvmesh.mesh.identity.credentials import Credentials
from kvmesh.mesh.identity.names import MeshRole
from tests.support.certificates import TestCa

IS_ON = os.environ.get("KVMESH_TEST_MESH_TLS") == "1"
_LIFE_S = 30 * 86_400.0
_SERVICES = {
    "FRONTEND": MeshRole.FRONTEND,
    "ROUTER": MeshRole.ROUTER,
    "WORKER": MeshRole.WORKER,
    "ATTACH": MeshRole.WORKER,
    "PLANNER": MeshRole.PLANNER,
    "EXPLAIN": MeshRole.OPERATOR,
    "DOCTOR": MeshRole.OPERATOR,
}


def close_all_meshes() -> None:
    """Set the environment of all services that are started from now on."""
    ca = _ca()
    for command in ("UP", "DEMO"):
        os.environ[f"KVMESH_{command}_MESH_TLS"] = str(ca.folder)
    for service, role in _SERVICES.items():
        os.environ[f"KVMESH_{service}_MESH_TLS"] = str(ca.issue(role, life_s=_LIFE_S))


def operator() -> Credentials | None:
    """Return the credentials of an operator, None where meshes are open."""
    return _operator() if IS_ON else None


def verify() -> ssl.SSLContext | bool:
    """Return how an HTTP client of a test checks a port within the mesh."""
    return _operator().dialing() if IS_ON else False


@cache
def _ca() -> TestCa:
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-test-ca-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return TestCa(folder / "ca")


@cache
def _operator() -> Credentials:
    return _ca().member(MeshRole.OPERATOR)
