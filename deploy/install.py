"""Make .venv and install kvmesh into it, one line per step; all that pip says goes to .venv/install.log.

Called by the Makefile with a bare Python >= 3.11, so it uses nothing beyond the standard library.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "install.log"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
INSTALL = [*PIP, "install", "--progress-bar", "off", "-c", "constraints.txt"]
LOCKED = [*PIP, "install", "--progress-bar", "off", "--require-hashes", "--no-deps", "-r"]  # and a file of deploy/locks
LOG_TAIL_LINES = 25
_DOING = re.compile(r"^\s*(Collecting|Downloading|Processing|Building|Installing|Obtaining)\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class InstallStep:
    title: str
    argv: Sequence[str]
    instead: str = ""  # what happens if it fails, where the mesh can do without; else a failure ends everything
    hint: str = ""  # for that end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["runtime", "dev"])
    parser.add_argument("--torch", choices=["cpu", "cuda"], help="default: what .venv has, else cpu")
    parser.add_argument("--unlocked", action="store_true", help="versions of constraints.txt, without hashes")
    arguments = parser.parse_args()
    if problem := missing_here():
        print(problem, file=sys.stderr)
        return 1
    os.chdir(ROOT)
    is_locked = not arguments.unlocked
    steps = [tools(is_locked)] if arguments.what == "dev" else runtime_steps(arguments.torch, is_locked)
    started = time.monotonic()
    VENV.mkdir(exist_ok=True)
    LOG.write_bytes(b"")
    for number, step in enumerate(steps, 1):
        if not carry_out(step, f"[{number}/{len(steps)}] {step.title}"):
            return 1
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    if not list((ROOT / "router").glob("_native.*.so")):
        print(NO_NATIVE_CODE, flush=True)
    return 0


def missing_here() -> str:
    """Return what this Python lacks to make a virtual environment, and how to get it; "" if nothing."""
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{sys.executable} cannot make virtual environments: on Debian and Ubuntu that part is a package of its own.\n"
        f"apt-get install python{version}-venv    (or python3-venv), then run make again."
    )


# --- what to do ---------------------------------------------------------------------------------------


def runtime_steps(torch: str | None, is_locked: bool) -> list[InstallStep]:
    steps = []
    if not venv_works():
        shutil.rmtree(VENV, ignore_errors=True)
        steps.append(InstallStep("virtual environment", [sys.executable, "-m", "venv", str(VENV)]))
    if is_locked:
        steps.append(InstallStep("dependencies, by their hashes", [*LOCKED, "deploy/locks/runtime.txt"], hint=UNLOCKED))
    if torch is not None or not has(*pins("torch")):
        steps.append(torch_step(torch))
    return [*steps, nixl(is_locked), KVMESH]


def tools(is_locked: bool) -> InstallStep:
    argv = [*LOCKED, "deploy/locks/dev.txt"] if is_locked else [*INSTALL, "-e", ".[dev]"]
    return InstallStep("tools for tests and checks", argv, hint=UNLOCKED if is_locked else "")


def torch_step(torch: str | None) -> InstallStep:
    """Install torch first and by itself: on Linux the CPU build, which only PyTorch's index has."""
    [pin] = pins("torch")
    if torch == "cuda":
        return InstallStep("torch with CUDA, several GB", [*INSTALL, "--force-reinstall", pin])
    if sys.platform != "linux":
        return InstallStep("torch", [*INSTALL, pin])
    return InstallStep(
        "torch for the CPU, about 200 MB",
        [*INSTALL, "--retries", "2", "--extra-index-url", CPU_INDEX, f"{pin}+cpu"],
        hint=f"is {CPU_INDEX} out of reach? `make install TORCH=cuda` takes PyPI's build, several GB with CUDA",
    )


def pins(*names: str) -> list[str]:
    """The lines of constraints.txt for these packages."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for name in names for line in lines if line.startswith(f"{name}==")]


def venv_works() -> bool:
    try:
        return subprocess.run([*PIP, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def has(pin: str) -> bool:
    """Return whether .venv has exactly that version, in any build."""
    name, _, version = pin.partition("==")
    return any(VENV.glob(f"lib/python3*/site-packages/{name}-{version}[.+]*dist-info"))


def nixl(is_locked: bool) -> InstallStep:
    """Install nixl alone: it asks for CUDA's torch and for a second build of itself (docs/decisions/0003-nixl.md)."""
    return InstallStep(
        "nixl, which moves KV between workers",
        [*LOCKED, "deploy/locks/nixl.txt"] if is_locked else [*INSTALL, "--no-deps", *pins("nixl", "nixl-cu12")],
        instead="without it KV moves through shared memory, between workers on one host",
    )


UNLOCKED = """\
Files that differ from deploy/locks were not made by who made the tested ones; an index of your own may build its own.
`make LOCKED=no install` takes the versions of constraints.txt without hashes."""
KVMESH = InstallStep("kvmesh", [*INSTALL, "-e", ".[s3,torch]"])
NO_NATIVE_CODE = """\
The KV index could not be built and runs in plain Python, many times slower: see .venv/install.log.
It takes a C++17 compiler and Python.h (Debian, Ubuntu: apt-get install g++ python3-dev), then `make -B install`."""


# --- doing it -----------------------------------------------------------------------------------------


def carry_out(step: InstallStep, title: str) -> bool:
    """Run one step under a line that says how it goes. False: everything ends here."""
    started = time.monotonic()
    code = watch(step, title, started)
    took = f"{time.monotonic() - started:.0f} s"
    if code == 0:
        show(f"{title}: {took}", last=True)
    elif step.instead:
        show(f"{title}: failed, see {LOG.relative_to(ROOT)}; {step.instead}", last=True)
    else:
        show(f"{title}: FAILED after {took}", last=True)
        print("\n".join(log_text().splitlines()[-LOG_TAIL_LINES:]), file=sys.stderr)
        print(f"\nthe whole log: {LOG}{f'{chr(10)}{step.hint}' if step.hint else ''}", file=sys.stderr)
    return code == 0 or bool(step.instead)


def watch(step: InstallStep, title: str, started: float) -> int:
    """Wait for a step and return its exit code. Show its progress: each second on a terminal, else every 10 s."""
    show(f"{title} ...")
    with LOG.open("ab") as output:
        output.write(f"\n{title}\n$ {' '.join(step.argv)}\n".encode())
        output.flush()
        process = subprocess.Popen(step.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    while True:
        try:
            return process.wait(1.0 if sys.stdout.isatty() else 10.0)
        except subprocess.TimeoutExpired:
            show(f"{title} ... {time.monotonic() - started:.0f} s  {doing()}")
        except KeyboardInterrupt:
            return process.wait() or 130


def show(line: str, last: bool = False) -> None:
    """Show a line. On a terminal it replaces the line before, until the `last` one of a step."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line if last else line[:width]}", end="\n" if last else "", flush=True)
    else:
        print(line, flush=True)


def doing() -> str:
    """Return what pip does now, from the end of its log."""
    found = _DOING.findall(log_text())
    return " ".join(found[-1])[:80] if found else ""


def log_text() -> str:
    return LOG.read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
