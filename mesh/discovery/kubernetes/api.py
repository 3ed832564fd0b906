"""Talk to a Kubernetes API server over HTTP, as a pod's service account."""

import asyncio
import base64
import binascii
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvmesh.mesh.bodies import bounded
from kvmesh.mesh.silence import probe_when_silent
from kvmesh.protocol.errors import ConfigError, MeshError, WireError
from kvmesh.protocol.messages import UNREADABLE

ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 32 << 20  # a page of 250 pods has about 2 MB
MAX_LINE_BYTES = 4 << 20  # an object has at most 1.5 MiB in etcd
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class KubernetesError(MeshError):
    """The API server has refused, or does not answer."""

    code = "kubernetes"

    def __init__(self, message: str, status: int = 0, hint: str = "") -> None:
        """Make the text. `status` is that of HTTP, 0 if there was no answer that could be read."""
        super().__init__(message, hint=hint)
        self.status = status


@dataclass(frozen=True, slots=True)
class Account:
    """The address of the API server, and the credentials for it."""

    url: str
    namespace: str
    token_file: Path | None  # Kubernetes renews it while we run
    ca_file: Path | None


@dataclass(frozen=True, slots=True)
class ApiTarget:
    """Names what a request is about, in the words of a Role: they stand in the error if it is refused."""

    path: str  # without the leading slash
    verb: str
    resource: str  # such as `pods` or `deployments.apps/scale`


