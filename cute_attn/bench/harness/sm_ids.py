"""A Triton kernel that records which SM each block ran on; a file of its own as it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCKS = 8192  # many waves over any GPU, so that every SM in reach gets some


@triton.jit
def record_smid(out):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    # Enough work that a block outlives the launch of the next, or few SMs would take all of them.
    smid = tl.inline_asm_elementwise(
        "nanosleep.u32 2000; mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + block, smid)
