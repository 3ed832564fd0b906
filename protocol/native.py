"""Say whether native code is wanted: it is used where it was built, unless KVMESH_NATIVE=0 asks for Python."""

import os

WANTED = os.environ.get("KVMESH_NATIVE", "1") != "0"
