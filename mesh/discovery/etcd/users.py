"""Let an etcd ask for passwords: make the users of a mesh, which may use the keys of its prefix and nothing else.

All may read the cards of the mesh; which ones a user may write says its role. If a user has its rights already, nothing
is changed. `root` can do everything and is used here alone.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import grpc
from aetcd import rpc

from kvmesh.mesh.discovery.etcd.discovery import CALL_TIMEOUT_S, LOGIN_TIMEOUT_S, EtcdSettings, after, open_channel
from kvmesh.protocol.errors import ConfigError, UnreachableError

ROOT = "root"
HEALTH = "health"  # its password is the same word. It has no rights: it is for health checks, which have to log in
RETRY_S = 0.5
# By default gRPC resolves a name at most every 30 s, and waits ever longer between connections.
OFTEN = (("grpc.max_reconnect_backoff_ms", 1_000), ("grpc.dns_min_time_between_resolutions_ms", 1_000))
NOT_ENABLED = "authentication is not enabled"
THERE_ALREADY = "already exists"


EtcdRole = Literal["all", "worker", "router", "frontend", "planner", "reader"]
WRITES: Mapping[EtcdRole, Sequence[str]] = {  # the keys that a role may write: those that begin so
    "all": ("",),
    "worker": ("workers/",),
    "router": ("routers/",),
    "frontend": ("frontends/", "limiters/", "routers/"),  # a frontend may have a router in it
    "planner": ("planners/",),
    "reader": (),
}


def permissions(settings: EtcdSettings, role: EtcdRole, name: str = "") -> list[rpc.Permission]:
    """Return what a role may do. With `name` a worker may write its own card alone, and those of its copies.

    A worker's id is its name, a dash and more.
    """
    writes = (f"workers/{name}-",) if role == "worker" and name else WRITES[role]
    whole = settings.etcd_key("")
    found = [] if role == "all" else [_permission(rpc.Permission.READ, whole)]
    kind = rpc.Permission.READWRITE if role == "all" else rpc.Permission.WRITE
    return found + [_permission(kind, settings.etcd_key(prefix)) for prefix in writes]


def _permission(kind: Any, prefix: bytes) -> rpc.Permission:
    return rpc.Permission(permType=kind, key=prefix, range_end=after(prefix))


def guard(settings: EtcdSettings, root_password: str, wait_s: float, role: EtcdRole = "all", name: str = "") -> None:
    """Make a user with the rights of its role, then have etcd ask everybody for a password.

    Wait at most `wait_s` for etcd to answer. Raises UnreachableError after that, and ConfigError if etcd has another
    root password, or refuses.
    """
    with open_channel(settings.endpoints[0], settings, OFTEN) as channel:
        admin = _Admin(channel, settings)
        is_guarded = admin.log_in_as_root(root_password, time.monotonic() + wait_s)
        wanted = permissions(settings, role, name)
        if is_guarded and admin.user_works() and _same(admin.permissions_of(settings.user), wanted):
            return
        admin.make("RoleAdd", rpc.AuthRoleAddRequest(name=settings.user))
        admin.set_permissions(settings.user, wanted)
        admin.make_user(settings.user, settings.password, role=settings.user)
        admin.make_user(HEALTH, HEALTH)
        if not is_guarded:
            admin.make_user(ROOT, root_password, role=ROOT)
            admin.ask("AuthEnable", rpc.AuthEnableRequest())


class _Admin:
    """Changes users and roles. Every method raises ConfigError if etcd refuses."""

    def __init__(self, channel: grpc.Channel, settings: EtcdSettings) -> None:
        self._auth = rpc.AuthStub(channel)
        self._kv = rpc.KVStub(channel)
        self._settings = settings
        self._metadata: tuple[tuple[str, str], ...] = ()

    def log_in_as_root(self, password: str, until_s: float) -> bool:
        """Return False if etcd asks for no passwords yet. Raises UnreachableError if it does not answer in time."""
        place = self._settings.shown()
        while True:
            try:
                self._metadata = self._token_of(ROOT, password)
                return True
            except grpc.RpcError as error:
                said = str(error.details())
                if NOT_ENABLED in said:
                    return False
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    hint = "give the one that this etcd was set up with, or remove its data"
                    raise ConfigError(f"{place} does not take the password of {ROOT}: {said}", hint=hint) from error
                if time.monotonic() > until_s:
                    raise UnreachableError(f"{place} does not answer: {said}", hint="start etcd") from error
            time.sleep(RETRY_S)

    def user_works(self) -> bool:
        """Return whether the user of the mesh can log in and read its keys."""
        request = rpc.RangeRequest(key=self._settings.etcd_key(""), count_only=True)
        try:
            token = self._token_of(self._settings.user, self._settings.password)
            self._kv.Range(request, timeout=CALL_TIMEOUT_S, metadata=token)
        except grpc.RpcError:
            return False
        return True

    def permissions_of(self, role: str) -> list[Any]:
        return list(self._answer("RoleGet", rpc.AuthRoleGetRequest(role=role)).perm)

    def set_permissions(self, role: str, wanted: Sequence[Any]) -> None:
        """Give a role these permissions and no others."""
        ranges = {(one.key, one.range_end) for one in wanted}
        for old in self.permissions_of(role):
            if (old.key, old.range_end) not in ranges:
                request = rpc.AuthRoleRevokePermissionRequest(role=role, key=old.key, range_end=old.range_end)
                self.ask("RoleRevokePermission", request)
        for one in wanted:
            self.ask("RoleGrantPermission", rpc.AuthRoleGrantPermissionRequest(name=role, perm=one))

    def make_user(self, name: str, password: str, role: str = "") -> None:
        """Make a user, or change the password of the present one."""
        if not self.make("UserAdd", rpc.AuthUserAddRequest(name=name, password=password)):
            self.ask("UserChangePassword", rpc.AuthUserChangePasswordRequest(name=name, password=password))
        if role:
            self.ask("UserGrantRole", rpc.AuthUserGrantRoleRequest(user=name, role=role))

    def make(self, method: str, request: Any) -> bool:
        """Return False if the thing exists already."""
        try:
            self._call(method, request)
        except grpc.RpcError as error:
            if THERE_ALREADY in str(error.details()):
                return False
            raise _refused(method, error) from error
        return True

    def ask(self, method: str, request: Any) -> None:
        self._answer(method, request)

    def _answer(self, method: str, request: Any) -> Any:
        try:
            return self._call(method, request)
        except grpc.RpcError as error:
            raise _refused(method, error) from error

    def _call(self, method: str, request: Any) -> Any:
        return getattr(self._auth, method)(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)

    def _token_of(self, name: str, password: str) -> tuple[tuple[str, str], ...]:
        """Raises grpc.RpcError."""
        request = rpc.AuthenticateRequest(name=name, password=password)
        return (("token", self._auth.Authenticate(request, timeout=LOGIN_TIMEOUT_S).token),)


def _same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return _texts(found) == _texts(wanted)


def _texts(some: Sequence[Any]) -> set[tuple[int, bytes, bytes]]:
    return {(one.permType, one.key, one.range_end) for one in some}


def _refused(method: str, error: grpc.RpcError) -> ConfigError:
    return ConfigError(f"etcd refuses {method}: {error.details()}", hint="see the log of etcd")
