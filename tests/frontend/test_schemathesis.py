"""Schemathesis reads our own description of the API and tries to prove it wrong, over HTTP against a whole mesh.

Runs are the same every time. A longer one that is not: KVMESH_SCHEMATHESIS_EXAMPLES=1000 pytest <this file>.
It belongs to `make test-large`: schemathesis makes its cases during collection, which every parallel worker does.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from schemathesis.config import SchemathesisConfig

from kvmesh.cluster.tiny_model import CHECKPOINT_DIR
from kvmesh.frontend.http import HttpSettings
from kvmesh.frontend.openapi import SSE, openapi
from kvmesh.frontend.table import ENDPOINTS
from tests.frontend.whole_mesh import ADAPTER, MODEL, PREFILL_WORKER, WORKER, whole_mesh
from tests.support.budget import LARGE
from tests.support.patience import PATIENCE_S

CONTEXT_TOKENS = 96
EXAMPLES = int(os.environ.get("KVMESH_SCHEMATHESIS_EXAMPLES", "0"))
if not (LARGE or EXAMPLES):
    pytest.skip("belongs to `make test-large`", allow_module_level=True)
pytestmark = pytest.mark.budget
DOCUMENT = json.loads(openapi(ENDPOINTS, "0", HttpSettings().max_request_timeout_s))
REFUSED = "400"  # data that fits the description may be refused for what a schema cannot say: see `names_the_fault`
CHECKS = {
    "positive_data_acceptance": {"expected-statuses": ["2xx", "404", REFUSED, "503", "504"]},
    "negative_data_rejection": {"expected-statuses": ["400", "404", "503", "504"]},
    "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "503", "504"]},  # see `has_not_failed`
}


def configured(mode: str, phases: Sequence[str], **more: Any) -> SchemathesisConfig:
    """Return settings of schemathesis: the mode "positive" sends data that fits, "all" also data that does not."""
    generation = {
        "mode": mode,
        "max-examples": EXAMPLES or 40,
        "deterministic": not EXAMPLES,
        "database": "none",
        "allow-extra-parameters": False,  # unknown headers are a gateway's
    }
    return SchemathesisConfig.from_dict(
        more
        | {
            "generation": generation,
            "checks": CHECKS,
            "max-stream-events": 1_000_000,
            "phases": {name: {"enabled": name in phases} for name in ("examples", "coverage", "fuzzing", "stateful")},
        }
    )


def narrowed(document: dict[str, Any], *, streams: bool = False) -> dict[str, Any]:
    """Put in names that there are, so that most requests go all the way, and let answers hold what is described
    only."""
    document = json.loads(json.dumps(document))
    schemas = document["components"]["schemas"]
    sent = named_in(
        [operation.get("requestBody") for path in document["paths"].values() for operation in path.values()], schemas
    )
    for name, schema in schemas.items():
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is False and "model" in properties:
            properties["model"]["enum"] = [MODEL, ADAPTER]
            if streams and "stream" in properties:
                properties["stream"] = {"enum": [True]}
                schema["required"].append("stream")
        if properties and name not in sent:  # what is sent may have fields of its own in messages and tools
            schema.setdefault("additionalProperties", False)
    for operation in [operation for path in document["paths"].values() for operation in path.values()]:
        for parameter in operation.get("parameters", ()):
            parameter["schema"] |= NARROW.get(parameter["name"], {})
    return document


def named_in(part: Any, schemas: dict[str, Any]) -> set[str]:
    """Return the names of all schemas that the part of a document refers to, at any depth."""
    found: set[str] = set()
    left = [part]
    while left:
        new = set(re.findall('"#/components/schemas/([^"]+)"', json.dumps(left))) - found
        found |= new
        left = [schemas[name] for name in new]
    return found


STORED = "resp_stored"  # stands for the id of a response that is made for the request
NARROW: dict[str, Any] = {
    "response_id": {"enum": [STORED, "resp_none"]},
    "name": {"enum": [MODEL, ADAPTER, "none/such"]},
    "x-kvmesh-worker": {"enum": [WORKER]},
    "x-kvmesh-prefill-worker": {"enum": [PREFILL_WORKER]},
    "x-kvmesh-dp-rank": {"maximum": 0},
}
STREAMING = [endpoint.path for endpoint in ENDPOINTS if endpoint.operation.events and endpoint.operation.request]
LIKE_OTHERS = [  # they take the requests of other operations; few random ones are right, so there are more of them
    {"include-path": path, "phases": {"coverage": {"enabled": False}}, "generation": {"max-examples": EXAMPLES or most}}
    for path, most in (("/kvmesh/route", 40), ("/v1/messages/count_tokens", 40), ("/tokenize", 120))
]
schema = schemathesis.openapi.from_dict(
    narrowed(DOCUMENT), config=configured("all", ["examples", "coverage", "fuzzing"], operations=LIKE_OTHERS)
)
streaming = schemathesis.openapi.from_dict(
    narrowed(DOCUMENT, streams=True), config=configured("positive", ["examples", "fuzzing"])
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with whole_mesh(tmp_path_factory.mktemp("mesh"), Path(CHECKPOINT_DIR), CONTEXT_TOKENS) as url:
        yield url


@pytest.fixture(scope="module")
def reached() -> dict[str, bool]:
    """Collect, for each operation that was tried, whether it has answered a request with 200."""
    return {}


@pytest.fixture(scope="module")
def streams_reached() -> dict[str, bool]:
    return {}


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


# --- what else must hold --------------------------------------------------------------------------------


def has_not_failed(context: Any, response: Any, case: Any) -> None:
    """Check that a 503 names a pinned worker that is not there, and that only a short timeout runs out."""
    if response.status_code == 503:
        assert re.search(r"no (prefill |decode )?worker ['\\]|has no rank \d", response.text), response.text
    if response.status_code == 504:
        assert float(case.headers["x-request-timeout-s"]) < PATIENCE_S


def names_the_fault(context: Any, response: Any, case: Any) -> None:
    """A refusal tells what is wrong, and where: a parameter of the request."""
    if response.status_code != 400 or "/v1/messages" in case.path:  # Anthropic's errors have no field for it
        return
    error = response.json()["error"]
    is_unread = error["message"].startswith(("the request body is ", "Invalid request body"))
    assert is_unread or error["param"], error


def is_a_whole_stream(context: Any, response: Any, case: Any) -> None:
    """Check that a stream ends as its API says, and never just stops. What each event holds is checked against the
    description."""
    if response.status_code != 200:
        return
    assert response.headers["content-type"] == [SSE]
    assert response.text.endswith("\n\n")
    *_, last = response.text[:-2].split("\n\n")
    ends = {
        "/v1/chat/completions": "data: [DONE]",
        "/v1/completions": "data: [DONE]",
        "/v1/messages": "event: message_stop\n",
        "/v1/responses": ("event: response.completed\n", "event: response.incomplete\n"),
    }
    assert last.startswith(ends[case.path]), last


def stored_response(url: str, session: requests.Session) -> str:
    """Return the id of a new background response that is complete."""
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 2, "background": True, "stream": True}
    events = session.post(f"{url}/v1/responses", json=body).text
    return str(json.loads(events.partition("data: ")[2].partition("\n")[0])["response"]["id"])


@schema.parametrize()
def test_an_operation_keeps_to_its_description_whatever_is_sent(
    case: Any, url: str, session: requests.Session, reached: dict[str, bool]
) -> None:
    checks = [has_not_failed, names_the_fault]
    if case.path_parameters.get("response_id") == STORED:
        case.path_parameters["response_id"] = stored_response(url, session)
    response = case.call_and_validate(base_url=url, session=session, additional_checks=checks)
    reached[case.operation.label] = reached.get(case.operation.label, False) or response.status_code == 200


@streaming.include(path=STREAMING).parametrize()
def test_a_stream_keeps_to_its_description_and_is_whole(
    case: Any, url: str, session: requests.Session, streams_reached: dict[str, bool]
) -> None:
    checks = [has_not_failed, names_the_fault, is_a_whole_stream]
    response = case.call_and_validate(base_url=url, session=session, additional_checks=checks)
    streams_reached[case.operation.label] = (
        streams_reached.get(case.operation.label, False) or response.status_code == 200
    )


def test_every_operation_that_was_tried_has_answered(
    reached: dict[str, bool], streams_reached: dict[str, bool]
) -> None:
    """Otherwise the tests above have proven how requests are refused, and nothing else."""
    never = [label for tried in (reached, streams_reached) for label, has_answered in tried.items() if not has_answered]
    assert never == []


def test_the_description_under_test_is_the_one_that_is_served(url: str) -> None:
    served = httpx.get(f"{url}/openapi.json").json()
    assert served | {"info": None} == DOCUMENT | {"info": None}
