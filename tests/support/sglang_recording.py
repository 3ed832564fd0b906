"""KV events that a real SGLang published, and the script that recorded them."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "kvevents" / "data" / "sglang-0.5.23.msgpack"


@cache
def recorder() -> ModuleType:
    """Return the module deploy/record_sglang_events.py."""
    spec = importlib.util.spec_from_file_location("record_sglang_events", ROOT / "deploy" / "record_sglang_events.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its types name each other
    spec.loader.exec_module(module)
    return module


def recording() -> Any:
    """The `Recording` in the repository."""
    return msgspec.msgpack.decode(FILE.read_bytes(), type=recorder().Recording)
