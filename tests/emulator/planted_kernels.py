"""Small kernels written in PTX, free of bugs, for bugs to be planted in.

Lines that matter carry a mark, `// @name`. Each kernel has the sizes of its launch, and a function
that makes its arguments anew; `expected` says what the last of them holds afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_attn.emulator.runner import Buffer


@dataclass(frozen=True)
class Small:
    """A kernel in PTX, and its launch.

    Attributes:
        arguments: of the launch, made anew for each.
        expected: what the last argument holds after a run of the kernel as it is.
        options: of `run_ptx`.
    """

    text: str
    arguments: Callable[[], list[Any]]
    expected: np.ndarray
    grid: int = 1
    block: int = 32
    dynamic_shared: int = 0


HEADER = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k({parameters}) {directives}
{{
    .reg .pred %p<20>; .reg .b16 %rs<10>; .reg .b32 %r<60>; .reg .b64 %rd<40>; .reg .f32 %f<80>;
    .reg .b32 %thread, %warp, %lane, %cta, %rank, %bars;
    mov.u32 %thread, %tid.x; shr.u32 %warp, %thread, 5; and.b32 %lane, %thread, 31; mov.u32 %cta, %ctaid.x;
"""


def module(
    body: str,
    target: str = "sm_90a",
    parameters: str = ".param .u64 x, .param .u64 out",
    directives: str = "",
) -> str:
    header = HEADER.format(target=target, parameters=parameters, directives=directives)
    return f"{header}{body}\n    ret; // @exit\n}}\n"


def wait(name: str, barrier: str, parity: str, mark: str) -> str:
    """A loop that waits for a phase of an mbarrier."""
    return f"""
    {name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p19, {barrier}, {parity}; // @{mark}
    @!%p19 bra {name};
"""


def ramp(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def output(count: int) -> Buffer:
    """Memory to be written."""
    return Buffer(np.zeros(count, np.uint32), initialised=False)


# -- bulk copies ----------------------------------------------------------------------------------

TILES = 6

# Warp 0 copies tiles of 256 bytes into a ring of two stages, warp 1 adds them up by lane.
# Barriers at [dynamic]: full 0, full 1, empty 0, empty 1. Stages at [dynamic + 1024].
PIPELINE = Small(
    module(
        f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mov.u32 %bars, dynamic; mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r10, 0;
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%bars], 1; // @init
    mbarrier.init.shared::cta.b64 [%bars+8], 1; // @init1
    mbarrier.init.shared::cta.b64 [%bars+16], 32; // @init_empty
    mbarrier.init.shared::cta.b64 [%bars+24], 32; // @init_empty1
    fence.mbarrier_init.release.cluster; // @init_fence
    READY:
    bar.sync 0; // @ready
    setp.eq.u32 %p1, %warp, 1;
    @%p1 bra CONSUMER;
    setp.ne.u32 %p1, %lane, 0;
    @%p1 bra END;

    LOAD:
    shl.b32 %r4, %r2, 3; add.s32 %r4, %bars, %r4;
    mul.lo.u32 %r5, %r2, 256; // @stage
    add.s32 %r5, %r5, %bars; add.s32 %r5, %r5, 1024;
    xor.b32 %r6, %r3, 1;
    {wait("EMPTY", "[%r4+16]", "%r6", "empty_wait")}
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 256; // @expect
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd1], 256, [%r4]; // @copy
    add.s64 %rd1, %rd1, 256;
    add.s32 %r2, %r2, 1;
    setp.eq.u32 %p2, %r2, 2; // @wrap
    @%p2 xor.b32 %r3, %r3, 1;
    @%p2 mov.u32 %r2, 0;
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p3, %r1, {TILES}; // @count
    @%p3 bra LOAD;
    bra END;

    CONSUMER:
    shl.b32 %r4, %r2, 3; add.s32 %r4, %bars, %r4;
    mul.lo.u32 %r5, %r2, 256; // @consumer_stage
    add.s32 %r5, %r5, %bars; add.s32 %r5, %r5, 1024;
    shl.b32 %r7, %lane, 3; add.s32 %r5, %r5, %r7;
    {wait("FULL", "[%r4]", "%r3", "full_wait")}
    ld.shared.v2.u32 {{%r8, %r9}}, [%r5]; // @read
    add.s32 %r10, %r10, %r8; add.s32 %r10, %r10, %r9;
    mbarrier.arrive.shared::cta.b64 _, [%r4+16]; // @release
    add.s32 %r2, %r2, 1;
    setp.eq.u32 %p2, %r2, 2; // @consumer_wrap
    @%p2 xor.b32 %r3, %r3, 1;
    @%p2 mov.u32 %r2, 0;
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p3, %r1, {TILES}; // @consumer_count
    @%p3 bra CONSUMER;
    mul.wide.u32 %rd3, %lane, 4; add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r10; // @store
    END:
"""
    ),
    lambda: [ramp(64 * TILES), output(32)],
    ramp(64 * TILES).reshape(TILES, 32, 2).sum((0, 2)),
    block=64,
    dynamic_shared=2048,
)

# Four warps write 2 KiB of shared memory, which a bulk copy stores, three times over.
STORE = Small(
    module(
        """
    ld.param.u64 %rd2, [out];
    mov.u32 %bars, dynamic; mov.u32 %r1, 0;
    shl.b32 %r2, %thread, 4; add.s32 %r3, %bars, %r2; // each thread's 16 bytes
    LOOP:
    shl.b32 %r4, %r1, 10; add.s32 %r5, %thread, %r4;
    st.shared.v4.u32 [%r3], {%r5, %r5, %r5, %r5}; // @write
    fence.proxy.async.shared::cta; // @fence
    bar.sync 1, 128; // @written
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra STORED;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%bars], 2048; // @copy
    cp.async.bulk.commit_group; // @commit
    cp.async.bulk.wait_group.read 0; // @drain
    STORED:
    bar.sync 2, 128; // @stored
    add.s64 %rd2, %rd2, 2048;
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 3;
    @%p2 bra LOOP;
