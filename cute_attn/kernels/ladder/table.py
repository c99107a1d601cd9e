"""The steps of the ladder. Importing this loads no compiler."""

from __future__ import annotations

from typing import NamedTuple

from ...cache import KernelDef


class LadderStep(NamedTuple):
    """A step of the ladder.

    Attributes:
        number: 0 is PyTorch; each kernel includes the ideas of all earlier steps.
        name: the step's name on the command line and in tables.
        idea: what the step adds, in one line.
        kernel: None for PyTorch.
        archs: the targets that the kernel runs on; empty for all targets from sm_80 on.
        persistent: the kernel takes two more arguments before the stream: the number of CTAs, and
            an int32 counter that is 0.
    """

    number: int
    name: str
    idea: str
    kernel: KernelDef | None
    archs: tuple[str, ...] = ()
    persistent: bool = False

    def runs_on(self, arch: str) -> bool:
        return not self.archs or arch in self.archs


def _kernel(number: int, name: str) -> KernelDef:
    module = f"cute_attn.kernels.ladder.step{number}_{name}"
    return KernelDef(name=f"fmha_step{number}_{name}", target=f"{module}:FmhaStep{number}")


HOPPER = ("sm_90a",)

STEPS = (
    LadderStep(0, "pytorch", "PyTorch's scaled_dot_product_attention as it chooses", None),
    LadderStep(1, "basic", "tensor cores; K transposed in shared memory", _kernel(1, "basic")),
    LadderStep(2, "math", "exponentials in base 2, the scale folded in", _kernel(2, "math")),
    LadderStep(3, "memory", "loads ahead, K read without a transpose", _kernel(3, "memory")),
    LadderStep(
        4, "full", "occupancy target, approximate division, longest first", _kernel(4, "full")
    ),
    LadderStep(5, "swizzle", "swizzled shared memory, ldmatrix.x4", _kernel(5, "swizzle")),
    LadderStep(6, "tma", "TMA by a load warp, mbarriers", _kernel(6, "tma"), HOPPER),
    LadderStep(
        7, "wgmma", "wgmma out of shared memory, P in registers", _kernel(7, "wgmma"), HOPPER
    ),
    LadderStep(
        8, "warpgroups", "two consumer warpgroups, setmaxnreg", _kernel(8, "warpgroups"), HOPPER
    ),
    LadderStep(9, "overlap", "softmax beside products, in turns", _kernel(9, "overlap"), HOPPER),
    LadderStep(
        10,
        "persistent",
        "a CTA an SM, tiles by a counter, longest first",
        _kernel(10, "persistent"),
        HOPPER,
        persistent=True,
    ),
)


def find(number: int) -> LadderStep:
    """The step of this number.

    Raises:
        ValueError: no step has this number.
    """
    for step in STEPS:
        if step.number == number:
            return step
    raise ValueError(f"step is {number}, must be one of {[step.number for step in STEPS]}")
