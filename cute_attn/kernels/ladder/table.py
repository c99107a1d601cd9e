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
    LadderStep(1, "basic", "tensor cores; K transposed through shared memory", _kernel(1, "basic")),
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