""",
        parameters=".param .u64 out",
    ),
    lambda: [output(3 * 512)],
    np.repeat(np.arange(128)[None] + 1024 * np.arange(3)[:, None], 4, 1).reshape(-1),
    block=128,
    dynamic_shared=2048,
)

# -- cp.async and named barriers ------------------------------------------------------------------

# Two warps load tiles of 256 bytes, 4 bytes a thread, ahead of the one they read; each thread reads
# what a thread of the other warp has copied.
CP_ASYNC = Small(
    module(
        f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mov.u32 %r1, 0; mov.u32 %r2, dynamic; mov.u32 %r10, 0;
    shl.b32 %r3, %thread, 2; add.s32 %r4, %r2, %r3; // where the thread copies to
    xor.b32 %r5, %r3, 128; add.s32 %r5, %r2, %r5; // and where it reads
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd4, %rd1, %rd3;
    cp.async.ca.shared.global [%r4], [%rd4], 4; // @first
    cp.async.commit_group;
    LOOP:
    add.s32 %r6, %r1, 1;
    and.b32 %r7, %r6, 1; shl.b32 %r7, %r7, 8; add.s32 %r8, %r4, %r7;
    add.s64 %rd4, %rd4, 256;
    setp.ge.u32 %p1, %r6, {TILES};
    @%p1 bra LOADED;
    cp.async.ca.shared.global [%r8], [%rd4], 4; // @copy
    LOADED:
    cp.async.commit_group; // @commit
    cp.async.wait_group 1; // @wait
    bar.sync 0; // @landed
    and.b32 %r7, %r1, 1; shl.b32 %r7, %r7, 8; add.s32 %r8, %r5, %r7;
    ld.shared.u32 %r9, [%r8]; // @read
    add.s32 %r10, %r10, %r9;
    bar.sync 0; // @free
    mov.u32 %r1, %r6;
    setp.lt.u32 %p2, %r1, {TILES};
    @%p2 bra LOOP;
    add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r10; // @store
""",
        target="sm_80",
    ),
    lambda: [ramp(64 * TILES), output(64)],
    ramp(64 * TILES).reshape(TILES, 64).sum(0)[np.arange(64) ^ 32],
    block=64,
    dynamic_shared=512,
)

