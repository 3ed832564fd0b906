"""Say what this machine's processor computes natively. Needs no torch."""

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")  # x86-64, x86-64, AArch64; the fastest first


def cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Return the instruction sets that Linux lists; none on other systems."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())


def bfloat16_by(flags: frozenset[str]) -> str:
    """Return the instruction set that multiplies bfloat16; "" if the processor has none."""
    return next((name for name in _BFLOAT16 if name in flags), "")
