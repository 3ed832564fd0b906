"""Answer one question in a process of its own: AskedMesh as a line of JSON comes in, lines of an access log follow.

Out comes one JSON object: the report, or `refused` and `hint`. Frontends start `python -m kvmesh.simulator.whatif`.
"""

import os
import resource
import sys

import msgspec

from kvmesh.frontend.whatif.question import AskedMesh
from kvmesh.protocol.errors import MeshError
from kvmesh.protocol.messages import UNREADABLE
from kvmesh.simulator.access_log import in_order
from kvmesh.simulator.whatif.answer import answer
from kvmesh.simulator.whatif.traffic import is_generation

CPU_S = 120
NICER = 10  # than the mesh


def main() -> int:
    os.nice(NICER)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    first, _, lines = sys.stdin.buffer.read().partition(b"\n")
    try:
        asked = msgspec.json.decode(first, type=AskedMesh)
        found = in_order(lines.splitlines(), is_generation)
        reply: object = answer(found, asked.question, asked.meshes)
    except UNREADABLE as error:
        reply = {"refused": f"the question cannot be read: {error}", "hint": ""}
    except MeshError as error:
        reply = {"refused": error.message, "hint": error.hint}
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main())
