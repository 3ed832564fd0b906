"""The memory of an image: made by the service, written by one worker, sealed, and mapped by all at one address.

It lies in a memfd. No file is left behind, and the memory is freed with the last descriptor and mapping of it, however
their processes end. A sealed memfd can be changed by nobody, also not by the process that wrote it.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

from kvmesh.protocol.errors import EngineError

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
# Images lie where neither programs, nor their heaps, nor the maps that the kernel places have anything: 128 places of
# 64 GiB from 32 TiB on. The place follows from the key: it is the same in every process and after every restart.
FIRST_ADDRESS, PLACES, PLACE_BYTES = 1 << 45, 128, 1 << 36
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class MappedImage:
    """An image in this process. It is unmapped when nothing refers to `memory` any more."""

    memory: Any  # a buffer of ctypes; writing to it ends the process
    address: int
    has_moved: bool  # not where other processes have it: something else lies there


def address_of(key: bytes) -> int:
    """Return the address of an image in every process that maps it."""
    return FIRST_ADDRESS + int.from_bytes(key[:8], "little") % PLACES * PLACE_BYTES


def make_space(num_bytes: int) -> int:
    """Return a descriptor of new memory, which can be written to, and sealed. Raise OSError."""
    fd = os.memfd_create("kvmesh-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Let nobody write to the memory any more. Raise OSError (EBUSY) while a writable mapping of it exists."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def read_only(fd: int) -> int:
    """Return another descriptor of the same memory, which can only be read."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_image(fd: int, num_bytes: int, address: int) -> MappedImage:
    """Map sealed memory at `address`, or elsewhere if something lies there. The caller closes `fd`.

    Raise EngineError, also for memory that is not sealed.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size != num_bytes:
        raise EngineError("the memory service handed over memory that is not sealed, or of another size")
    found = _map(fd, num_bytes, address, _MAP_FIXED_NOREPLACE)
    if found != address:  # a kernel before 4.17 takes the address for a wish
        if found is not None:
            _libc.munmap(found, num_bytes)
        found = _map(fd, num_bytes, 0, 0)
    if found is None:
        raise EngineError(f"{num_bytes} bytes of weights cannot be mapped: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_ubyte * num_bytes).from_address(found)
    weakref.finalize(memory, _libc.munmap, found, num_bytes).atexit = False  # a step may still read it then
    return MappedImage(memory, found, found != address)


def _map(fd: int, num_bytes: int, address: int, flags: int) -> int | None:
    # Private: kernels before 6.7 refuse shared mappings of what is sealed. Nobody writes, so nothing is ever copied.
    found: int | None = _libc.mmap(address, num_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE | flags, fd, 0)
    return None if found == _MAP_FAILED else found
