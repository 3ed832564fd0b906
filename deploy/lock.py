"""Write the lock files in deploy/locks: every package of an environment at one version, with the hashes of its files.

`make lock` runs this in .venv-supply. A lock fits every platform and every Python from 3.11: lines that do not count
for all have markers. torch and its CUDA packages are left out, because each build of torch has files of its own; so
torch alone is installed without a hash (docs/security.md, "Supply chain").
"""

import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "deploy" / "locks"
SETS: dict[str, list[str]] = {  # what is resolved for each lock, beside pyproject.toml's own dependencies
    "control": ["--extra", "certs", "--extra", "jwt"],
    "runtime": ["--extra", "torch", "--extra", "s3"],
    "dev": ["--extra", "dev"],
}
OLDEST_PYTHON = "3.11"
NIXL = ("nixl", "nixl-cu12")
_LEFT_OUT = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = "# inputs: sha256 "


def main() -> int:
    LOCKS.mkdir(exist_ok=True)
    for name, extras in SETS.items():
        write(name, resolved(["pyproject.toml", *extras]))
    wanted = "\n".join(line for line in constraints() if line.partition("==")[0] in NIXL)
    write("nixl", resolved(["-", "--no-deps"], wanted))
    return 0


def resolved(arguments: list[str], stdin: str = "") -> str:
    """Return what uv makes of the requirements. Exit with uv's words if there is no solution."""
    uv = Path(sys.executable).parent / "uv"
    argv = [
        str(uv),
        "pip",
        "compile",
        *arguments,
        "--universal",
        "--generate-hashes",
        "--python-version",
        OLDEST_PYTHON,
    ]
    argv += [
        "-c",
        "constraints.txt",
        "--no-annotate",
        "--no-header",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "-q",
    ]
    done = subprocess.run(argv, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"uv found no solution:\n{done.stderr}")
    return done.stdout


def write(name: str, text: str) -> None:
    kept = [block for block in blocks(text) if not _LEFT_OUT.match(name_of(block))]
    head = f"# Written by `make lock`; not to be changed by hand.\n{_DIGEST}{inputs_digest()}\n"
    (LOCKS / f"{name}.txt").write_text(head + "".join(kept))
    print(f"deploy/locks/{name}.txt: {len(kept)} packages")


def blocks(text: str) -> Iterator[str]:
    """Yield each requirement of a lock with its hashes, without comments."""
    block = ""
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        if not line[0].isspace() and block:
            yield block
            block = ""
        block += line
    if block:
        yield block


def name_of(block: str) -> str:
    found = _NAME.match(block)
    return found[0].lower().replace("_", "-").replace(".", "-") if found else ""


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return sorted(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def inputs_digest() -> str:
    """Return the digest of what the locks follow from: the dependencies in pyproject.toml and constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    text = "\n".join([*(f"{extra}: {sorted(lines)}" for extra, lines in sorted(wanted.items())), *constraints()])
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(lock: str) -> str:
    """Return the digest that a lock was written with, "" if none."""
    return next((line.removeprefix(_DIGEST) for line in lock.splitlines() if line.startswith(_DIGEST)), "")


if __name__ == "__main__":
    sys.exit(main())
