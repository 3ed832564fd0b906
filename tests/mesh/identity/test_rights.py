"""Read members from certificates, and ask the table what they may do."""

from pathlib import Path

import pytest

from kvmesh.mesh.identity.names import Identity, MeshRole, identity_of, identity_of_uri
from kvmesh.mesh.identity.rights import METHODS, ROUTES, check_peer, may_call, may_publish, may_request, refusal
from kvmesh.protocol.errors import IdentityError, UnreachableError

ROOT = Path(__file__).parents[3]
DECODE = Identity("prod", MeshRole.WORKER, "decode")


def test_a_uri_is_read_back_as_it_was_written() -> None:
    assert identity_of_uri(DECODE.uri) == DECODE
    assert DECODE.uri == "spiffe://kvmesh/prod/worker/decode"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://other/prod/worker/decode",
        "spiffe://kvmesh/prod/worker",
        "spiffe://kvmesh/prod/worker/decode/0",
        "spiffe://kvmesh//worker/decode",
        "spiffe://kvmesh/prod/worker/..",
        "spiffe://kvmesh/prod/worker/a b",
        "spiffe://kvmesh/prod/king/decode",
        f"spiffe://kvmesh/prod/worker/{'a' * 129}",
    ],
)
def test_any_other_uri_names_nobody(uri: str) -> None:
    with pytest.raises(IdentityError):
        identity_of_uri(uri)


def test_a_certificate_with_two_uris_names_nobody() -> None:
    uris = (("URI", DECODE.uri), ("URI", DECODE.uri))
    with pytest.raises(IdentityError, match="2 URIs"):
        identity_of({"subjectAltName": uris})


def test_a_name_stands_for_copies_after_a_dash() -> None:
    assert DECODE.stands_for("decode")
    assert DECODE.stands_for("decode-7")
    assert not DECODE.stands_for("decoder")
    assert not DECODE.stands_for("prefill-0")


def test_a_name_that_is_the_role_stands_for_all() -> None:
    assert Identity("prod", MeshRole.WORKER, "worker").stands_for("prefill-0")


def test_a_worker_cannot_place_requests() -> None:
    assert may_call(MeshRole.FRONTEND, MeshRole.ROUTER, "place")
    assert not may_call(MeshRole.WORKER, MeshRole.ROUTER, "place")
    assert not may_call(MeshRole.WORKER, MeshRole.WORKER, "generate")


def test_a_frontend_cannot_publish_kv_events() -> None:
    assert may_publish(MeshRole.WORKER, "kv")
    assert not may_publish(MeshRole.FRONTEND, "kv")


def test_an_unknown_method_is_for_nobody() -> None:
    assert not any(may_call(role, MeshRole.WORKER, "shell") for role in MeshRole)
    assert not any(may_request(role, MeshRole.ROUTER, "GET", "/shell") for role in MeshRole)


def test_a_refusal_names_caller_method_and_who_may() -> None:
    error = refusal(Identity("prod", MeshRole.ROUTER, "router"), DECODE, "generate")
    assert str(error) == ("router router of prod may not call generate of worker decode of prod; this is for: frontend")
    assert isinstance(error, UnreachableError)  # nothing has begun: the caller may try elsewhere


def test_a_member_of_another_mesh_is_refused() -> None:
    with pytest.raises(IdentityError, match="meshes do not talk"):
        check_peer(Identity("stage", MeshRole.WORKER, "decode"), DECODE, frozenset(MeshRole))


def test_every_route_of_the_router_is_in_the_table() -> None:
    source = (ROOT / "router" / "http.py").read_text()
    for route in ROUTES[MeshRole.ROUTER]:
        method, path = route.split()
        assert f'Route("{method}", "{path}"' in source
    assert source.count('Route("') == len(ROUTES[MeshRole.ROUTER])


def test_the_document_shows_the_same_table() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [
        f"| {server} | `{what}` | {', '.join(sorted(roles)) if len(roles) < len(MeshRole) else 'every member'} |"
        for table in (METHODS, ROUTES)
        for server, rights in table.items()
        for what, roles in rights.items()
    ]
    assert [row for row in rows if row not in text] == []