# Warp 0 writes and bar.arrives; warp 1 bar.syncs and reads; and back. Warps 2 and 3 meet at
# another barrier meanwhile.
NAMED = Small(
    module(
        """
    ld.param.u64 %rd2, [out];
    mov.u32 %r1, dynamic; shl.b32 %r2, %lane, 2; add.s32 %r3, %r1, %r2; mov.u32 %r10, 0;
    setp.ge.u32 %p1, %warp, 2;
    @%p1 bra OTHERS;
    setp.eq.u32 %p1, %warp, 1;
    @%p1 bra READER;
    st.shared.u32 [%r3], %lane; // @write
    bar.arrive 1, 64; // @arrive
    bar.sync 2, 64; // @again
    st.shared.u32 [%r3], %thread; // @rewrite
    bra END;
    READER:
    bar.sync 1, 64; // @reader
    xor.b32 %r4, %r3, 4;
    ld.shared.u32 %r10, [%r4]; // @read
    bar.arrive 2, 64; // @done
    bra OUT;
    OTHERS:
    bar.sync 3, 64; // @others
    OUT:
    setp.eq.u32 %p2, %warp, 0;
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r10; // @store
    END:
""",
        target="sm_80",
        parameters=".param .u64 out",
    ),
    lambda: [Buffer(np.zeros(128, np.uint32))],
    np.concatenate([np.zeros(32), np.arange(32) ^ 1, np.zeros(64)]),
    block=128,
    dynamic_shared=128,
)

# Two warps, two mbarriers: each arrives at one and waits for the other.
CROSSED = Small(
    module(
        f"""
    ld.param.u64 %rd2, [out];
    mov.u32 %bars, dynamic;
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%bars], 32; // @init_a
    mbarrier.init.shared::cta.b64 [%bars+8], 32; // @init_b
    READY:
    bar.sync 0; // @ready
    setp.eq.u32 %p1, %warp, 1;
    @%p1 bra SECOND;
    mbarrier.arrive.shared::cta.b64 _, [%bars]; // @arrive_a
    {wait("A", "[%bars+8]", "0", "wait_b")}
    bra OUT; // @waited_b
    SECOND:
    {wait("B", "[%bars]", "0", "wait_a")}
    mbarrier.arrive.shared::cta.b64 _, [%bars+8]; // @arrive_b
    OUT:
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %thread;
""",
        parameters=".param .u64 out",
    ),
    lambda: [output(64)],
    np.arange(64),
    block=64,
    dynamic_shared=64,
)

# -- one warp, registers, plain memory ------------------------------------------------------------

# A sum over the warp, kept by its first 16 lanes, and a vector store.
WARP = Small(
    module(
        """
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd4, %rd1, %rd3;
    mov.u32 %r1, 7; // @value
    ld.global.u32 %r2, [%rd4]; // @load
    add.s32 %r2, %r2, %r1; // @add
    shfl.sync.bfly.b32 %r3|%p1, %r2, 16, 31, -1; // @shfl
    add.s32 %r2, %r2, %r3;
    setp.ge.u32 %p2, %lane, 16;
    @%p2 bra END; // @leave
    shfl.sync.bfly.b32 %r3, %r2, 8, 15, 0xffff; // @half
    add.s32 %r2, %r2, %r3;
    setp.ge.u32 %p2, %lane, 8;
    mul.wide.u32 %rd3, %lane, 16; add.s64 %rd5, %rd2, %rd3; // @address
    @%p2 bra END;
    st.global.v4.u32 [%rd5], {%r2, %r1, %r1, %r1}; // @store
    END:
    bar.warp.sync -1; // @together
""",
        target="sm_80",
    ),
    lambda: [ramp(32), output(32)],
    np.stack(
        [(ramp(32) + 7).reshape(4, 8).sum(0), np.full(8, 7), np.full(8, 7), np.full(8, 7)], 1
    ).reshape(-1),
)

