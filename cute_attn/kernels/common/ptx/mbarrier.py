"""mbarriers at 32-bit shared addresses, on sm_80 too."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from .asm import asm


def arrive(barrier: Any) -> None:
    """Arrive once at the mbarrier at a shared address."""
    text = "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [$0];\n}"
    asm(text, [], [Int32(barrier)], memory=True)


def wait(barrier: Any, phase: Any) -> None:
    """Wait until that phase (0 or 1) of the mbarrier at a shared address is complete. sm_80 cannot
    suspend a thread meanwhile, so this is a loop of tests."""
    text = (
        "{\n.reg .pred done;\nagain_${:uid}:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [$0], $1;\n"
        "@!done bra again_${:uid};\n}"
    )
    asm(text, [], [Int32(barrier), Int32(phase)], memory=True)
