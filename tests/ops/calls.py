"""What a family's module of calls is made of: `tests.ops.operators` puts the families together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16, INT32 = torch.bfloat16, torch.int32

# The architectures that ArchCalls are for.
OTHER_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_103a", "sm_120a")


@dataclass(frozen=True)
class Operator:
    """An operator, and a good call of it on the CPU.

    Attributes:
        function: the public function.
        arguments: makes the call's arguments.
        arch: the architecture that the call is emulated for.
        majors: the compute capabilities that there are kernels for; empty is all from 8 on.
        written: the arguments that it writes.
        differentiable: whether it has a gradient of all floating-point arguments.
        registered: the name in torch.ops.cute_attn; empty is the function's.
        pools: the arguments whose slots may share pages, where host code alone checks a warm call.
    """

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    arch: str = "sm_90a"
    majors: tuple[int, ...] = ()
    written: tuple[str, ...] = ()
    differentiable: bool = False
    registered: str = ""
    pools: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[str]:
        return [name for name, x in self.arguments().items() if isinstance(x, Tensor)]

    @property
    def tensors_of_kernels(self) -> list[str]:
        """All but those that the host reads."""
        return [name for name in self.tensors if name != "cu_seqlens_cpu"]

    @property
    def numbers(self) -> list[str]:
        """The parameters that kernels take as float32."""
        parameters = inspect.signature(self.function).parameters.values()
        return [x.name for x in parameters if x.annotation in ("float", "float | None")]

    @property
    def floats(self) -> list[str]:
        given = self.arguments()
        return [name for name in self.tensors if given[name].is_floating_point()]

    def call(self, **changed: Any) -> Any:
        return self.function(**self.arguments() | changed)


@dataclass(frozen=True)
class ArchCall:
    """A call that compares results with the reference, on architectures that no other test covers.

    Attributes:
        run: makes the call, emulated, and compares.
        covers: the rows of docs/support.md that it stands for, each (public function, direction).
        refused: the architectures that have no kernel for it.
        quick: the architectures that `make test` takes; the others are slow.
    """

    run: Callable[[], None]
    covers: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


def values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.linspace(-1, 1, max(1, torch.Size(shape).numel())).view(shape).to(dtype)


def tensors_in(results: Any) -> list[Tensor]:
    """The tensors that an operator returned."""
    if isinstance(results, Tensor):
        return [results]
    return [x for x in results if isinstance(x, Tensor)]
