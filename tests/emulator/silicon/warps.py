"""Cases of warps: shuffles, votes, matches, reductions, divergence, special registers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .cases import Case, Instruction, Part

_FAMILY = "warp"
_ALL = "0xFFFFFFFF"


def cases() -> list[Case]:
    groups = (_shuffles(), _votes(), _matches(), _reductions(), _elections())
    single = [instruction.case() for group in groups for instruction in group]
    return single + list(_divergent()) + list(_block_reductions()) + list(_special_registers())


def _one(name: str, text: str, outputs: tuple[str, ...], inputs: tuple[str, ...]) -> Instruction:
    return Instruction(name, text, outputs, inputs, _FAMILY)


def _shuffles() -> Iterator[Instruction]:
    for mode in ("up", "down", "bfly", "idx"):
        opcode = f"shfl.sync.{mode}.b32"
        yield _one(
            opcode,
            f"{opcode} %o0|%o1, %i0, %i1, %i2, {_ALL};",
            ("b32", "pred"),
            ("b32", "b32:lane", "b32:segment"),
        )
        for distance, clamp in itertools.product((1, 4, 17), (0, 0x1F, 0x181F, 0x1C00)):
            yield _one(
                f"{opcode} {distance} {clamp:#x}",
                f"{opcode} %o0|%o1, %i0, {distance}, {clamp}, {_ALL};",
                ("b32", "pred"),
                ("b32",),
            )
        for part, lanes in ((0x55555555, "even"), (0x0000FFFF, "low"), (0xF00F00F0, "some")):
            yield _one(
                f"{opcode} {lanes}",
                "{ .reg .b32 me; .reg .pred in; mov.u32 me, %lanemask_eq; "
                f"and.b32 me, me, {part}; setp.ne.u32 in, me, 0; "
                "mov.b32 %o0, 0; setp.eq.u32 %o1, 0, 1; "
                f"@in {opcode} %o0|%o1, %i0, {0 if mode != 'idx' else 4}, 31, {part}; }}",
                ("b32", "pred"),
                ("b32",),
            )


def _votes() -> Iterator[Instruction]:
    for mode, not_ in itertools.product(("all", "any", "uni"), ("", "!")):
        yield _one(
            f"vote.sync.{mode}.pred {not_}",
            f"vote.sync.{mode}.pred %o0, {not_}%i0, {_ALL};",
            ("pred",),
            ("pred:predbywarp",),
        )
        yield _one(
            f"vote.sync.{mode}.pred {not_} some",
            "{ .reg .b32 me; .reg .pred in; mov.u32 me, %lanemask_eq; "
            "and.b32 me, me, 0x0FF0F00F; setp.ne.u32 in, me, 0; setp.eq.u32 %o0, 0, 1; "
            f"@in vote.sync.{mode}.pred %o0, {not_}%i0, 0x0FF0F00F; }}",
            ("pred",),
            ("pred:predbywarp",),
        )
    yield _one(
        "vote.sync.ballot.b32", f"vote.sync.ballot.b32 %o0, %i0, {_ALL};", ("b32",), ("pred",)
    )
    yield _one(
        "vote.sync.ballot.b32 some",
        "{ .reg .b32 me; .reg .pred in; mov.u32 me, %lanemask_eq; "
        "and.b32 me, me, 0x0FF0F00F; setp.ne.u32 in, me, 0; mov.b32 %o0, 99; "
        "@in vote.sync.ballot.b32 %o0, !%i0, 0x0FF0F00F; }",
        ("b32",),
        ("pred",),
    )


def _matches() -> Iterator[Instruction]:
    for bits in (32, 64):
        for kind in ("few", "bywarp"):
            wide = f"{kind}{bits}" if kind == "few" else kind + ("64" if bits == 64 else "")
            yield _one(
                f"match.any.sync.b{bits} {kind}",
                f"match.any.sync.b{bits} %o0, %i0, {_ALL};",
                ("b32",),
                (f"b{bits}:{wide}",),
            )
            yield _one(
                f"match.all.sync.b{bits} {kind}",
                f"match.all.sync.b{bits} %o0|%o1, %i0, {_ALL};",
                ("b32", "pred"),
                (f"b{bits}:{wide}",),
            )
    yield _one(
        "match.any.sync.b32 some",
        "{ .reg .b32 me; .reg .pred in; mov.u32 me, %lanemask_eq; "
        "and.b32 me, me, 0x0FF0F00F; setp.ne.u32 in, me, 0; mov.b32 %o0, 99; "
        "@in match.any.sync.b32 %o0, %i0, 0x0FF0F00F; }",
        ("b32",),
        ("b32:few32",),
    )


def _reductions() -> Iterator[Instruction]:
    opcodes = [f"{op}.{kind}" for op in ("add", "min", "max") for kind in ("u32", "s32")]
    for opcode in [*opcodes, "and.b32", "or.b32", "xor.b32"]:
        yield _one(
            f"redux.sync.{opcode}", f"redux.sync.{opcode} %o0, %i0, {_ALL};", ("b32",), ("b32",)
        )
        yield _one(
            f"redux.sync.{opcode} some",
            "{ .reg .b32 me; .reg .pred in; mov.u32 me, %lanemask_eq; "
            "and.b32 me, me, 0x0FF0F00F; setp.ne.u32 in, me, 0; mov.b32 %o0, 99; "
            f"@in redux.sync.{opcode} %o0, %i0, 0x0FF0F00F; }}",
            ("b32",),
            ("b32:raw32",),
        )


def _elections() -> Iterator[Instruction]:
    yield _one("elect.sync", f"elect.sync %o0|%o1, {_ALL};", ("b32", "pred"), ())
    yield _one("elect.sync sink", f"elect.sync _|%o0, {_ALL};", ("pred",), ())
    yield _one(
        "elect.sync some",
        "{ .reg .b32 me; .reg .pred in; mov.u32 me, %lanemask_eq; and.b32 me, me, 0x0FF0F000; "
        "setp.ne.u32 in, me, 0; mov.b32 %o0, 99; setp.eq.u32 %o1, 0, 1; "
        "@in elect.sync %o0|%o1, 0x0FF0F000; }",
        ("b32", "pred"),
        (),
    )
    yield _one(
        "activemask.b32",
        "{ .reg .b32 l; .reg .pred in; mov.u32 l, %laneid; setp.lt.u32 in, l, 32; "
        "activemask.b32 %o0; bar.warp.sync 0xFFFFFFFF; }",
        ("b32",),
        (),
    )


def _divergent() -> Iterator[Case]:
    """Control flow: loops of uneven length, nested branches, brx.idx, calls."""
    head = (
        ".reg .b32 x, y, n; .reg .b64 p, q; .reg .pred c, d;\n"
        "mad.wide.u32 p, %t, 4, %in; mad.wide.u32 q, %t, 4, %out; ld.global.b32 x, [p];\n"
    )
    tail = "st.global.b32 [q], y;"
    given, wanted = (Part("b32", 256),), (Part("u4", 256),)
    yield Case(
        "control: uneven loops",
        "control",
        head + "mov.b32 y, 0; and.b32 n, x, 31;\n"
        "loop: setp.eq.u32 c, n, 0; @c bra done; mad.lo.u32 y, y, 3, n; "
        "sub.u32 n, n, 1; bra loop;\n"
        "done: bar.warp.sync 0xFFFFFFFF; shfl.sync.bfly.b32 n, y, 1, 31, 0xFFFFFFFF;\n"
        "add.u32 y, y, n;" + tail,
        given,
        wanted,
    )
    yield Case(
        "control: nested branches",
        "control",
        head + "and.b32 n, x, 1; setp.eq.u32 c, n, 0; and.b32 n, x, 2; setp.eq.u32 d, n, 0;\n"
        "@c bra a; @d bra b; mov.b32 y, 1; bra join; b: activemask.b32 y; popc.b32 y, y; "
        "setp.ge.u32 d, y, 1; selp.b32 y, 2, 0, d; bra join;\n"
        "a: @!d bra.uni e; e: mov.b32 y, 3; @d add.u32 y, y, x;\njoin:" + tail,
        given,
        wanted,
    )
    yield Case(
        "control: brx.idx",
        "control",
        head + "and.b32 n, x, 3;\n"
        "ts: .branchtargets t0, t1, t2, t3;\nbrx.idx n, ts;\n"
        "t0: mov.b32 y, 10; bra join;\nt1: mov.b32 y, 11; bra join;\n"
        "t2: not.b32 y, x; bra join;\nt3: mov.b32 y, 13;\njoin:" + tail,
        given,
        wanted,
    )
    yield Case(
        "control: call",
        "control",
        head + "and.b32 n, x, 7; setp.gt.u32 c, n, 3; mov.b32 y, 5;\n"
        "@!c bra past;\n{ .param .b32 p0, p1, r0;\n"
        "st.param.b32 [p0], x; st.param.b32 [p1], n; call (r0), f$K, (p0, p1); "
        "ld.param.b32 y, [r0]; }\npast:\n" + tail,
        given,
        wanted,
        header=".func (.param .b32 r) f$K(.param .b32 a, .param .b32 b)\n"
        "{ .reg .b32 x, y; ld.param.b32 x, [a]; ld.param.b32 y, [b]; mad.lo.u32 x, x, y, 7; "
        "st.param.b32 [r], x; ret; }",
    )
    yield Case(
        "control: exit of some",
        "control",
        head + "and.b32 n, x, 3; setp.eq.u32 c, n, 0; mov.b32 y, 1; @c exit;\n"
        "activemask.b32 n; vote.sync.ballot.b32 y, 1, n;\n" + tail,
        given,
        wanted,
    )


def _block_reductions() -> Iterator[Case]:
    head = (
        ".reg .b32 x, y; .reg .b64 p, q; .reg .pred c, d, e;\n"
        "mad.wide.u32 p, %t, 4, %in; mad.wide.u32 q, %t, 4, %out; ld.global.b32 x, [p];\n"
        "and.b32 x, x, 1; setp.ne.u32 c, x, 0; setp.lt.u32 e, %t, 128; mov.b32 y, 77;\n"
    )
    tail = "st.global.b32 [q], y;"
    given, wanted = (Part("raw32", 256),), (Part("u4", 256),)
    for kind in ("bar", "barrier", "barrier.cta", "bar.cta"):
        for suffix in ("", ".aligned") if kind.startswith("barrier") else ("",):
            red = f"{kind}.red"
            yield Case(
                f"{red}.popc{suffix}.u32",
                "barrier",
                head + f"{red}.popc{suffix}.u32 y, 1, c;\n" + tail,
                given,
                wanted,
            )
            yield Case(
                f"{red}.popc{suffix}.u32 half",
                "barrier",
                head + f"@e {red}.popc{suffix}.u32 y, 3, 128, !c;\n" + tail,
                given,
                wanted,
            )
            yield Case(
                f"{kind}.arrive{suffix}",
                "barrier",
                head + "mov.b32 y, smem; mad.lo.u32 y, %t, 4, y; @!e bra taker;\n"
                f"st.shared.b32 [y], x; {kind}.arrive{suffix} 4, 256; mov.b32 y, 77; bra over;\n"
                f"taker: {kind}.sync{suffix} 4, 256; xor.b32 y, y, 512; ld.shared.b32 y, [y];\n"
                f"over: {tail}",
                given,
                wanted,
                shared=1024,
            )
            for op in ("and", "or"):
                yield Case(
                    f"{red}.{op}{suffix}.pred whole block",
                    "barrier",
                    head + f"{red}.{op}{suffix}.pred d, 2, !c; selp.b32 y, 1, 0, d;\n" + tail,
                    given,
                    wanted,
                )
                for what, test in (("data", "c"), ("true", "e"), ("all", "!d")):
                    yield Case(
                        f"{red}.{op}{suffix}.pred {what}",
                        "barrier",
                        head + "setp.gt.u32 d, %t, 1000;\n"
                        f"{red}.{op}{suffix}.pred d, 2, 256, {test}; selp.b32 y, 1, 0, d;\n" + tail,
                        given,
                        wanted,
                    )


_REGISTERS = (  # noqa: SIM905 - a list would take a line for each
    "%tid.x %tid.y %tid.z %ntid.x %ntid.y %ntid.z %ctaid.x %ctaid.y %ctaid.z %nctaid.x %nctaid.y "
    "%nctaid.z %clusterid.x %clusterid.y %clusterid.z %nclusterid.x %nclusterid.y %nclusterid.z "
    "%cluster_ctaid.x %cluster_ctaid.y %cluster_ctaid.z %cluster_nctaid.x %cluster_nctaid.y "
    "%cluster_nctaid.z %cluster_ctarank %cluster_nctarank %laneid %lanemask_eq %lanemask_le "
    "%lanemask_lt %lanemask_ge %lanemask_gt %dynamic_smem_size %total_smem_size %aggr_smem_size"
).split()


def _special_registers() -> Iterator[Case]:
    for blocks, cluster, shared in ((2, 1, 0), (4, 2, 2048), (4, 4, 300)):
        n = 64 * blocks
        body = ".reg .b32 x; .reg .b64 q; mad.wide.u32 q, %g, 4, %out;\n"
        if shared:
            body += "mov.b32 x, smem; mad.lo.u32 x, %t, 4, x; st.shared.b32 [x], x;\n"
        for i, name in enumerate(_REGISTERS):
            body += f"mov.u32 x, {name}; st.global.b32 [q+{4 * n * i}], x;\n"
        body += (
            ".reg .pred c; mov.pred c, %is_explicit_cluster; selp.b32 x, 1, 0, c; "
            f"st.global.b32 [q+{4 * n * len(_REGISTERS)}], x;"
        )
        yield Case(
            f"special registers {blocks} {cluster} {shared}",
            "control",
            body,
            (),
            (Part("u4", n * (len(_REGISTERS) + 1)),),
            threads=64,
            blocks=blocks,
            cluster=cluster,
            shared=shared,
        )
