"""One side of `kvmesh lab bench engine versus`: load a model with one engine, then time what the parent asks for.

    python -m kvmesh.lab.bench.engine_side torch|vllm FOLDER DTYPE BATCH ISL_TOKENS KV_GIB

It runs in the Python that has the engine, and imports nothing of the other. Questions come on the standard input and
answers go to the standard output, each a line of JSON. `"prefill"` times one prompt; `"decode_8"` times a step of 8
sequences, the best of some. The contexts of decoding are not computed: both engines fill their keys and values with
one number.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

BLOCK_SIZE = 32  # the least that vLLM takes on a CPU
STEPS = 4  # of decoding, of which the best counts
FILLED_WITH = 0.015
COMPUTED = "computed"  # how the ids of requests begin whose prompts vLLM is to compute
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # as our workers ask for: docs/engines.md


class EngineSide(Protocol):
    def prefill_s(self) -> float: ...

    def decode_s(self, batch: int) -> float: ...


class TorchSide:
    def __init__(self, folder: str, dtype: str, batch: int, isl_tokens: int, kv_gib: int) -> None:
        from kvmesh.lab.bench.engine_steps import decode_row, prefill_row
        from kvmesh.workers.engines.torch.executor import TorchExecutor

        self._isl_tokens = isl_tokens
        self._blocks = -(-(isl_tokens + 2 * STEPS) // BLOCK_SIZE)
        self._filled = 0  # contexts
        self._prefill_row, self._decode_row = prefill_row, decode_row
        self._executor = TorchExecutor(folder, device="cpu", dtype=dtype, block_size=BLOCK_SIZE, num_threads=0)
        info = self._executor.load()
        num_blocks = max((batch + 1) * self._blocks, kv_gib * 2**30 // info.layout.block_bytes)
        self._cache: Any = self._executor.allocate_kv(num_blocks, None).owner

    def prefill_s(self) -> float:
        row = self._prefill_row(self._isl_tokens, self._blocks)
        return _took_s(lambda: self._executor.execute([row]))

    def decode_s(self, batch: int) -> float:
        if batch > self._filled:  # pages that were never written would all be one page, which stays in the caches
            self._cache[: batch * self._blocks].fill_(FILLED_WITH)
            self._filled = batch
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
            enable_prefix_caching=False,
            max_model_len=isl_tokens + 2 * STEPS + 8,
            max_num_seqs=batch,
            max_num_batched_tokens=max(isl_tokens, batch),
            block_size=BLOCK_SIZE,
            disable_log_stats=True,
            distributed_executor_backend=ONE_PROCESS,
            kv_transfer_config={
                "kv_connector": "FilledContexts",
                "kv_connector_module_path": "kvmesh.lab.bench.engine_contexts",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"fill_mean": FILLED_WITH},
            },
        ).llm_engine

    def _ask(self, name: str, max_tokens: int) -> str:
        self._count += 1
        request_id = f"{name}-{self._count}"
        sampling = self._sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        prompt: Any = {"prompt_token_ids": [i % 1000 for i in range(self._isl_tokens)]}
        self._engine.add_request(request_id, prompt, sampling)
        return request_id

    def prefill_s(self) -> float:
        self._ask(COMPUTED, 1)
        return _took_s(self._finish)

    def decode_s(self, batch: int) -> float:
        asked = [self._ask("filled", 2 * STEPS) for _ in range(batch)]
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        best_s = min(_took_s(self._engine.step) for _ in range(STEPS))
        self._engine.abort_request(asked)
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
        work, _, size = json.loads(line).partition("_")
        taken_s = side.decode_s(int(size)) if work == "decode" else side.prefill_s()
        print(json.dumps(taken_s), file=answers)


if __name__ == "__main__":
    main(sys.argv[1:])
