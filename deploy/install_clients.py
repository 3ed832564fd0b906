"""Make the environments of `make test-clients`: those that the clients of a part need (tests/clients/catalogue.py).

Called by the Makefile with a bare Python >= 3.11; nothing beyond the standard library is used. An environment whose
pins have not changed stays as it is. uv installs several times faster than pip, and environments share equal files.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.clients.catalogue import ENVIRONMENTS, HERE, NODE, clients_of  # noqa: E402

UV = "uv==0.13.9"
UV_FOLDER = ENVIRONMENTS / "uv"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_SETTINGS = {"global.index-url": "UV_DEFAULT_INDEX", "global.find-links": "UV_FIND_LINKS"}  # uv does not read pip's
NPM_FLAGS = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder that is installed from a file of pins, by these commands."""

    folder: Path
    pins: Path
    steps: list[list[str]]

    @property
    def mark(self) -> Path:
        return self.folder / ".installed-pins"

    def is_done(self) -> bool:
        return self.mark.exists() and self.mark.read_text() == self.pins.read_text()


def main() -> int:
    began = time.monotonic()
    missing = [one for one in wanted(sys.argv[1] if sys.argv[1:] else "all") if not one.is_done()]
    if missing and not has_uv():
        return 1
    variables = uv_variables() if missing else {}
    for one in missing:
        print(f"{one.folder.relative_to(ROOT)} ...", flush=True)
        if not run(*one.steps, variables=variables):
            return 1
        one.mark.write_text(one.pins.read_text())
    print(f"the clients are installed, {time.monotonic() - began:.0f} s", flush=True)
    return 0


def has_uv() -> bool:
    """Install uv if it is missing. False: that failed."""
    make = [sys.executable, "-m", "venv", str(UV_FOLDER)]
    return (UV_FOLDER / "bin" / "uv").exists() or run(make, [*pip(), "install", "--quiet", UV])


def run(*steps: list[str], variables: dict[str, str] | None = None) -> bool:
    for argv in steps:
        if subprocess.run(argv, env=variables, stdin=subprocess.DEVNULL, check=False).returncode:
            print(f"FAILED: {' '.join(argv)}; what it said stands above", file=sys.stderr)
            return False
    return True


def wanted(part: str) -> Iterator[Environment]:
    """Yield the environments that the clients of a part need: first Python's, because one of them has Node itself."""
    clients = clients_of(part)
    for name in dict.fromkeys(client.environment for client in clients):
        pins = HERE / "requirements" / f"{name}.txt"
        yield Environment(ENVIRONMENTS / name, pins, python_steps(ENVIRONMENTS / name, pins))
    for packages in dict.fromkeys(client.packages for client in clients if client.packages):
        folder = HERE / packages
        npm = ["env", f"PATH={ENVIRONMENTS / NODE / 'bin'}{os.pathsep}{os.environ['PATH']}", "npm"]
        steps = [[*npm, "--prefix", str(folder), "ci", *NPM_FLAGS]]
        yield Environment(folder / "node_modules", folder / "package-lock.json", steps)


def python_steps(folder: Path, pins: Path) -> list[list[str]]:
    uv = [str(UV_FOLDER / "bin" / "uv"), "--quiet"]
    into = ["--python", str(folder / "bin" / "python")]
    # Torch for the CPU is on PyTorch's own index; pip goes on if that cannot be reached and a wheel is here.
    torch = [line for line in pins.read_text().splitlines() if line.startswith("torch==")]
    torch_flags = ["--quiet", "--no-deps", "--retries", "2", "--extra-index-url", CPU_INDEX]
    return [
        [*uv, "venv", "--clear", "--python", sys.executable, str(folder)],
        *([*pip(), *into, "install", *torch_flags, line] for line in torch),
        [*uv, "pip", "install", *into, "--no-deps", "--requirements", str(pins)],
    ]


def pip() -> list[str]:
    return [str(UV_FOLDER / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def uv_variables() -> dict[str, str]:
    """Return this process's variables, and the package index that pip is set to, if uv has none of its own."""
    found = dict(os.environ)
    for setting, name in PIP_SETTINGS.items():
        argv = [sys.executable, "-m", "pip", "config", "get", setting]
        said = subprocess.run(argv, capture_output=True, text=True, check=False)
        if said.returncode == 0 and name not in found:
            found[name] = said.stdout.strip()
    return found


if __name__ == "__main__":
    sys.exit(main())
