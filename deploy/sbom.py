"""Write what kvmesh consists of as CycloneDX, one file per lock: `make sbom`. The same lock gives the same file."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "dist"
PARTS = {"control": "control.txt", "worker": "runtime.txt", "dev": "dev.txt"}


def main() -> int:
    OUT.mkdir(exist_ok=True)
    release = re.search(r'^RELEASE = "(.+)"', (ROOT / "protocol" / "version.py").read_text(), re.MULTILINE)
    for part, lock in PARTS.items():
        target = OUT / f"kvmesh-{part}.cdx.json"
        argv = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", f"deploy/locks/{lock}"]
        code = subprocess.run(
            [*argv, "--pyproject", "pyproject.toml", "--output-reproducible", "-o", str(target)], cwd=ROOT, check=False
        ).returncode
        if code:
            return code
        bom = json.loads(target.read_text())
        bom["metadata"]["component"]["version"] = release[1] if release else "unknown"
        target.write_text(json.dumps(bom, indent=2) + "\n")
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
