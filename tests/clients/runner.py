"""Run the scripts of clients in their own environments, two at once, cut off from the internet."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.clients.catalogue import HERE, Client
from tests.clients.results import ClientResult, read_lines

SCRIPT_S = 600.0  # on a machine that does much else; alone, no script takes longer than 90 s
AT_ONCE = 2
TAIL_CHARACTERS = 3000
KEY = "sk-clients"
# What clients send home, and look up at home, unless they are told not to.
QUIET = {
    "AI_SDK_LOG_WARNINGS": "false",
    "AIPERF_DISABLE_TELEMETRY": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "NEXT_TELEMETRY_DISABLED": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_KEPT = ("LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")


def environment(client: Client, urls: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the variables of a script: nothing of the user's own settings, keys or proxies."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    cut_off = {"PYTHONPATH": str(HERE / "offline"), "NODE_OPTIONS": f"--require {HERE / 'offline' / 'offline.cjs'}"}
    path = f"{client.bin}{os.pathsep}{os.environ.get('PATH', '')}"
    own = {
        "HOME": str(home),
        "PATH": path,
        "KVMESH_API_KEY": KEY,
        "KVMESH_ATTEMPTS": str(home / "attempts"),
        "NO_COLOR": "1",
    }
    return {**kept, **QUIET, **own, **urls, **cut_off, "PYTHONUNBUFFERED": "1"}


def run_client(client: Client, urls: Mapping[str, str]) -> ClientResult:
    """Run the script of one client to its end, and return what it said."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-client-") as folder:
        home = Path(folder)
        output, trouble = _output_of(client, environment(client, urls, home), home)
        result = read_lines(output.splitlines())
        result.trouble = trouble
        attempts = home / "attempts"
        result.attempts = tuple(sorted(set(attempts.read_text().splitlines()))) if attempts.exists() else ()
    return result


def _output_of(client: Client, variables: Mapping[str, str], home: Path) -> tuple[str, str]:
    """Return the stdout of a script, and its trouble: how it ended if not with 0, and the end of its stderr."""
    with (home / "stdout").open("w+") as stdout, (home / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            client.argv, cwd=home, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        ended = _wait(process)
        stdout.seek(0)
        stderr.seek(0)
        return stdout.read(), f"{ended}: {stderr.read()[-TAIL_CHARACTERS:]}" if ended else ""


def _wait(process: subprocess.Popen[bytes]) -> str:
    """Wait for a script and everything that it started. Return how it ended, "" if well."""
    try:
        code = process.wait(SCRIPT_S)
        return f"it ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"it was still running after {SCRIPT_S:.0f} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


class Runs:
    """Start all scripts at once and hand out their results as they come."""

    def __init__(self, clients: Iterable[Client], urls: Mapping[str, str]) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._results: dict[str, Future[ClientResult]] = {
            client.name: self._pool.submit(run_client, client, urls) for client in clients
        }

    def of(self, client: Client) -> ClientResult:
        return self._results[client.name].result()

    def all(self) -> dict[str, ClientResult]:
        return {name: result.result() for name, result in self._results.items()}

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
