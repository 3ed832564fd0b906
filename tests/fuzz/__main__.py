"""Fuzz every surface for a while: `make fuzz`, `make fuzz ARGS='--seconds 600 --surface kv_events'`.

Surfaces in Python run under atheris, the native code under libFuzzer with the address and undefined-behaviour
sanitizers. What is found lies in .fuzz/, together with the inputs that reached new code; the exit code is then 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.names import NATIVE, PYTHON_NAMES

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
KEPT = ROOT / ".fuzz"
ATHERIS = ROOT / ".venv-fuzz"
SANITIZERS = ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined"]
FLAGS = ["-std=c++17", "-O2", "-g1", "-fno-omit-frame-pointer", *SANITIZERS]
MAX_INPUT_BYTES = 512
INPUT_LIMIT_S = 10  # for one input; more is a finding
MEMORY_LIMIT_MIB = 2500
NO_CLANG = "clang++ with its sanitizers is not here, so the native code is left out (Debian: apt-get install clang)"
_DONE = re.compile(r"stat::number_of_executed_units: (\d+)")
_RATE = re.compile(r"stat::average_exec_per_sec: +(\d+)")
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+)")


@dataclass(frozen=True, slots=True)
class Outcome:
    surface: str
    inputs: int
    per_s: int
    coverage: str
    exit_code: int
    output: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all surfaces together")
    parser.add_argument("--inputs", type=int, default=0, help="of each surface, instead of a time")
    parser.add_argument("--surface", action="append", choices=[*PYTHON_NAMES, *NATIVE], help="only this; repeatable")
    arguments = parser.parse_args()
    clang = compiler()
    if clang is None:
        print(NO_CLANG)
    names = [name for name in arguments.surface or [*NATIVE, *PYTHON_NAMES] if clang or name not in NATIVE]
    outcomes = []
    for name in names:
        limit = f"-runs={arguments.inputs}" if arguments.inputs else f"-max_total_time={share_s(arguments, names)}"
        outcomes.append(fuzz(name, native_program(name, clang) if name in NATIVE and clang else None, limit))
        report(outcomes[-1])
    return int(any(outcome.exit_code for outcome in outcomes))


def share_s(arguments: argparse.Namespace, names: list[str]) -> int:
    return max(1, int(arguments.seconds / len(names)))


def compiler() -> str | None:
    """Return a clang++ that can link libFuzzer and the sanitizers, the newest first; None if there is none."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(25, 12, -1))):
        if (found := shutil.which(name)) and _links(found):
            return found
    return None


def _links(clang: str) -> bool:
    source = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
    argv = [clang, "-x", "c++", *FLAGS, "-", "-o", os.devnull]
    return subprocess.run(argv, input=source.encode(), capture_output=True, check=False).returncode == 0


def native_program(name: str, clang: str) -> Path:
    program = KEPT / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([clang, *FLAGS, f"tests/fuzz/native/{name}.cpp", "-o", str(program)], cwd=ROOT, check=True)
    return program


def fuzz(name: str, program: Path | None, limit: str) -> Outcome:
    """Run one surface on what was kept of it and on the corpus in the repository."""
    kept, shipped = KEPT / "corpus" / name, CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    argv = [str(program)] if program else [sys.executable, "-m", "tests.fuzz.drive", name]
    argv += [str(kept), *([str(shipped)] if shipped.is_dir() else [])]
    argv += [f"-artifact_prefix={KEPT}/{name}-", f"-max_len={MAX_INPUT_BYTES}", f"-timeout={INPUT_LIMIT_S}"]
    argv += [f"-rss_limit_mb={MEMORY_LIMIT_MIB}", "-keep_seed=1", "-print_final_stats=1", limit]
    environment = {**os.environ, "PYTHONPATH": f"{ATHERIS}{os.pathsep}{ROOT}"}
    began = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, check=False)
    output = (done.stdout + done.stderr).decode(errors="replace")
    inputs, rate, coverage = _DONE.findall(output), _RATE.findall(output), _COVERAGE.findall(output)
    count = int(inputs[-1]) if inputs else 0
    per_s = int(rate[-1]) if rate else int(count / max(1e-9, time.monotonic() - began))
    return Outcome(name, count, per_s, " ".join(coverage[-1]) if coverage else "none", done.returncode, output)


def report(outcome: Outcome) -> None:
    edges, _, features = outcome.coverage.partition(" ")
    print(
        f"{outcome.surface:16} {outcome.inputs:>10,} inputs  {outcome.per_s:>8,}/s  "
        f"coverage: {edges} edges, {features or 'none'} features",
        flush=True,
    )
    if outcome.exit_code:
        print("\n".join(outcome.output.splitlines()[-40:]))
        print(
            f"FOUND in {outcome.surface}: the input lies in {KEPT.relative_to(ROOT)}/, mend it and add it to the corpus"
        )


if __name__ == "__main__":
    sys.exit(main())
