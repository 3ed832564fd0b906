"""Read and write the messages of Envoy's external processing (`envoy.service.ext_proc.v3`). Pure.

Only the fields that a picker needs are declared, with Envoy's numbers, in a pool of descriptors of their own: the
packages that ship all of Envoy's messages replace files of other packages. Maps are declared as what they are on the
wire, repeated entries of a key and a value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from kvmesh.protocol.errors import WireError

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
ENDPOINT_NAMESPACE = "envoy.lb"
ENDPOINT_KEY = "x-gateway-destination-endpoint"
MAX_SUBSET = 4096  # endpoints that a gateway may name
OVERWRITE = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

_PACKAGE = "kvmesh.ext_proc"
# Each field: its name, its number, its type; "*" before the type: repeated; a fourth item names its oneof.
_MESSAGES: Mapping[str, Sequence[tuple[str, int, str] | tuple[str, int, str, str]]] = {
    "Value": (
        ("number_value", 2, "double", "kind"),
        ("string_value", 3, "string", "kind"),
        ("struct_value", 5, "Struct", "kind"),
        ("list_value", 6, "ListValue", "kind"),
    ),
    "ListValue": (("values", 1, "*Value"),),
    "StructEntry": (("key", 1, "string"), ("value", 2, "Value")),
    "Struct": (("fields", 1, "*StructEntry"),),
    "Duration": (("seconds", 1, "int64"), ("nanos", 2, "int32")),
    "MetadataEntry": (("key", 1, "string"), ("value", 2, "Struct")),
    "Metadata": (("filter_metadata", 1, "*MetadataEntry"),),
    "HeaderValue": (("key", 1, "string"), ("value", 2, "string"), ("raw_value", 3, "bytes")),
    "HeaderMap": (("headers", 1, "*HeaderValue"),),
    "HeaderValueOption": (("header", 1, "HeaderValue"), ("append_action", 3, "int32")),
    "HttpHeaders": (("headers", 1, "HeaderMap"), ("end_of_stream", 3, "bool")),
    "HttpBody": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "HttpTrailers": (("trailers", 1, "HeaderMap"),),
    "ProtocolConfiguration": (("request_body_mode", 1, "int32"), ("response_body_mode", 2, "int32")),
    "ProcessingRequest": (
        ("request_headers", 2, "HttpHeaders", "request"),
        ("response_headers", 3, "HttpHeaders", "request"),
        ("request_body", 4, "HttpBody", "request"),
        ("response_body", 5, "HttpBody", "request"),
        ("request_trailers", 6, "HttpTrailers", "request"),
        ("response_trailers", 7, "HttpTrailers", "request"),
        ("metadata_context", 8, "Metadata"),
        ("protocol_config", 11, "ProtocolConfiguration"),
    ),
    "HeaderMutation": (("set_headers", 1, "*HeaderValueOption"), ("remove_headers", 2, "*string")),
    "StreamedBodyResponse": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "BodyMutation": (("body", 1, "bytes", "mutation"), ("streamed_response", 3, "StreamedBodyResponse", "mutation")),
    "CommonResponse": (
        ("header_mutation", 2, "HeaderMutation"),
        ("body_mutation", 3, "BodyMutation"),
        ("clear_route_cache", 5, "bool"),
    ),
    "HeadersResponse": (("response", 1, "CommonResponse"),),
    "BodyResponse": (("response", 1, "CommonResponse"),),
    "TrailersResponse": (("header_mutation", 1, "HeaderMutation"),),
    "HttpStatus": (("code", 1, "int32"),),
    "ImmediateResponse": (
        ("status", 1, "HttpStatus"),
        ("headers", 2, "HeaderMutation"),
        ("body", 3, "bytes"),
        ("details", 5, "string"),
    ),
    "ProcessingResponse": (
        ("request_headers", 1, "HeadersResponse", "response"),
        ("response_headers", 2, "HeadersResponse", "response"),
        ("request_body", 3, "BodyResponse", "response"),
        ("response_body", 4, "BodyResponse", "response"),
        ("request_trailers", 5, "TrailersResponse", "response"),
        ("response_trailers", 6, "TrailersResponse", "response"),
        ("immediate_response", 7, "ImmediateResponse", "response"),
        ("dynamic_metadata", 8, "Struct"),
        ("override_message_timeout", 10, "Duration"),
    ),
    "HealthCheckRequest": (("service", 1, "string"),),
    "HealthCheckResponse": (("status", 1, "int32"),),
}


def _build(messages: Mapping[str, Sequence[tuple[str, ...] | tuple[Any, ...]]]) -> dict[str, Any]:
    """Return a class for each message."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="kvmesh/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in messages.items():
        declared = file.message_type.add(name=name)
        for field_name, number, kind, *oneof in fields:
            label = field.LABEL_REPEATED if kind.startswith("*") else field.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            one = declared.field.add(name=field_name, number=number, label=label)
            if kind in messages:
                one.type, one.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                one.type = field.Type.Value(f"TYPE_{kind.upper()}")
            if oneof:
                if not declared.oneof_decl:
                    declared.oneof_decl.add(name=oneof[0])
                one.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in messages]
    return {one.name: message_factory.GetMessageClass(one) for one in found}