# Registers and shared memory by way of ldmatrix, behind a branch that all lanes take together.
ALIGNED = Small(
    module(
        """
    ld.param.u64 %rd2, [out];
    mov.u32 %r1, dynamic; shl.b32 %r2, %lane, 4; add.s32 %r3, %r1, %r2;
    st.shared.v4.u32 [%r3], {%lane, %lane, %lane, %lane}; // @write
    bar.warp.sync -1;
    setp.lt.u32 %p1, %lane, 32; // @condition
    @!%p1 bra END; // @branch
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3]; // @ldmatrix
    END:
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r4; // @store
""",
        parameters=".param .u64 out",
    ),
    lambda: [output(32)],
    np.arange(32) // 4,
    dynamic_shared=512,
)

# Two warpgroups trade registers.
REGISTERS = Small(
    module(
        """
    ld.param.u64 %rd2, [out];
    setp.lt.u32 %p1, %warp, 4;
    @%p1 bra GROW;
    setmaxnreg.dec.sync.aligned.u32 40; // @shrink
    bra OUT;
    GROW:
    setmaxnreg.inc.sync.aligned.u32 216; // @grow
    OUT:
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %thread;
""",
        parameters=".param .u64 out",
        directives=".maxnreg 128",
    ),
    lambda: [output(256)],
    np.arange(256),
    block=256,
)

# -- between blocks -------------------------------------------------------------------------------

# Block 0 writes, and raises a flag; block 1 waits for the flag, and reads.
FLAG = Small(
    module(
        """
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out]; ld.param.u64 %rd4, [flag];
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    setp.ne.u32 %p1, %cta, 0;
    @%p1 bra CONSUMER;
    st.global.u32 [%rd1], %thread; // @write
    bar.sync 0; // @written
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra END;
    mov.u32 %r1, 1;
    st.release.gpu.global.u32 [%rd4], %r1; // @raise
    bra END;
    CONSUMER:
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra SEEN;
    SPIN:
    ld.acquire.gpu.global.u32 %r1, [%rd4]; // @look
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra SPIN;
    SEEN:
    bar.sync 0; // @seen
    ld.global.u32 %r2, [%rd1]; // @read
    st.global.u32 [%rd2], %r2; // @store
    END:
""",
        target="sm_80",
        parameters=".param .u64 x, .param .u64 flag, .param .u64 out",
    ),
    lambda: [output(64), np.zeros(1, np.uint32), output(64)],
    np.arange(64),
    grid=2,
    block=64,
)

