"""Carry out what operators ask of a running SGLang engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import Control, ControlAction
from kvmesh.workers.engines.external.content import AdapterFiles, EngineContent
from kvmesh.workers.engines.external.control import argument
from kvmesh.workers.engines.sglang.runtime import Runtime, TokenizerManager


@dataclass(frozen=True, slots=True)
class ControlOutcome:
    detail: str
    loras: Mapping[str, str]  # the adapters that are served now: SGLang's name of each


async def carry_out(
    request: Control,
    runtime: Runtime,
    manager: TokenizerManager,
    loras: Mapping[str, str],
    number: int,
    content: EngineContent,
) -> ControlOutcome:
    """Do what was asked. `loras`: SGLang's name of each adapter that is served. `number` is new for each call.

    `content` learns which adapters are served.

    Raise InvalidRequestError for what SGLang does not do, with what it says.
    """
    match request.action:
        case ControlAction.RESET_PREFIX_CACHE:
            _check(await manager.flush_cache(), "emptied no cache", "try again when nothing runs")
            return ControlOutcome("the prefix cache is empty", loras)
        case ControlAction.START_PROFILE | ControlAction.STOP_PROFILE:
            starts = request.action is ControlAction.START_PROFILE
            await _profile(manager, starts=starts)
            return ControlOutcome("profiling" if starts else "profiled", loras)
        case ControlAction.LOAD_LORA:
            name, path = argument(request, "name"), argument(request, "path")
            if name in loras:
                raise InvalidRequestError(f"{name!r} is served already", hint="choose another name", param="name")
            engine_name = f"{name}@{number}"  # unique to one loading: KV of earlier weights has another name
            files = AdapterFiles(path)
            await files.begin()
            loaded = await runtime.async_load_lora_adapter(lora_name=engine_name, lora_path=path)
            _check(loaded, f"did not load adapter {name!r}", "start it with -- --enable-lora --max-lora-rank ...")
            content.add_adapter(name, await files.loaded())
            return ControlOutcome(f"adapter {name!r} is served", {**loras, name: engine_name})
        case ControlAction.UNLOAD_LORA:
            name = argument(request, "name")
            if name not in loras:
                raise InvalidRequestError(f"there is no adapter {name!r}", param="name")
            unloaded = await runtime.async_unload_lora_adapter(lora_name=loras[name])
            _check(unloaded, f"did not unload adapter {name!r}", "")
            content.remove_adapter(name)
            return ControlOutcome(f"adapter {name!r} is gone", {key: loras[key] for key in loras if key != name})
        case ControlAction.LIST_LORAS:
            return ControlOutcome(", ".join(loras) or "no adapters", loras)
        case _:
            raise InvalidRequestError(f"a SGLang worker cannot {request.action}", hint="stop it, and start it again")


async def _profile(manager: TokenizerManager, *, starts: bool) -> None:
    try:
        await (manager.start_profile() if starts else manager.stop_profile())
    except RuntimeError as error:
        raise InvalidRequestError(f"SGLang does not profile: {error}") from error


def _check(reply: Any, failure: str, hint: str) -> None:
    if not reply.success:
        said = getattr(reply, "error_message", None) or getattr(reply, "message", None) or "it does not say why"
        raise InvalidRequestError(f"SGLang {failure}: {str(said)[:500]}", hint=hint)
