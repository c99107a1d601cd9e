"""Programmatic dependent launch (sm_90 and newer): a grid that is launched with `use_pdl` starts
before the one in front of it in the stream is done."""

from __future__ import annotations

from cutlass import Int64

from .asm import asm


def start_dependents() -> None:
    """Let the next grid start, once every CTA of this one has come here or is done."""
    asm("griddepcontrol.launch_dependents;", [], [], volatile=True)


def wait_for_previous(address: Int64) -> None:
    """Wait until the grid in front is done and its results are visible. The assembler would put
    this before all arithmetic; `address`, which is not 0, is computed first."""
    text = "{\n.reg .pred some;\nsetp.ne.b64 some, $0, 0;\n@some griddepcontrol.wait;\n}"
    asm(text, [], [Int64(address)], memory=True)
