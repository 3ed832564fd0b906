"""Run make targets and record each green run in docs/lanes.md: `python deploy/lanes.py test-faults test-hosts`."""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "lanes.md"
_CLOSING = re.compile(r"\d+ passed.* in [\d.]+s|no leak|clean|promise")


def with_record(page: str, lane: str, record: str) -> str:
    """Return the page with the record in the row of the lane. The first cell names the lane and stays."""
    row = re.compile(rf"^(\| `make {re.escape(lane)}` \|).*$", re.MULTILINE)
    text, rows = row.subn(lambda found: f"{found[1]} {record} |", page)
    if rows != 1:
        raise SystemExit(f"docs/lanes.md has {rows} rows for `make {lane}`, expected one; add the row")
    return text


def closing_line(output: list[str]) -> str:
    """Return the last line with a result, without what would break a table; else the last line that is not empty."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip(" =\n") for line in output]
    lines = [line for line in lines if line] or ["(no output)"]
    return next((line for line in reversed(lines) if _CLOSING.search(line)), lines[-1]).replace("|", "/")[:160]


def run(lane: str) -> tuple[int, list[str]]:
    """Run `make LANE`, show its output, and return its exit code and lines."""
    with subprocess.Popen(
        ["make", lane], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        output = []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            output.append(line)
    return process.returncode, output


def main(lanes: list[str]) -> int:
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    failed = []
    for lane in lanes:
        began = time.monotonic()
        code, output = run(lane)
        if code:
            failed.append(lane)
            continue
        took_s = time.monotonic() - began
        record = f"{commit} | {time.strftime('%Y-%m-%d', time.gmtime())} | {closing_line(output)} | {took_s:.0f} s"
        PAGE.write_text(with_record(PAGE.read_text(encoding="utf-8"), lane, record), encoding="utf-8")
    print(f"failed: {', '.join(failed)}" if failed else "all lanes passed; docs/lanes.md has their records")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