_CLASSES = _build(_MESSAGES)
_Request, _Response = _CLASSES["ProcessingRequest"], _CLASSES["ProcessingResponse"]


def message_class(name: str) -> Any:
    """Return the class of a message, by the name that Envoy has for it."""
    return _CLASSES[name]


# --- what Envoy says -----------------------------------------------------------------------------------------------


class BodyMode(IntEnum):
    """Name the ways in which Envoy sends a body (ProcessingMode.BodySendMode)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The headers of a request, and what Envoy says with them."""

    headers: Sequence[tuple[str, str]]  # names in lower case, `:method` and `:path` among them
    has_body: bool
    request_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    response_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    subset: Sequence[str] | None = None  # the only endpoints that may be picked; None: any

    def header(self, name: str) -> str | None:
        """Return the first header of this name."""
        return next((value for found, value in self.headers if found == name), None)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int  # 0: Envoy has not said it
    has_body: bool


@dataclass(frozen=True, slots=True)
class BodyPart:
    of_request: bool
    data: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class Trailers:
    of_request: bool


Heard = RequestHead | ResponseHead | BodyPart | Trailers


def read(data: bytes) -> Heard:
    """Return what a message of Envoy says. Raise WireError."""
    try:
        told = _Request.FromString(data)
    except message.DecodeError as error:
        raise WireError(f"a message of the gateway cannot be read: {error}") from error
    match told.WhichOneof("request"):
        case "request_headers":
            return _request_head(told)
        case "request_body":
            return BodyPart(True, told.request_body.body, told.request_body.end_of_stream)
        case "request_trailers":
            return Trailers(True)
        case "response_headers":
            status = next((value for name, value in _headers(told.response_headers) if name == ":status"), "")
            return ResponseHead(int(status) if status.isdecimal() else 0, not told.response_headers.end_of_stream)
        case "response_body":
            return BodyPart(False, told.response_body.body, told.response_body.end_of_stream)
        case "response_trailers":
            return Trailers(False)
    raise WireError("a message of the gateway says nothing that a picker knows", hint="see docs/gateway.md")


def _request_head(told: Any) -> RequestHead:
    request_mode = response_mode = BodyMode.FULL_DUPLEX_STREAMED  # of gateways that do not say it: what is usual
    if told.HasField("protocol_config"):
        given = told.protocol_config
        request_mode, response_mode = _mode(given.request_body_mode), _mode(given.response_body_mode)
    head, subset = told.request_headers, _subset(told.metadata_context)
    return RequestHead(_headers(head), not head.end_of_stream, request_mode, response_mode, subset)


def _mode(number: int) -> BodyMode:
    try:
        return BodyMode(number)
    except ValueError:
        raise WireError(f"the gateway sends bodies in the unknown mode {number}", hint="see docs/gateway.md") from None


def _headers(told: Any) -> list[tuple[str, str]]:
    """Return the headers. Envoy writes a value as bytes or as text."""
    return [
        (one.key.lower(), one.raw_value.decode("utf-8", "replace") if one.raw_value else one.value)
        for one in told.headers.headers
    ]