# All threads of four blocks count in eight bins.
HISTOGRAM = Small(
    module(
        """
    ld.param.u64 %rd2, [out];
    and.b32 %r1, %thread, 7; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd2, %rd3;
    mov.u32 %r2, 1;
    red.global.add.u32 [%rd2], %r2; // @count
""",
        target="sm_80",
        parameters=".param .u64 out",
    ),
    lambda: [np.zeros(8, np.uint32)],
    np.full(8, 4 * 64 // 8),
    grid=4,
    block=64,
)

# The two blocks of a cluster: each writes into the other's shared memory, arrives at the other's
# mbarrier, reads its own, and then the other's again.
CLUSTER = Small(
    module(
        """
    ld.param.u64 %rd2, [out];
    mov.u32 %rank, %cluster_ctarank; xor.b32 %r1, %rank, 1; mov.u32 %bars, dynamic;
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra READY; // @init_all
    mbarrier.init.shared::cta.b64 [%bars], 32; // @init
    fence.mbarrier_init.release.cluster; // @init_fence
    READY:
    barrier.cluster.arrive.aligned; // @hello
    barrier.cluster.wait.aligned; // @hello_wait
    mapa.shared::cluster.u32 %r2, %bars, %r1; // @mapa
    shl.b32 %r3, %lane, 2; add.s32 %r4, %r2, %r3;
    mad.lo.s32 %r5, %rank, 100, %lane;
    st.shared::cluster.u32 [%r4+128], %r5; // @write
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2]; // @arrive
    WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%bars], 0; // @wait
    @!%p2 bra WAIT;
    add.s32 %r6, %bars, %r3;
    ld.shared.u32 %r7, [%r6+128]; // @read
    ld.shared::cluster.u32 %r9, [%r4+128]; // @read_back
    sub.s32 %r9, %r9, %r5; add.s32 %r7, %r7, %r9;
    mad.lo.s32 %r8, %cta, 32, %lane;
    mul.wide.u32 %rd3, %r8, 4; add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r7; // @store
    barrier.cluster.arrive.aligned; // @bye
    barrier.cluster.wait.aligned; // @bye_wait
""",
        parameters=".param .u64 out",
        directives=".reqnctapercluster 2, 1, 1",
    ),
    lambda: [output(64)],
    np.concatenate([100 + np.arange(32), np.arange(32)]),
    grid=2,
    dynamic_shared=256,
)

# Block 0 of a cluster of two copies 256 bytes into both blocks.
MULTICAST = Small(
    module(
        f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mov.u32 %rank, %cluster_ctarank; mov.u32 %bars, dynamic;
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%bars], 1; // @init
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bars], 256; // @expect
    READY:
    barrier.cluster.arrive.aligned; // @hello
    barrier.cluster.wait.aligned; // @hello_wait
    add.s32 %r1, %thread, %rank;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra COPIED;
    mov.b16 %rs1, 3; // @mask
    add.s32 %r2, %bars, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%rd1], 256, [%bars], %rs1; // @copy
    COPIED:
    {wait("WAIT", "[%bars]", "0", "wait")}
    shl.b32 %r3, %lane, 3; add.s32 %r3, %bars, %r3;
    ld.shared.v2.u32 {{%r4, %r5}}, [%r3+128]; // @read
    add.s32 %r6, %r4, %r5;
    mad.lo.s32 %r8, %cta, 32, %lane;
    mul.wide.u32 %rd3, %r8, 4; add.s64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r6;
    barrier.cluster.arrive.aligned; // @bye
    barrier.cluster.wait.aligned; // @bye_wait
""",
        directives=".reqnctapercluster 2, 1, 1",
    ),
    lambda: [ramp(64), output(64)],
    np.tile(ramp(64).reshape(32, 2).sum(1), 2),
    grid=2,
    dynamic_shared=512,
)

# -- matrix instructions --------------------------------------------------------------------------

HALF = np.float16


def matrices(rows: int, columns: int, tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Consecutive tiles of A [rows, 16] and B [columns, 16], and the sum of A B^T."""
    generator = np.random.default_rng(0)
    values = generator.integers(-8, 8, (tiles, rows + columns, 16)).astype(HALF)
    a, b = values[:, :rows].astype(np.float32), values[:, rows:].astype(np.float32)
    return values, np.einsum("tik,tjk->ij", a, b)


# Rows of 32 bytes, 32-byte swizzling: chunk c of row r lies at 32 r + 16 (c ^ (r / 4 % 2)).
# The thread's row is {row}: its two chunks from [{source}] to {matrix} + ...
def copy_row(row: str, source: str, matrix: str, mark: str) -> str:
    return f"""
    ld.global.v4.u32 {{%r50, %r51, %r52, %r53}}, [{source}];
    ld.global.v4.u32 {{%r54, %r55, %r56, %r57}}, [{source}+16];
    shr.u32 %r48, {row}, 2; and.b32 %r48, %r48, 1; shl.b32 %r48, %r48, 4;
    shl.b32 %r49, {row}, 5; add.s32 %r49, %r49, {matrix}; add.s32 %r49, %r49, %r48;
    st.shared.v4.u32 [%r49], {{%r50, %r51, %r52, %r53}}; // @{mark}
    xor.b32 %r49, %r49, 16;
    st.shared.v4.u32 [%r49], {{%r54, %r55, %r56, %r57}}; // @{mark}
"""


