"""Timed loops of products beside other work, and of products that wait for other work."""

from __future__ import annotations

from collections.abc import Sequence

from .arithmetic import ARITHMETIC
from .timed import BUFFER, CHAINS, DATA, SHARED, UNROLL, TimedLoop, descriptors, timed

GROUP = 32  # products of an iteration
LEAST_N = 64
WARPGROUPS = 3  # the first multiplies, the others do other work
BESIDE_BYTES = 40 * 1024  # from the start of the operands to what other warps access
ACCESSES = 32  # of shared memory in a round

# Rounds of other work that take about as long as `GROUP` products of N = `LEAST_N`.
ROUNDS = {
    "fma": 8, "square": 8, "logic": 4, "max": 4, "pack_bf16x2": 4, "ex2": 1,
    "store 16 B": 1, "load 16 B": 1, "store 4 B": 4,
}  # fmt: skip

NOTHING = "nothing"

_X = [f"x{i}" for i in range(CHAINS + 2)]
_VECTORS = [f"v{i}" for i in range(CHAINS * 4)]


def beside_products(n: int, kind: str) -> list[TimedLoop]:
    """Products m64 by `n` by k16 of a warpgroup beside other work of two, and that work alone."""
    together = _beside(f"products beside {kind}", n, True, kind)
    return [together] if kind == NOTHING else [together, _beside(f"{kind} alone", n, False, kind)]


def other_work(kind: str, n: int) -> int:
    """Instructions of other work on a quarter of the SM, in an iteration."""
    each = UNROLL if kind in ARITHMETIC else ACCESSES
    return ROUNDS[kind] * n // LEAST_N * each * (WARPGROUPS - 1)


def _beside(name: str, n: int, products: bool, kind: str) -> TimedLoop:
    d = [f"d{i}" for i in range(n // 2)]
    a = [f"a{i}" for i in range(4)]
    # Each role loops by itself: where roles meet in a branch, products become one at a time.
    multiply: list[str] = []
    work: list[str] = []
    if products:
        multiply = ["setp.ge.s32 more, n, 0;", "wgmma.fence.sync.aligned;"]
        multiply += [_product(d, n, a, "SS")] * GROUP
        multiply += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    registers: list[str] = []
    if kind != NOTHING:
        registers = _X if kind in ARITHMETIC else _VECTORS
        work = [f"mov.b32 m, {ROUNDS[kind] * n // LEAST_N};", "work_${:uid}:", *_round(kind)]
        work += ["sub.s32 m, m, 1;", "setp.ne.s32 again, m, 0;", "@again bra work_${:uid};"]
    body = ["@!mine bra others_${:uid};", *_loop("multiply", multiply), "bra join_${:uid};"]
    body += ["others_${:uid}:", *_loop("others", work), "join_${:uid}:"]
    text = timed(
        body,
        declare=[
            f".reg .b32 {', '.join([*d, *a, *registers])}, sum, at, m, s;",
            ".reg .pred mine, again;",
            ".reg .b64 left, right, s64;",
        ],
        before=[
            *(f"mov.b32 {x}, 0;" for x in d),
            *(f"and.b32 {x}, tid, {i};" for i, x in enumerate(a)),
            *(f"mad.lo.s32 {x}, tid, {2 * i + 3}, 0x3f000001;" for i, x in enumerate(registers)),
            "mov.b32 sum, 0;",
            f"mad.lo.u32 at, tid, 16, {SHARED};",
            f"add.u32 at, at, {BUFFER + BESIDE_BYTES};",
            "shfl.sync.idx.b32 warp, warp, 0, 31, -1;",  # uniform, as the assembler then knows
            "setp.lt.u32 mine, warp, 4;",
            *descriptors(),
        ],
        after=[f"xor.b32 sum, sum, {x};" for x in [*d, *registers]],
        result="sum",
    )
    return TimedLoop(name, text, 1)


def _loop(name: str, body: Sequence[str]) -> list[str]:
    """All iterations of a role; the last leaves the outer loop with one."""
    return [
        f"role_{name}_${{:uid}}:",
        *body,
        "bar.sync 1;",
        "setp.eq.s32 again, n, 1;",
        f"@again bra done_{name}_${{:uid}};",
        "sub.s32 n, n, 1;",
        f"bra role_{name}_${{:uid}};",
        f"done_{name}_${{:uid}}:",
    ]


def _product(d: Sequence[str], n: int, a: Sequence[str], operands: str) -> str:
    left, majors = ("left", "0, 0") if operands == "SS" else (f"{{{', '.join(a)}}}", "0")
    return (
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{', '.join(d)}}}, {left}, "
        f"right, more, 1, 1, {majors};"
    )


def _round(kind: str) -> list[str]:
    """A round of other work of a warp."""
    if kind in ARITHMETIC:
        return [
            ARITHMETIC[kind].format(x=_X[i % CHAINS], y=_X[(i + 1) % CHAINS], z=_X[-1])
            for i in range(UNROLL)
        ]
    lines = []
    for i in range(ACCESSES):
        vector = _VECTORS[i % CHAINS * 4 :][:4]
        if kind == "store 16 B":
            lines.append(f"st.volatile.shared.v4.b32 [at], {{{', '.join(vector)}}};")
        elif kind == "store 4 B":
            lines.append(f"st.volatile.shared.b32 [s], {vector[0]};")
        else:  # the assembler drops loads whose registers nobody reads
            lines += [f"xor.b32 sum, sum, {x};" for x in vector]
            lines.append(f"ld.volatile.shared.v4.b32 {{{', '.join(vector)}}}, [at];")
    if kind == "store 4 B":
        lines.insert(0, f"mad.lo.u32 s, tid, 4, {SHARED}; add.u32 s, s, {BUFFER + BESIDE_BYTES};")
    return lines


