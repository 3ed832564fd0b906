"""The NIXL connector of vLLM with a progress thread that rests between looks. vLLM loads it in each of its processes.

NIXL's progress thread polls without a pause and takes a core of every idle worker. NIXL's native code has a setting for
it, but neither vLLM nor NIXL's Python layer does. The thread itself stays: without it a peer's read over TCP would
stop. Named in --kv-transfer-config as `kv_connector_module_path`.
"""

import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

__all__ = ["NixlConnector"]

PROGRESS_PAUSE_US = 1000  # 4 % of a core instead of all of it; a pull takes milliseconds


def let_progress_rest() -> None:
    """Let the progress thread of every NIXL agent that this process makes from now on rest."""
    import nixl._api  # not before vLLM has: it sets the environment of UCX first

    api: Any = sys.modules[nixl._api.nixl_agent.__module__]  # of the CUDA build that is installed
    api.nixlBind = _Bindings(api.nixlBind)


class _Bindings:
    """NIXL's native module, whose agents' configuration does not take the pause of 0 that the Python layer sets."""

    def __init__(self, bindings: Any) -> None:
        class RestingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, PROGRESS_PAUSE_US if name == "pthrDelay" else value)

        self._bindings = bindings
        self.nixlAgentConfig = RestingConfig

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)


let_progress_rest()
