"""Make the images of docker-compose.yml.

Where no registry can be reached, the base image is made with debootstrap, and those of etcd, NATS and Prometheus are
made of Debian's packages. They have names of their own, which the compose file takes from the environment.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.containers.engine import Engine

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
BASE_VARIABLE = "KVMESH_BASE_IMAGE"  # an image with Python to build on, instead of the Dockerfile's
BUILD_S = 1500.0
# Left out of a base that debootstrap makes: nobody reads it in a container.
UNREAD = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")

STAND_IN = """\
ARG BASE
FROM ${BASE}
ARG PACKAGES
RUN apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} busybox && rm -rf /var/lib/apt/lists/* \\
 && ln -sf /bin/busybox /usr/bin/wget
"""


@dataclass(frozen=True, slots=True)
class Foreign:
    """An image of somebody else, and how its stand-in is made."""

    service: str
    variable: str  # of the compose file
    packages: str
    entrypoint: str = ""

    @property
    def image(self) -> str:
        given: str = COMPOSE[self.service]["image"]
        return given.partition(":-")[2].removesuffix("}")


FOREIGN = (
    Foreign("etcd", "KVMESH_ETCD_IMAGE", "etcd-server etcd-client"),
    Foreign("nats", "KVMESH_NATS_IMAGE", "nats-server"),
    Foreign("prometheus", "KVMESH_PROMETHEUS_IMAGE", "prometheus", entrypoint="prometheus"),
)


@dataclass(slots=True)
class Images:
    """Name what was made, and the environment in which compose finds it."""

    environ: dict[str, str] = field(default_factory=dict)
    stand_ins: list[str] = field(default_factory=list)


def make_images(engine: Engine, folder: Path) -> Images:
    """Build the images that docker-compose.yml builds, but for vLLM's, and get the others."""
    images = Images()
    base = base_image(engine, folder)
    settings = PipSettings.of_this_machine()
    built = {s["image"]: s["build"]["target"] for s in COMPOSE.values() if "build" in s and "profiles" not in s}
    for image, target in built.items():
        settings.build(engine, folder, image, target, base)
    for one in FOREIGN:
        if engine.pull(one.image):
            continue
        images.environ[one.variable] = stand_in(engine, folder, one, base)
        images.stand_ins.append(one.service)
    return images


def base_image(engine: Engine, folder: Path) -> str:
    """Return the image to build on: the one that is named, the Dockerfile's, or one that debootstrap makes."""
    if given := os.environ.get(BASE_VARIABLE):
        return given
    pinned = next(line.partition("=")[2] for line in DOCKERFILE.read_text().splitlines() if "PYTHON_IMAGE=" in line)
    if engine.pull(pinned):
        return pinned
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    image = f"localhost/kvmesh-base:{release['VERSION_CODENAME']}"
    if not engine.has_image(image):
        debootstrap(engine, folder / "rootfs", release["VERSION_CODENAME"], image)
    return image


def debootstrap(engine: Engine, rootfs: Path, codename: str, image: str) -> None:
    """Make a base image of this machine's own distribution, from the mirror that apt uses here."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)", "Created-By: Packages"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    mirror = next(line.split()[1] for line in listed if line.startswith(f"{codename} "))
    include = "--include=python3,python3-venv,ca-certificates"
    command = ["debootstrap", "--variant=minbase", include, codename, str(rootfs), mirror]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (rootfs / "usr/bin/python").symlink_to("python3")
    archive = rootfs.with_suffix(".tar")
    with tarfile.open(archive, "w") as tar:
        tar.add(rootfs, ".", filter=lambda one: None if one.name.startswith(tuple(f"./{u}/" for u in UNREAD)) else one)
    engine.run("import", str(archive), image)
    archive.unlink()


def stand_in(engine: Engine, folder: Path, one: Foreign, base: str) -> str:
    """Return an image with Debian's packages in the place of `one`."""
    image = f"localhost/kvmesh-stand-in-{one.service}:1"
    if not engine.has_image(image):
        entrypoint = f'ENTRYPOINT ["{one.entrypoint}"]\n' if one.entrypoint else ""
        context = folder / one.service
        context.mkdir()
        (context / "Dockerfile").write_text(STAND_IN + entrypoint)
        chroot = ("--isolation", "chroot") if engine.is_podman else ()
        args = ("--build-arg", f"BASE={base}", "--build-arg", f"PACKAGES={one.packages}")
        engine.run("build", *chroot, *args, "-t", image, str(context), timeout_s=BUILD_S)
    return image


@dataclass(frozen=True, slots=True)
class PipSettings:
    """Hold what `pip config` says on this machine: builds have to install from the same places."""

    options: dict[str, str]

    @classmethod
    def of_this_machine(cls) -> "PipSettings":
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
        )
        if listed.returncode:
            listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True)
        options: dict[str, str] = {}
        for line in sorted(listed.stdout.splitlines(), reverse=True):  # global.*, then :env:.*, which wins
            name, _, value = line.partition("=")
            options[name.rpartition(".")[2]] = " ".join(value.strip("'\"").split("\\n"))
        return cls(options)

    def build(self, engine: Engine, folder: Path, image: str, target: str, base: str) -> None:
        args = [f"PYTHON_IMAGE={base}"]
        words = ["build", "-f", str(DOCKERFILE), "-t", image, "--target", target]
        if engine.is_podman:
            (folder / "pip.conf").write_text(self.file())
            words += ["--isolation", "chroot", "--layers", "-v", f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]
            words += [word for path in self.paths() for word in ("-v", f"{path}:{path}:ro")]
            local = [place for place in self.options.get("extra-index-url", "").split() if place.startswith("file:")]
            args += [f"TORCH_INDEX={place}" for place in local[:1]]
        else:  # docker mounts nothing into a build; indexes of the network can be named
            for name in ("index-url", "extra-index-url"):
                if self.options.get(name, "").startswith("http"):
                    args.append(f"PIP_{name.upper().replace('-', '_')}={self.options[name]}")
        words += [word for arg in args for word in ("--build-arg", arg)]
        engine.run(*words, str(ROOT), timeout_s=BUILD_S)

    def file(self) -> str:
        wanted = ("index-url", "extra-index-url", "find-links", "constraint", "cert", "trusted-host")
        return "\n".join(
            ["[global]", *(f"{name} = {self.options[name]}" for name in wanted if name in self.options), ""]
        )

    def paths(self) -> Sequence[str]:
        """Return the files and folders of this machine that the settings name."""
        words = [word for value in self.options.values() for word in value.split()]
        places = [urlsplit(word).path if word.startswith("file:") else word for word in words]
        there = {Path(place) for place in places if place.startswith("/") and Path(place).exists()}
        return sorted(str(p.parent if p.name == "simple" else p) for p in there)
