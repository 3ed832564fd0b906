"""Run a worker whose mock engine loads and unloads adapters, as vLLM's and SGLang's do: `-m ... MODULE FLAGS`."""

import runpy
import sys

import kvmesh.workers.checks
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Control, ControlAction, ControlReply
from kvmesh.workers.controls import WorkerControls
from kvmesh.workers.engine import EngineInfo

loaded: set[str] = set()


async def load_or_unload(controls: WorkerControls, request: Control) -> ControlReply:
    name = request.arguments["name"]
    if request.action is ControlAction.LOAD_LORA:
        loaded.add(name)
    else:
        loaded.remove(name)
    return ControlReply(detail="done", loras=tuple(sorted(loaded)))


def refuse_unknown(lora: str | None, info: EngineInfo) -> None:
    if lora is not None and lora not in loaded:
        raise InvalidRequestError(f"there is no adapter {lora!r}", param="model")


if __name__ == "__main__":
    kvmesh.workers.checks._check_lora = refuse_unknown
    WorkerControls._engine_reply = load_or_unload  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
