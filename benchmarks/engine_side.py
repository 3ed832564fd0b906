"""One side of `kvmesh bench engine versus`: load a model with one engine, then time what the parent asks for.

    python -m benchmarks.engine_side torch|vllm FOLDER DTYPE BATCH ISL_TOKENS KV_GIB

It runs in the Python that has the engine, and imports nothing of the other. Questions come on the standard input and
answers go to the standard output, each a line of JSON. `{"prefill": 1}` times one prompt; `{"decode": 8}` times a step
of 8 sequences, the best of some.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

BLOCK_SIZE = 32  # the least that vLLM takes on a CPU
STEPS = 6  # of decoding, of which the best counts
BATCH_LIMIT = 64  # prompts of lower numbers are contexts of decoding


class EngineSide(Protocol):
    def prefill_s(self) -> float: ...

    def decode_s(self, batch: int) -> float: ...


class TorchSide:
    def __init__(self, folder: str, dtype: str, batch: int, isl_tokens: int, kv_gib: int) -> None:
        from benchmarks.engine_steps import decode_row, prefill_row
        from workers.engines.torch.executor import TorchExecutor

        self._isl_tokens = isl_tokens
        self._blocks = -(-(isl_tokens + 2 * STEPS) // BLOCK_SIZE)
        self._prefill_row, self._decode_row = prefill_row, decode_row
        self._executor = TorchExecutor(folder, device="cpu", dtype=dtype, block_size=BLOCK_SIZE, num_threads=0)
        info = self._executor.load()
        self._executor.allocate_kv(max(batch * self._blocks, kv_gib * 2**30 // info.layout.block_bytes), None)

    def prefill_s(self) -> float:
        row = self._prefill_row(self._isl_tokens, self._blocks)
        return _took_s(lambda: self._executor.execute([row]))

    def decode_s(self, batch: int) -> float:
        rows = [self._decode_row(n, self._isl_tokens, self._blocks) for n in range(batch)]
        return min(_took_s(lambda: self._executor.execute(rows)) for _ in range(STEPS))


class VllmSide:
    def __init__(self, folder: str, dtype: str, batch: int, isl_tokens: int, kv_gib: int) -> None:
        from vllm import LLM, SamplingParams

        self._isl_tokens = isl_tokens
        self._sampling = SamplingParams
        self._count = 0
        self._engine = LLM(
            model=folder,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,  # the contexts of decoding are computed once
            max_model_len=isl_tokens + 2 * STEPS + batch + 8,
            max_num_seqs=batch,
            max_num_batched_tokens=max(2048, isl_tokens),
            block_size=BLOCK_SIZE,
            disable_log_stats=True,
        ).llm_engine

    def _ask(self, max_tokens: int, context: int | None = None) -> None:
        """Ask for an answer to the prompt of number `context`, or to a new prompt."""
        self._count += 1
        number = BATCH_LIMIT + self._count if context is None else context
        sampling = self._sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        prompt: Any = {"prompt_token_ids": [number, *(i % 1000 for i in range(1, self._isl_tokens))]}
        self._engine.add_request(str(self._count), prompt, sampling)

    def prefill_s(self) -> float:
        self._ask(1)
        return _took_s(self._finish)

    def decode_s(self, batch: int) -> float:
        for context in range(batch):
            self._ask(2 * STEPS + batch, context)  # enough for the first to go on while the last is computed
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        best_s = min(_took_s(self._engine.step) for _ in range(STEPS))
        self._finish()
        return best_s

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


SIDES: dict[str, Callable[[str, str, int, int, int], EngineSide]] = {"torch": TorchSide, "vllm": VllmSide}


def _took_s(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(argv: list[str]) -> None:
    name, folder, dtype, *sizes = argv
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints is no answer
    batch, isl_tokens, kv_gib = map(int, sizes)
    side = SIDES[name](folder, dtype, batch, isl_tokens, kv_gib)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        question: dict[str, int] = json.loads(line)
        taken_s = side.decode_s(question["decode"]) if "decode" in question else side.prefill_s()
        print(json.dumps(taken_s), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
