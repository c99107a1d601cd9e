"""Compiled kernels of peers: which ones `make test` has, and where captures are kept.

Compiling one takes seconds, and so does starting the process that does: tests share what they can,
and the first one of an architecture has all compiled that `make test` needs of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from cute_attn.bench.attention import hd256_forward
from cute_attn.bench.peers import Captured, CaptureError, Request, capture_all, missing
from cute_attn.bench.peers.flash_attention_4 import backward, forward
from cute_attn.bench.peers.quack_kernels import cross_entropy_forward, gemm

from . import whole_kernels

DIRECTORY = Path(__file__).parents[2] / "build" / "peers"
SM90, SM100 = "sm_90a", "sm_100a"

# For bugs to be planted in: what each launches before the kernel in question, and the shapes. There
# are a few tiles in each pipeline, so that stages are used again; rows do not fill the last tile.
PEERS: dict[str, tuple[Request, int]] = {
    "forward sm_90": (forward(arch="sm_90a", head_dim=64, heads=1, seqlen_q=160, seqlen_k=640), 0),
    "forward sm_100": (
        forward(arch="sm_100a", head_dim=128, heads=2, seqlen_q=256, seqlen_k=640, num_sms=1),
        0,
    ),
    "backward sm_90": (
        backward(arch="sm_90a", head_dim=64, heads=1, seqlen_q=512, seqlen_k=128),
        1,
    ),
    # Its last tile has 5 rows of 16, so that one warp has a row that is stored and one that is not.
    "combine sm_100": (
        forward(
            arch="sm_100a", head_dim=64, heads=1, num_splits=3, seqlen_q=37, seqlen_k=600, num_sms=1
        ),
        1,
    ),
    "gemm sm_90": (gemm(arch="sm_90a", m=512, n=256, k=512, cluster=(2, 1), num_sms=2), 0),
    "gemm sm_100": (gemm(arch="sm_100a", m=256, n=256, k=512, num_sms=1), 0),
    "gemm sm_100 pairs": (
        gemm(
            arch="sm_100a",
            m=512,
            n=256,
            k=512,
            tile=(256, 128),
            cluster=(2, 1),
            scheduler="dynamic",
            num_sms=2,
        ),
        0,
    ),
}
QUICK_PEERS = ("forward sm_100", "backward sm_90", "gemm sm_100 pairs")

UNEVEN = {"heads": 1, "causal": True, "seqlen_q": 200, "seqlen_k": 333}
BACKWARD_SM100 = backward(arch=SM100, head_dim=128, **UNEVEN)

# Of test_sass.py, whose machine code is compared with ours: slow.
SASS = [
    forward(arch=SM100, head_dim=256, seqlen_q=512, **s.theirs)
    for s in hd256_forward.FORWARD
    if s.name in hd256_forward.SHORT and s.theirs is not None
]

# One of a kind: attention forward and backward, GEMMs with clusters, with scale factors and by
# cluster launch control, and a kernel over rows.
QUICK = [
    PEERS["forward sm_100"][0],
    PEERS["backward sm_90"][0],
    PEERS["gemm sm_100 pairs"][0],
    forward(arch=SM100, head_dim=256, **UNEVEN),
    gemm(arch=SM100, m=128, n=128, k=256, block_scaled="nvfp4"),
    cross_entropy_forward(arch=SM90, dx=True),
]
QUICK_REQUESTS = [
    *QUICK,
    *(case.request for case in whole_kernels.CASES.values() if case.quick),
]


def capture(kernel: Request, others: Iterable[Request] = ()) -> Captured:
    """The kernel's capture, compiled in one batch with others of its architecture; or skip."""
    if reason := missing(kernel.peer):
        pytest.skip(reason)
    alike = [r for r in dict.fromkeys(others) if r.arch == kernel.arch and not missing(r.peer)]
    first = alike.index(kernel) // 12 * 12 if kernel in alike else 0
    together = alike[first : first + 12] if kernel in alike else [kernel]
    directory = DIRECTORY / kernel.arch
    try:
        capture_all(directory, together)
    except CaptureError as error:  # perhaps of another one
        if kernel.name in str(error):
            raise
    return kernel.capture(directory)
