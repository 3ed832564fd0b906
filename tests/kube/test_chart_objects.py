"""A real API server takes the chart's workloads and services as they are, and keeps every field of them."""

import copy
from typing import Any

import pytest

from tests.kube.conftest import Space
from tests.support.chart import EXAMPLES, Object, of_kind, rendered

# Budgets, scalers and ranges of ports in policies are newer than the server that Debian has the source of.
KINDS = ("Deployment", "Service")
PICKER = ("endpointPicker.enabled=true", "router.separate=true", 'endpointPicker.tlsSecret="tls"')


@pytest.mark.parametrize(("example", "settings"), [*((one, ()) for one in EXAMPLES), ("values-tiny.yaml", PICKER)])
async def test_every_field_arrives(space: Space, example: str, settings: tuple[str, ...]) -> None:
    """The server refuses fields that it does not know, names that are too long, and values that cannot be."""
    objects = copy.deepcopy(of_kind(rendered(example, *settings), *KINDS))
    space.server.install([in_namespace(one, space.namespace) for one in objects])
    for one in of_kind(objects, "Deployment"):
        name = one["metadata"]["name"]
        stored = space.server.ask("GET", f"apis/apps/v1/namespaces/{space.namespace}/deployments/{name}")
        assert missing(one["spec"], stored["spec"]) == []


def in_namespace(one: Object, namespace: str) -> Object:
    one["metadata"]["namespace"] = namespace
    return one


def missing(sent: Any, stored: Any, place: str = "spec") -> list[str]:
    """Return the places whose values the server has not stored as they were sent."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        return [lost for key in sent for lost in missing(sent[key], stored.get(key), f"{place}.{key}")]
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        return [
            lost for n, (a, b) in enumerate(zip(sent, stored, strict=True)) for lost in missing(a, b, f"{place}.{n}")
        ]
    return [] if str(sent) == str(stored) or not sent else [f"{place}: {sent!r} is {stored!r}"]
