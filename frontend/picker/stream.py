"""Follow one HTTP request as Envoy shows it: messages in, answers out. Pure: who picks and who sends stands elsewhere.

Envoy sends the head of a request, its body in one of several modes, and later the response, if it is set so. Each
message needs an answer of its own kind. The answer to the head, or that to the body, says where the request goes.
"""

from dataclasses import dataclass

from kvmesh.frontend.picker.budget import BodyBudget
from kvmesh.frontend.picker.wire import (
    BodyMode,
    BodyPart,
    Heard,
    RequestHead,
    ResponseHead,
    Steering,
    Trailers,
    body_part,
    head_answer,
    trailers_answer,
    whole_body_answer,
)
from kvmesh.mesh.http.errors import BodyTooLargeError
from kvmesh.protocol.errors import MeshError, WireError

PART_BYTES = 62_000  # of a body that is sent back: Envoy takes at most 64 KiB at once
SEE_MODES = "set request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED, see docs/gateway.md"
EVENT = b"data:"  # begins an event of a stream, which has about one token


class GatewayModeError(MeshError):
    """The gateway sends bodies in a way in which no picker can read them."""

    code = "gateway_mode"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that an endpoint is to be picked for."""

    head: RequestHead
    body: bytes | None  # None: it is not read


class ExtProcStream:
    """The state of one request at the gateway. Its body counts in the budget until it is sent on."""

    def __init__(self, max_body_bytes: int, budget: BodyBudget) -> None:
        self._max_body_bytes = max_body_bytes
        self._budget = budget
        self._head: RequestHead | None = None
        self._reads_body = False
        self._parts: list[bytes] = []
        self._size = 0
        self._has_trailers = False
        self._asked: Asked | None = None
        self._is_steered = False
        self.status = 0  # of the response; 0: not seen yet
        self.events = 0  # of a streamed response, so far
        self.has_begun = False  # the first part of the answer has come
        self.has_ended = False  # the end of the response was seen

    @property
    def asked(self) -> Asked | None:
        """Return the request once it is complete and until it is `steered`."""
        return self._asked

    @property
    def sees_answer(self) -> bool:
        """Return whether Envoy shows the response to its end."""
        return self._head is not None and self._head.response_mode is not BodyMode.NONE

    def hear(self, heard: Heard, reads_body: bool = True) -> list[bytes]:
        """Take a message; return the answers that need no endpoint. `reads_body` counts for a head alone.

        Raise WireError for a message out of turn, BodyTooLargeError, OverloadedError if all bodies together are too
        large, GatewayModeError if Envoy is set so that no body can be read.
        """
        match heard:
            case RequestHead():
                return self._on_head(heard, reads_body)
            case BodyPart(of_request=True):
                return self._on_request_body(heard)
            case Trailers(of_request=True):
                return self._on_request_trailers()
            case ResponseHead():
                return self._on_response_head(heard)
            case BodyPart():
                return self._on_response_body(heard)
            case Trailers():
                self.has_ended = True
                return [trailers_answer(of_request=False)]

    def steered(self, steering: Steering, body: bytes | None = None) -> list[bytes]:
        """Return the answers that send the request to an endpoint; `body` takes the place of its body."""
        assert self._asked is not None and not self._is_steered, "an endpoint is picked once"
        own = self._asked.body
        self._is_steered = True
        self.forget_body()
        if own is None:
            return [head_answer(of_request=True, steering=steering)]
        if self._mode is BodyMode.FULL_DUPLEX_STREAMED:
            whole = own if body is None else body
            return [head_answer(of_request=True, steering=steering), *self._sent_back(whole)]
        return [whole_body_answer(of_request=True, steering=steering, body=body)]

    def forget_body(self) -> None:
        """Let the body go. A second call does nothing."""
        self._asked = None
        self._parts.clear()
        self._budget.give_back(self._size)
        self._size = 0

    # --- the request ---------------------------------------------------------------------------------------------

    @property
    def _mode(self) -> BodyMode:
        if self._head is None:
            raise WireError("the gateway has sent a body before its headers")
        return self._head.request_mode

    def _on_head(self, head: RequestHead, reads_body: bool) -> list[bytes]:
        if self._head is not None:
            raise WireError("the gateway has sent two heads of one request")
        self._head = head
        if not (head.has_body and reads_body):
            self._asked = Asked(head, None)
            return []
        if head.request_mode not in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED):
            raise GatewayModeError(
                f"the gateway sends request bodies in the mode {head.request_mode.name}", hint=SEE_MODES
            )
        self._reads_body = True
        return [head_answer(of_request=True)] if head.request_mode is BodyMode.BUFFERED else []

    def _on_request_body(self, part: BodyPart) -> list[bytes]:
        mode = self._mode
        if not self._reads_body or self._is_steered:
            return [self._passed_on(part, mode)]
        if self._asked is not None:
            raise WireError("the gateway has sent more of a body after its end")
        self._budget.hold(len(part.data))
        self._size += len(part.data)
        if self._size > self._max_body_bytes:
            raise BodyTooLargeError(
                f"the request body has more than {self._max_body_bytes} bytes", hint="send less, or raise the limit"
            )
        self._parts.append(part.data)
        if part.is_last or mode is BodyMode.BUFFERED:  # with trailers, a body that was kept is not marked as the last
            self._complete()
        return []

    def _on_request_trailers(self) -> list[bytes]:
        if not self._reads_body or self._is_steered:
            return [trailers_answer(of_request=True)]
        self._has_trailers = True
        if self._asked is None:
            self._complete()
        return []

    def _complete(self) -> None:
        assert self._head is not None
        self._asked = Asked(self._head, b"".join(self._parts))
        self._parts.clear()

    def _sent_back(self, body: bytes) -> list[bytes]:
        """Return the whole body in parts; trailers end it if there are any."""
        starts = range(0, len(body), PART_BYTES) or range(1)
        parts = [
            body_part(
                of_request=True,
                data=body[start : start + PART_BYTES],
                is_last=start + PART_BYTES >= len(body) and not self._has_trailers,
            )
            for start in starts
        ]
        return [*parts, trailers_answer(of_request=True)] if self._has_trailers else parts

    # --- the response --------------------------------------------------------------------------------------------

    def _on_response_head(self, head: ResponseHead) -> list[bytes]:
        self.status = head.status
        self.has_begun = self.has_begun or not self.sees_answer
        self.has_ended = not head.has_body
        return [head_answer(of_request=False)]

    def _on_response_body(self, part: BodyPart) -> list[bytes]:
        if self._head is None:
            raise WireError("the gateway has sent a response before its request")
        self.has_begun = self.has_begun or bool(part.data)
        self.events += part.data.count(EVENT)
        self.has_ended = part.is_last
        return [self._passed_on(part, self._head.response_mode)]

    @staticmethod
    def _passed_on(part: BodyPart, mode: BodyMode) -> bytes:
        """Return the answer to a part of a body that stays as it is."""
        if mode is BodyMode.FULL_DUPLEX_STREAMED:
            return body_part(of_request=part.of_request, data=part.data, is_last=part.is_last)
        return whole_body_answer(of_request=part.of_request)
