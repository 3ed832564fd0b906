"""Streamed completions as a client sees them, each read by a thread of its own; and the answers they must get."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.tokenizer import Tokenizer
from kvmesh.workers.engines.mock.executor import mock_token
from tests.support.mesh import until
from tests.support.patience import PATIENCE_S

VOCAB = 2048  # of the mock engine


class Stream:
    """One streamed text completion, greedy unless said otherwise."""

    def __init__(
        self,
        url: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> None:
        self.prompt, self.max_tokens, self.deadline_s = list(prompt), max_tokens, timeout_s
        self.status = 0
        self.headers: dict[str, str] = {}
        self.tokens: list[str] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.trace: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None  # of a reply that is no stream, or the stream's last event
        self.is_done = False  # [DONE] has come
        self.broken = ""  # how the connection broke
        self.began = time.monotonic()
        self.took_s = 0.0
        self.ended_s = 0.0  # when
        fields = {"model": "tiny", "prompt": self.prompt, "max_tokens": max_tokens, "temperature": 0}
        fields |= {"ignore_eos": True, "logprobs": 0, "stream": True, "kvmesh": {"trace": True}}
        self._body = json.dumps(fields | body)
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if timeout_s is not None:
            self._headers["x-request-timeout-s"] = str(timeout_s)
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float = PATIENCE_S) -> "Stream":
        """Wait for the end; a stream that hangs is a failure."""
        self._thread.join(timeout_s)
        assert self.is_over, f"hangs after {time.monotonic() - self.began:.1f} s and {len(self.tokens)} tokens"
        return self

    def until_tokens(self, count: int) -> "Stream":
        until(lambda: len(self.tokens) >= count or self.is_over, what=f"{count} tokens")
        assert len(self.tokens) >= count, self
        return self

    def leave(self) -> None:
        """As a client that goes away."""
        until(lambda: self._socket is not None)
        assert self._socket is not None
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k[0] != "_" and k not in ("prompt", "tokens", "text")}
        return f"Stream({len(self.prompt)} + {len(self.tokens)}/{self.max_tokens} tokens, {shown})"

    def _run(self) -> None:
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            self._connection.request("POST", "/v1/completions", self._body, self._headers)
            response = self._connection.getresponse()
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            self.status = response.status
            if response.status != 200:
                self.error = json.loads(response.read())["error"]
                return
            if not response.headers["content-type"].startswith("text/event-stream"):
                self._on_event(response.read())
                self.is_done = True
                return
            while line := response.readline():
                if line.startswith(b"data: "):
                    self._on_event(line[6:].strip())
        except (OSError, http.client.HTTPException) as error:
            self.broken = repr(error)
        finally:
            self.ended_s = time.monotonic()
            self.took_s = self.ended_s - self.began
            self._connection.close()

    def _on_event(self, data: bytes) -> None:
        assert not self.is_done, "an event after [DONE]"
        if data == b"[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        self.trace = event.get("kvmesh", self.trace)
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["logprobs"] is not None:
                self.tokens += choice["logprobs"]["tokens"]


def check_answer(stream: Stream, expected: Sequence[str]) -> None:
    """The whole answer, with neither a token lost nor one repeated."""
    assert (stream.status, stream.error, stream.broken) == (200, None, ""), stream
    assert stream.is_done, stream
    assert stream.finish_reason == "length", stream
    assert stream.tokens == list(expected), stream


def check_mock_answer(stream: Stream) -> None:
    check_answer(stream, mock_answer(stream.prompt, stream.max_tokens))


def check_failed_loudly(stream: Stream) -> None:
    """An error as status or as last event, after nothing but right tokens; never the look of a whole answer."""
    assert stream.error is not None, stream
    assert not stream.is_done, stream
    assert stream.tokens == mock_answer(stream.prompt, stream.max_tokens)[: len(stream.tokens)]


def mock_answer(prompt: Sequence[int], count: int) -> list[str]:
    """The tokens of the mock engine's answer, as the API shows them."""
    return [_shown(mock_token(prompt, index, VOCAB)) for index in range(count)]


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(CHECKPOINT_DIR)


@cache
def _shown(token_id: int) -> str:
    return _tokenizer().token_bytes(token_id).decode(errors="replace")
