"""The `kvmesh` command as a shell runs it."""

import os
import signal
import subprocess
import sys


def test_a_reader_that_leaves_ends_a_command_in_silence() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = subprocess.run(
            [sys.executable, "-m", "kvmesh", "bench", "soak", "--help"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(write_end)
    assert (command.returncode, command.stderr) == (128 + signal.SIGPIPE, "")


def test_an_unknown_command_is_named_with_those_that_exist() -> None:
    command = subprocess.run([sys.executable, "-m", "kvmesh", "serve"], capture_output=True, text=True, timeout=60)
    assert command.returncode == 2
    assert "no command 'serve'" in command.stderr
    assert "  up " in command.stderr
