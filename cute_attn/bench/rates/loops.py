"""The timed loops of `bench rates`, as PTX. Needs no compiler; see `timed` for the operands."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .arithmetic import ARITHMETIC, arithmetic
from .beside import NOTHING, ROUNDS, beside_products, chains
from .code import jumping_code, straight_code
from .timed import (
    BUFFER,
    CHAINS,
    DATA,
    DEPTH,
    MASK,
    SHARED,
    SIZE,
    STEP,
    UNROLL,
    TimedLoop,
    descriptors,
    timed,
)

# ------------------------------------------------------------------------------- mma.sync

MMA_BESIDE = 4
MMA_SYNC = {
    "m16n8k16 bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2),
    "m16n8k8 tf32": ("m16n8k8.row.col.f32.tf32.tf32.f32", 4, 2),
}


def mma_sync(chains: int) -> list[TimedLoop]:
    """mma.sync with `chains` independent accumulators a warp."""
    loops = []
    for name, (shape, na, nb) in MMA_SYNC.items():
        a = [f"a{i}" for i in range(na)]
        b = [f"b{i}" for i in range(nb)]
        d = [[f"d{c}_{i}" for i in range(4)] for c in range(chains)]
        every = [*a, *b, *(x for xs in d for x in xs)]
        body = []
        for i in range(UNROLL // 2):
            x = ", ".join(d[i % chains])
            operands = f"{{{', '.join(a)}}}, {{{', '.join(b)}}}, {{{x}}}"
            body.append(f"mma.sync.aligned.{shape} {{{x}}}, {operands};")
        text = timed(
            body,
            declare=[f".reg .b32 {', '.join(every)};"],
            before=[f"and.b32 {x}, tid, {i};" for i, x in enumerate(every)],
            after=[f"xor.b32 {d[0][0]}, {d[0][0]}, {x};" for x in every if x != d[0][0]],
            result=d[0][0],
        )
        loops.append(TimedLoop(name, text, UNROLL // 2))
    return loops


def mma_beside(kind: str) -> list[TimedLoop]:
    """mma.sync of a warp with `MMA_BESIDE` other instructions in between."""
    shape, na, nb = MMA_SYNC["m16n8k16 bf16"]
    a, b = [f"a{i}" for i in range(na)], [f"b{i}" for i in range(nb)]
    d = [[f"d{c}_{i}" for i in range(4)] for c in range(4)]
    x = [f"x{i}" for i in range(CHAINS + 1)]
    every = [*a, *b, *(r for rs in d for r in rs), *x]
    count = UNROLL // 2
    body = []
    for i in range(count):
        at = ", ".join(d[i % 4])
        body.append(
            f"mma.sync.aligned.{shape} {{{at}}}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {{{at}}};"
        )
        for k in range(MMA_BESIDE):
            r = x[(i * MMA_BESIDE + k) % CHAINS]
            body.append(ARITHMETIC[kind].format(x=r, y=r, z=x[-1]))
    text = timed(
        body,
        declare=[f".reg .b32 {', '.join(every)};"],
        before=[f"mad.lo.u32 {r}, tid, {2 * i + 3}, 7;" for i, r in enumerate(every)],
        after=[f"xor.b32 a0, a0, {r};" for r in every[1:]],
        result="a0",
    )
    return [TimedLoop(f"m16n8k16 bf16 and {MMA_BESIDE} {kind}", text, count)]


# ---------------------------------------------------------------------------- shared memory


def _shared_loop(name: str, line: str, words: int, stride: int) -> TimedLoop:
    """`line` again and again, lane l at `stride` * l."""
    # The assembler drops a load whose registers nobody reads, volatile or not, and a second load
    # from one address.
    loads = line.startswith("ld")
    count = CHAINS if loads else UNROLL // 2
    registers = [f"x{i}" for i in range(CHAINS * 4)]
    body = []
    for i in range(count):
        some = registers[i % CHAINS * 4 :][:words]
        if loads:  # what the iteration before has loaded
            body += [f"xor.b32 sum, sum, {x};" for x in some]
        body.append(line.format(x=", ".join(some), at=f"a+{i * 512 if loads else i % 2 * 512}"))
    address = [f"mad.lo.u32 a, lane, {stride}, {SHARED};", f"add.u32 a, a, {BUFFER};"]
    if loads:
        body.append("xor.b32 a, a, 4096;")
    else:
        address.append("mad.lo.u32 a, warp, 2048, a;")
    text = timed(
        body,
        declare=[f".reg .b32 a, sum, {', '.join(registers)};"],
        before=[
            "mov.b32 sum, 0;",
            *(f"add.s32 {x}, tid, {i};" for i, x in enumerate(registers)),
            *address,
        ],
        after=[f"xor.b32 sum, sum, {x};" for x in registers],
        result="sum",
    )
    return TimedLoop(name, text, count)


def shared_memory() -> list[TimedLoop]:
    """Loads and stores of shared memory, without bank conflicts unless the name says so."""
    loops = []
    for words in (1, 2, 4):
        size = 4 * words
        vector, x = (f".v{words}", "{{{x}}}") if words > 1 else ("", "{x}")
        load = f"ld.volatile.shared{vector}.b32 " + x + ", [{at}];"
        store = f"st.volatile.shared{vector}.b32 [{{at}}], " + x + ";"
        loops.append(_shared_loop(f"load {size} B", load, words, size))
        loops.append(_shared_loop(f"store {size} B", store, words, size))
    loops += [
        _shared_loop("load 4 B, 4-way conflicts", "ld.volatile.shared.b32 {x}, [{at}];", 1, 16),
        _shared_loop("load 16 B, one address", "ld.volatile.shared.v4.b32 {{{x}}}, [{at}];", 4, 0),
        _shared_loop(
            "ldmatrix x4", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{x}}}, [{at}];", 4, 16
        ),
        _shared_loop(
            "ldmatrix x4 transposed",
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{x}}}, [{at}];", 4, 16
        ),
        _shared_loop(
            "stmatrix x4", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{at}], {{{x}}};", 4, 16
        ),
    ]  # fmt: skip
    return loops


def shared_latency() -> list[TimedLoop]:
    """Loads whose address is the value of the load before."""
    chase = timed(
        ["ld.volatile.shared.b32 a, [a];"] * UNROLL,
        declare=[".reg .b32 a;"],
        before=[
            f"mad.lo.u32 a, tid, 4, {SHARED};",
            f"add.u32 a, a, {BUFFER};",
            "st.volatile.shared.b32 [a], a;",
        ],
        result="a",
    )
    matrices = timed(
        [
            "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {x}, [a];",
            f"and.b32 x, x, {STEP};",  # 0, as the assembler cannot know
            "add.u32 a, a, x;",
        ]
        * (UNROLL // 2),
        declare=[".reg .b32 a, x;"],
        before=[f"mad.lo.u32 a, lane, 16, {SHARED};", f"add.u32 a, a, {BUFFER};"],
        result="a",
    )
    return [
        TimedLoop("load 4 B", chase, UNROLL),
        TimedLoop("ldmatrix x1", matrices, UNROLL // 2),
    ]


# ------------------------------------------------------------------------------------ wgmma

WGMMA_GROUPS = (1, 9)  # instructions of a group that is awaited
WGMMA_BESIDE = 256  # dependent fma between a group and the wait for it


def wgmma(n: int, a_in_registers: bool) -> list[TimedLoop]:
    """m64 by n by k16 of bf16, in groups of `WGMMA_GROUPS` that are awaited at once, and the larger
    group with other instructions before the wait."""
    few, many = WGMMA_GROUPS
    return [
        TimedLoop(f"group of {few}", _wgmma_loop(n, a_in_registers, few, 0), 1),
        TimedLoop(f"group of {many}", _wgmma_loop(n, a_in_registers, many, 0), 1),
        TimedLoop(
            f"group of {many} beside fma", _wgmma_loop(n, a_in_registers, many, WGMMA_BESIDE), 1
        ),
    ]


def _wgmma_loop(n: int, a_in_registers: bool, size: int, beside: int) -> str:
    d = [f"d{i}" for i in range(n // 2)]
    a = [f"a{i}" for i in range(4)]
    left = f"{{{', '.join(a)}}}" if a_in_registers else "left"
    majors = "0" if a_in_registers else "0, 0"
    one = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{', '.join(d)}}}, {left}, "
        f"right, more, 1, 1, {majors};"
    )
    body = ["setp.ge.s32 more, n, 0;", "wgmma.fence.sync.aligned;", *[one] * size]
    body += ["wgmma.commit_group.sync.aligned;"]
    # The store keeps the fma between the group and the wait.
    body += ["fma.rn.f32 x, x, y, y;"] * beside
    body += ["st.volatile.shared.b32 [t], x;"] * (beside > 0)
    body += ["wgmma.wait_group.sync.aligned 0;"]
    return timed(
        body,
        declare=[
            f".reg .b32 {', '.join(d)};",
            f".reg .b32 {', '.join(a)}, s, t, x, y;",
            ".reg .b64 left, right, s64;",
        ],
        before=[
            *(f"mov.b32 {x}, 0;" for x in d),
            *(f"and.b32 {x}, tid, {i};" for i, x in enumerate(a)),
            "cvt.rn.f32.u32 x, tid;",
            "mov.b32 y, x;",
            f"mad.lo.u32 t, tid, 4, {SHARED};",
            *descriptors(),
        ],
        after=[*(f"xor.b32 d0, d0, {x};" for x in d[1:]), "xor.b32 d0, d0, x;"],
        result="d0",
    )


# --------------------------------------------------------------------------------- barriers


def _wait(at: str, phase: str, label: str) -> list[str]:
    return [
        f"{label}_${{:uid}}:",
        f"mbarrier.try_wait.parity.shared.b64 done, [{at}], {phase};",
        f"@!done bra {label}_${{:uid}};",
    ]


def barriers() -> list[TimedLoop]:
    """Hand-overs between warps, and what the calls cost when nobody waits."""
    phases = [".reg .b32 ph, p, q;", ".reg .pred mine;"]
    init = [
        "mov.b32 ph, 0;",
        f"add.u32 p, {SHARED}, {{at}};",
        "add.u32 q, p, 8;",
        "@first mbarrier.init.shared.b64 [p], 1;",
        "@first mbarrier.init.shared.b64 [q], 1;",
        "fence.mbarrier_init.release.cluster;",
        "setp.eq.s32 mine, warp, 0;",
    ]
    next_phase = ["xor.b32 ph, ph, 1;"]

    def at(offset: int) -> list[str]:
        return [line.format(at=offset) for line in init]

    ping = [
        "@!mine bra other_${:uid};",
        "@lane0 mbarrier.arrive.shared.b64 _, [p];",
        *_wait("q", "ph", "one"),
        "bra join_${:uid};",
        "other_${:uid}:",
        "setp.gt.u32 mine, warp, 1;",  # warps 2, 3 ... only pass
        "@mine bra join_${:uid};",
        *_wait("p", "ph", "two"),
        "@lane0 mbarrier.arrive.shared.b64 _, [q];",
        "join_${:uid}:",
        "setp.eq.s32 mine, warp, 0;",
        *next_phase,
    ]
    alone = ["@lane0 mbarrier.arrive.shared.b64 _, [p];", *_wait("p", "ph", "own"), *next_phase]
    # Every warp has an mbarrier of its own.
    own = [
        "mov.b32 ph, 0;",
        f"mad.lo.u32 p, warp, 8, {SHARED};",
        "add.u32 p, p, 256;",
        "@lane0 mbarrier.init.shared.b64 [p], 1;",
        "fence.mbarrier_init.release.cluster;",
    ]
    ready = [
        f"mbarrier.try_wait.parity.shared.b64 done, [p], 1;\n@!done bra never_{i}_${{:uid}};\n"
        f"never_{i}_${{:uid}}:"
        for i in range(8)
    ]
    return [
        TimedLoop("mbarrier, two hand-overs between two warps",
                  timed(ping, declare=phases, before=at(0)), 1),
        TimedLoop("mbarrier, a warp's own arrival and wait",
                  timed(alone, declare=phases, before=own), 1),
        TimedLoop("mbarrier, try_wait of a completed phase",
                  timed(ready, declare=phases, before=[x.replace("256", "512") for x in own]), 8),
        TimedLoop("bar.sync of all warps", timed(["bar.sync 1;"] * 8), 8),
        TimedLoop("fence.proxy.async", timed(["fence.proxy.async.shared::cta;"] * 8), 8),
    ]  # fmt: skip


def cluster_barrier() -> TimedLoop:
    """All warps of a cluster meet."""
    body = ["barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"] * 4
    return TimedLoop("barrier of all warps", timed(body), 4)


# ---------------------------------------------------------------------------- bulk copies

_RING = [
    ".reg .b32 s, ph, bar, to, bars, ends;",
    ".reg .b64 from, at, step, mask;",
]


_START_COPY = [
    f"mbarrier.arrive.expect_tx.shared.b64 _, [bar], {SIZE};",
    f"add.u64 from, at, {DATA};",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    f"[to], [from], {SIZE}, [bar];",
    "add.u64 at, at, step;",
    "and.b64 at, at, mask;",
    "add.u32 bar, bar, 8;",
    f"add.u32 to, to, {SIZE};",
]


def bulk_loads() -> list[TimedLoop]:
    """A thread keeps `depth` bulk copies of `size` bytes in flight."""
    start = [f"mov.b32 bar, {SHARED};", f"add.u32 to, bar, {BUFFER};"]

    def wrapped(name: str) -> list[str]:
        return [
            "setp.eq.u32 done, bar, ends;",
            f"@!done bra next_{name}_${{:uid}};",
            *start,
            "xor.b32 ph, ph, 1;",
            f"next_{name}_${{:uid}}:",
        ]

    before = [
        f"cvt.u64.u32 step, {STEP};",
        f"cvt.u64.u32 mask, {MASK};",
        "mov.u32 s, %ctaid.x;",
        f"mul.wide.u32 at, s, {SIZE};",
        "and.b64 at, at, mask;",
        f"mad.lo.u32 ends, {DEPTH}, 8, {SHARED};",
        "mov.b32 ph, 0;",
        *start,
        "@!first bra skip_${:uid};",
        "init_${:uid}:",
        "mbarrier.init.shared.b64 [bar], 1;",
        "add.u32 bar, bar, 8;",
        "setp.ne.u32 done, bar, ends;",
        "@done bra init_${:uid};",
        "fence.mbarrier_init.release.cluster;",
        *start,
        "fill_${:uid}:",
        *_START_COPY,
        "setp.ne.u32 done, bar, ends;",
        "@done bra fill_${:uid};",
        *start,
        "skip_${:uid}:",
    ]
    body = [
        "@!first bra pass_${:uid};",
        *_wait("bar", "ph", "full"),
        *_START_COPY,
        *wrapped("a"),
        "pass_${:uid}:",
    ]
    after = [
        "@!first bra out_${:uid};",
        f"mov.b32 s, {DEPTH};",
        "drain_${:uid}:",
        *_wait("bar", "ph", "last"),
        "add.u32 bar, bar, 8;",
        *wrapped("b"),
        "sub.u32 s, s, 1;",
        "setp.ne.u32 done, s, 0;",
        "@done bra drain_${:uid};",
        "out_${:uid}:",
    ]
    return [TimedLoop("load", timed(body, declare=_RING, before=before, after=after), 1)]


def bulk_stores() -> list[TimedLoop]:
    """A thread stores `size` bytes by bulk copies, at most 4 groups in flight; and adds them."""
    before = [
        f"cvt.u64.u32 step, {STEP};",
        f"cvt.u64.u32 mask, {MASK};",
        "mov.u32 s, %ctaid.x;",
        f"mul.wide.u32 at, s, {SIZE};",
        "and.b64 at, at, mask;",
        f"add.u32 to, {SHARED}, {BUFFER};",
        "fence.proxy.async.shared::cta;",
    ]
    loops = []
    for name, what in (
        ("store", "cp.async.bulk.global.shared::cta.bulk_group"),
        ("add", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"),
    ):
        body = [
            "@!first bra pass_${:uid};",
            f"add.u64 from, at, {DATA};",
            f"{what} [from], [to], {SIZE};",
            "cp.async.bulk.commit_group;",
            "cp.async.bulk.wait_group 3;",
            "add.u64 at, at, step;",
            "and.b64 at, at, mask;",
            "pass_${:uid}:",
        ]
        after = ["cp.async.bulk.wait_group 0;"]
        loops.append(TimedLoop(name, timed(body, declare=_RING, before=before, after=after), 1))
    return loops


# ------------------------------------------------------------------------- global memory

STORED_AT = 2**20  # bytes from what is loaded to where it is stored


def global_memory(nbytes: int) -> list[TimedLoop]:
    """Stores and additions of `nbytes` a thread to global memory, a warp's bytes contiguous."""
    declare = [".reg .b64 at, from, step, mask;", ".reg .b32 x, s;", ".reg .f32 f;"]
    before = [
        f"cvt.u64.u32 step, {STEP};",
        f"cvt.u64.u32 mask, {MASK};",
        "mov.u32 s, %ctaid.x;",
        "mov.u32 x, %ntid.x;",
        "mad.lo.u32 s, s, x, tid;",
        f"mul.wide.u32 at, s, {nbytes};",
        "and.b64 at, at, mask;",
        "cvt.rn.f32.u32 f, tid;",
        "mov.b32 x, f;",
    ]
    loops = []
    for name, line in (
        ("store 16 B", "st.global.v4.b32 [from], {x, x, x, x};"),
        ("add 4 B", "red.global.add.f32 [from], f;"),
        ("add 16 B", "red.global.add.v4.f32 [from], {f, f, f, f};"),
    ):
        if not name.endswith(f" {nbytes} B"):
            continue
        one = [
            f"add.u64 from, at, {DATA};",
            line,
            "add.u64 at, at, step;",
            "and.b64 at, at, mask;",
        ]
        text = timed(one * 8, declare=declare, before=before)
        loops.append(TimedLoop(name, text, 8))
    return loops


