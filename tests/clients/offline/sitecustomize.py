"""Refuse every connection that leaves this host, and write it down. Python imports this by itself at its start."""

import os
import sys

_HERE = ("127.", "::1", "localhost", "0.0.0.0")
_ATTEMPTS = os.environ.get("KVMESH_ATTEMPTS", "")


def _refuse(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if not host or host.startswith(_HERE):
        return
    if _ATTEMPTS:
        with open(_ATTEMPTS, "a") as file:
            file.write(f"{host}\n")
    raise ConnectionRefusedError(f"clients under test may not leave this host: {host}")


sys.addaudithook(_refuse)
