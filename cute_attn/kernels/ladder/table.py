"""The steps of the ladder. Importing this loads no compiler."""

from __future__ import annotations

from typing import NamedTuple

from ...cache import KernelDef


class LadderStep(NamedTuple):
    """A step.

    Attributes:
        number: 0 is PyTorch; each other step has the ideas of the ones before it.
        name: on the command line and in tables.
        idea: what the step adds, in one line.
        kernel: None for PyTorch.
        archs: the targets that it runs on; empty for all from sm_80 on.
    """

    number: int
    name: str
    idea: str
    kernel: KernelDef | None
    archs: tuple[str, ...] = ()

    def runs_on(self, arch: str) -> bool:
        return not self.archs or arch in self.archs


def _kernel(number: int, name: str) -> KernelDef:
    module = f"cute_attn.kernels.ladder.step{number}_{name}"
    return KernelDef(name=f"fmha_step{number}_{name}", target=f"{module}:FmhaStep{number}")


STEPS = (
    LadderStep(0, "pytorch", "PyTorch's scaled_dot_product_attention as it chooses", None),
    LadderStep(1, "basic", "tensor cores; K transposed in shared memory", _kernel(1, "basic")),
    LadderStep(2, "math", "exponentials in base 2, the scale folded in", _kernel(2, "math")),
    LadderStep(3, "memory", "loads ahead, K read without a transpose", _kernel(3, "memory")),
    LadderStep(
        4, "full", "occupancy target, approximate division, longest first", _kernel(4, "full")
    ),
    LadderStep(5, "swizzle", "swizzled shared memory, ldmatrix.x4", _kernel(5, "swizzle")),
)


def find(number: int) -> LadderStep:
    """The step of this number.

    Raises:
        ValueError: there is none.
    """
    for step in STEPS:
        if step.number == number:
            return step
    raise ValueError(f"step is {number}, must be one of {[step.number for step in STEPS]}")
