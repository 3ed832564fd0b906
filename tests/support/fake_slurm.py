"""Stand-ins for Slurm's programs: a node is a command that enters it. They refuse flags that they do not know."""

import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SRUN = """#!{python}
import os, signal, subprocess, sys
NODES = {nodes!r}
HOSTS = {hosts!r}
flags, command = {{}}, sys.argv[1:]
while command and command[0].startswith("--"):
    name, _, value = command.pop(0).partition("=")
    flags[name] = value
unknown = flags.keys() - {{"--overlap", "--nodes", "--ntasks", "--nodelist", "--output", "--open-mode"}}
if unknown or flags.get("--nodes") != "1" or flags.get("--ntasks") != "1" or "--overlap" not in flags:
    sys.exit(f"srun: not as expected here: {{sys.argv[1:]}}")
if "--output" in flags:
    assert flags["--open-mode"] == "append"
    log = os.open(flags["--output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
entered = subprocess.Popen([*NODES[flags["--nodelist"]], *command])

def forward(number, frame):
    # a program that entered a host waits there for the task, its child
    children = open(f"/proc/{{entered.pid}}/task/{{entered.pid}}/children").read().split() if HOSTS else []
    for pid in children or [entered.pid]:
        os.kill(int(pid), number)

signal.signal(signal.SIGTERM, forward)
code = entered.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
_SCONTROL = """#!{python}
import sys
ADDRESSES = {addresses!r}
match sys.argv[1:]:
    case ["show", "hostnames", nodes]:
        print(*nodes.split(","), sep="\\n")
    case ["--oneliner", "show", "node", node]:
        print(f"NodeName={{node}} Arch=x86_64 NodeAddr={{ADDRESSES[node]}} NodeHostName={{node}}")
    case arguments:
        sys.exit(f"scontrol: not as expected here: {{arguments}}")
"""
_SBATCH = """#!{python}
import os, subprocess, sys
match sys.argv[1:]:
    case [nodes, "--gpus-per-node=8", script] if nodes.startswith("--nodes="):
        names = [f"n{{i}}" for i in range(1, int(nodes.removeprefix("--nodes=")) + 1)]
    case arguments:
        sys.exit(f"sbatch: not as expected here: {{arguments}}")
job = os.environ | {{"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": ",".join(names)}}
with open("kvmesh-4711.log", "wb") as log:
    started = subprocess.Popen(["bash", script], env=job, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
open({pid_file!r}, "w").write(str(started.pid))
print("Submitted batch job 4711")
"""
_SCANCEL = """#!{python}
import os, signal, sys
if sys.argv[1:] != ["--batch", "--signal=TERM", "4711"]:
    sys.exit(f"scancel: not as expected here: {{sys.argv[1:]}}")
os.kill(int(open({pid_file!r}).read()), signal.SIGTERM)
"""


@dataclass(frozen=True, slots=True)
class Node:
    address: str
    enter: Sequence[str] = ()  # the command that runs another one on this node, and waits for it


def write_fake_slurm(folder: Path, nodes: Mapping[str, Node]) -> dict[str, str]:
    """Write the programs into `folder`; return the variables that a job on all these nodes has.

    A job of `sbatch` has nodes called n1, n2, ..., and its number is in `folder`/pid.
    """
    folder.mkdir()
    pid_file = str(folder / "pid")
    enter = {name: list(node.enter) for name, node in nodes.items()}
    addresses = {name: node.address for name, node in nodes.items()}
    for program, text in (
        ("srun", _SRUN.format(python=sys.executable, nodes=enter, hosts=any(enter.values()))),
        ("scontrol", _SCONTROL.format(python=sys.executable, addresses=addresses)),
        ("sbatch", _SBATCH.format(python=sys.executable, pid_file=pid_file)),
        ("scancel", _SCANCEL.format(python=sys.executable, pid_file=pid_file)),
    ):
        file = folder / program
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": ",".join(nodes)}
