"""Read and make the objects of Kubernetes that discovery uses: cards, and the pods that own them. Pure."""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.protocol.errors import WireError
from kvmesh.protocol.messages import UNREADABLE

GROUP = "kvmesh.dev"
API_VERSION = f"{GROUP}/v1"
MESH_LABEL = f"{GROUP}/mesh"  # of pods and of cards
POD_LABEL = f"{GROUP}/pod-uid"  # these three are of cards alone
CONTAINER_LABEL = f"{GROUP}/container"
RUN_LABEL = f"{GROUP}/run"
MAX_VALUE_BYTES = 384 << 10  # the schema allows 512 KiB of base64
MAX_KEY_CHARS = 1024
_SHOWN_CHARS = 100


class CardOwner(Struct, frozen=True):
    """The process that owns cards. Container and run tell what an earlier process of its pod has left behind."""

    pod: str
    uid: str
    container: str = ""
    run: str = ""  # another one in each start of the container


class MeshCard(Struct, frozen=True):
    """A key of discovery. The value is empty once its owner has withdrawn it."""

    name: str  # of the object
    key: str
    value: bytes
    owner: CardOwner
    revision: str = ""


class UnreadableCard(Struct, frozen=True):
    name: str
    reason: str


class MeshPod(Struct, frozen=True):
    name: str
    uid: str
    is_ready: bool
    is_leaving: bool  # Kubernetes has begun to delete it
    mesh: str = ""
    containers: int = 1


class ListPage(Struct, frozen=True):
    """A part of a list."""

    objects: list[msgspec.Raw]
    revision: str
    more: str  # the token for the next part, "" if this is the last one


class WatchEvent(Struct, frozen=True):
    """A line of a watch. `kind`: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    kind: str
    content: msgspec.Raw


# --- as Kubernetes writes them ------------------------------------------------------------------------


class _OwnerReference(Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Meta(Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    owner_references: list[_OwnerReference] | None = None
    deletion_timestamp: str | None = None


class _CardSpec(Struct):
    key: str
    value: str = ""


class _CardObject(Struct):
    metadata: _Meta
    spec: _CardSpec


class _AnyObject(Struct):
    metadata: _Meta


class _Condition(Struct):
    type: str = ""
    status: str = ""


class _PodStatus(Struct):
    conditions: list[_Condition] | None = None


class _PodSpec(Struct):
    containers: list[msgspec.Raw] | None = None


class _PodObject(Struct):
    metadata: _Meta
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _ListMeta(Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: str = ""
    more: str = ""


class _List(Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _EventObject(Struct):
    type: str
    object: msgspec.Raw


class _Status(Struct):
    code: int = 0
    message: str = ""


def decoded(content: bytes | msgspec.Raw, shape: type[Any]) -> Any:
    """Return the object. Raises WireError for any other content."""
    try:
        return msgspec.json.decode(content, type=shape)
    except UNREADABLE as error:
        raise WireError(f"an object of Kubernetes cannot be read: {error}") from error


def read_page(content: bytes) -> ListPage:
    """Raises WireError for anything but a list that says its revision."""
    found: _List = decoded(content, _List)
    if not found.metadata.resource_version:
        raise WireError("a list of Kubernetes has no resourceVersion")
    return ListPage(found.items or [], found.metadata.resource_version, found.metadata.more)


def read_event(line: bytes) -> WatchEvent:
    found: _EventObject = decoded(line, _EventObject)
    return WatchEvent(found.type, found.object)


def read_revision(content: bytes | msgspec.Raw) -> str:
    found: _AnyObject = decoded(content, _AnyObject)
    return found.metadata.resource_version


def read_status(content: msgspec.Raw) -> tuple[int, str]:
    """Return code and message of what an ERROR event carries."""
    found: _Status = decoded(content, _Status)
    return found.code, found.message[:300]


def read_pod(content: bytes | msgspec.Raw) -> MeshPod:
    """Raises WireError for anything but a pod with name and uid."""
    found: _PodObject = decoded(content, _PodObject)
    meta = found.metadata
    if not meta.name or not meta.uid:
        raise WireError("a pod has no name or no uid")
    return MeshPod(
        name=meta.name,
        uid=meta.uid,
        is_ready=any(one.type == "Ready" and one.status == "True" for one in found.status.conditions or ()),
        is_leaving=meta.deletion_timestamp is not None,
        mesh=(meta.labels or {}).get(MESH_LABEL, ""),
        containers=len(found.spec.containers or ()),
    )


def read_card(content: bytes | msgspec.Raw, mesh: str) -> MeshCard | UnreadableCard:
    """Return a card, or why it cannot be believed. Raises WireError for what is no named object at all."""
    meta = decoded(content, _AnyObject).metadata
    if not meta.name:
        raise WireError("a card has no name")
    try:
        found: _CardObject = decoded(content, _CardObject)
        value = base64.b64decode(found.spec.value, validate=True)
    except (WireError, binascii.Error, ValueError) as error:
        return UnreadableCard(meta.name[:_SHOWN_CHARS], f"its object cannot be read: {error}"[:300])
    if name_of(mesh, found.spec.key) != meta.name:
        return UnreadableCard(meta.name[:_SHOWN_CHARS], "its name is not that of its key: somebody made it by hand")
    if len(value) > MAX_VALUE_BYTES:
        return UnreadableCard(meta.name, f"its value has {len(value)} bytes, more than {MAX_VALUE_BYTES}")
    labels = meta.labels or {}
    owners: Sequence[_OwnerReference] = [one for one in meta.owner_references or () if one.kind == "Pod" and one.uid]
    pod, uid = (owners[0].name, owners[0].uid) if owners else ("", "")
    owner = CardOwner(pod[:_SHOWN_CHARS], uid, labels.get(CONTAINER_LABEL, ""), labels.get(RUN_LABEL, ""))
    return MeshCard(meta.name, found.spec.key, value, owner, meta.resource_version)


# --- as we write them ---------------------------------------------------------------------------------


def name_of(mesh: str, key: str) -> str:
    """Return the name of a card: keys may have any characters, and two meshes may live in one namespace."""
    return f"card-{hashlib.sha256(f'{mesh}/{key}'.encode(errors='surrogatepass')).hexdigest()[:40]}"


def card_object(mesh: str, key: str, value: bytes, owner: CardOwner) -> dict[str, Any]:
    """Return a card for a server-side apply, which makes it or replaces it.

    An empty value is left out, which removes the one that was there: Kubernetes 1.20 makes null of an empty string.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": "MeshCard",
        "metadata": {
            "name": name_of(mesh, key),
            "labels": {
                MESH_LABEL: mesh,
                POD_LABEL: owner.uid,
                CONTAINER_LABEL: owner.container,
                RUN_LABEL: owner.run,
            },
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": owner.pod, "uid": owner.uid}],
        },
        "spec": {"key": key} | ({"value": base64.b64encode(value).decode()} if value else {}),
    }
