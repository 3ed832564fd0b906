"""The parts of sglang that the worker uses. Only this module imports it, and only when it is asked for."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import msgspec
import psutil

from kvmesh.protocol.errors import ConfigError, WireError

FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # a prefill engine takes it for "nobody fetches this"

MAX_METRICS_BYTES = 1 << 16
_OUR_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})

log = logging.getLogger(__name__)


class TokenizerManager(Protocol):
    context_len: int

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...

    def auto_create_handle_loop(self) -> None: ...

    async def flush_cache(self) -> Any: ...

    async def start_profile(self) -> Any: ...

    async def stop_profile(self) -> Any: ...


class PortArgs(Protocol):
    metrics_ipc_name: str


class Runtime(Protocol):
    """The parts of `sglang.Engine` that the worker uses. On nodes that do not lead, `tokenizer_manager` is None."""

    server_args: Any
    port_args: PortArgs
    tokenizer_manager: TokenizerManager | None

    async def async_generate(self, **kwargs: Any) -> AsyncGenerator[dict[str, Any], None]: ...

    async def async_load_lora_adapter(self, lora_name: str, lora_path: str) -> Any: ...

    async def async_unload_lora_adapter(self, lora_name: str) -> Any: ...

    def get_all_child_pids(self) -> Sequence[int]: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Sglang:
    """The package. `launch` takes minutes and starts processes; both block."""

    version: str
    parse: Callable[[list[str]], Any]  # flags -> ServerArgs
    launch: Callable[[Any], Runtime]


def load_sglang() -> Sglang:
    """Import it: tens of seconds. Raises ConfigError where it is not installed."""
    os.environ.setdefault("SGLANG_USE_PICKLE_IPC", "0")  # else it sends its load as pickles, which are never opened
    try:
        sglang = import_module("sglang")
        server_args = import_module("sglang.srt.server_args")
    except ImportError as error:
        raise ConfigError(
            f"the SGLang engine needs the sglang package: {error}",
            hint="install it into the worker's environment, or set another --engine",
        ) from error
    return Sglang(
        sglang.__version__, server_args.prepare_server_args, lambda args: cast(Runtime, sglang.Engine(server_args=args))
    )


def parse(sglang: Sglang, argv: list[str]) -> Any:
    """Raises ConfigError for flags that SGLang refuses."""
    try:
        return sglang.parse(argv)
    except SystemExit as exit_of_argparse:
        raise ConfigError(
            f"SGLang {sglang.version} refused its flags (see above)", hint="check what follows --"
        ) from exit_of_argparse
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"SGLang {sglang.version} refused its flags: {error}", hint="check what follows --"
        ) from error


def launch(sglang: Sglang, server_args: Any, *, is_leader: bool) -> Runtime:
    """Blocks for minutes. Called on a thread, so SGLang leaves the process's signal handlers alone.

    Raises ConfigError if it does not come up.
    """
    if not is_leader:  # else it would never return
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    try:
        return sglang.launch(server_args)
    except (SystemExit, Exception) as error:
        raise ConfigError(f"SGLang {sglang.version} did not start: {error}", hint="see its log above") from error


def total_tokens(runtime: Runtime) -> int:
    """Return the tokens in the KV cache of one rank.

    The public call for it, get_server_info, cannot be used on a running loop.
    """
    infos = runtime._scheduler_init_result.scheduler_infos  # type: ignore[attr-defined]
    return int(infos[0]["max_total_num_tokens"])


def kv_settings(server_args: Any) -> str:
    """Return what changes the values of KV beside the model's files. How many GPUs share the work does not."""
    names = ["dtype", "quantization", "kv_cache_dtype", "json_model_override_args"]
    if getattr(server_args, "load_format", "") == "dummy":
        names.append("random_seed")
    return json.dumps({name: getattr(server_args, name, None) for name in names}, default=str)


@contextmanager
def signals_kept(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGQUIT stay the worker's: SGLang would take them when it makes its first task on `loop`."""
    add = loop.add_signal_handler

    def add_others(number: int, callback: Callable[..., object], *args: Any) -> None:
        if number not in _OUR_SIGNALS:
            add(number, callback, *args)

    loop.add_signal_handler = add_others  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del loop.add_signal_handler


def outlive_failures(loop: asyncio.AbstractEventLoop, cleanup: ExitStack) -> None:
    """Ignore SIGQUIT until `cleanup` is closed: SGLang's processes send it when they fail.

    SGLang's own handler would kill the worker and all its requests. Here the health check finds the dead process.
    """
    loop.add_signal_handler(signal.SIGQUIT, log.error, "SGLang signals that one of its processes failed")
    cleanup.callback(loop.remove_signal_handler, signal.SIGQUIT)


def dead_child(runtime: Runtime) -> int | None:
    """The process id of a scheduler or detokenizer that has ended, None if all live."""
    for pid in runtime.get_all_child_pids():
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return pid
        except psutil.NoSuchProcess:
            return pid
    return None


class Metrics(msgspec.Struct, tag="KvMetrics", array_like=True, frozen=True):
    """The load that each rank's scheduler pushes over ZMQ (`KvMetrics`): sequences, and KV in tokens in spite of the
    names.
    """

    running: int = 0
    max_running: int = 0
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    hit_rate: float = 0.0
    rank: int = 0


_metrics = msgspec.msgpack.Decoder(Metrics)


def read_metrics(payload: bytes) -> Metrics:
    """Return the metrics. Raises WireError, also for a pickle, which SGLang can be set to send: it is never opened."""
    try:
        return _metrics.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"unreadable metrics of SGLang: {error}", hint="do not set SGLANG_USE_PICKLE_IPC") from error
