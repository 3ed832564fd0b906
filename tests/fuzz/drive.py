"""Fuzz one surface of Python code with atheris: `python -m tests.fuzz.drive SURFACE [flags of libFuzzer] [FOLDER ...]`.

Run by `python -m tests.fuzz`, which `make fuzz` calls.
"""

import logging
import random
import sys

import atheris

OURS = ["kvmesh"]
KEPT_AS_BYTES = 0.4  # of the changes are made byte by byte, as libFuzzer likes


def main() -> None:
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=OURS, enable_loader_override=False):
        from tests.fuzz.surfaces import MUTATORS, PYTHON
    logging.getLogger().setLevel(logging.CRITICAL)  # what refusals log is no news here
    one_input, mutate = PYTHON[name], MUTATORS.get(name)

    def changed(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if mutate is None or rng.random() < KEPT_AS_BYTES:
            return atheris.Mutate(data, max_bytes)
        for _ in range(rng.choice([1, 1, 2, 4])):
            data = mutate(data, rng)
        return data[:max_bytes]

    if mutate is None:
        atheris.Setup(sys.argv, one_input)
    else:
        atheris.Setup(sys.argv, one_input, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
