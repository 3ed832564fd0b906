"""Stands for torchvision where SGLang runs on a CPU: PyPI has builds for CUDA alone, and models of text use none of it.

SGLang and transformers import classes and enumerations from its parts: every name in every part is there, and does
nothing.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Named(type):
    """A class whose attributes are their own names, as the members of an enumeration may be."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Part(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Part(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(_Finder())


def _without_pinned_memory() -> None:
    """Let torch make plain tensors where SGLang's LoRA asks for pinned ones, which only a GPU has a use for."""
    import torch

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, _plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _plain(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_plain(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return make_plain


_without_pinned_memory()


def __getattr__(name: str) -> type:
    return _Part(__name__).__getattr__(name)
