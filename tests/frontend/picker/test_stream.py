"""One request as a gateway shows it, in each mode; the answers come in the order that Envoy expects."""

import pytest

from kvmesh.frontend.picker.budget import BodyBudget
from kvmesh.frontend.picker.stream import PART_BYTES, ExtProcStream, GatewayModeError
from kvmesh.frontend.picker.wire import BodyMode, BodyPart, RequestHead, ResponseHead, Steering, Trailers, message_class
from kvmesh.mesh.http.errors import BodyTooLargeError
from kvmesh.protocol.errors import OverloadedError, WireError

DUPLEX, BUFFERED, NONE = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED, BodyMode.NONE
STEERING = Steering("10.0.0.1:80", {})
HEADERS = [(":method", "POST"), (":path", "/v1/chat/completions")]


def head(request: BodyMode = DUPLEX, response: BodyMode = DUPLEX, *, has_body: bool = True) -> RequestHead:
    return RequestHead(HEADERS, has_body, request, response)


def part(data: bytes, *, is_last: bool = True, of_request: bool = True) -> BodyPart:
    return BodyPart(of_request, data, is_last)


def kinds(answers: list[bytes]) -> list[str]:
    return [message_class("ProcessingResponse").FromString(answer).WhichOneof("response") for answer in answers]


def stream(max_body_bytes: int = 1 << 20, budget: BodyBudget | None = None) -> ExtProcStream:
    return ExtProcStream(max_body_bytes, budget or BodyBudget(1 << 30))


def test_duplex_answers_nothing_before_the_body_is_read() -> None:
    one = stream()
    assert one.hear(head()) == one.hear(part(b"a", is_last=False)) == one.hear(part(b"b")) == []
    assert one.asked is not None and one.asked.body == b"ab"
    assert kinds(one.steered(STEERING)) == ["request_headers", "request_body"]
    assert one.asked is None


def test_a_kept_body_is_asked_for_by_answering_the_head() -> None:
    one = stream()
    assert kinds(one.hear(head(BUFFERED, NONE))) == ["request_headers"]
    assert one.hear(part(b"ab")) == []
    assert kinds(one.steered(STEERING)) == ["request_body"]


def test_a_request_without_a_body_is_steered_by_its_head() -> None:
    one = stream()
    assert one.hear(head(has_body=False)) == []
    assert one.asked is not None and one.asked.body is None
    assert kinds(one.steered(STEERING)) == ["request_headers"]


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED, BodyMode.STREAMED])
def test_a_body_that_is_not_read_passes_through(mode: BodyMode) -> None:
    one = stream()
    one.hear(head(mode), reads_body=False)
    one.steered(STEERING)
    assert kinds(one.hear(part(b"x", is_last=False))) == ["request_body"]
    assert kinds(one.hear(Trailers(True))) == ["request_trailers"]


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_a_body_is_sent_back_in_parts_of_which_one_is_last(size: int) -> None:
    one = stream()
    one.hear(head())
    one.hear(part(b"x" * size))
    answers = [message_class("ProcessingResponse").FromString(answer) for answer in one.steered(STEERING)[1:]]
    parts = [answer.request_body.response.body_mutation.streamed_response for answer in answers]
    assert b"".join(one.body for one in parts) == b"x" * size
    assert [one.end_of_stream for one in parts] == [False] * (len(parts) - 1) + [True]


def test_trailers_are_the_last_thing_sent_back() -> None:
    one = stream()
    one.hear(head())
    one.hear(part(b"x", is_last=False))
    assert one.hear(Trailers(True)) == []
    assert kinds(one.steered(STEERING)) == ["request_headers", "request_body", "request_trailers"]


def test_bodies_are_bounded_over_all_their_parts() -> None:
    one = stream(max_body_bytes=3)
    one.hear(head())
    one.hear(part(b"ab", is_last=False))
    with pytest.raises(BodyTooLargeError):
        one.hear(part(b"cd"))


def test_the_bodies_of_all_streams_share_a_budget() -> None:
    budget = BodyBudget(5)
    one, other = stream(budget=budget), stream(budget=budget)
    for each in (one, other):
        each.hear(head())
    one.hear(part(b"abcd"))
    with pytest.raises(OverloadedError):
        other.hear(part(b"ef"))
    one.steered(STEERING)
    other.hear(part(b"ef"))
    other.forget_body()
    other.forget_body()
    assert budget.held_bytes == 0


@pytest.mark.parametrize("mode", [NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.GRPC])
def test_modes_without_a_whole_body_are_refused(mode: BodyMode) -> None:
    with pytest.raises(GatewayModeError, match=mode.name):
        stream().hear(head(mode))


def test_an_answer_begins_with_its_first_part_and_is_counted_by_events() -> None:
    one = stream()
    one.hear(head(has_body=False))
    one.steered(STEERING)
    assert kinds(one.hear(ResponseHead(200, True))) == ["response_headers"]
    assert (one.has_begun, one.status) == (False, 200)
    one.hear(part(b"data: a\n\ndata: b\n\n", is_last=False, of_request=False))
    assert (one.has_begun, one.has_ended, one.events) == (True, False, 2)
    one.hear(part(b"", of_request=False))
    assert one.has_ended


def test_an_answer_that_is_not_shown_begins_with_its_head() -> None:
    one = stream()
    one.hear(head(BUFFERED, NONE))
    one.hear(part(b"x"))
    one.steered(STEERING)
    one.hear(ResponseHead(200, True))
    assert one.has_begun and not one.sees_answer and not one.has_ended


@pytest.mark.parametrize(
    "messages",
    [
        [part(b"x")],
        [part(b"x", of_request=False)],
        [head(), head()],
        [head(), part(b"x"), part(b"y")],
    ],
)
def test_messages_out_of_turn_are_refused(messages: list) -> None:
    one = stream()
    with pytest.raises(WireError):
        for message in messages:
            one.hear(message)
