"""Say who may do what, in one table. Pure. docs/security.md shows the same table, and a test compares them."""

from collections.abc import Mapping
from typing import Literal

from kvmesh.mesh.identity.names import Identity, MeshRole
from kvmesh.protocol.errors import IdentityError

FRONTEND, ROUTER, WORKER, PLANNER = MeshRole.FRONTEND, MeshRole.ROUTER, MeshRole.WORKER, MeshRole.PLANNER
GATEWAY, OPERATOR, OBSERVER = MeshRole.GATEWAY, MeshRole.OPERATOR, MeshRole.OBSERVER
EVERYBODY = frozenset(MeshRole)
_READERS = frozenset({PLANNER, OPERATOR, OBSERVER})
_PLACERS = frozenset({FRONTEND, OPERATOR})
_INDEXES = frozenset({FRONTEND, ROUTER, OPERATOR})  # frontends have routers in them

Rights = Mapping[str, frozenset[MeshRole]]

# Methods of the request plane, by the role of the process that answers.
_OF_KEYS: Rights = {"discovery_keys": EVERYBODY}  # static discovery: the cards that a process shows
_OF_ALL: Rights = {"clock": frozenset({OPERATOR, ROUTER, WORKER}), "probe_peer": frozenset({OPERATOR}), **_OF_KEYS}
METHODS: Mapping[MeshRole, Rights] = {
    WORKER: {
        **_OF_ALL,
        "generate": frozenset({FRONTEND}),
        "embed": frozenset({FRONTEND}),
        "release": frozenset({FRONTEND}),
        "redeem": frozenset({WORKER}),
        "identify": EVERYBODY,
        "model_file": frozenset({FRONTEND, ROUTER}),  # a router may have an endpoint picker in it
        "kv_snapshot": _INDEXES,
        "kv_digest": _INDEXES,
        "event_key": frozenset({FRONTEND, ROUTER}),
        "load": _INDEXES,
        "control": _PLACERS,  # frontends pass on what callers with an admin key ask
        "probe_offer": frozenset({OPERATOR, WORKER}),
        "offer_prefix": frozenset({WORKER}),
    },
    ROUTER: {
        **_OF_ALL,
        "place": frozenset({FRONTEND}),
        "resume": frozenset({FRONTEND}),
        "progress": frozenset({FRONTEND}),
        "preview": _PLACERS,
        "identify": EVERYBODY,
    },
    # Where discovery is a list of addresses, any service may have a request plane that shows its cards.
    FRONTEND: {"budget": frozenset({FRONTEND}), **_OF_KEYS},
    PLANNER: _OF_KEYS,
    OPERATOR: _OF_KEYS,
}

# Routes of the HTTP ports that belong to the mesh, by the role of the process that answers. The frontend's public
# port is not among them: it has API keys.
_PAGES: Rights = {"GET /health": EVERYBODY, "GET /live": EVERYBODY, "GET /metrics": _READERS}
ROUTES: Mapping[MeshRole, Rights] = {
    WORKER: _PAGES,
    ROUTER: {
        **_PAGES,
        "POST /place": frozenset({GATEWAY, OPERATOR}),
        "POST /bookings/{id}": frozenset({GATEWAY, OPERATOR}),
        "DELETE /bookings/{id}": frozenset({GATEWAY, OPERATOR}),
        "POST /overlap": frozenset({GATEWAY, OPERATOR}),
        "GET /workers": frozenset({GATEWAY, OPERATOR, PLANNER, OBSERVER}),
        "GET /snapshot": frozenset({OPERATOR}),
    },
    FRONTEND: {**_PAGES, "POST /kvmesh/route": frozenset({OPERATOR})},
    PLANNER: {
        **_PAGES,
        "GET /steps": frozenset({FRONTEND, OPERATOR, OBSERVER}),
        "GET /decision": frozenset({OPERATOR, PLANNER}),
        "POST /decision/{number}/acknowledge": frozenset({OPERATOR, PLANNER}),
    },
}

# What a member may publish on the event plane. "gossip" is what routers tell each other of their load.
EventKind = Literal["kv", "gossip"]
PUBLISHERS: Mapping[EventKind, frozenset[MeshRole]] = {
    "kv": frozenset({WORKER}),
    "gossip": frozenset({FRONTEND, ROUTER}),
}


def may_call(caller: MeshRole, server: MeshRole, method: str) -> bool:
    """Tell if `caller` may call `method` of a request plane. A method that is not in the table is nobody's."""
    return caller in METHODS.get(server, {}).get(method, frozenset())


def may_request(caller: MeshRole, server: MeshRole, method: str, path: str) -> bool:
    """Tell if `caller` may ask for a route. `path` is the route's, with the names of its parameters."""
    if method == "HEAD":
        method = "GET"
    return caller in ROUTES.get(server, {}).get(f"{method} {path}", frozenset())


def may_publish(role: MeshRole, kind: EventKind) -> bool:
    return role in PUBLISHERS[kind]


def refusal(caller: Identity, server: Identity, what: str) -> IdentityError:
    """Return the error for a member that may not do `what`: the name of a method, or a route."""
    allowed = METHODS.get(server.role, {}).get(what) or ROUTES.get(server.role, {}).get(what) or frozenset()
    who = ", ".join(sorted(allowed)) or "nobody"
    return IdentityError(f"{caller} may not call {what} of {server}", hint=f"this is for: {who}")


def check_peer(peer: Identity, own: Identity, roles: frozenset[MeshRole]) -> None:
    """Raise IdentityError if `peer` is of another mesh, or has none of `roles`."""
    if peer.namespace != own.namespace:
        raise IdentityError(
            f"the peer is {peer}, this process is of {own.namespace}", hint="meshes do not talk to each other"
        )
    if peer.role not in roles:
        raise IdentityError(f"the peer is {peer}, expected was: {', '.join(sorted(roles))}")
