"""A cluster of four CTAs is two pairs for tcgen05 with cta_group::2; CTAs of both exchange data."""

from __future__ import annotations

import numpy as np
import pytest

from cute_attn.emulator.machine import Run
from cute_attn.emulator.runner import Buffer, run_ptx

from .planted_kernels import copy_row, module, registers, wait

ROWS, COLUMNS, K = 128, 32, 16  # rows of a CTA; columns of a pair, half of them from each CTA
LOADED = ROWS + COLUMNS // 2
SENT = 4  # columns of a row that go to the other pair

# Each pair computes its own 256 x 32 product, issued by its CTA of even rank. Then each thread
# sends 4 values of its row to the CTA of the other pair that has the same place. Shared memory has
# mbarriers at 0 and 8, TMEM's address at 16, A at 1024, B at 5120, what was received at 8192.
PAIRS = module(
    f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mov.u32 %bars, dynamic; add.s32 %r1, %bars, 1024; mov.u32 %rank, %cluster_ctarank;
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra ALLOCATED;
    add.s32 %r2, %bars, 16;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r2], 32;
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
    setp.ne.u32 %p2, %lane, 0;
    @%p2 bra ALLOCATED;
    mbarrier.init.shared::cta.b64 [%bars], 1;
    mbarrier.init.shared::cta.b64 [%bars+8], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars+8], {ROWS * SENT * 4};
    fence.mbarrier_init.release.cluster;
    ALLOCATED:
    mul.wide.u32 %rd3, %cta, {LOADED * K * 2}; add.s64 %rd1, %rd1, %rd3;
    mul.wide.u32 %rd3, %thread, {K * 2}; add.s64 %rd4, %rd1, %rd3;
    {copy_row("%thread", "%rd4", "%r1", "fill")}
    setp.ge.u32 %p2, %thread, {COLUMNS // 2};
    @%p2 bra FILLED;
    add.s64 %rd5, %rd4, {ROWS * K * 2}; add.s32 %r3, %r1, {ROWS * K * 2};
    {copy_row("%thread", "%rd5", "%r3", "fill_b")}
    FILLED:
    fence.proxy.async.shared::cta;
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    tcgen05.fence::after_thread_sync;
    ld.shared.u32 %r4, [%bars+16];
    shr.u32 %r5, %r1, 4; cvt.u64.u32 %rd10, %r5; and.b64 %rd10, %rd10, 0x3FFF;
    or.b64 %rd10, %rd10, {6 << 61 | 1 << 46 | 256 >> 4 << 32 | 1 << 16:#x};
    add.s64 %rd11, %rd10, {ROWS * K * 2 >> 4};
    mov.u32 %r6, {1 << 4 | COLUMNS >> 3 << 17 | 2 * ROWS >> 4 << 24:#x};
    and.b32 %r7, %rank, 1; or.b32 %r7, %r7, %thread; setp.ne.u32 %p3, %r7, 0;
    @%p3 bra ISSUED;
    setp.ne.u32 %p4, %r4, %r4;
    tcgen05.mma.cta_group::2.kind::f16 [%r4], %rd10, %rd11, %r6, %p4;
    and.b32 %r7, %rank, 2; mov.u32 %r8, 3; shl.b32 %r8, %r8, %r7; cvt.u16.u32 %rs1, %r8; // @mask
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
        [%bars], %rs1;
    ISSUED:
    {wait("WAIT", "[%bars]", "0", "done")}
    tcgen05.fence::after_thread_sync;
    shl.b32 %r7, %warp, 21; add.s32 %r8, %r4, %r7;
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(10, 32, "r")}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    xor.b32 %r43, %rank, 2; // @partner
    shl.b32 %r44, %thread, 4; add.s32 %r44, %r44, %bars; add.s32 %r44, %r44, 8192;
    mapa.shared::cluster.u32 %r45, %r44, %r43;
    add.s32 %r46, %bars, 8; mapa.shared::cluster.u32 %r46, %r46, %r43; // @signalled
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32
        [%r45], {registers(10, 4, "r")}, [%r46];
    {wait("RECEIVE", "[%bars+8]", "0", "received")}
    ld.shared.v4.b32 {registers(50, 4, "r")}, [%r44];
    shl.b32 %r47, %cta, 7; add.s32 %r47, %r47, %thread;
    mul.wide.u32 %rd3, %r47, {4 * (COLUMNS + SENT)}; add.s64 %rd2, %rd2, %rd3;
"""
    + "".join(f"    st.global.b32 [%rd2+{4 * i}], %r{10 + i};\n" for i in range(COLUMNS))
    + "".join(f"    st.global.b32 [%rd2+{4 * (COLUMNS + i)}], %r{50 + i};\n" for i in range(SENT))
    + """
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 bra FREED;
    tcgen05.fence::after_thread_sync;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r4, 32;
    FREED:
""",
    target="sm_100a",
    directives=".reqnctapercluster 4, 1, 1",
)


def run_pairs(text: str, schedule: int = 0) -> tuple[Run, np.ndarray, np.ndarray]:
    """The run, its output, and what that ought to be: [clusters, CTAs, rows, columns]."""
    clusters = 2
    generator = np.random.default_rng(0)
    values = generator.integers(-8, 8, (clusters, 4, LOADED, K)).astype(np.float16)
    pairs = values.astype(np.float32).reshape(clusters, 2, 2, LOADED, K)
    products = np.einsum("cpirk,cpjsk->cpirjs", pairs[..., :ROWS, :], pairs[..., ROWS:, :])
    products = products.reshape(clusters, 4, ROWS, COLUMNS)
    received = products[:, [2, 3, 0, 1], :, :SENT]
    out = np.zeros((clusters, 4, ROWS, COLUMNS + SENT), np.float32)
    run = run_ptx(
        text,
        grid=4 * clusters,
        block=ROWS,
        args=[values, Buffer(out, initialised=False)],
        dynamic_shared=1 << 14,
        schedule=schedule,
        num_sms=8,
    )
    return run, out, np.concatenate([products, received], axis=-1)


@pytest.mark.parametrize("schedule", range(3))
def test_two_pairs_compute_and_exchange(schedule: int) -> None:
    run, out, expected = run_pairs(PAIRS, schedule)
    assert run.findings == []
    assert (out == expected).all()


MISTAKES = {
    "the commit of both leaders goes to the first pair": (
        "shl.b32 %r8, %r8, %r7;", "", "deadlock",
    ),
    "the data go to the own pair, their mbarrier is in the other": (
        "mapa.shared::cluster.u32 %r46, %r46, %r43;",
        "xor.b32 %r43, %rank, 1; mapa.shared::cluster.u32 %r46, %r46, %r43;",
        "cluster",
    ),
    "a rank that the cluster does not have": (
        "xor.b32 %r43, %rank, 2;", "add.s32 %r43, %rank, 2;", "cluster",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "check"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_between_pairs_are_found(right: str, wrong: str, check: str) -> None:
    assert PAIRS.count(right) == 1
    run, _, _ = run_pairs(PAIRS.replace(right, wrong))
    assert check in {f.check for f in run.findings if f.severity == "error"}
