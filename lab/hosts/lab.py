"""Make hosts of one machine: network namespaces with pids, IPC and /dev/shm of their own, on one bridge; and faults.

Nothing here touches the machine's own network: the bridge is in a namespace too. Root, iproute2, nftables, iptables,
util-linux and curl are needed.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvmesh.protocol.errors import ConfigError, MeshError

HOSTS = ("infra", "front", "prefill", "decode")
NETWORK = "10.77.0"
MARK = "KVMESH_LAB"  # in the environment of every process of a lab
TABLE = "faults"
TOOLS = ("ip", "nft", "iptables", "unshare", "curl")
# Private pids, IPC, host name and /dev/shm, so that two hosts can share memory in no way.
_ENTER = 'mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm; hostname "$0"; exec "$@"'


class LabError(MeshError):
    """A command or a service of the lab has failed."""


def why_not() -> str:
    """Return why hosts cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"missing: {', '.join(missing)}; apt-get install iproute2 nftables iptables util-linux curl"
    return ""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class HostProcess:
    """A process on a host. `pid` is the machine's number of the process, not of the host's."""

    def __init__(self, host: "LabHost", name: str, command: Sequence[str], log: Path) -> None:
        self.host, self.name, self.log_path = host, name, log
        wrapped = ["ip", "netns", "exec", host.namespace]
        wrapped += ["unshare", "-m", "-p", "-i", "-u", "-f", "--kill-child", "--mount-proc"]
        wrapped += ["bash", "-c", _ENTER, host.name, *command]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                wrapped, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=host.lab.environment
            )

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def until_logged(self, text: str, timeout_s: float = 60.0) -> str:
        """Return the first line of the log with `text`."""
        ends_s = time.monotonic() + timeout_s
        while True:
            for line in self.log().splitlines():
                if text in line:
                    return line
            if self.process.poll() is not None or time.monotonic() > ends_s:
                raise LabError(f"{self.name} did not log {text!r}:\n{self.log()[-3000:]}")
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command itself, which is the child of `unshare`."""
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            os.kill(int(child), number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class LabHost:
    def __init__(self, lab: "Lab", name: str, number: int) -> None:
        self.lab, self.name = lab, name
        self.namespace = f"{lab.prefix}{name}"
        self.address = f"{lab.network}.{number}"
        self.port = f"p{number}"  # its end at the bridge
        self.detour = (f"d{number}", f"e{number}")  # a pair of devices between that end and the bridge
        self.relay: subprocess.Popen[str] | None = None

    def start(self, name: str, *command: str) -> HostProcess:
        process = HostProcess(self, name, command, self.lab.folder / f"{name}.log")
        self.lab.processes.append(process)
        return process

    def run(self, *command: str) -> str:
        return run("ip", "netns", "exec", self.namespace, *command)

    def sent_bytes(self) -> int:
        """Return the bytes that this host has put on its link, headers included."""
        return int(self.run("cat", "/sys/class/net/eth0/statistics/tx_bytes"))


class Lab:
    """A bridge with hosts. Faults are rules of the bridge; `heal` removes them all."""

    def __init__(self, folder: Path, names: Sequence[str] = HOSTS, network: str = NETWORK) -> None:
        """Plan hosts with the addresses `network`.1, `network`.2 and so on. Nothing is made before `open`."""
        self.folder = folder
        self.network = network
        self.prefix = f"kvm{secrets.token_hex(2)}-"
        self.bridge = f"{self.prefix}bridge"
        self.processes: list[HostProcess] = []
        self.temporary = folder / "tmp"  # of all processes, so that what they leave behind is seen
        self.temporary.mkdir(exist_ok=True)
        self.environment = os.environ | {MARK: self.prefix, "TMPDIR": str(self.temporary)}
        self.hosts = {name: LabHost(self, name, number) for number, name in enumerate(names, 1)}

    def open(self) -> None:
        run("ip", "netns", "add", self.bridge)
        self._on_bridge("ip", "link", "add", "br0", "type", "bridge")
        self._on_bridge("ip", "link", "set", "br0", "up")
        for host in self.hosts.values():
            run("ip", "netns", "add", host.namespace)
            self._on_bridge("ip", "link", "add", host.port, "type", "veth", "peer", "eth0", "netns", host.namespace)
            self._on_bridge("ip", "link", "set", host.port, "master", "br0", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("ip", "link", "set", "lo", "up")
        self.heal()

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
        for host in self.hosts.values():
            self._end_delay(host)
        for namespace in (*[host.namespace for host in self.hosts.values()], self.bridge):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def stop_all(self) -> None:
        """Ask all processes to stop, the last one that was started first."""
        for process in reversed(self.processes):
            process.stop()

    def leftovers(self) -> list[str]:
        """Return what is left of this lab after `close`: namespaces, processes, rules on the machine's own network."""
        namespaces = [line for line in run("ip", "netns", "list").splitlines() if line.startswith(self.prefix)]
        tables = [line for line in run("nft", "list", "tables").splitlines() if line == f"table bridge {TABLE}"]
        return [*namespaces, *(f"process {pid}" for pid in self.living()), *tables]

    def living(self) -> list[int]:
        """Return the processes that were started in this lab, with their children, and have not ended."""
        mark = f"{MARK}={self.prefix}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def temporary_files(self) -> list[str]:
        """Return the files that processes have left where temporary files go."""
        return sorted(str(path.relative_to(self.temporary)) for path in self.temporary.rglob("*"))

    def _on_bridge(self, *command: str) -> str:
        return run("ip", "netns", "exec", self.bridge, *command)

    # --- faults ---------------------------------------------------------------------------------------

    def heal(self) -> None:
        self._on_bridge("nft", "flush ruleset")
        self._on_bridge("nft", f"add table bridge {TABLE}")
        chain = "{ type filter hook forward priority 0; }"
        self._on_bridge("nft", f"add chain bridge {TABLE} forward {chain}")
        for host in self.hosts.values():
            self._end_delay(host)
            self._on_bridge("ip", "link", "set", host.port, "up")
            host.run("iptables", "-F", "INPUT")

    def _between(self, one: str, other: str, verdict: str) -> None:
        a, b = self.hosts[one].address, self.hosts[other].address
        for source, target in ((a, b), (b, a)):
            rule = f"add rule bridge {TABLE} forward ip saddr {source} ip daddr {target} {verdict}"
            self._on_bridge("nft", rule)

    def cut(self, one: str, other: str, *, except_port: int = 0) -> None:
        """Drop all packets between two hosts: neither learns anything. `except_port` of either host stays open."""
        if except_port:
            for end in ("sport", "dport"):
                self._between(one, other, f"tcp {end} {except_port} accept")
        self._between(one, other, "drop")

    def reset(self, one: str, other: str) -> None:
        """Answer every TCP packet between two hosts with a reset, which arrives."""
        for name, peer in ((one, other), (other, one)):
            source = self.hosts[peer].address
            rule = ("-s", source, "-p", "tcp", "!", "--tcp-flags", "RST", "RST", "-j", "REJECT")
            self.hosts[name].run("iptables", "-A", "INPUT", *rule, "--reject-with", "tcp-reset")

    def lose(self, one: str, other: str, percent: int) -> None:
        self._between(one, other, f"numgen random mod 100 < {percent} drop")

    def delay(self, name: str, delay_s: float) -> None:
        """Hold every packet that leaves or reaches a host for a time, in user space."""
        host = self.hosts[name]
        outer, inner = host.detour
        self._on_bridge("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        self._on_bridge("ip", "link", "set", host.port, "nomaster")
        self._on_bridge("ip", "link", "set", inner, "master", "br0", "up")
        self._on_bridge("ip", "link", "set", outer, "up")
        relay = ("ip", "netns", "exec", self.bridge, sys.executable, "-P", "-m", "kvmesh.lab.hosts.delay")
        host.relay = subprocess.Popen([*relay, host.port, outer, str(delay_s)], stdout=subprocess.PIPE, text=True)
        assert host.relay.stdout is not None
        if host.relay.stdout.readline().strip() != "ready":
            raise LabError(f"packets of {name} cannot be delayed", hint="AF_PACKET sockets are needed")

    def _end_delay(self, host: LabHost) -> None:
        relay, host.relay = host.relay, None
        if relay is not None:
            relay.kill()
            relay.communicate()
            self._on_bridge("ip", "link", "del", host.detour[0])
            self._on_bridge("ip", "link", "set", host.port, "master", "br0")

    def unplug(self, name: str) -> None:
        self._on_bridge("ip", "link", "set", self.hosts[name].port, "down")


@contextmanager
def lab(folder: Path, names: Sequence[str] = HOSTS, network: str = NETWORK) -> Iterator[Lab]:
    """Make the hosts; at the end, end their processes and remove them. Raises ConfigError where that is impossible."""
    if problem := why_not():
        raise ConfigError(problem, hint="run it as root on a Linux machine, or in a privileged container")
    made = Lab(folder, names, network)
    try:
        made.open()
        yield made
    finally:
        made.close()
