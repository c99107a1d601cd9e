"""mbarriers at 32-bit shared addresses, for sm_80 and newer."""

from __future__ import annotations

from cutlass import Int32

from .asm import asm


def arrive(barrier: Int32) -> None:
    """Arrive once at the mbarrier at a shared address."""
    text = "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [$0];\n}"
    asm(text, [], [Int32(barrier)], memory=True)


def wait(barrier: Int32, phase: Int32) -> None:
    """Wait until the phase of parity `phase` of the mbarrier at a shared address is complete. The
    loop polls with `test_wait`, because sm_80 has no `try_wait`."""
    text = (
        "{\n.reg .pred done;\nagain_${:uid}:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [$0], $1;\n"
        "@!done bra again_${:uid};\n}"
    )
    asm(text, [], [Int32(barrier), Int32(phase)], memory=True)
