"""Many requests of all kinds while workers are killed and stalled at random: every answer is right, or fails loudly.

One seed, so that two runs of one commit do the same: KVMESH_FAULT_SEED sets another, KVMESH_FAULT_ROUNDS makes it
longer. `kvmesh lab faults` draws a seed of its own for each run.
"""

import os
import random
import signal
import threading
import time
from collections import Counter

from tests.faults.conftest import PAIR
from tests.faults.prompts import prompt_of
from tests.support.mesh import Mesh
from tests.support.recovery import OWN_WAY_S
from tests.support.streams import Stream, check_failed_loudly, check_mock_answer, mock_answer

SEED = int(os.environ.get("KVMESH_FAULT_SEED", 1))
ROUNDS = int(os.environ.get("KVMESH_FAULT_ROUNDS", 8))
REQUESTS_PER_ROUND = 8
LOSSES = {"peer_lost", "engine", "no_worker", "draining", "cancelled", "deadline_exceeded"}


def start(mesh: Mesh, rng: random.Random) -> Stream:
    length = rng.choice([1, 15, 16, 17, 40, 100, 700])
    body = {
        "kvmesh": {"trace": True, "disaggregate": rng.choice([True, True, False, None])},
        "stream": rng.random() < 0.9,
        "timeout_s": rng.choice([None, None, None, 1.5]),
    }
    return Stream(mesh.url, prompt_of(length, rng.randrange(50)), rng.choice([1, 2, 20, 100, 200]), **body)


def disturb(mesh: Mesh, rng: random.Random) -> None:
    name = rng.choice(PAIR)
    if name not in mesh.workers():
        return  # it is being started again
    match rng.random():
        case draw if draw < 0.6:
            mesh.kill(name)
        case draw if draw < 0.75:
            mesh.signal(name, signal.SIGTERM)
        case _:
            pid = mesh.pid(name)
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(rng.uniform(0.05, 0.4), resume, [pid]).start()


def resume(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # killed meanwhile


def check(stream: Stream, has_left: bool) -> None:
    if has_left:
        expected = mock_answer(stream.prompt, stream.max_tokens)
        assert stream.tokens == expected[: len(stream.tokens)], stream
    elif stream.error is not None:
        check_failed_loudly(stream)
        assert stream.error["code"] in LOSSES, stream
    else:
        check_mock_answer(stream)


def test_every_answer_is_right_or_fails_loudly(mesh: Mesh) -> None:
    print(f"KVMESH_FAULT_SEED={SEED}")
    rng = random.Random(SEED)
    streams: list[Stream] = []
    left: set[Stream] = set()
    for _ in range(ROUNDS):
        streams += [start(mesh, rng) for _ in range(REQUESTS_PER_ROUND)]
        time.sleep(rng.uniform(0.05, 0.3))
        disturb(mesh, rng)
        for stream in rng.sample(streams, 2):
            if not stream.is_over:
                left.add(stream)
                stream.leave()
    for stream in streams:
        stream.join()
    for stream in streams:
        check(stream, stream in left)
        assert stream.deadline_s is None or stream.took_s < stream.deadline_s + OWN_WAY_S, stream
    whole = [s for s in streams if s.is_done or (s.status == 200 and s not in left and s.finish_reason)]
    failed = [s for s in streams if s.error is not None and s not in left]
    reasons = Counter(stream.error["code"] for stream in failed)
    print(f"{len(streams)} requests: {len(whole)} whole, {len(left)} left, {len(failed)} failed {dict(reasons)}")
    assert whole
