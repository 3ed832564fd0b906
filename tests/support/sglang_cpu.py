"""A real SGLang that computes on this machine's CPU, in an environment that was made for it."""

import importlib.util
import os

import pytest

ENV = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
)
FLAGS += ("--disable-cuda-graph", "--log-level", "warning")
ASKED_FOR = bool(os.environ.get("KVMESH_TEST_SGLANG")) and importlib.util.find_spec("sglang") is not None

needs_sglang = pytest.mark.skipif(not ASKED_FOR, reason="runs by `make test-sglang`, in an environment that has SGLang")
