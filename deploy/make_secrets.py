"""Make the passwords of docker-compose.yml, in secrets/ beside it. One that is there already stays.

    python3 deploy/make_secrets.py

KVMESH_SECRETS names another folder, for this script and for docker compose.
The folder is yours alone. Everybody may read the files in it, because containers see each file without its folder,
and run as another user. Standard library only.
"""

import os
import secrets
from pathlib import Path

NAMES = (
    "etcd_root_password",
    *(f"etcd_{role}_password" for role in ("worker", "router", "frontend", "planner")),
    *(f"nats_{role}_password" for role in ("worker", "router")),
    "planner_token",
)
BESIDE = Path(__file__).resolve().parent.parent / "secrets"


def main(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in NAMES:
        file = folder / name
        if not file.exists():
            file.write_text(secrets.token_hex(24) + "\n")
            file.chmod(0o644)
            print(f"made {file}")


if __name__ == "__main__":
    main(Path(os.environ.get("KVMESH_SECRETS") or BESIDE))