def _subset(metadata: Any) -> Sequence[str] | None:
    """Return the endpoints that the gateway allows, None if it does not say so. Raise WireError if they are too many.

    The list stands in metadata as a list of texts, or as one text with commas.
    """
    for namespace in metadata.filter_metadata:
        if namespace.key != SUBSET_NAMESPACE:
            continue
        for entry in namespace.value.fields:
            if entry.key != SUBSET_KEY:
                continue
            if entry.value.WhichOneof("kind") == "string_value":
                found = [part.strip() for part in entry.value.string_value.split(",")]
            else:
                found = [one.string_value for one in entry.value.list_value.values]
            if len(found) > MAX_SUBSET:
                raise WireError(f"the gateway allows {len(found)} endpoints by name, more than {MAX_SUBSET}")
            return [endpoint for endpoint in found if endpoint]
    return None


# --- what is answered ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Steering:
    """The changes of a request that Envoy makes: the endpoint that gets it, and headers."""

    endpoint: str
    set_headers: Mapping[str, str]
    remove_headers: Sequence[str] = ()


def head_answer(*, of_request: bool, steering: Steering | None = None) -> bytes:
    """Return the answer to headers: go on, and with `steering`, to that endpoint."""
    answer = _Response()
    common = (answer.request_headers if of_request else answer.response_headers).response
    common.SetInParent()
    if steering is not None:
        _steer(answer, common, steering)
    return _bytes(answer)


def whole_body_answer(*, of_request: bool, steering: Steering | None = None, body: bytes | None = None) -> bytes:
    """Return the answer to a body that Envoy keeps until then; `body` replaces it."""
    answer = _Response()
    common = (answer.request_body if of_request else answer.response_body).response
    common.SetInParent()
    if steering is not None:
        _steer(answer, common, steering)
    if body is not None:
        common.body_mutation.body = body
    return _bytes(answer)


def body_part(*, of_request: bool, data: bytes, is_last: bool) -> bytes:
    """Return a part of a body that Envoy does not keep: what is not sent back is lost."""
    answer = _Response()
    common = (answer.request_body if of_request else answer.response_body).response
    part = common.body_mutation.streamed_response
    part.body, part.end_of_stream = data, is_last
    part.SetInParent()
    return _bytes(answer)


def trailers_answer(*, of_request: bool) -> bytes:
    answer = _Response()
    (answer.request_trailers if of_request else answer.response_trailers).SetInParent()
    return _bytes(answer)


def refusal_answer(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """Return the answer that ends the request at the gateway."""
    answer = _Response()
    told = answer.immediate_response
    told.status.code, told.body, told.details = status, body, details
    _set(told.headers, headers.items())
    return _bytes(answer)


def more_time_answer(seconds: float) -> bytes:
    """Return the answer that asks Envoy to wait for the real one."""
    answer = _Response()
    answer.override_message_timeout.seconds = int(seconds)
    answer.override_message_timeout.nanos = int(seconds % 1 * 1e9)
    return _bytes(answer)


def _steer(answer: Any, common: Any, steering: Steering) -> None:
    """Name the endpoint in both ways of the protocol, which gateways choose from."""
    _set(common.header_mutation, [(ENDPOINT_KEY, steering.endpoint), *steering.set_headers.items()])
    common.header_mutation.remove_headers.extend(steering.remove_headers)
    common.clear_route_cache = True
    namespace = answer.dynamic_metadata.fields.add(key=ENDPOINT_NAMESPACE)
    namespace.value.struct_value.fields.add(key=ENDPOINT_KEY).value.string_value = steering.endpoint


def _set(mutation: Any, headers: Iterable[tuple[str, str]]) -> None:
    for name, value in headers:
        one = mutation.set_headers.add(append_action=OVERWRITE)
        one.header.key, one.header.raw_value = name, value.encode()


def _bytes(answer: Any) -> bytes:
    data: bytes = answer.SerializeToString()
    return data


# --- health --------------------------------------------------------------------------------------------------------


def read_health_check(data: bytes) -> str:
    """Return the name of the service that a health check asks for. Raise WireError."""
    try:
        return str(_CLASSES["HealthCheckRequest"].FromString(data).service)
    except message.DecodeError as error:
        raise WireError(f"a health check cannot be read: {error}") from error


def health_answer(*, is_serving: bool) -> bytes:
    return _bytes(_CLASSES["HealthCheckResponse"](status=1 if is_serving else 2))