def account_of(
    folder: str, url: str = "", namespace: str = "", *, token_file: str = "", ca_file: str = "", setting: str = ""
) -> Account:
    """Read the account from the files that Kubernetes puts into a pod. Raise ConfigError outside of a pod.

    `url`, `namespace` and the two files win over those of the pod. `setting` says how to set them, for errors.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not url and not host:
        raise ConfigError("there is no Kubernetes here", hint=f"run this in a pod, or set {setting}")
    if url and not is_http(url):
        raise ConfigError(f"no API server at {url!r}", hint="write https://host:port")
    files = Path(folder)
    if not namespace:
        try:
            namespace = (files / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(f"no namespace in {folder}: {error}", hint=f"set {setting}") from error
    if not _DNS_LABEL.fullmatch(namespace):
        raise ConfigError(f"{namespace!r} is no namespace of Kubernetes", hint="use a-z, 0-9 and -, at most 63")
    shown = f"[{host}]" if ":" in host else host
    for named in (token_file, ca_file):
        if named and not os.access(named, os.R_OK):
            raise ConfigError(f"{named} cannot be read", hint="name a file that this user may read")
    token, ca = Path(token_file or files / "token"), Path(ca_file or files / "ca.crt")
    return Account(
        url.rstrip("/") or f"https://{shown}:{port}",
        namespace,
        token if token.exists() or not url else None,  # `kubectl proxy` needs none
        ca if ca.exists() else None,
    )


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class KubernetesApi:
    """Sends requests to the API server. Every method raises KubernetesError if it does not do what it is asked."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._http: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | bool = True  # True: the certificates of this host

    async def ask(
        self,
        method: str,
        target: ApiTarget,
        *,
        body: object = None,
        body_type: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of an answer of 200 or 201."""
        data = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session().request(
                method, self._url(target), data=data, params=params, timeout=timeout, ssl=self._tls,
                headers=self._headers(None if body is None else body_type),
            ) as response:  # fmt: skip
                content = await bounded(response, MAX_BODY_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, WireError) as error:
            raise self._no_answer(target, error) from error
        if response.status not in (200, 201):
            raise self._refusal(target, response.status, content)
        return content

    async def ask_json(self, method: str, target: ApiTarget, **options: Any) -> dict[str, Any]:
        """Return the object of an answer."""
        content = await self.ask(method, target, **options)
        try:
            answer = msgspec.json.decode(content)
        except UNREADABLE as error:
            raise KubernetesError(f"{self._shown(target)} answered 200, not with JSON: {error}") from error
        if not isinstance(answer, dict):
            raise KubernetesError(f"{self._shown(target)} answered 200, not with an object")
        return answer

    async def watch(self, target: ApiTarget, params: Mapping[str, str], limit_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch until the server ends it. A server that takes longer than `limit_s` is cut off."""
        timeout = aiohttp.ClientTimeout(limit_s, connect=CONNECT_TIMEOUT_S)
        async with AsyncExitStack() as cleanup:
            try:
                response = await cleanup.enter_async_context(
                    self._session().get(
                        self._url(target), params=params, timeout=timeout, ssl=self._tls, headers=self._headers(None)
                    )
                )
                if response.status != 200:
                    raise self._refusal(target, response.status, await bounded(response, MAX_BODY_BYTES))
                break_when_cut(response)
                async for line in lines(response, MAX_LINE_BYTES):
                    yield line
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, WireError) as error:
                raise self._no_answer(target, error) from error

    async def close(self) -> None:
        """End all connections. A second call does nothing."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def who(self) -> str:
        """Return the name of the service account, as its token says it; "" if it does not."""
        try:
            return subject_of(self._token())
        except OSError:
            return ""

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
            if self.account.ca_file is not None:
                self._tls = ssl.create_default_context(cafile=str(self.account.ca_file))
        return self._http

    def _token(self) -> str:
        return "" if self.account.token_file is None else self.account.token_file.read_text().strip()

    def _headers(self, body_type: str | None) -> dict[str, str]:
        headers = {} if body_type is None else {"content-type": body_type}
        if token := self._token():
            headers["authorization"] = f"Bearer {token}"
        return headers

    def _url(self, target: ApiTarget) -> str:
        return f"{self.account.url}/{target.path}"

    def _shown(self, target: ApiTarget) -> str:
        return f"{target.verb} {self._url(target)}"

    def _no_answer(self, target: ApiTarget, error: Exception) -> KubernetesError:
        return KubernetesError(f"{self._shown(target)}: {told(error)}")

    def _refusal(self, target: ApiTarget, status: int, content: bytes) -> KubernetesError:
        said = message_of(content)
        if status == 403:
            who = self.who() or "this user"
            said = said.partition(": RBAC:")[0]  # then come Roles of Kubernetes itself that are not loaded yet
            return KubernetesError(
                f"{who} may not {target.verb} {target.resource} in the namespace {self.account.namespace}, "
                f"says the API server at {self.account.url}: {said}",
                status,
                f"give it a Role with the verb {target.verb} on {target.resource}, such as that of the Helm chart",
            )
        if status == 401:
            return KubernetesError(
                f"the API server at {self.account.url} does not accept the token of {self.account.token_file} "
                f"(401): {said}",
                status,
                "see whether the pod has a service account and its token is that of this cluster",
            )
        return KubernetesError(f"{self._shown(target)} answered {status}: {said}", status)


async def lines(response: aiohttp.ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the lines of a body as they come. Raise WireError for one that is longer than `max_bytes`."""
    rest = bytearray()
    async for part in response.content.iter_any():
        begin = 0
        while (end := part.find(b"\n", begin)) >= 0:
            rest += part[begin:end]
            begin = end + 1
            if rest.strip():
                yield bytes(rest)
            rest.clear()
            await asyncio.sleep(0)
        rest += part[begin:]
        if len(rest) > max_bytes:
            raise WireError(f"{response.url.with_query(None)} sends a line of more than {max_bytes} bytes")
    if rest.strip():
        raise WireError("the connection broke in the middle of an event")


def break_when_cut(response: aiohttp.ClientResponse) -> None:
    """Have the kernel break a watch whose server has gone: on an idle one nothing else would notice for minutes."""
    connection = response.connection
    transport = None if connection is None else connection.transport
    wire = None if transport is None else transport.get_extra_info("socket")
    if wire is not None:
        with socket.socket(fileno=os.dup(wire.fileno())) as copy:
            probe_when_silent(copy)


def told(error: Exception) -> str:
    """Return why there is no answer, without what only programmers understand."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return f"cannot connect: {error.os_error.strerror}"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return "the connection broke"
    return str(error) or "no answer in time"


def message_of(content: bytes) -> str:
    """Return what a refusal says: the message of a Status object, or the beginning of the body."""
    try:
        said = msgspec.json.decode(content)
        if isinstance(said, dict) and isinstance(said.get("message"), str):
            return str(said["message"])[:500]
    except UNREADABLE:
        pass
    return content[:200].decode(errors="replace").strip()


def subject_of(token: str) -> str:
    """Return the account that a token names, "" if it names none. It is not verified: the text is for messages."""
    parts = token.split(".")
    if len(parts) != 3:
        return ""
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (*UNREADABLE, binascii.Error, ValueError):
        return ""
    subject = claims.get("sub") if isinstance(claims, dict) else ""
    return subject[:200] if isinstance(subject, str) else ""
