"""SGLang without a model: what `kvmesh.workers.engines.sglang` uses of the package, with the shapes of SGLang 0.5.23.

From its source: `prepare_server_args` and the fields of ServerArgs (srt/server_args.py, srt/arg_groups/fields),
`Engine.async_generate`, `get_all_child_pids`, `shutdown` (srt/entrypoints/engine.py), outputs, aborts and the reuse of
one growing list in streams that are not incremental (srt/managers/tokenizer_manager.py), finish reasons
(srt/managers/schedule_batch.py), KV events and their sockets (srt/disaggregation/kv_events.py; held to what a real one
published by tests/kvevents/test_sglang_recording.py), KvMetrics over a PUSH socket
(srt/managers/scheduler_components/kv_events_publisher.py).

Tokens are those of tests.support.toy_model. Engines of one `FakeSglang` meet in bootstrap rooms.
"""

import argparse
import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq

from kvmesh.kvevents.sockets import Frames, LoopSocket, open_socket
from kvmesh.workers.engines.sglang.runtime import FAKE_BOOTSTRAP_HOST, Runtime, Sglang
from tests.support.toy_model import VOCAB, Event, PagedCache, StoredBlocks, next_token

CONTEXT_TOKENS = 4096
VERSION = "0.5.23"

_EOS = 2


class FakeSglang:
    """The package, and the network in which its engines meet."""

    def __init__(self, num_blocks: int = 256, *, incremental: bool = True) -> None:
        self.num_blocks = num_blocks
        self.page_size: int | None = None  # that the model wants, whatever the flags say
        self.incremental = incremental  # False: as releases before --incremental-streaming-output
        self.rooms: dict[tuple[str, int, int], asyncio.Future[tuple[int, ...]]] = {}
        self.engines: list[FakeEngine] = []
        self.argv: list[list[str]] = []

    def package(self) -> Sglang:
        return Sglang(VERSION, self._parse, self._launch)

    def _parse(self, argv: list[str]) -> argparse.Namespace:
        self.argv.append(argv)
        parser = argparse.ArgumentParser(prog="sglang serve")
        for name in ("--model-path", "--served-model-name", "--host", "--kv-events-config", "--grammar-backend"):
            parser.add_argument(name)
        parser.add_argument("--page-size", type=int, default=1)
        parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--max-running-requests", type=int)
        parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"], default="null")
        parser.add_argument("--disaggregation-transfer-backend", default="mooncake")
        parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
        parser.add_argument("--lora-paths", nargs="*", default=[])
        for flag in ("--skip-tokenizer-init", "--incremental-streaming-output", "--enable-metrics", "--enable-lora"):
            parser.add_argument(flag, action="store_true")
        for flag in ("--enable-hierarchical-cache", "--enable-eplb"):
            parser.add_argument(flag, action="store_true")
        parser.add_argument("--expert-distribution-recorder-mode")
        args = parser.parse_args(argv)
        args.incremental_streaming_output = args.incremental_streaming_output and self.incremental
        return args

    def _launch(self, args: argparse.Namespace) -> Runtime:
        args.page_size = self.page_size or args.page_size
        engine = FakeEngine(self, args)
        self.engines.append(engine)
        return engine


class _PortArgs:
    def __init__(self, path: str) -> None:
        self.metrics_ipc_name = f"ipc://{path}"


