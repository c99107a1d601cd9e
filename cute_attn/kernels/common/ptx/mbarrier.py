"""mbarriers at 32-bit shared addresses, on sm_80 too."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from .asm import asm


def arrive(barrier: Any) -> None:
    """One of the arrivals that the mbarrier at a shared address waits for; on sm_80 too."""
    text = "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [$0];\n}"
    asm(text, [], [Int32(barrier)], memory=True)


def wait(barrier: Any, phase: Any) -> None:
    """Until that phase (0 or 1) of the mbarrier at a shared address is complete; on sm_80 too,
    which cannot suspend a thread meanwhile."""
    text = (
        "{\n.reg .pred done;\nagain_${:uid}:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [$0], $1;\n"
        "@!done bra again_${:uid};\n}"
    )
    asm(text, [], [Int32(barrier), Int32(phase)], memory=True)
