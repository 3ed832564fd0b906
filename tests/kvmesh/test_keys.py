"""Tests of `kvmesh keys`: what it writes is read, and what it prints shows no secrets."""

from pathlib import Path

import pytest

from kvmesh.frontend.keys.command import main
from kvmesh.frontend.keys.keyfile import hashed, read_key_file
from kvmesh.protocol.errors import ConfigError


def test_a_new_key_is_printed_once_and_its_hash_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    flags = ["--tenant", "t", "--models", "a, b*", "--requests-per-minute", "5", "--expires-days", "30"]
    assert main(["new", "--name", "alice", "--file", str(file), *flags]) == 0
    key = capsys.readouterr().out.strip()
    assert main(["new", "--name", "bob", "--file", str(file)]) == 0
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    alice, bob = read_key_file(file.read_text(), "FILE").lines
    assert (alice.sha256, alice.tenant, alice.models, alice.requests_per_minute) == (hashed(key), "t", ("a", "b*"), 5)
    assert alice.expires is not None
    assert (bob.name, bob.expires) == ("bob", None)


def test_without_a_file_the_line_follows_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "--name", "alice"])
    key, line = capsys.readouterr().out.splitlines()
    [read] = read_key_file(line, "stdout").lines
    assert read.sha256 == hashed(key)


@pytest.mark.parametrize(
    "flags",
    [["--name", "alice"], ["--name", "a b"], ["--name", "b", "--streams", "0"], ["--name", "b", "--tenant", "é"]],
)
def test_a_line_that_would_not_be_read_is_not_written(tmp_path: Path, flags: list[str]) -> None:
    file = tmp_path / "keys"
    main(["new", "--name", "alice", "--file", str(file)])
    before = file.read_text()
    with pytest.raises(ConfigError):
        main(["new", "--file", str(file), *flags])
    assert file.read_text() == before


def test_a_file_of_the_older_form_is_hashed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nsk-one  # of the first\nsk-two acme\n")
    assert main(["hash", str(file)]) == 0
    text = capsys.readouterr().out
    assert "sk-" not in text
    assert "# people" in text
    assert "# of the first" in text
    content = read_key_file(text, "hashed")
    assert content.num_plain == 0
    assert [(line.sha256, line.tenant) for line in content.lines] == [
        (hashed("sk-one"), ""),
        (hashed("sk-two"), "acme"),
    ]


def test_the_list_shows_no_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    main(["new", "--name", "alice", "--file", str(file), "--tenant", "acme"])
    capsys.readouterr()
    assert main(["list", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown
    assert "acme" in shown
    assert read_key_file(file.read_text(), "FILE").lines[0].sha256 not in shown


@pytest.mark.parametrize("argv", [[], ["make"], ["hash"], ["list", "a", "b"], ["list", "/nonexistent"]])
def test_what_it_cannot_do_says_what_it_can(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(argv)