# ------------------------------------------------------------------------------------- chains

CHAIN_N = 64
CHAIN_PRODUCTS = 4


def chains() -> list[TimedLoop]:
    """What a warpgroup does one after the other, when each step waits for the step before."""
    d = [f"d{i}" for i in range(CHAIN_N // 2)]
    a = [f"a{i}" for i in range(4)]
    packed = [f"p{i}" for i in range(len(d) // 2)]
    pack = [f"cvt.rn.bf16x2.f32 {p}, d{2 * i + 1}, d{2 * i};" for i, p in enumerate(packed)]
    tiles = [
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 "
        f"[at+{i * 512}], {{{', '.join(packed[4 * i : 4 * i + 4])}}};"
        for i in range(4)
    ]
    vectors = [
        f"st.shared.v4.b32 [row+{i * 2048}], {{{', '.join(packed[4 * i : 4 * i + 4])}}};"
        for i in range(4)
    ]
    fence, meet = "fence.proxy.async.shared::cta;", "bar.sync 1;"

    def products(operands: str, count: int) -> list[str]:
        return [
            "wgmma.fence.sync.aligned;",
            *[_product(d, CHAIN_N, a, operands)] * count,
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 0;",
        ]

    def bulk(what: str, nbytes: int, wait: str) -> list[str]:
        """A thread copies to global memory, and waits."""
        return [
            "@!first bra pass_${:uid};",
            f"{what} [to], [from], {nbytes};",
            "cp.async.bulk.commit_group;",
            f"cp.async.bulk.wait_group{wait} 0;",
            f"add.s64 to, to, {nbytes};",
            "pass_${:uid}:",
        ]

    store = "cp.async.bulk.global.shared::cta.bulk_group"
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
    back = [f"xor.b32 d{i}, d{i}, {p};" for i, p in enumerate(packed)]
    exchange = ["st.shared.b32 [word], p0;", meet, "ld.shared.b32 p0, [other];", meet]
    many = products("SS", CHAIN_PRODUCTS)
    steps = {
        "4 stores of 16 B, fence.proxy.async": [*vectors, fence],
        "4 stmatrix x4, fence.proxy.async": [*tiles, fence],
        "4 stmatrix x4, bar.sync": [*tiles, meet],
        "4 stmatrix x4, fence.proxy.async, bar.sync": [*tiles, fence, meet],
        "store, bar.sync, load, bar.sync": exchange,
        **{
            f"bulk {name} of {nbytes} bytes, {until}": bulk(what, nbytes, wait)
            for name, what in (("store", store), ("add", add))
            for nbytes in (1024, 8192)
            for until, wait in (("until read", ".read"), ("until written", ""))
        },
        "wgmma.fence, commit and wait": products("SS", 0),
        **{
            f"{count} products {operands}, wait": products(operands, count)
            for operands in ("SS", "RS")
            for count in (1, 2, CHAIN_PRODUCTS)
        },
        f"{CHAIN_PRODUCTS} products SS, wait, pack": [*many, *pack, *back],
        f"{CHAIN_PRODUCTS} products SS, wait, pack, 4 stmatrix x4, fence.proxy.async, bar.sync": [
            *many, *pack, *tiles, fence, meet,
        ],
    }  # fmt: skip
    return [
        TimedLoop(
            name,
            timed(
                ["setp.ge.s32 more, n, 0;", *body],
                declare=[
                    f".reg .b32 {', '.join([*d, *a, *packed])}, sum, at, row, word, other, s;",
                    ".reg .b64 left, right, s64, to;",
                    ".reg .b32 from;",
                ],
                before=[
                    "mov.u32 s, %ctaid.x;",
                    f"mul.wide.u32 to, s, {2**20};",
                    f"add.s64 to, to, {DATA};",
                    f"add.u32 from, {SHARED}, {BUFFER};",
                    *(f"cvt.rn.f32.u32 {x}, tid;" for x in d),
                    *(f"and.b32 {x}, tid, {i};" for i, x in enumerate([*a, *packed])),
                    "mov.b32 sum, 0;",
                    # What is stored is the right operand: 64 rows of 128 bytes.
                    f"add.u32 s, {SHARED}, {BUFFER};",
                    "mad.lo.u32 at, warp, 2048, s;",
                    "mad.lo.u32 at, lane, 16, at;",
                    "mad.lo.u32 row, tid, 16, s;",
                    f"add.u32 s, s, {BESIDE_BYTES};",
                    "mad.lo.u32 word, tid, 4, s;",
                    "xor.b32 other, tid, 32;",
                    "mad.lo.u32 other, other, 4, s;",
                    *descriptors(),
                ],
                after=[
                    "cp.async.bulk.wait_group 0;",
                    *(f"xor.b32 sum, sum, {x};" for x in [*d, *packed]),
                ],
                result="sum",
            ),
            1,
        )
        for name, body in steps.items()
    ]