class _Requests:
    """The tokenizer manager: knows the requests by their rid."""

    context_len = CONTEXT_TOKENS

    def __init__(self, engine: "FakeEngine") -> None:
        self._engine = engine
        self.running: dict[str, _State] = {}
        self.aborted: list[str] = []

    def auto_create_handle_loop(self) -> None:
        """Takes the process's signals, as the real one does in its main thread."""
        for number in (signal.SIGTERM, signal.SIGQUIT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        self._engine.open_sockets()

    async def flush_cache(self) -> SimpleNamespace:
        """Refused while anything runs; with one event if it is done."""
        if self.running:
            return SimpleNamespace(success=False, message="requests are running")
        self._engine.empty_cache()
        return SimpleNamespace(success=True, message="")

    async def start_profile(self) -> None:
        if self._engine.is_profiling:
            raise RuntimeError("Profiling is already in progress")
        self._engine.is_profiling = True

    async def stop_profile(self) -> None:
        self._engine.is_profiling = False

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.append(rid)
        if (state := self.running.get(rid)) is not None:
            state.finish({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})


class _State:
    """The outputs of one request: those that nobody has read yet are merged into the next one that is read."""

    def __init__(self, *, incremental: bool, wants_logprobs: bool, top: int) -> None:
        self.output_ids: list[int] = []
        self.changed = asyncio.Event()
        self.finish_reason: dict[str, Any] | None = None
        self.cached_tokens = 0
        self._incremental = incremental
        self._wants_logprobs = wants_logprobs
        self._top = top
        self._read = 0

    def push(self, token: int) -> None:
        self.output_ids.append(token)
        self.changed.set()

    def finish(self, reason: dict[str, Any]) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            self.changed.set()

    def output(self) -> dict[str, Any]:
        start = self._read if self._incremental else 0
        self._read = len(self.output_ids)
        ids = self.output_ids[start:] if self._incremental else self.output_ids
        if self._incremental and self.finish_reason is not None and self.finish_reason["type"] == "abort":
            ids = self.output_ids[-1:]
        meta: dict[str, Any] = {
            "id": "rid",
            "finish_reason": self.finish_reason,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
        }
        if self._wants_logprobs:
            meta["output_token_logprobs"] = [(-0.5, token, None) for token in self.output_ids[start:]]
            meta["output_top_logprobs"] = [
                [(-0.5 - n, (token + n) % VOCAB, None) for n in range(self._top)] or None
                for token in self.output_ids[start:]
            ]
        return {"output_ids": ids, "meta_info": meta}


class FakeEngine:
    """Stands for `sglang.Engine`: implements kvmesh.workers.engines.sglang.runtime.Runtime."""

    def __init__(self, network: FakeSglang, args: argparse.Namespace) -> None:
        self.server_args = args
        config = msgspec.json.decode(args.kv_events_config)
        self.events_config: dict[str, Any] = config
        self.is_leader = args.node_rank == 0
        self.requests = _Requests(self)
        self.tokenizer_manager = self.requests if self.is_leader else None
        self.port_args = _PortArgs(f"/tmp/kvmesh-fake-sglang-{os.getpid()}-{id(self)}")
        self._scheduler_init_result = _SchedulerInit(network.num_blocks * args.page_size)
        self.cache = PagedCache(network.num_blocks, args.page_size)
        self.seen: list[dict[str, Any]] = []  # arguments of async_generate
        self.warm_ups = 0
        self.is_profiling = False
        self.adapters = dict(pair.split("=", 1) for pair in args.lora_paths)
        self.child_pids: list[int] = [os.getpid()]
        self.is_shut_down = False
        self.gate = asyncio.Event()  # cleared: no request computes a token
        self.gate.set()
        self._network = network
        self._publishers: list[EventSockets] = []
        self._push: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open_sockets(self) -> None:
        if not self._publishers:
            self._loop = asyncio.get_running_loop()
            self._publishers.append(EventSockets(self.events_config))
            self._publishers[0].publish_maps([{"type": "AllBlocksCleared"}])  # it begins with an empty cache
            self._push = open_socket(zmq.PUSH)
            self._push.connect(self.port_args.metrics_ipc_name)

    async def async_generate(self, **kwargs: Any) -> AsyncGenerator[dict[str, Any], None]:
        assert kwargs.pop("stream") is True
        return self._generate_request(**kwargs)

    async def async_load_lora_adapter(self, lora_name: str, lora_path: str) -> SimpleNamespace:
        if not self.server_args.enable_lora:
            return SimpleNamespace(success=False, error_message="LoRA is not enabled.")
        self.adapters[lora_name] = lora_path
        return SimpleNamespace(success=True, error_message=None)

    async def async_unload_lora_adapter(self, lora_name: str) -> SimpleNamespace:
        del self.adapters[lora_name]
        return SimpleNamespace(success=True, error_message=None)

    def empty_cache(self) -> None:
        self.cache = PagedCache(self._network.num_blocks, self.server_args.page_size)
        self._publishers[0].publish_maps([{"type": "AllBlocksCleared"}])

    def get_all_child_pids(self) -> Sequence[int]:
        return self.child_pids

    def shutdown(self) -> None:
        """Stop, on the thread on which the worker calls everything that blocks."""
        self.is_shut_down = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._close_sockets)

    def _close_sockets(self) -> None:
        for publisher in self._publishers:
            publisher.close()
        if self._push is not None:
            self._push.close()
        Path(self.port_args.metrics_ipc_name.removeprefix("ipc://")).unlink(missing_ok=True)

    async def _generate_request(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        rid: str = "warm-up",
        bootstrap_host: str | None = None,
        bootstrap_port: int | None = None,
        bootstrap_room: int | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        lora_path: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        if len(input_ids) >= CONTEXT_TOKENS:
            raise ValueError(f"The input ({len(input_ids)} tokens) is longer than the model's context length")
        if rid in self.requests.running:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        if rid == "warm-up":
            self.warm_ups += 1
        else:
            self.seen.append({"input_ids": input_ids, "sampling_params": sampling_params, "lora_path": lora_path})
        state = _State(
            incremental=self.server_args.incremental_streaming_output,
            wants_logprobs=return_logprob,
            top=top_logprobs_num,
        )
        self.requests.running[rid] = state
        room = None if bootstrap_room is None else (bootstrap_host or "", bootstrap_port or 0, bootstrap_room)
        task = asyncio.create_task(self._schedule(state, input_ids, sampling_params, room, lora_path, cache_salt))
        try:
            while True:
                await state.changed.wait()
                state.changed.clear()
                output = state.output()
                yield output
                if output["meta_info"]["finish_reason"] is not None:
                    return
        finally:
            task.cancel()
            self.requests.running.pop(rid, None)

    async def _schedule(
        self,
        state: _State,
        input_ids: list[int],
        params: dict[str, Any],
        room: tuple[str, int, int] | None,
        lora: str | None,
        salt: str | None,
    ) -> None:
        mode = self.server_args.disaggregation_mode
        if (mode == "null") != (room is None):
            state.finish(
                {"type": "abort", "message": f"{mode} with {room}", "status_code": 400, "err_type": "BadRequest"}
            )
            return
        sequence = list(input_ids)
        if mode == "decode":
            assert room is not None
            sequence += await asyncio.shield(self._room(room))
            state.push(sequence[-1])
        else:
            state.cached_tokens = self.cache.cached_tokens(input_ids, lora, salt)
        limit = 1 if mode == "prefill" else params["max_new_tokens"]
        while not self._finish(state, params, limit):
            await self.gate.wait()
            await asyncio.sleep(0)
            sequence.append(next_token(sequence, lora))
            state.push(sequence[-1])
        self.cache.store(sequence, lora, salt)
        self._publish()
        if mode == "prefill" and room is not None and room[0] != FAKE_BOOTSTRAP_HOST:
            future = self._room(room)
            if not future.done():
                future.set_result((sequence[-1],))
        state.finish(state_reason(state, params, limit))

    def _room(self, room: tuple[str, int, int]) -> asyncio.Future[tuple[int, ...]]:
        return self._network.rooms.setdefault(room, asyncio.get_running_loop().create_future())

    def _finish(self, state: _State, params: dict[str, Any], limit: int) -> bool:
        return bool(state.output_ids) and bool(state_reason(state, params, limit))

    def _publish(self) -> None:
        news = self.cache.take_news()
        if news and self._publishers:
            self._publishers[0].publish(news, self.server_args.page_size)
        if self._push is not None:
            used = len(self.requests.running)
            metrics = ["KvMetrics", used, 8, used * self.server_args.page_size, 1, 0, 0.0, 0.0, 0]
            self._push.send(msgspec.msgpack.encode(metrics), zmq.NOBLOCK)


class _SchedulerInit:
    def __init__(self, max_total_num_tokens: int) -> None:
        self.scheduler_infos = [{"status": "ready", "max_total_num_tokens": max_total_num_tokens}]


def state_reason(state: _State, params: dict[str, Any], limit: int) -> dict[str, Any]:
    last = state.output_ids[-1]
    stops = {*params.get("stop_token_ids", ()), *(() if params.get("ignore_eos") else (_EOS,))}
    if last in stops:
        return {"type": "stop", "matched": last}
    return {"type": "length", "length": limit} if len(state.output_ids) >= limit else {}


class EventSockets:
    """A rank's PUB and ROUTER sockets; the ring replays what was sent."""

    def __init__(self, config: dict[str, Any]) -> None:
        assert config["publisher"] == "zmq" and config["bind"] is True
        self._pub = open_socket(zmq.PUB)
        self._pub.bind(config["endpoint"])
        router = open_socket(zmq.ROUTER)
        router.bind(config["replay_endpoint"])
        self._router = LoopSocket(router, self._on_request)
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=10_000)
        self._next_seq = 0

    def publish(self, news: list[Event], block_size: int) -> None:
        self.publish_maps([event_map(event, block_size) for event in news])

    def publish_maps(self, events: list[dict[str, Any]]) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._ring.append((seq, payload))
        self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._pub.close()
        self._router.close()

    def _on_request(self, frames: Frames) -> None:
        client, _, start = frames
        for seq, payload in self._ring:
            if seq >= int.from_bytes(start, "big"):
                self._router.send((client, b"", b"", seq.to_bytes(8, "big"), payload))
        self._router.send((client, b"", b"", b"\xff" * 8, b""))


@contextmanager
def event_sockets(folder: Path) -> Iterator[EventSockets]:
    """Bind ipc://`folder`/live and ipc://`folder`/replay."""
    endpoints = {"endpoint": f"ipc://{folder}/live", "replay_endpoint": f"ipc://{folder}/replay"}
    published = EventSockets({"publisher": "zmq", "bind": True} | endpoints)
    try:
        yield published
    finally:
        published.close()


def event_map(event: Event, block_size: int) -> dict[str, Any]:
    if not isinstance(event, StoredBlocks):
        return {"type": "BlockRemoved", "block_hashes": [event.block_hash], "medium": "GPU"}
    stored = {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": [token for tokens in event.tokens for token in tokens],
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
    }
    optional = {"cache_salt": event.salt, "lora_name": event.lora}
    return stored | {key: value for key, value in optional.items() if value is not None}
