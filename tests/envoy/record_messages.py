"""Write messages with Envoy's own classes (xds-protos), as tests/frontend/picker/ext_proc.json keeps them.

`.venv-envoy/bin/python tests/envoy/record_messages.py FILE`: these classes cannot be in the environment of the tests.
"""

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from envoy.config.core.v3 import base_pb2 as core
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf import struct_pb2

ENDPOINT = "10.0.0.1:8000"
PAIR = ["10.0.0.1:8000", "10.0.0.2:8000"]
HEADERS = {
    ":method": "POST",
    ":path": "/v1/chat/completions",
    "content-type": "application/json",
    "x-request-id": "abc-1",
}
STEERING = {"x-gateway-destination-endpoint": ENDPOINT, "x-kvmesh-worker": "w-1"}
BUFFERED, DUPLEX = 2, 4


def head(
    modes: tuple[int, int] | None, subset: object = None, *, is_last: bool = False, as_text: bool = False
) -> ext_proc.ProcessingRequest:
    values = [
        core.HeaderValue(key=name, value=value) if as_text else core.HeaderValue(key=name, raw_value=value.encode())
        for name, value in HEADERS.items()
    ]
    headers = ext_proc.HttpHeaders(headers=core.HeaderMap(headers=values), end_of_stream=is_last)
    said = ext_proc.ProcessingRequest(request_headers=headers)
    if modes is not None:
        said.protocol_config.request_body_mode, said.protocol_config.response_body_mode = modes
    if subset is not None:
        hint, other = struct_pb2.Struct(), struct_pb2.Struct()
        hint.update({"x-gateway-destination-endpoint-subset": subset})
        other.update({"n": 1.5, "b": True, "deep": {"a": ["x", None]}})
        said.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
        said.metadata_context.filter_metadata["envoy.other"].CopyFrom(other)
    said.attributes["envoy.filters.http.ext_proc"].update({"request.path": "/v1"})
    return said


def said() -> Mapping[str, ext_proc.ProcessingRequest]:
    request = ext_proc.ProcessingRequest
    trailer = core.HeaderMap(headers=[core.HeaderValue(key="t", raw_value=b"1")])
    status = core.HeaderMap(headers=[core.HeaderValue(key=":status", raw_value=b"200")])
    return {
        "head, buffered": head((BUFFERED, 0)),
        "head, full duplex, with a subset": head((DUPLEX, DUPLEX), PAIR),
        "head, subset in one text": head((DUPLEX, DUPLEX), ", ".join(PAIR)),
        "head, without modes and body": head(None, is_last=True),
        "head, values as text": head((BUFFERED, 0), as_text=True),
        "body part": request(request_body=ext_proc.HttpBody(body=b'{"model"')),
        "body, last": request(request_body=ext_proc.HttpBody(body=b': "m"}', end_of_stream=True)),
        "trailers": request(request_trailers=ext_proc.HttpTrailers(trailers=trailer)),
        "response head": request(response_headers=ext_proc.HttpHeaders(headers=status)),
        "response body, last": request(response_body=ext_proc.HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True)),
        "response trailers": request(response_trailers=ext_proc.HttpTrailers()),
    }


def mutation(headers: Mapping[str, str], removed: Sequence[str] = ()) -> ext_proc.HeaderMutation:
    options = [
        core.HeaderValueOption(header=core.HeaderValue(key=name, raw_value=value.encode()), append_action=2)
        for name, value in headers.items()
    ]
    return ext_proc.HeaderMutation(set_headers=options, remove_headers=removed)


def steered(answer: ext_proc.ProcessingResponse) -> ext_proc.ProcessingResponse:
    answer.dynamic_metadata.update({"envoy.lb": {"x-gateway-destination-endpoint": ENDPOINT}})
    return answer


def common(**fields: object) -> ext_proc.CommonResponse:
    return ext_proc.CommonResponse(**fields)


def part(data: bytes, *, is_last: bool) -> ext_proc.BodyResponse:
    streamed = ext_proc.StreamedBodyResponse(body=data, end_of_stream=is_last)
    return ext_proc.BodyResponse(response=common(body_mutation=ext_proc.BodyMutation(streamed_response=streamed)))


def answers() -> Mapping[str, ext_proc.ProcessingResponse]:
    response = ext_proc.ProcessingResponse
    to_there = {"header_mutation": mutation(STEERING, ["x-kvmesh-prefill-worker"]), "clear_route_cache": True}
    replaced = common(**to_there, body_mutation=ext_proc.BodyMutation(body=b"{}"))
    refusal = ext_proc.ImmediateResponse(headers=mutation({"retry-after": "1"}), body=b"{}", details="full")
    refusal.status.code = 429
    more_time = response()
    more_time.override_message_timeout.seconds, more_time.override_message_timeout.nanos = 2, 500_000_000
    return {
        "head, go on": response(request_headers=ext_proc.HeadersResponse(response=common())),
        "response head, go on": response(response_headers=ext_proc.HeadersResponse(response=common())),
        "head, steered": steered(response(request_headers=ext_proc.HeadersResponse(response=common(**to_there)))),
        "body, steered and replaced": steered(response(request_body=ext_proc.BodyResponse(response=replaced))),
        "response body, go on": response(response_body=ext_proc.BodyResponse(response=common())),
        "body part": response(request_body=part(b"ab", is_last=False)),
        "empty last part of a response": response(response_body=part(b"", is_last=True)),
        "trailers": response(request_trailers=ext_proc.TrailersResponse()),
        "refusal": response(immediate_response=refusal),
        "more time": more_time,
    }


def main(file: str) -> None:
    written = {
        kind: {
            name: base64.b64encode(one.SerializeToString(deterministic=True)).decode() for name, one in named.items()
        }
        for kind, named in (("said", said()), ("answers", answers()))
    }
    Path(file).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
