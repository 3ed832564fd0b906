"""Build a real kube-apiserver for `make test-kube`, once: from Debian's source package, about 15 minutes and 2.5 GB.

No package holds the binary, Debian has the source of 1.20.2. The result stays in ${KVMESH_CACHE:-~/.cache/kvmesh}.
It needs root and apt on Debian or Ubuntu, for Go and the other tools; the sources come from the mirror that this
machine's apt uses, through a list of their own, so that apt's settings stay as they are. Standard library only.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

VERSION = "1.20.2"
PACKAGES = ["golang-go", "golang-github-modern-go-reflect2-dev", "rsync", "make", "gcc", "dpkg-dev", "etcd-server"]
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# The vendored reflect2 1.0.1 crashes under Go >= 1.18, at the first custom resource: Debian has a newer one.
REFLECT2 = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")


def binary() -> Path:
    cache = os.environ.get("KVMESH_CACHE") or Path.home() / ".cache" / "kvmesh"
    return Path(cache) / f"kube-apiserver-{VERSION}" / "kube-apiserver"


def main() -> int:
    if binary().exists():
        print(f"{binary()} is there", flush=True)
        return 0
    if problem := missing_here():
        print(problem, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="kube-apiserver-", dir=os.environ.get("TMPDIR")) as folder:
        try:
            build(Path(folder))
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd))
            print(f"FAILED with {error.returncode}: {command}; what it said stands above", file=sys.stderr)
            return 1
    print(f"built {binary()}", flush=True)
    return 0


def missing_here() -> str:
    """Return what this machine lacks for the build, and what to do about it; "" if nothing."""
    if missing := [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)} here: the build takes Debian's source package, run it on Debian 12"
    if os.geteuid() != 0:
        return f"this user is not root: the build installs {' '.join(PACKAGES)} with apt-get; run it with sudo"
    if not debian_lines():
        return "apt knows no Debian mirror with the component main: see `apt-get indextargets`, /etc/apt/sources.list.d"
    return ""


def debian_lines() -> list[str]:
    """Return lines for packages and sources of this Debian release, from wherever this machine's apt takes them."""
    release = codename()
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    places = {tuple(line.split()) for line in shown.splitlines() if line.split()[1:] == [release, "main"]}
    signed = f"[signed-by={KEYRING}] " if Path(KEYRING).exists() else ""
    return [f"{kind} {signed}{uri} {suite} main" for kind in ("deb", "deb-src") for uri, suite, _ in sorted(places)]


def codename() -> str:
    fields = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return fields.get("VERSION_CODENAME", "").strip('"')


def build(folder: Path) -> None:
    lists, sources = folder / "lists", folder / "sources.list"
    (lists / "partial").mkdir(parents=True)
    sources.write_text("".join(f"{line}\n" for line in debian_lines()))
    folder.chmod(0o755)  # apt reads as a user of its own
    apt = ["apt-get", "-qq", "-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=-"]
    apt += ["-o", f"Dir::State::Lists={lists}", "-o", "APT::Sandbox::User=root"]
    say(1, "lists of packages and sources")
    run([*apt, "update"])
    say(2, f"tools: {' '.join(PACKAGES)}")
    run([*apt, "install", "-y", "--no-install-recommends", *PACKAGES])
    say(3, "source of kubernetes, 35 MB")
    run([*apt, "source", "kubernetes"], cwd=folder)
    [tree] = folder.glob("kubernetes-*/")
    vendored = tree / "vendor" / "github.com" / "modern-go" / "reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(REFLECT2, vendored)
    say(4, "kube-apiserver, 4 to 15 minutes")
    go = {"GOFLAGS": "-mod=vendor", "GOPROXY": "off", "GOCACHE": str(folder / "go-cache"), "GOTOOLCHAIN": "local"}
    run(["make", "WHAT=cmd/kube-apiserver"], cwd=tree, env={**os.environ, **go})
    [built] = tree.glob("_output/local/bin/*/*/kube-apiserver")
    binary().parent.mkdir(parents=True, exist_ok=True)
    beside = binary().with_suffix(".new")
    shutil.copyfile(built, beside)
    beside.chmod(0o755)
    beside.replace(binary())


def say(number: int, what: str) -> None:
    print(f"[{number}/4] {what} ...", flush=True)


def run(argv: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    settings = env or {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(argv, cwd=cwd, env=settings, stdin=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    sys.exit(main())
