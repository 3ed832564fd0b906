"""The messages between a gateway and a picker. The bytes were written by Envoy's own classes (xds-protos)."""

import base64
import json
from pathlib import Path

import pytest

from kvmesh.frontend.picker.wire import (
    MAX_SUBSET,
    BodyMode,
    BodyPart,
    Heard,
    RequestHead,
    ResponseHead,
    Steering,
    Trailers,
    body_part,
    head_answer,
    message_class,
    more_time_answer,
    read,
    refusal_answer,
    trailers_answer,
    whole_body_answer,
)
from kvmesh.protocol.errors import WireError
from tests.support.gateway import head

RECORDED = json.loads((Path(__file__).parent / "ext_proc.json").read_bytes())
HEADERS = [
    (":method", "POST"),
    (":path", "/v1/chat/completions"),
    ("content-type", "application/json"),
    ("x-request-id", "abc-1"),
]
DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
PAIR = ["10.0.0.1:8000", "10.0.0.2:8000"]
STEERING = Steering("10.0.0.1:8000", {"x-kvmesh-worker": "w-1"}, ["x-kvmesh-prefill-worker"])
SAID: dict[str, Heard] = {
    "head, buffered": RequestHead(HEADERS, True, BodyMode.BUFFERED, BodyMode.NONE),
    "head, full duplex, with a subset": RequestHead(HEADERS, True, DUPLEX, DUPLEX, PAIR),
    "head, subset in one text": RequestHead(HEADERS, True, DUPLEX, DUPLEX, PAIR),
    "head, without modes and body": RequestHead(HEADERS, False, DUPLEX, DUPLEX),
    "head, values as text": RequestHead(HEADERS, True, BodyMode.BUFFERED, BodyMode.NONE),
    "body part": BodyPart(True, b'{"model"', False),
    "body, last": BodyPart(True, b': "m"}', True),
    "trailers": Trailers(True),
    "response head": ResponseHead(200, True),
    "response body, last": BodyPart(False, b"data: [DONE]\n\n", True),
    "response trailers": Trailers(False),
}
ANSWERS = {
    "head, go on": head_answer(of_request=True),
    "response head, go on": head_answer(of_request=False),
    "head, steered": head_answer(of_request=True, steering=STEERING),
    "body, steered and replaced": whole_body_answer(of_request=True, steering=STEERING, body=b"{}"),
    "response body, go on": whole_body_answer(of_request=False),
    "body part": body_part(of_request=True, data=b"ab", is_last=False),
    "empty last part of a response": body_part(of_request=False, data=b"", is_last=True),
    "trailers": trailers_answer(of_request=True),
    "refusal": refusal_answer(429, {"retry-after": "1"}, b"{}", "full"),
    "more time": more_time_answer(2.5),
}


def test_all_that_is_recorded_is_tried() -> None:
    assert SAID.keys() == RECORDED["said"].keys()
    assert ANSWERS.keys() == RECORDED["answers"].keys()


@pytest.mark.parametrize("name", SAID)
def test_messages_of_envoy_are_read(name: str) -> None:
    assert read(base64.b64decode(RECORDED["said"][name])) == SAID[name]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_the_bytes_that_envoys_classes_write(name: str) -> None:
    kind = message_class("ProcessingResponse")
    recorded = kind.FromString(base64.b64decode(RECORDED["answers"][name]))
    assert kind.FromString(ANSWERS[name]) == recorded
    assert len(recorded.SerializeToString()) == len(ANSWERS[name])


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"", b"\x50\x01"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read(data)


def test_an_unknown_body_mode_is_refused() -> None:
    with pytest.raises(WireError, match="mode 9"):
        read(head(modes=(9, 0)))  # type: ignore[arg-type]


def test_a_subset_is_bounded() -> None:
    with pytest.raises(WireError, match=str(MAX_SUBSET)):
        read(head(subset=["10.0.0.1:80"] * (MAX_SUBSET + 1)))
