"""Record the KV events of a running SGLang server, for tests/kvevents/test_sglang_recording.py.

Start SGLang with its events on and room for few blocks, so that it has to drop some, for example on a CPU

    python -m sglang.launch_server --model-path MODEL --device cpu --page-size 16 --max-total-tokens 1024 \
        --kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'

and then, before anybody else asks it something,

    python deploy/record_sglang_events.py --url http://127.0.0.1:30000 --out sglang.msgpack

which sends prompts of token ids: some begin alike, some have a salt, some come at once, and together they need more
room than there is. In between it empties the cache. `Recording` is what it writes. Events of a later rank: add its
number to both ports.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq
from msgspec import Struct

from kvmesh.kvevents.formats import decode_payload
from kvmesh.kvevents.publisher import END_OF_REPLAY
from kvmesh.kvevents.sockets import Frames, LoopSocket, open_socket
from kvmesh.protocol.errors import MeshError, PeerLostError, WireError

PROMPT_TOKENS = 200
ANSWER_TOKENS = 8
NUM_STRANGERS = 6  # prompts that begin like no other, of PROMPT_TOKENS each
PATIENCE_S = 60.0
SETTLE_S = 0.5  # SGLang publishes a step's events after its answer

TokenIds = tuple[int, ...]


class RecordedPrompt(Struct, frozen=True):
    token_ids: TokenIds
    cache_salt: str | None = None


class Answered(Struct, frozen=True):
    """A prompt that ran alone: all that was published before it is known."""

    prompt: RecordedPrompt
    num_frames_before: int
    cached_tokens: int  # of the prompt, as SGLang said in its answer


class Recording(Struct, frozen=True):
    version: str  # of SGLang
    page_size: int  # tokens of a block
    answers: tuple[Answered, ...]
    frames: tuple[tuple[bytes, bytes, bytes], ...]  # topic, seq (8 bytes, big endian), payload


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the KV events of a running SGLang server.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--replay", default="tcp://127.0.0.1:5558", help="its replay endpoint")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    try:
        recording = asyncio.run(record(args.url, args.replay))
    except (MeshError, aiohttp.ClientError, TimeoutError) as error:
        print(f"record_sglang_events: {error!r}", file=sys.stderr)
        return 1
    args.out.write_bytes(msgspec.msgpack.encode(recording))
    events = [event for _, _, payload in recording.frames for event in decode_payload(payload).events]
    print(f"SGLang {recording.version}: {len(recording.frames)} batches with {len(events)} events in {args.out}")
    return 0 if events else 1


async def record(url: str, replay: str) -> Recording:
    """Raises PeerLostError, WireError if the server does not tell what is needed, and aiohttp's errors."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
        version, page_size = await _server_info(session)
        answers = [await _ask_alone(session, replay, prompt) for prompt in prompts()]
        await asyncio.gather(*[_ask(session, prompt) for prompt in prompts_at_once()])
        answers += [await _ask_alone(session, replay, prompt) for prompt in prompts_at_once()]
        async with session.post("/flush_cache") as response:
            response.raise_for_status()
        answers += [await _ask_alone(session, replay, prompt) for prompt in prompts()[:3]]
        await asyncio.sleep(SETTLE_S)
    topics_seqs_payloads = [(topic, seq, payload) for topic, seq, payload in await fetch(replay)]
    return Recording(version, page_size, tuple(answers), tuple(topics_seqs_payloads))


def prompts() -> list[RecordedPrompt]:
    """Send prompts one after the other: they share prefixes, then evict each other from a small cache."""
    first = numbered(0)
    strangers = [RecordedPrompt(numbered(n)) for n in range(2, 2 + NUM_STRANGERS)]
    return [
        RecordedPrompt(first),
        RecordedPrompt(first + numbered(1)[:40]),  # continues where the first ends
        RecordedPrompt(first[: PROMPT_TOKENS // 2] + numbered(1)),  # leaves it half way
        RecordedPrompt(first),
        RecordedPrompt(first, cache_salt="tenant"),
        RecordedPrompt(first + numbered(1)[:40], cache_salt="tenant"),
        *strangers,
        RecordedPrompt(first),
        *strangers[-2:],
    ]


def prompts_at_once() -> list[RecordedPrompt]:
    """Send prompts at once: each computes the same beginning, because none has ended when the others start."""
    beginning = numbered(40)[: PROMPT_TOKENS // 2]
    return [RecordedPrompt(beginning + numbered(n)[:20]) for n in (41, 42, 43)]


def numbered(number: int) -> TokenIds:
    """PROMPT_TOKENS tokens that begin like those of no other `number` below 100."""
    return tuple((37 * number + 7 * position) % 1000 + 10 for position in range(PROMPT_TOKENS))


async def fetch(endpoint: str) -> list[Frames]:
    """Return all batches in the ring: `[topic, seq, payload]` each. Raises PeerLostError without an answer."""
    frames: list[Frames] = []
    heard = asyncio.Event()
    ended = asyncio.Event()

    def on_message(message: Frames) -> None:
        heard.set()
        if message[-2] == END_OF_REPLAY:
            ended.set()
        else:
            frames.append(message[-3:])

    socket = open_socket(zmq.DEALER, receive=100_000)
    socket.connect(endpoint)
    dealer = LoopSocket(socket, on_message)
    try:
        dealer.send([b"", (0).to_bytes(8, "big")])
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    except TimeoutError as error:
        said = "stopped in the middle" if heard.is_set() else "does not answer"
        raise PeerLostError(f"the replay socket {endpoint} {said}", hint="check --kv-events-config") from error
    finally:
        dealer.close()
    return frames


async def _server_info(session: aiohttp.ClientSession) -> tuple[str, int]:
    """SGLang's version, and the tokens of a block."""
    async with session.get("/server_info") as response:
        response.raise_for_status()
        info = await response.json()
    try:
        return str(info["version"]), int(info["page_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"/server_info does not tell {error}", hint="is this a SGLang server?") from error


async def _ask_alone(session: aiohttp.ClientSession, replay: str, prompt: RecordedPrompt) -> Answered:
    await asyncio.sleep(SETTLE_S)
    num_frames_before = len(await fetch(replay))
    return Answered(prompt, num_frames_before, await _ask(session, prompt))


async def _ask(session: aiohttp.ClientSession, prompt: RecordedPrompt) -> int:
    """Return how many of the prompt's tokens SGLang had cached."""
    body: dict[str, Any] = {
        "input_ids": prompt.token_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
    }
    if prompt.cache_salt is not None:
        body["cache_salt"] = prompt.cache_salt
    async with session.post("/generate", json=body) as response:
        response.raise_for_status()
        answer = await response.json()
    try:
        return int(answer["meta_info"]["cached_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"an answer of SGLang does not tell {error}", hint="it was recorded with 0.5.23") from error


if __name__ == "__main__":
    sys.exit(main())
