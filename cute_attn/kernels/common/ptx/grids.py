"""Programmatic dependent launch (sm_90 and newer): a grid launched with `use_pdl` starts before the
previous grid of its stream has finished."""

from __future__ import annotations

from cutlass import Int64

from .asm import asm


def start_dependents() -> None:
    """Let the next grid start, once every CTA of this grid has called this or has exited."""
    asm("griddepcontrol.launch_dependents;", [], [], volatile=True)


def wait_for_previous(address: Int64) -> None:
    """Wait until the previous grid has finished and its results are visible. The assembler would
    move this wait before all arithmetic; the wait depends on `address`, a nonzero value, which is
    therefore computed first."""
    text = "{\n.reg .pred some;\nsetp.ne.b64 some, $0, 0;\n@some griddepcontrol.wait;\n}"
    asm(text, [], [Int64(address)], memory=True)
