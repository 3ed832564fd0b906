"""Record the KV events of a running SGLang server, for tests of kvevents/formats.py.

Start SGLang with its events on, for example on a CPU

    python -m sglang.launch_server --model-path MODEL --device cpu --page-size 16 --kv-events-config \
        '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": ""}'

and then

    python deploy/record_sglang_events.py --url http://127.0.0.1:30000 --out sglang_frames.msgpack

which sends a few prompts of token ids that share prefixes, empties the cache, and writes what was published from the
beginning on: a msgpack list of `[topic, seq (8 bytes), payload]`. Events of a later rank: add its number to both ports.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import aiohttp
import msgspec
import zmq

from kvevents.formats import decode_payload
from kvevents.publisher import END_OF_REPLAY
from kvevents.sockets import Frames, LoopSocket, open_socket
from protocol.errors import MeshError, PeerLostError

PROMPT_TOKENS = 200
ANSWER_TOKENS = 8
PATIENCE_S = 30.0
SETTLE_S = 1.0  # SGLang publishes a step's events after its answer


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the KV events of a running SGLang server.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--replay", default="tcp://127.0.0.1:5558", help="its replay endpoint")
    parser.add_argument("--prompts", type=int, default=6, help="how many are sent")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    try:
        frames = asyncio.run(record(args.url, args.replay, args.prompts))
    except (MeshError, aiohttp.ClientError, TimeoutError) as error:
        print(f"record_sglang_events: {error!r}", file=sys.stderr)
        return 1
    args.out.write_bytes(msgspec.msgpack.encode(frames))
    events = [event for _, _, payload in frames for event in decode_payload(payload).events]
    print(f"{len(frames)} batches with {len(events)} events in {args.out}")
    return 0 if events else 1


async def record(url: str, replay: str, prompts: int) -> list[Frames]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
        for number in range(prompts):
            await _ask(session, number)
        async with session.post("/flush_cache") as response:
            response.raise_for_status()
        await asyncio.sleep(SETTLE_S)
    return await fetch(replay)


async def fetch(endpoint: str) -> list[Frames]:
    """All batches that the ring still has: `[topic, seq, payload]` each. Raises PeerLostError if nobody answers."""
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


async def _ask(session: aiohttp.ClientSession, number: int) -> None:
    """Every second prompt begins as the one before it."""
    first = 100 + 37 * (number // 2)
    prompt = [(first + 7 * i) % 1000 + 10 for i in range(PROMPT_TOKENS + 20 * (number % 2))]
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS}}
    async with session.post("/generate", json=body) as response:
        response.raise_for_status()
        await response.read()


if __name__ == "__main__":
    sys.exit(main())
