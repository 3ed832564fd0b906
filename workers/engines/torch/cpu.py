"""Say what this machine's processor computes natively. Needs no torch."""

import ctypes
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 256 << 20
_LARGEST_KEPT_BYTES = 32 << 20  # the most that glibc takes
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # x86-64, x86-64, AArch64; the fastest first


def cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Return the instruction sets that Linux lists; none on other systems."""
    return frozenset(_listed(path, "flags", "Features").split())


def is_amd(path: Path = _CPUINFO) -> bool:
    """Return whether AMD made the processor. MKL, torch's library for float32, is made for Intel's."""
    return _listed(path, "vendor_id") == "AuthenticAMD"


def _listed(path: Path, *names: str) -> str:
    """Return what Linux lists for the first processor under one of the names; "" if it lists nothing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def bfloat16_by(flags: frozenset[str]) -> str:
    """Return the instruction set that multiplies bfloat16; "" if the processor has none."""
    return next((name for name in _BFLOAT16 if name in flags), "")


def keep_freed_memory() -> bool:
    """Let malloc keep what a step frees, for the next step. Return whether this C library can.

    By default glibc gives large pieces back to the kernel, which zeroes every page when it is next touched.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES))
    return all(mallopt(name, value) for name, value in wanted)
