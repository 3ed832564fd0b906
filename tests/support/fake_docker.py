#!/usr/bin/env python3
"""`docker compose` and `docker inspect` as far as the planner calls them, over containers in $FAKE_DOCKER_STATE.

State: {"containers": [{"Service", "State", "Health"}], "fail": "" or what to say on stderr, "calls": [...]}.
"""

import json
import os
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    path = Path(os.environ["FAKE_DOCKER_STATE"])
    state = json.loads(path.read_text())
    state["calls"].append(argv)
    code = answer(argv, state)
    path.write_text(json.dumps(state))
    return code


def answer(argv: list[str], state: dict) -> int:
    if state["fail"]:
        print(state["fail"], file=sys.stderr)
        return 1
    if argv[0] == "inspect":
        print(json.dumps([inspected(state["containers"][int(word)]) for word in argv[1:]]))
        return 0
    if argv[0] != "compose":
        print(f"docker: {argv[0]!r} is not a docker command.", file=sys.stderr)
        return 1
    words = argv[1:]
    while words and words[0] in ("-f", "-p"):
        words = words[2:]
    command, *rest = words
    if command == "ps":
        services = [word for word in rest if not word.startswith("-")]
        for number, container in enumerate(state["containers"]):
            if container["Service"] in services:
                print(number)
        return 0
    if command == "up":
        for word in rest:
            if word.startswith("--scale="):
                service, _, count = word.removeprefix("--scale=").partition("=")
                scale(state["containers"], service, int(count))
        return 0
    print(f"unknown docker command: compose {command}", file=sys.stderr)
    return 1


def inspected(container: dict) -> dict:
    health = {"Health": {"Status": container["Health"]}} if container["Health"] else {}
    labels = {"com.docker.compose.service": container["Service"]}
    return {"State": {"Status": container["State"], **health}, "Config": {"Labels": labels}}


def scale(containers: list[dict], service: str, count: int) -> None:
    """The youngest go first, whether they are ready or not."""
    own = [c for c in containers if c["Service"] == service]
    for container in own[count:]:
        containers.remove(container)
    new = {"Service": service, "State": "running", "Health": "starting"}
    containers += [dict(new) for _ in range(count - len(own))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
