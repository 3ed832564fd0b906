"""Whether to use native code: wherever it was built, unless KVMESH_NATIVE=0 asks for plain Python."""

import os

WANTED = os.environ.get("KVMESH_NATIVE", "1") != "0"
