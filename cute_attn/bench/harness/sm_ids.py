"""A Triton kernel that records which SM each CTA ran on. Importing this module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

CTAS = 8192  # many waves on any GPU, so that every reachable SM runs CTAs


@triton.jit
def record_smid(out):  # type: ignore[no-untyped-def]
    cta = tl.program_id(0)
    # A CTA sleeps until later CTAs are launched, because otherwise a few SMs would run all CTAs.
    smid = tl.inline_asm_elementwise(
        "nanosleep.u32 2000; mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out + cta, smid)
