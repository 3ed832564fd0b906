"""The `kvmesh` command as a shell runs it."""

import codecs
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.__main__ import COMMANDS, GROUPS, IN_ASCII, OF_LABORATORY, in_ascii, usage
from kvmesh.commands import laboratory
from kvmesh.commands.bench import parts
from kvmesh.lab import commands as lab
from kvmesh.protocol.errors import ConfigError
from kvmesh.protocol.version import RELEASE


def kvmesh(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvmesh", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", ["bench serve --help", "workers --help", "--help", "help", "--version", "fronted"])
def test_a_reader_that_leaves_ends_a_command_in_silence(words: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = subprocess.run(
            [sys.executable, "-m", "kvmesh", *words.split()],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    finally:
        os.close(write_end)
    assert "Traceback" not in command.stderr and "BrokenPipe" not in command.stderr
    if words == "fronted":  # only standard output is gone
        assert (command.returncode, command.stderr) == (
            2,
            "kvmesh: unknown command 'fronted'; did you mean frontend?\n",
        )
    else:
        assert (command.returncode, command.stderr) == (128 + signal.SIGPIPE, "")


def test_an_unknown_command_is_named_with_those_that_exist() -> None:
    command = kvmesh("serve")
    assert command.returncode == 2
    assert "unknown command 'serve'" in command.stderr
    assert "  up " in command.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("wrokers", "workers"),
        ("--verison", "--version"),
        ("lab fautls", "faults"),
        ("bench serv", "serve"),
        ("profile paln", "plan"),
        ("keys nwe", "new"),
        ("workers drian decode-0", "drain"),
        ("up --prefil 2", "--prefill"),
    ],
)
def test_a_misspelled_word_gets_the_nearest_known_one(typed: str, meant: str) -> None:
    command = kvmesh(*typed.split())
    assert command.returncode == 2
    assert command.stderr.endswith(f"; did you mean {meant}?\n")


def test_the_version_is_that_of_the_release() -> None:
    command = kvmesh("--version")
    assert (command.returncode, command.stdout) == (0, f"kvmesh {RELEASE}\n")


def test_help_with_a_command_is_the_help_of_the_command() -> None:
    assert kvmesh("help", "planner", "explain").stdout == kvmesh("planner", "explain", "--help").stdout != ""
    assert kvmesh("help").stdout.rstrip() == usage()


def test_an_ascii_terminal_gets_lookalikes() -> None:
    codecs.register_error(IN_ASCII, in_ascii)
    shown = "█░ 5 → 7 – ü"
    assert shown.encode("ascii", IN_ASCII).decode() == "#. 5 > 7 - ?"
    code = f"from kvmesh.__main__ import open_standard_streams; open_standard_streams(); print({shown!r})"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert (printed.stdout, printed.stderr) == ("#. 5 > 7 - ?\n", "")


def test_a_model_name_that_is_too_long_is_one_line() -> None:
    command = kvmesh("up", "--model", "m" * 300)
    [line] = command.stderr.splitlines()
    assert command.returncode == 2 and "--model" in line and "<= 256" in line


def test_piped_output_has_no_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    keys = tmp_path / "keys"
    assert kvmesh("keys", "new", "--name", "a", f"--file={keys}").returncode == 0
    shown = kvmesh("keys", "list", str(keys))
    assert shown.returncode == 0 and "tenant" in shown.stdout and "\x1b" not in shown.stdout


def test_the_help_lists_what_people_use_in_three_groups() -> None:
    listed = [name for group in GROUPS.values() for name in group]
    assert (len(GROUPS), len(listed)) == (3, 16)
    assert all(f"  {name} " in usage() for name in listed)
    assert all(f"  {name} " in usage(with_seldom=True) for name in COMMANDS)


@pytest.mark.parametrize("name", OF_LABORATORY)
def test_an_earlier_spelling_leads_to_the_laboratory(name: str) -> None:
    command = [sys.executable, "-m", "kvmesh", name, "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith(f"usage: kvmesh lab {name}")


def test_an_earlier_spelling_of_a_benchmark_leads_to_the_laboratory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parts.main(["index", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: kvmesh lab bench index")


def test_a_wheel_says_that_it_has_no_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="clone the repository"):
        laboratory.main(["faults"])


def test_the_laboratory_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in lab.COMMANDS)
    with pytest.raises(ConfigError, match="there are: bench, faults"):
        lab.main(["juggle"])
