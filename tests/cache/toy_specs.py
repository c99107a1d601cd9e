"""Specialisations of the toy kernels, and a plan. Apart from them: this does not import cutlass."""

from __future__ import annotations

from dataclasses import dataclass

from cute_attn.cache import KernelDef, planner


@dataclass(frozen=True)
class ScaleSpec:
    factor: float = 2.0


@dataclass(frozen=True)
class SumSpec:
    terms: int = 4


@dataclass(frozen=True)
class NeedsMoreSpec:
    terms: int
    width: int
    others: int


SCALE = KernelDef("scale", "toy_kernels:Scale")
SUM = KernelDef("sum", "toy_kernels:Sum")
REVERSE = KernelDef("reverse", "toy_kernels:Reverse")
SLOW = KernelDef("slow", "toy_kernels:Slow")
BROKEN = KernelDef("broken", "toy_kernels:Broken")


@planner
def plan_scale(arch: str, *, factors: list[float]) -> list[tuple[KernelDef, ScaleSpec]]:
    """As an operator's plan: from the parameters in a TOML file to kernels."""
    return [(SCALE, ScaleSpec(factor)) for factor in factors]


@planner
def plan_broken(arch: str) -> list[tuple[KernelDef, ScaleSpec]]:
    """A plan for a kernel that does not compile."""
    return [(BROKEN, ScaleSpec())]


@planner
def plan_hopper(arch: str) -> list[tuple[KernelDef, ScaleSpec]]:
    """A plan for one architecture alone."""
    if arch != "sm_90a":
        raise NotImplementedError(f"no kernel for {arch}; there is: sm_90a")
    return [(SCALE, ScaleSpec(2.0))]


@planner
def plan_wrong(arch: str) -> list[tuple[KernelDef, ScaleSpec]]:
    """A plan that forgets the kernel."""
    return [ScaleSpec()]  # type: ignore[list-item]


def plan_undeclared(arch: str) -> list[tuple[KernelDef, ScaleSpec]]:
    """Not declared as a plan."""
    raise AssertionError("called")
