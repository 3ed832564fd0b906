"""Run a module as a release that speaks another protocol: `python -m ... 99 98 9.9.9 kvmesh worker --role decode`."""

import runpy
import sys

import kvmesh.protocol.version as version


def main() -> None:
    protocol, oldest, release, module = sys.argv[1:5]
    versions = version.Versions(int(protocol), int(oldest), release)
    version.PROTOCOL_VERSION, version.OLDEST_PROTOCOL, version.RELEASE = version.OURS = versions
    version.common_version.__defaults__ = (versions,)
    sys.argv = [module, *sys.argv[5:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
