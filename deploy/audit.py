"""Look for known weaknesses of everything in the locks: `make audit`.

The exit code is 0 if nothing is known, 1 if something is, and 2 if no advisories could be read; nothing was
checked then.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("runtime", "dev", "nixl")
SERVICES = ("pypi", "osv")  # the first that answers counts


def main() -> int:
    worst = 0
    for lock in LOCKS:
        found = next((found for service in SERVICES if (found := asked(lock, service)) is not None), None)
        if found is None:
            print(
                f"deploy/locks/{lock}.txt: the advisories of PyPI and OSV cannot be read here, so nothing was checked"
            )
            worst = 2
            continue
        weak = [package for package in found if package["vulns"]]
        print(f"deploy/locks/{lock}.txt: {len(found)} packages, {len(weak)} with known weaknesses")
        for package in weak:
            for weakness in package["vulns"]:
                fixed = ", ".join(weakness["fix_versions"]) or "no version yet"
                print(f"  {package['name']} {package['version']}: {weakness['id']}, mended in {fixed}")
        worst = max(worst, 1 if weak else 0)
    return worst


def asked(lock: str, service: str) -> list[dict[str, Any]] | None:
    """Return what the service knows of each package of a lock; None if the service does not know all of them."""
    program = Path(sys.executable).parent / "pip-audit"
    argv = [str(program), "-r", f"deploy/locks/{lock}.txt", "--no-deps", "--disable-pip", "-s", service, "-f", "json"]
    done = subprocess.run([*argv, "--progress-spinner", "off"], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return None
    return None if any("skip_reason" in package for package in packages) else packages


if __name__ == "__main__":
    sys.exit(main())
