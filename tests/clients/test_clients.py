"""Run each flow of each client against a real mesh, and compare the table in docs/api.md with the results."""

import os

import pytest

from tests.clients.catalogue import FLOWS, ROOT, Client, clients_of
from tests.clients.results import section_of, table, with_section
from tests.clients.runner import Runs

pytestmark = pytest.mark.timeout(3600)  # a test waits until its client's turn has come
PAGE = ROOT / "docs" / "api.md"
CLIENTS = clients_of(os.environ["KVMESH_TEST_CLIENTS"])
CASES = [(client, flow) for client in CLIENTS for flow in (*FLOWS, *client.more)]


@pytest.mark.parametrize(("client", "flow"), CASES, ids=[f"{client.name}-{flow}" for client, flow in CASES])
def test_a_flow_works(client: Client, flow: str, runs: Runs) -> None:
    result = runs.of(client).flow(flow)
    if result.outcome == "lacks":
        pytest.skip(f"{client.name} has no {flow}: {result.detail}")
    assert result.outcome == "ok", result.detail


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_a_client_stays_on_this_host(client: Client, runs: Runs) -> None:
    assert runs.of(client).attempts == ()


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_a_script_ends_well_and_reports_only_flows_of_the_catalogue(client: Client, runs: Runs) -> None:
    result = runs.of(client)
    assert (result.trouble, set(result.flows) - {*FLOWS, *client.more}) == ("", set())
    assert result.version


def test_the_table_in_the_docs_is_what_the_run_saw(runs: Runs, request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    expected = table(runs.all(), section_of(page))
    if request.config.getoption("--write-table"):
        PAGE.write_text(page := with_section(page, expected), encoding="utf-8")
    assert section_of(page) == expected, "run `make test-clients ARGS=--write-table` and look at what has changed"