WGMMA_VALUES, WGMMA_SUM = matrices(64, 8, 2)
# 64 x 8 += 64 x 16 by 16 x 8, for two tiles: A at [dynamic], B at [dynamic + 2048].
WGMMA = Small(
    module(
        f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mov.u32 %bars, dynamic; mov.u32 %r1, 0; add.s32 %r5, %bars, 2048;
    mul.wide.u32 %rd3, %thread, 32; add.s64 %rd4, %rd1, %rd3;
    shr.u32 %r2, %bars, 4; cvt.u64.u32 %rd10, %r2;
    or.b64 %rd10, %rd10, {3 << 62 | 256 >> 4 << 32 | 1 << 16:#x}; // @a_descriptor
    add.s64 %rd11, %rd10, {2048 >> 4}; // @b_descriptor
    TILE:
    setp.ge.u32 %p1, %thread, 72;
    @%p1 bra FILLED;
    {copy_row("%thread", "%rd4", "%bars", "fill")}
    FILLED:
    fence.proxy.async.shared::cta; // @fence
    bar.sync 0; // @filled
    setp.ne.u32 %p2, %r1, 0;
    wgmma.fence.sync.aligned; // @wgmma_fence
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f1, %f2, %f3, %f4}}, %rd10, %rd11, %p2, 1, 1, 0, 0; // @wgmma
    wgmma.commit_group.sync.aligned; // @commit
    wgmma.wait_group.sync.aligned 0; // @wait
    bar.sync 0; // @used
    add.s64 %rd4, %rd4, {72 * 32};
    add.s32 %r1, %r1, 1;
    setp.lt.u32 %p3, %r1, 2;
    @%p3 bra TILE;
    // Registers 1, 2: row 16 warp + lane / 4, columns 2 (lane % 4), + 1; 3, 4: eight rows below.
    shl.b32 %r2, %warp, 4; shr.u32 %r3, %lane, 2; add.s32 %r2, %r2, %r3; shl.b32 %r2, %r2, 3;
    and.b32 %r3, %lane, 3; shl.b32 %r3, %r3, 1; add.s32 %r2, %r2, %r3;
    mul.wide.u32 %rd5, %r2, 4; add.s64 %rd2, %rd2, %rd5;
    st.global.v2.f32 [%rd2], {{%f1, %f2}}; // @store
    st.global.v2.f32 [%rd2+256], {{%f3, %f4}};
"""
    ),
    lambda: [WGMMA_VALUES, Buffer(np.zeros((64, 8), np.float32), initialised=False)],
    WGMMA_SUM,
    block=128,
    dynamic_shared=1 << 14,  # more than is used, so that a wrong descriptor stays inside
)

TCGEN05_VALUES, TCGEN05_SUM = matrices(128, 16, 1)


def registers(first: int, count: int, kind: str = "f") -> str:
    return "{" + ", ".join(f"%{kind}{first + i}" for i in range(count)) + "}"


# D = A B^T with A in shared memory, then D += A B^T with A in TMEM; the sum of both D.
# Shared memory: the mbarriers at 0 and 8, the address of TMEM at 16, A at 1024, B at 1024 + 4096.
# TMEM: D in columns 0 to 15, A in columns 16 to 23.
TCGEN05 = Small(
    module(
        f"""
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
    mov.u32 %bars, dynamic; add.s32 %r1, %bars, 1024;
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra ALLOCATED;
    add.s32 %r2, %bars, 16;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32; // @alloc
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; // @relinquish
    setp.ne.u32 %p2, %lane, 0;
    @%p2 bra ALLOCATED;
    mbarrier.init.shared::cta.b64 [%bars], 1; // @init
    mbarrier.init.shared::cta.b64 [%bars+8], 1; // @init_other
    fence.mbarrier_init.release.cluster;
    ALLOCATED:
    mul.wide.u32 %rd3, %thread, 32; add.s64 %rd4, %rd1, %rd3;
    {copy_row("%thread", "%rd4", "%r1", "fill")}
    setp.ge.u32 %p2, %thread, 16;
    @%p2 bra FILLED;
    add.s64 %rd5, %rd4, 4096; add.s32 %r3, %r1, 4096;
    {copy_row("%thread", "%rd5", "%r3", "fill_b")}
    FILLED:
    fence.proxy.async.shared::cta; // @fence
    tcgen05.fence::before_thread_sync;
    bar.sync 0; // @filled
    tcgen05.fence::after_thread_sync;
    ld.shared.u32 %r4, [%bars+16]; // @address
    shr.u32 %r5, %r1, 4; cvt.u64.u32 %rd10, %r5;
    or.b64 %rd10, %rd10, {6 << 61 | 1 << 46 | 256 >> 4 << 32 | 1 << 16:#x}; // @a_descriptor
    add.s64 %rd11, %rd10, {4096 >> 4}; // @b_descriptor
    mov.u32 %r6, {1 << 4 | 16 >> 3 << 17 | 128 >> 4 << 24:#x}; // @instruction_descriptor
    setp.ne.u32 %p3, %thread, 0; // @issuer
    @%p3 bra ISSUED;
    setp.ne.u32 %p4, %r4, %r4;
    tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd10, %rd11, %r6, %p4; // @mma
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bars]; // @commit
    ISSUED:
    {wait("WAIT", "[%bars]", "0", "done")}
    tcgen05.fence::after_thread_sync; // @fence_after
    shl.b32 %r7, %warp, 21; add.s32 %r8, %r4, %r7; // the warp's lanes
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(20, 16, "r")}, [%r8]; // @ld
    tcgen05.wait::ld.sync.aligned; // @wait_ld
    ld.global.v4.u32 {registers(50, 4, "r")}, [%rd4];
    ld.global.v4.u32 {registers(54, 4, "r")}, [%rd4+16];
    add.s32 %r9, %r8, 16;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r9], {registers(50, 8, "r")}; // @st
    tcgen05.wait::st.sync.aligned; // @wait_st
    tcgen05.fence::before_thread_sync; // @fence_before
    bar.sync 0; // @stored
    @%p3 bra ISSUED2;
    tcgen05.fence::after_thread_sync; // @fence_after2
    setp.eq.u32 %p4, %r4, %r4;
    add.s32 %r10, %r4, 16;
    tcgen05.mma.cta_group::1.kind::f16 [%r4], [%r10], %rd11, %r6, %p4; // @mma2
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bars]; // @commit2
    ISSUED2:
    {wait("WAIT2", "[%bars]", "1", "done2")}
    tcgen05.fence::after_thread_sync; // @fence_after3
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(36, 16, "r")}, [%r8]; // @ld2
    tcgen05.wait::ld.sync.aligned; // @wait_ld2
    tcgen05.fence::before_thread_sync;
    bar.sync 0; // @loaded
    @%p1 bra FREED;
    tcgen05.fence::after_thread_sync;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32; // @dealloc
    FREED:
    mul.wide.u32 %rd3, %thread, 64; add.s64 %rd2, %rd2, %rd3;
"""
        + "".join(
            f"    mov.b32 %f1, %r{20 + i}; mov.b32 %f2, %r{36 + i}; add.f32 %f1, %f1, %f2;\n"
            f"    st.global.f32 [%rd2+{4 * i}], %f1;{' // @store' if i == 0 else ''}\n"
            for i in range(16)
        ),
        target="sm_100a",
    ),
    lambda: [TCGEN05_VALUES, Buffer(np.zeros((128, 16), np.float32), initialised=False)],
    3 * TCGEN05_SUM,
    block=128,
    dynamic_shared=1 << 15,  # as above
)
