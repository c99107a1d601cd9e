"""Specialisations of the toy kernels, apart from them: importing this does not import cutlass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleSpec:
    factor: float = 2.0
