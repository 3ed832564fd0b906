"""Find what runs containers here: a Docker daemon that answers, or else podman, which needs no daemon.

For podman this starts podman's own API service, so that docker compose talks to both alike. Only podman needs the rest
of this file; somebody with Docker needs nothing of it.
"""

import contextlib
import fcntl
import json
import os
import resource
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 30.0
HEALTH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to run containers. `cli` understands docker's words; `compose` is the command of compose."""

    name: str
    cli: Sequence[str]
    compose: Sequence[str]
    environ: Mapping[str, str]

    @property
    def is_podman(self) -> bool:
        return self.name == "podman"

    def run(self, *words: str, check: bool = True, timeout_s: float = 600.0) -> str:
        """Return what the command prints. With `check` a failure raises RuntimeError with all that was said."""
        return self._run([*self.cli, *words], check, timeout_s)

    def run_compose(self, *words: str, environ: Mapping[str, str], timeout_s: float = 600.0) -> str:
        return self._run([*self.compose, *words], True, timeout_s, environ)

    def ids(self, project: str, *services: str) -> list[str]:
        """Return the ids of a project's containers, also of those that have ended."""
        found = []
        for service in services or ("",):
            label = f"label=com.docker.compose.service={service}"
            one = ("--filter", label) if service else ()
            found += self.run(
                "ps", "-aq", "--no-trunc", "--filter", f"label=com.docker.compose.project={project}", *one
            ).split()
        return found

    def inspect(self, *ids: str) -> list[dict[str, Any]]:
        read: list[dict[str, Any]] = json.loads(self.run("inspect", *ids)) if ids else []
        return read

    def logs(self, container: str) -> str:
        """Return the last lines of a container, of both its streams."""
        command = [*self.cli, "logs", "--tail", "15", container]
        done = subprocess.run(
            command, env=dict(self.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.stdout

    def has_image(self, image: str) -> bool:
        return self.run("image", "inspect", "--format", "{{.Id}}", image, check=False).strip() != ""

    def pull(self, image: str) -> bool:
        """Return whether the image is here now. Registries that cannot be reached are no error."""
        if self.has_image(image):
            return True
        try:
            self.run("pull", image, timeout_s=300.0)
        except (RuntimeError, subprocess.TimeoutExpired):
            return False
        return self.has_image(image)

    def _run(self, command: Sequence[str], check: bool, timeout_s: float, more: Mapping[str, str] | None = None) -> str:
        environ = {**self.environ, **(more or {})}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            said = "\n".join([*done.stdout.splitlines()[-20:], *done.stderr.splitlines()[-40:]])
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
        return done.stdout


@contextlib.contextmanager
def container_engine(cache: Path, folder: Path) -> Iterator[Engine]:
    """Yield what runs containers here. `cache` keeps images between runs. Raises LookupError if there is nothing."""
    environ = dict(os.environ)
    if answers(["docker", "info"], environ):
        yield Engine("docker", [str(shutil.which("docker"))], compose_command(environ), environ)
        return
    if shutil.which("podman") is None or os.geteuid() != 0:
        raise LookupError("no Docker daemon answers, and there is no podman for root: see docs/cluster.md, Compose")
    with podman_service(cache, folder) as engine:
        yield engine


def compose_command(environ: Mapping[str, str]) -> list[str]:
    """Return `docker compose`, or docker-compose. Raises LookupError."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if answers([*command, "version"], environ):
            return [str(shutil.which(command[0])), *command[1:]]
    raise LookupError("there is neither docker compose nor docker-compose: install one of them")


def answers(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    try:
        return subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


# --- podman -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def podman_service(cache: Path, folder: Path) -> Iterator[Engine]:
    """Run podman's API service until the end of the block.

    It lives in a mount namespace of its own, which all other calls of podman join: there /sys/fs/cgroup/unified can be
    taken away, because crun refuses a machine that has both versions of cgroups.
    """
    storage, runroot, socket = cache / "podman", cache / "podman-run", folder / "podman.sock"
    storage.mkdir(parents=True, exist_ok=True)
    with (cache / "podman.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LookupError(
                f"another run uses {storage}: wait for it, or set KVMESH_CACHE to another folder"
            ) from None
        shutil.rmtree(runroot, ignore_errors=True)  # what ran before is gone; podman remembers the path
        with serving(storage, runroot, socket, folder) as engine:
            yield engine


@contextlib.contextmanager
def serving(storage: Path, runroot: Path, socket: Path, folder: Path) -> Iterator[Engine]:
    (folder / "containers.conf").write_text(containers_conf(runroot))
    environ = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf"), "DOCKER_HOST": f"unix://{socket}"}
    podman = ["podman", "--root", str(storage), "--runroot", str(runroot)]
    script = 'mount --make-rprivate /; mountpoint -q /sys/fs/cgroup/unified && umount /sys/fs/cgroup/unified; exec "$@"'
    serve = [*podman, "system", "service", "--time", "0", f"unix://{socket}"]
    with (folder / "podman.log").open("wb") as log:
        command = ["unshare", "--mount", "bash", "-c", script, "podman-service", *serve]
        service = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    had_rules = "NETAVARK" in saved_rules()
    try:
        until_there(socket, service, folder / "podman.log")
        cli = ["nsenter", "--target", str(service.pid), "--mount", "--", *podman]
        engine = Engine("podman", cli, compose_command(environ), environ)
        with health_checks(engine):
            yield engine
    finally:
        service.terminate()
        service.wait()
        if not had_rules:
            remove_chains()


def saved_rules() -> str:
    return subprocess.run(["iptables-save"], capture_output=True, text=True, check=False).stdout


def remove_chains() -> None:
    """Remove the chains that podman's network makes once and leaves, and what jumps to them."""
    table, rules, chains = "", list[list[str]](), list[list[str]]()
    for line in saved_rules().splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif "NETAVARK" in line and line.startswith("-A"):
            rules.append(["-t", table, "-D", *shlex.split(line)[1:]])
        elif line.startswith(":NETAVARK"):
            chains.append(["-t", table, "-X", line[1:].split()[0]])
    for words in (*rules, *chains):
        subprocess.run(["iptables", *words], capture_output=True, check=False)


def containers_conf(runroot: Path) -> str:
    """Return limits that podman may give to containers: not everywhere may root raise them."""
    limits = []
    for name, kind, enough in (("nofile", resource.RLIMIT_NOFILE, 20_000), ("nproc", resource.RLIMIT_NPROC, 16_384)):
        hard = resource.getrlimit(kind)[1]
        at = min(hard, enough) if hard != resource.RLIM_INFINITY else enough
        limits.append(f'"{name}={at}:{at}"')
    return f'[containers]\ndefault_ulimits = [{", ".join(limits)}]\n[engine]\ntmp_dir = "{runroot}/libpod"\n'


def until_there(socket: Path, service: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while not socket.exists():
        if service.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"podman does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def health_checks(engine: Engine) -> Iterator[None]:
    """Run the health checks of all containers: podman leaves that to timers of systemd, which may not be there."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(HEALTH_EVERY_S):
            for container in engine.run("ps", "-q", check=False).split():
                if stop.is_set():
                    return
                engine.run("healthcheck", "run", container, check=False)

    thread = threading.Thread(target=run, name="health checks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
