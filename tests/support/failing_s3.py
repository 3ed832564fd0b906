"""A server that speaks the part of S3's protocol that shared storage uses, and that fails as it is told to."""

import hashlib
import socket
import struct
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from types import TracebackType
from typing import ClassVar, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Trouble = Literal[
    "", "silent", "late", "trickle", "half", "reset", "unavailable", "denied", "garbage", "endless", "whole"
]
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
BUCKET = "failing"
PAGE = 100  # objects of one page of a listing
WHEN = "%Y-%m-%dT%H:%M:%S.000Z"


class FailingS3:
    """Runs inside `with`. `trouble` may change at any time:

    silent: a request gets no answer. late: each answer comes after `late_s`. trickle: a body comes byte by byte.
    half: the connection breaks in the middle of a body. reset: the work is done, and the answer is lost.
    unavailable: 503. denied: 403. garbage: 200 with a page for people. endless: a listing always has another page.
    whole: ranges are not known.
    """

    def __init__(self) -> None:
        self.trouble: Trouble = ""
        self.late_s = 0.3
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.requests = 0
        self.pages = 0
        self.lock = Lock()
        self.ended = Event()
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def place(self) -> str:
        return f"s3://{BUCKET}/kv"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ClassVar[FailingS3]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if "list-type" in query:
            self._answer(200, self._page(query.get("prefix", [""])[0], int(query.get("continuation-token", ["0"])[0])))
            return
        with self.store.lock:
            found = self.store.objects.get(self._key())
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        body, when_s = found
        headers = {
            "ETag": _etag(body),
            "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(when_s)),
        }
        span = self.headers.get("Range")
        if span is None or self.store.trouble == "whole":
            self._answer(200, body, headers)
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        part = body[int(first) : int(last) + 1]
        if not part:
            self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
        self._answer(206, part, headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self._key()
        if self._is_denied():
            return
        with self.store.lock:
            there = self.store.objects.get(key)
            match = self.headers.get("If-Match")
            is_refused = (self.headers.get("If-None-Match") == "*" and there is not None) or (
                match is not None and (there is None or _etag(there[0]) != match)
            )
            if not is_refused:
                self.store.objects[key] = (body, time.time())
        if is_refused:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self._answer(200, b"", {"ETag": _etag(body)})

    def do_DELETE(self) -> None:
        if self._is_denied():
            return
        with self.store.lock:
            self.store.objects.pop(self._key(), None)
        self._answer(204, b"")

    def do_POST(self) -> None:
        """Remove several objects, as the bulk call does."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self._is_denied():
            return
        keys = [part.partition("</Key>")[0] for part in body.split("<Key>")[1:]]
        with self.store.lock:
            for key in keys:
                self.store.objects.pop(key, None)
        shown = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{shown}</DeleteResult>".encode())

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _page(self, prefix: str, first: int) -> bytes:
        with self.store.lock:
            self.store.pages += 1
            found = sorted((key, value) for key, value in self.store.objects.items() if key.startswith(prefix))
        is_endless = self.store.trouble == "endless"
        page = found[:PAGE] if is_endless else found[first : first + PAGE]
        is_more = is_endless or first + PAGE < len(found)
        shown = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{time.strftime(WHEN, time.gmtime(when_s))}</LastModified>"
            f"<ETag>{_etag(body)}</ETag><Size>{len(body)}</Size></Contents>"
            for key, (body, when_s) in page
        )
        more = f"<NextContinuationToken>{first + PAGE}</NextContinuationToken>" if is_more else ""
        return (
            f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{'true' if is_more else 'false'}</IsTruncated>{shown}{more}</ListBucketResult>"
        ).encode()

    def _is_denied(self) -> bool:
        """Answer for a server that does nothing; return whether it is one."""
        if self.store.trouble in ("silent", "unavailable", "denied", "garbage"):
            self._answer(200, b"")
            return True
        return False

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        store = self.store
        store.requests += 1
        match store.trouble:
            case "silent":
                store.ended.wait()
                self.close_connection = True
                return
            case "late":
                store.ended.wait(store.late_s)
            case "reset":
                self._reset()
                return
            case "unavailable":
                status, body, headers = 503, b"<Error><Code>SlowDown</Code></Error>", {}
            case "denied":
                status, body, headers = 403, b"<Error><Code>AccessDenied</Code></Error>", {}
            case "garbage":
                status, body, headers = 200, b"<html><body>Please log in</body></html>", {}
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if store.trouble == "half":
            self.wfile.write(body[: len(body) // 2])
            self._reset()
        elif store.trouble == "trickle":
            for at in range(len(body)):
                self.wfile.write(body[at : at + 1])
                if store.ended.wait(0.1):
                    return
        else:
            self.wfile.write(body)

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