def once(_: int, what: str) -> list[TimedLoop]:
    """Each thread loads 16 bytes, or stores them `STORED_AT` bytes on, or both."""
    body = []
    if "load" in what:
        body.append("ld.global.v4.b32 {x0, x1, x2, x3}, [at];")
    if "store" in what:
        body.append("st.global.v4.b32 [to], {x0, x1, x2, x3};")
    else:  # a store that never happens keeps the load
        body += ["setp.eq.s32 never, x3, -1;", "@never st.global.v4.b32 [to], {x0, x1, x2, x3};"]
    before = [
        *(f"mov.b32 x{i}, tid;" for i in range(4)),
        "mov.u32 s, %ctaid.x;",
        "mov.u32 x0, %ntid.x;",
        "mad.lo.u32 s, s, x0, tid;",
        "mul.wide.u32 at, s, 16;",
        f"add.u64 at, at, {DATA};",
        f"add.u64 to, at, {STORED_AT};",
    ]
    declare = [".reg .b64 at, to;", ".reg .b32 x0, x1, x2, x3, s;", ".reg .pred never;"]
    return [TimedLoop(what, timed(body, declare=declare, before=before), 1)]


def global_latency() -> list[TimedLoop]:
    """Loads whose address is the value of the load before, in data that hold byte offsets."""
    text = timed(
        ["ld.global.b32 x, [at];", "cvt.u64.u32 off, x;", f"add.u64 at, off, {DATA};"] * 8,
        declare=[".reg .b64 at, off;", ".reg .b32 x;"],
        before=[f"mov.b64 at, {DATA};", "mov.b32 x, 0;"],
        result="x",
    )
    return [TimedLoop("load", text, 8)]


# A table of loops by name; `width` is explained where it is used.
LOOPS: dict[str, Callable[[int], list[TimedLoop]]] = {
    "arithmetic": arithmetic,
    "code": straight_code,
    "code with jumps": jumping_code,
    "mma.sync": mma_sync,
    "mma.sync beside square": lambda _: mma_beside("square"),
    "mma.sync beside logic": lambda _: mma_beside("logic"),
    "wgmma": lambda n: wgmma(n, a_in_registers=False),
    "wgmma, A in registers": lambda n: wgmma(n, a_in_registers=True),
    "shared memory": lambda _: shared_memory(),
    "shared memory latency": lambda _: shared_latency(),
    "barriers": lambda _: barriers(),
    **{
        f"wgmma beside {kind}": functools.partial(beside_products, kind=kind)
        for kind in (NOTHING, *ROUNDS)
    },
    "cluster barrier": lambda _: [cluster_barrier()],
    "chains": lambda _: chains(),
    "bulk loads": lambda _: bulk_loads(),
    "bulk stores": lambda _: bulk_stores(),
    "global memory": global_memory,
    "global latency": lambda _: global_latency(),
    **{what: functools.partial(once, what=what) for what in ("load", "store", "load and store")},
    "nothing": lambda _: [],
}
