"""A functional emulator of compiled kernels: it runs and checks their PTX without a GPU.

    from cute_attn.emulator import Emulator

    emulator = Emulator()
    function = emulator.load(compiled)   # what cute.compile returned
    function(q, k, v, o)                 # CPU torch tensors, changed in place
    print(emulator.report)

docs/emulator.md describes what the emulator models and checks, and how it was validated.
"""

from __future__ import annotations

from .build import EmulatorUnavailable
from .emulator import EmulatedFunction, Emulator, Names
from .forms import UnsupportedInstruction
from .operands import PtxError
from .report import Finding, FindingsError, Report

__all__ = [
    "EmulatedFunction",
    "Emulator",
    "EmulatorUnavailable",
    "Finding",
    "FindingsError",
    "Names",
    "PtxError",
    "Report",
    "UnsupportedInstruction",
]
