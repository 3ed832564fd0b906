"""Give a run namespaces of its own: a small disk that can be full, and a loopback network whose packets can be lost.

They belong to this process and its children alone, and go with them, whatever happens. So does /dev/shm: what other
programs leave there is not the run's. Needs root.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SIZE_MIB = 16
SHARED_MEMORY = "/dev/shm"
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that ends. Linux only.

    A process that a fault has stopped could not notice it by itself, and a server of others does not look.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class PrivateRoom:
    """Make the room, as far as this user may. Call it before threads are started."""

    def __init__(self, folder: Path) -> None:
        """Mount a small disk at `folder`. What is not allowed is not done: see `has_disk` and `has_network`."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.has_disk = _unshare(_CLONE_NEWNS, "mount") and _all(
            ["mount", "--make-rprivate", "/"],
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "kvmesh-faults", str(folder)],
        )
        self.has_shared_memory = self.has_disk and _all(["mount", "-t", "tmpfs", "kvmesh-faults", SHARED_MEMORY])
        has_tools = shutil.which("nft") is not None
        self.has_network = has_tools and _unshare(_CLONE_NEWNET, "ip") and _all(["ip", "link", "set", "lo", "up"])

    def keep(self, folder: Path) -> None:
        """Copy what is on the disk to `folder`, because the disk ends with this process."""
        if self.has_disk:
            shutil.copytree(self._folder, folder, dirs_exist_ok=True)

    def close(self) -> None:
        if self.has_shared_memory:
            _all(["umount", "-l", SHARED_MEMORY])
            self.has_shared_memory = False
        if self.has_disk:
            _all(["umount", "-l", str(self._folder)])
            self.has_disk = False


class PacketFault:
    """Drop or refuse packets to and from an address, in the kernel. One table of nftables for each fault."""

    def __init__(self, number: int, address: str, verdict: str) -> None:
        """Take `verdict`, of nftables. A verdict that rejects is for packets to the address alone."""
        self._table = f"fault{number}"
        ways = ("daddr",) if verdict.startswith("reject") else ("daddr", "saddr")
        rules = [f"add rule ip {self._table} input ip {way} {address} meta l4proto tcp {verdict}" for way in ways]
        chain = f"add chain ip {self._table} input {{ type filter hook input priority 0; }}"
        self._begin = "\n".join([f"add table ip {self._table}", chain, *rules])

    def begin(self) -> None:
        """Raise OSError if nftables does not take it."""
        _nft(self._begin)

    def end(self) -> None:
        _nft(f"delete table ip {self._table}")


def _nft(script: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"nft: {done.stderr.strip()}")


def _unshare(kind: int, tool: str) -> bool:
    if os.geteuid() != 0 or shutil.which(tool) is None:
        return False
    return bool(ctypes.CDLL(None, use_errno=True).unshare(kind) == 0)


def _all(*commands: Sequence[str]) -> bool:
    return all(subprocess.run(command, capture_output=True).returncode == 0 for command in commands)
