"""Results are read from what scripts print, and become the table of docs/api.md."""

import json
import sys
from pathlib import Path

import pytest

from tests.clients.catalogue import CLIENTS, FLOWS, HERE, PARTS, ROOT, Client
from tests.clients.results import BEGIN, END, ClientResult, read_lines, section_of, table, with_section
from tests.clients.runner import environment, run_client

ONE, TWO = CLIENTS[0].name, CLIENTS[1].name
ALL_OK = [json.dumps({"flow": flow, "ok": True, "s": 0.1}) for flow in FLOWS]


def test_lines_of_a_script_become_its_version_and_flows() -> None:
    result = read_lines(['{"version": "1.2"}', *ALL_OK, '{"flow": "batch", "ok": true}'])
    assert (result.version, set(result.flows)) == ("1.2", {*FLOWS, "batch"})
    assert {said.outcome for said in result.flows.values()} == {"ok"}


def test_what_libraries_print_is_passed_over() -> None:
    assert read_lines(["hello", "{not json}", "{}", "[1]"]) == ClientResult()


def test_a_failed_flow_keeps_its_detail() -> None:
    said = read_lines(['{"flow": "chat", "ok": false, "detail": "400: no"}']).flow("chat")
    assert (said.outcome, said.detail) == ("failed", "400: no")


@pytest.mark.parametrize("ok", ["true", 1, None])
def test_only_true_counts_as_ok(ok: object) -> None:
    assert read_lines([json.dumps({"flow": "chat", "ok": ok})]).flow("chat").outcome == "failed"


def test_a_flow_without_a_line_has_failed_and_says_how_the_script_ended() -> None:
    said = ClientResult(trouble="it ended with 1: ImportError").flow("chat")
    assert said.outcome == "failed"
    assert "ImportError" in said.detail


def test_the_table_has_a_row_for_each_client_and_the_reasons_below() -> None:
    lacking = read_lines(
        ['{"version": "2"}', '{"flow": "tools", "lacks": "it sends load"}', '{"flow": "chat", "ok": false}']
    )
    lines = table({ONE: read_lines(['{"version": "1"}', *ALL_OK]), TWO: lacking}).splitlines()
    assert lines[2] == f"| {ONE} | 1 |" + " yes |" * len(FLOWS) + "  |"
    assert lines[3].startswith(f"| {TWO} | 2 | **no** |")
    assert lines[-1] == f"- {TWO} has no tools: it sends load."


def test_flows_beyond_the_eight_stand_in_the_last_column() -> None:
    result = read_lines(['{"version": "1"}', '{"flow": "batch", "ok": true}', '{"flow": "echo", "ok": false}'])
    assert table({ONE: result}).splitlines()[2].endswith("| batch, echo: **no** |")


def test_clients_that_were_not_run_keep_their_lines() -> None:
    lacking = read_lines(['{"version": "2"}', '{"flow": "tools", "lacks": "it sends load"}'])
    both = table({ONE: read_lines(['{"version": "1"}', *ALL_OK]), TWO: lacking})
    assert table({ONE: read_lines(['{"version": "7"}', *ALL_OK])}, both) == both.replace("| 1 |", "| 7 |")
    assert (
        table({}, both.replace(ONE, "gone"))
        == "\n".join(both.replace(ONE, "gone").splitlines()[:2] + both.splitlines()[3:]) + "\n"
    )


def test_a_section_replaces_what_stood_between_the_markers() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    changed = with_section(page, "new\n")
    assert (section_of(changed), changed) == ("new\n", f"before\n{BEGIN}\nnew\n{END}\nafter\n")


def test_the_page_has_a_row_for_each_client_of_the_catalogue() -> None:
    section = section_of((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[2:] == [client.name for client in CLIENTS]


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_a_client_has_its_script_and_its_pins(client: Client) -> None:
    assert (HERE / client.script).is_file()
    assert (HERE / "requirements" / f"{client.environment}.txt").is_file()
    assert not client.packages or (HERE / client.packages / "package-lock.json").is_file()
    assert client.part in PARTS


@pytest.mark.parametrize("file", sorted((HERE / "requirements").glob("*.txt")), ids=lambda file: file.stem)
def test_every_package_is_pinned(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if "==" not in line] == []


def test_a_script_gets_no_setting_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    client = Client("one", "sdks", "python/one.py")
    variables = environment(client, {"KVMESH_URL": "http://127.0.0.1:1"}, tmp_path)
    assert "OPENAI_API_KEY" not in variables
    assert (variables["HOME"], variables["KVMESH_URL"]) == (str(tmp_path), "http://127.0.0.1:1")


class Here(Client):
    """A client whose script runs in this Python."""

    @property
    def argv(self) -> list[str]:
        return [sys.executable, self.script]


def run_script(tmp_path: Path, text: str) -> ClientResult:
    script = tmp_path / "script.py"
    script.write_text(text)
    return run_client(Here("here", "", str(script)), {"KVMESH_URL": "", "KVMESH_SLOW_URL": ""})


def test_a_connection_to_another_host_is_refused_and_written_down(tmp_path: Path) -> None:
    result = run_script(tmp_path, "import socket\nsocket.create_connection(('example.com', 80))\n")
    assert result.attempts == ("example.com",)
    assert "may not leave this host" in result.trouble


def test_a_script_that_ends_badly_says_so(tmp_path: Path) -> None:
    result = run_script(tmp_path, 'print(\'{"flow": "chat", "ok": true}\')\nraise SystemExit(3)\n')
    assert result.flow("chat").outcome == "ok"
    assert "it ended with 3" in result.flow("stream").detail


def test_a_script_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.clients.runner.SCRIPT_S", 0.3)
    assert "still running" in run_script(tmp_path, "import time\ntime.sleep(60)\n").trouble
