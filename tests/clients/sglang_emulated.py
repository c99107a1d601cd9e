"""Puts SGLang's scheduler on the CPU, with an H100 that our emulator stands for.

SGLang has a CPU platform, whose layers are written in PyTorch. STUBS names what SGLang imports for
this platform and `unpack` leaves out; none of it is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENVIRONMENT = {
    "CUTE_ATTN_EMULATE": "1",
    "HF_HUB_OFFLINE": "1",  # models are directories
    "SGLANG_USE_CPU_ENGINE": "1",
}

STUBS = {
    "sgl_kernel": "SGLang's CUDA kernels; its CPU platform calls them on processors with AMX alone",
    "torchaudio": "decodes sound, of which a test has none",
    **dict.fromkeys(
        (
            "torchvision",
            "torchvision.io",
            "torchvision.transforms",
            "torchvision.transforms.functional",
            "torchvision.transforms.v2",
            "torchvision.transforms.v2.functional",
        ),
        "decodes images, of which a test has none",
    ),
}


class Missing(ModuleType):
    """A module from which any name can be imported, and none can be called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*arguments: Any, **named: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is a stub: {STUBS[self.__name__]}")

        return missing


class Stubs(MetaPathFinder, Loader):
    """Finds STUBS."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in STUBS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make SGLang, which must not be imported yet, run as above."""
    assert "sglang" not in sys.modules
    os.environ.update(ENVIRONMENT)
    import transformers  # noqa: F401, which must not find a stub

    sys.meta_path.append(Stubs())
