"""Tests of the batch format: which lines can be sent, and what a problem looks like."""

import json
import os
from pathlib import Path

import pytest

from kvmesh.commands.batch import lines
from kvmesh.commands.batch.lines import check_input, open_input, read_request, request_at
from kvmesh.protocol.errors import ConfigError

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def line_of(custom_id: str = "a", **fields: object) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": CHAT} | fields
    return json.dumps(line).encode() + b"\n"


def written(folder: Path, content: bytes) -> Path:
    path = folder / "input.jsonl"
    path.write_bytes(content)
    return path


def test_a_request_is_sent_as_it_was_written() -> None:
    request = read_request(line_of("a"), model="")
    assert (request.custom_id, request.path) == ("a", "/v1/chat/completions")
    assert json.loads(request.body) == CHAT


def test_another_model_can_be_asked_for_all() -> None:
    assert json.loads(read_request(line_of(), model="big").body)["model"] == "big"


def test_an_edited_request_has_another_id() -> None:
    ids = {
        read_request(line, model).id
        for line, model in [
            (line_of("a"), ""),
            (line_of("b"), ""),
            (line_of("a", url="/v1/completions"), ""),
            (line_of("a", body=CHAT | {"max_tokens": 1}), ""),
            (line_of("a"), "big"),
        ]
    }
    assert len(ids) == 5
    assert read_request(line_of("a"), "").id in ids


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"body": {"a": ' + b"[" * 100_000, "not JSON"),
        (b"[]", "custom_id, method, url and body"),
        (b'{"custom_id": "a", "url": "/v1/completions"}', "missing required field `body`"),
        (line_of(custom_id=7), "Expected `str`"),  # type: ignore[arg-type]
        (line_of(method="GET"), "method 'GET': only POST"),
        (line_of(url="/v1/images"), "url '/v1/images': expected one of /v1/chat/completions"),
        (line_of(body=CHAT | {"stream": True}), "body.stream"),
    ],
)
def test_a_line_that_cannot_be_sent_says_why(tmp_path: Path, line: bytes, problem: str) -> None:
    path = written(tmp_path, line_of("first") + line.rstrip() + b"\n")
    with pytest.raises(ConfigError, match="line 2: ") as raised:
        check_input(path, "")
    assert problem in str(raised.value)
    assert "nothing was sent" in str(raised.value)


def test_two_requests_must_not_share_a_custom_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2: custom_id 'a' is that of line 1 too"):
        check_input(written(tmp_path, line_of("a") + line_of("a")), "")


def test_of_many_problems_the_first_ten_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 30 lines that cannot be sent") as raised:
        check_input(written(tmp_path, b"x\n" * 30), "")
    assert "line 10: " in str(raised.value)
    assert "line 11: " not in str(raised.value)
    assert "and 20 more" in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="has no request"):
        check_input(written(tmp_path, content), "")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.jsonl"):
        check_input(tmp_path / "nothing.jsonl", "")


def test_blank_lines_a_bom_and_a_missing_newline_are_accepted(tmp_path: Path) -> None:
    path = written(tmp_path, lines.BOM + line_of("a") + b"\n\r\n" + line_of("b").rstrip())
    entries = check_input(path, "")
    assert [entry.number for entry in entries] == [1, 4]
    with open_input(path) as file:
        assert [request_at(file, entry, "").custom_id for entry in entries] == ["a", "b"]


def test_a_line_that_is_too_long_does_not_shift_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    path = written(tmp_path, line_of("a") + line_of("b", body=CHAT | {"user": "x" * 900}) + line_of("c"))
    with pytest.raises(ConfigError, match="has 1 lines that cannot be sent\n  line 2: "):
        check_input(path, "")


def test_an_input_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, line_of("a"))
    [entry] = check_input(path, "")
    path.write_bytes(line_of("b"))
    with open_input(path) as file, pytest.raises(ConfigError, match="line 1 of the input has changed"):
        request_at(file, entry, "")


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/null"])
def test_an_input_without_an_end_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no regular file"):
        check_input(tmp_path / name, "")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux alone")
def test_a_file_that_cannot_be_read_to_its_end_is_one_error() -> None:
    with pytest.raises(ConfigError, match="cannot read /proc/self/mem: Input/output error"):
        check_input(Path("/proc/self/mem"), "")
