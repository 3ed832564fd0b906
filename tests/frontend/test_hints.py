"""Headers of a request ask something of the mesh; some are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.generator import Hints
from kvmesh.frontend.hints import HEADERS, with_headers
from kvmesh.protocol.errors import InvalidRequestError
from kvmesh.protocol.messages import RouteRequest, decode, encode


def of(**headers: str) -> Hints:
    return with_headers(Hints(), [(f"x-kvmesh-{name.replace('_', '-')}", text) for name, text in headers.items()])


def test_every_header_sets_its_hint() -> None:
    hints = of(
        worker="decode-0", prefill_worker="prefill-0", dp_rank="1", session="chat 7", tenant="acme", priority="+9",
        explain="1",
    )  # fmt: skip
    assert hints == Hints(None, "decode-0", "prefill-0", 1, "chat 7", "acme", 9, True)
    assert {known.field for known in HEADERS.values()} <= set(Hints.__struct_fields__)


def test_header_names_have_no_case_and_foreign_ones_pass() -> None:
    headers = [("X-KVMesh-Tenant", "a"), ("x-request-id", "r"), ("user-agent", "kvmesh")]
    assert with_headers(Hints(), headers) == Hints(tenant="a")


def test_a_header_wins_over_the_body() -> None:
    body = Hints(disaggregate=True, pin="a", session="user", explain=True)
    headers = [("x-kvmesh-worker", "b"), ("x-kvmesh-session", "s"), ("x-kvmesh-explain", "0")]
    assert with_headers(body, headers) == Hints(disaggregate=True, pin="b", session="s", explain=False)
    assert with_headers(body, []) is body


BAD = [
    ("priority", text) for text in ("", "101", "-101", "1.5", "high", "9" * 400, "٣", " 1", "0x1", "1_0")
] + [
    ("dp-rank", text) for text in ("", "-1", "one", "1" * 7)
] + [
    ("explain", text) for text in ("", "true", "yes", "2")
] + [
    (name, text)
    for name in ("worker", "prefill-worker", "session", "tenant")
    for text in ("", "x" * 257, "é", "a\nb", "\udcff")
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), BAD, ids=lambda value: ascii(value)[:16])
def test_a_bad_value_is_refused_by_the_headers_name(name: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"x-kvmesh-{name}") as refused:
        with_headers(Hints(pin="a"), [(f"x-kvmesh-{name}", text)])
    assert refused.value.param == f"x-kvmesh-{name}"


def test_refusing_an_unknown_header_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"x-kvmesh-proirity is not known; there are: .*x-kvmesh-priority"):
        of(proirity="1")


def test_what_was_sent_twice_is_refused() -> None:
    """A gateway that adds its own to what came from outside: nobody could say whose counts."""
    with pytest.raises(InvalidRequestError, match="x-kvmesh-tenant was sent twice"):
        with_headers(Hints(), [("x-kvmesh-tenant", "mine"), ("X-Kvmesh-Tenant", "yours")])


def test_a_rank_needs_a_worker() -> None:
    with pytest.raises(InvalidRequestError, match="x-kvmesh-dp-rank needs a worker"):
        of(dp_rank="0")
    assert with_headers(Hints(pin="of the body"), [("x-kvmesh-dp-rank", "0")]).pin_rank == 0


@given(st.sampled_from(sorted(HEADERS)), st.text() | st.integers().map(str))
def test_whatever_is_sent_is_refused_or_can_travel(name: str, text: str) -> None:
    try:
        hints = with_headers(Hints(pin="a"), [(name, text)])
    except InvalidRequestError:
        return
    request = RouteRequest(
        request_id="r", model="m", isl_tokens=1, pin=hints.pin, pin_rank=hints.pin_rank,
        pin_prefill=hints.pin_prefill, session=hints.session, tenant=hints.tenant, priority=hints.priority,
        explain=hints.explain,
    )  # type: ignore[arg-type]  # fmt: skip
    assert decode(encode(request), RouteRequest) == request
