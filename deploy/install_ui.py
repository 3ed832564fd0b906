"""Install what the live page is built and tested with: the packages of ui/ from npm, and Chromium from Debian.

Usage: python3 deploy/install_ui.py [--only-node]. It says what is missing where it cannot install it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UI = ROOT / "ui"
STAMP = UI / "node_modules" / ".installed"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OLDEST_NODE = 18


def main(arguments: list[str]) -> int:
    if problem := install_packages():
        print(problem, file=sys.stderr)
        return 1
    if "--only-node" not in arguments and (problem := install_browser()):
        print(problem, file=sys.stderr)
        return 1
    return 0


def install_packages() -> str:
    """Install the locked packages of npm. Return why that is impossible, "" if they are there."""
    if STAMP.exists() and STAMP.stat().st_mtime >= (UI / "package-lock.json").stat().st_mtime:
        return ""
    if (shutil.which("npm") is None or node_version() < OLDEST_NODE) and not apt_install("nodejs", "npm"):
        return f"the live page is built with node {OLDEST_NODE} or newer and npm, which are not there: install them"
    done = subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=UI, timeout=300)
    if done.returncode != 0:
        return "npm ci has failed in ui/: see above; it needs npm's registry"
    STAMP.touch()
    return ""


def node_version() -> int:
    """Return the major version of node, 0 if there is none."""
    try:
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=20).stdout
        return int(said.strip().lstrip("v").split(".")[0])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0


def install_browser() -> str:
    """Install Chromium. Return why that is impossible, "" if one is there."""
    if any(map(shutil.which, BROWSERS)) or apt_install("chromium", "fonts-dejavu-core"):
        return ""
    return "the live page is tested in Chromium, which is not there: as root, apt-get install chromium"


def apt_install(*packages: str) -> bool:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return False
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        if subprocess.run(["apt-get", "-qq", *command], env=environ, timeout=600).returncode != 0:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
