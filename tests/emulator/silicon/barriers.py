"""Cases of mbarriers and clusters whose effects show in results."""

from __future__ import annotations

from collections.abc import Iterator

from .cases import Case, Part

_FAMILY = "barrier"


def cases() -> list[Case]:
    return [*_sequences(), *_clusters(), *_fences()]


class _Script:
    """One thread's instructions on an mbarrier, each result stored in the next word."""

    def __init__(self) -> None:
        self.lines = [
            ".reg .b64 s, u, q; .reg .b32 a, r; .reg .pred c, first;",
            "mov.b32 a, smem; setp.eq.u32 first, %t, 0; @!first bra over;",
        ]
        self.count = 0

    def do(self, *lines: str) -> _Script:
        self.lines += lines
        return self

    def word(self, register: str = "r") -> _Script:
        self.lines.append(f"st.global.b32 [%out+{4 * self.count}], {register};")
        self.count += 1
        return self

    def pending(self, state: str = "s") -> _Script:
        self.lines.append(f"mbarrier.pending_count.b64 r, {state};")
        return self.word()

    def test(self, text: str) -> _Script:
        self.lines += [text, "selp.b32 r, 1, 0, c;"]
        return self.word()

    def parities(self) -> _Script:
        for parity in (0, 1):
            self.test(f"mbarrier.test_wait.parity.shared::cta.b64 c, [a], {parity};")
        return self

    def case(self, name: str) -> Case:
        body = "\n".join([*self.lines, "mbarrier.inval.shared::cta.b64 [a];", "over:"])
        return Case(name, _FAMILY, body, (), (Part("u4", self.count),), threads=32, shared=1024)


def _sequences() -> Iterator[Case]:
    init = "mbarrier.init.shared::cta.b64 [a], {};"
    arrive = "mbarrier.arrive.shared::cta.b64 {}, [a];"
    s = _Script().do(init.format(3)).parities()
    for _ in range(7):
        s.do(arrive.format("s")).pending().parities()
        s.test("mbarrier.test_wait.shared::cta.b64 c, [a], s;")
    yield s.case("mbarrier: arrivals of three")

    s = _Script().do(init.format(5), arrive.format("u")).pending("u")
    s.do("mbarrier.arrive.shared::cta.b64 s, [a], 3;").pending().parities()
    s.do("mbarrier.arrive.shared::cta.b64 s, [a], 1;").pending().parities()
    s.test("mbarrier.test_wait.shared::cta.b64 c, [a], u;")
    s.do("mbarrier.arrive.shared::cta.b64 s, [a], 5;").pending().parities()
    s.test("mbarrier.test_wait.shared::cta.b64 c, [a], s;")
    s.test("mbarrier.try_wait.shared::cta.b64 c, [a], s;")
    s.test("mbarrier.try_wait.parity.shared::cta.b64 c, [a], 1;")
    s.test("mbarrier.try_wait.parity.shared::cta.b64 c, [a], 0, 100;")
    yield s.case("mbarrier: arrivals with counts")

    s = _Script().do(init.format(4))
    for _ in range(2):
        s.do("mbarrier.arrive.noComplete.release.cta.shared::cta.b64 s, [a], 2;").pending()
        s.do("mbarrier.arrive.noComplete.shared::cta.b64 s, [a], 1;").pending().parities()
        s.do(arrive.format("s")).pending().parities()
    yield s.case("mbarrier: noComplete")

    s = _Script().do(init.format(4))
    s.do("mbarrier.arrive_drop.shared::cta.b64 s, [a];").pending().parities()
    s.do("mbarrier.arrive.shared::cta.b64 s, [a], 3;").pending().parities()
    s.do("mbarrier.arrive.shared::cta.b64 s, [a], 2;").pending().parities()
    s.do(arrive.format("s")).pending().parities()
    s.do("mbarrier.arrive_drop.shared::cta.b64 s, [a], 2;").pending().parities()
    s.do(arrive.format("s")).pending().parities()
    s.do(arrive.format("s")).pending().parities()
    yield s.case("mbarrier: arrive_drop")

    for drop in ("", "_drop"):
        s = _Script().do(init.format(2))
        s.do(f"mbarrier.arrive{drop}.expect_tx.shared::cta.b64 s, [a], 64;").pending().parities()
        s.do(arrive.format("s")).pending().parities()
        s.do("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [a], 40;").parities()
        s.do("mbarrier.complete_tx.shared::cta.b64 [a], 24;").parities()
        s.test("mbarrier.test_wait.shared::cta.b64 c, [a], s;")
        s.do("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [a], 16;")
        s.do("mbarrier.expect_tx.shared::cta.b64 [a], 16;").parities()
        s.do("mbarrier.arrive.shared::cta.b64 s, [a], 1;").pending().parities()
        s.do("mbarrier.complete_tx.shared::cta.b64 [a], 32;").parities()
        if not drop:
            s.do(arrive.format("s")).pending().parities()
        s.test("mbarrier.test_wait.acquire.cta.shared::cta.b64 c, [a], s;")
        yield s.case(f"mbarrier: transactions, arrive{drop}")

    s = _Script().do(init.format(1))
    s.do("mbarrier.complete_tx.shared::cta.b64 [a], 48;").parities()  # before it is expected
    s.do("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 s, [a], 48;").parities()
    yield s.case("mbarrier: bytes before they are expected")

    s = _Script().do(init.format(1048575))
    s.do("mbarrier.arrive.shared::cta.b64 s, [a], 1048574;").pending().parities()
    s.do(arrive.format("s")).pending().parities()
    s.do("mbarrier.expect_tx.shared::cta.b64 [a], 1048575;")
    s.do("mbarrier.complete_tx.shared::cta.b64 [a], 1048575;")
    s.do(arrive.format("s")).pending()
    s.do("mbarrier.inval.shared::cta.b64 [a];", init.format(2)).parities()
    s.do(arrive.format("s")).pending()
    yield s.case("mbarrier: the largest counts")

    s = _Script().do(init.format(1), "cvt.u64.u32 q, a;")
    s.do("cvta.shared.u64 q, q;", "mbarrier.arrive.b64 s, [q];").pending()
    s.test("mbarrier.test_wait.b64 c, [q], s;").test("mbarrier.try_wait.parity.b64 c, [q], 1;")
    s.do("mbarrier.arrive.expect_tx.b64 s, [q], 0;").pending().parities()
    yield s.case("mbarrier: generic addresses")

    s = _Script().do("mbarrier.init.shared.b64 [a], 6;")
    s.do("mbarrier.arrive.relaxed.cta.shared::cta.b64 s, [a];").pending().parities()
    s.do("mbarrier.arrive.relaxed.cluster.shared.b64 s, [a];").pending()
    s.do("mbarrier.arrive_drop.noComplete.release.cta.shared.b64 s, [a], 1;").pending()
    s.do("mbarrier.arrive_drop.relaxed.cluster.shared::cta.b64 s, [a];").pending()
    s.do("mbarrier.arrive_drop.release.cta.shared::cluster.b64 _, [a];").parities()
    s.do("mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [a], 96;")
    s.do("mbarrier.expect_tx.relaxed.cta.shared.b64 [a], 32;")
    s.do("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [a], 16;").parities()
    s.do("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [a], 128;").parities()
    s.do("mbarrier.complete_tx.shared.b64 [a], 16;").parities()
    for how in ("", ".acquire.cta", ".acquire.cluster", ".relaxed.cta", ".relaxed.cluster"):
        for wait in ("test_wait", "try_wait"):
            s.test(f"mbarrier.{wait}{how}.shared.b64 c, [a], s;")
            for parity in (0, 1):
                s.test(f"mbarrier.{wait}.parity{how}.shared.b64 c, [a], {parity};")
    s.do("mbarrier.arrive.shared.b64 s, [a], 3;").pending().parities()
    yield s.case("mbarrier: semantics and scopes")

    yield Case(
        "mbarrier: all threads",
        _FAMILY,
        ".reg .b32 a, r, n; .reg .b64 s, q; .reg .pred c, first; mov.b32 a, smem;\n"
        "setp.eq.u32 first, %t, 0; @first mbarrier.init.shared::cta.b64 [a], 256;\n"
        "@first st.shared.b32 [a+8], 0; bar.sync 0; mov.b32 n, 0;\n"
        "again: atom.shared.add.u32 r, [a+8], 1; mbarrier.arrive.shared::cta.b64 s, [a];\n"
        "wait: mbarrier.try_wait.shared::cta.b64 c, [a], s; @!c bra wait;\n"
        "ld.shared.b32 r, [a+8]; bar.sync 0; add.u32 n, n, 1; setp.lt.u32 c, n, 5; @c bra again;\n"
        "mad.wide.u32 q, %t, 4, %out; st.global.b32 [q], r;",
        (),
        (Part("u4", 256),),
        shared=1024,
    )


def _clusters() -> Iterator[Case]:
    head = (
        ".reg .b32 a, b, r, me, you, n; .reg .b64 q, g, h, s; .reg .pred c, d, first;\n"
        "mov.b32 a, smem; mov.u32 me, %cluster_ctarank; xor.b32 you, me, 1;\n"
        "mapa.shared::cluster.u32 b, a, you; mad.wide.u32 q, %g, 4, %out;\n"
        "setp.eq.u32 first, %t, 0;\n"
    )
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    yield Case(
        "cluster: remote loads and stores",
        _FAMILY,
        head + "mad.lo.u32 n, %t, 4, b; mad.lo.u32 r, me, 1000, %t;\n"
        "st.shared::cluster.b32 [n], r;\n"
        + sync
        + "mad.lo.u32 n, %t, 4, a; ld.shared.b32 r, [n]; st.global.b32 [q], r;\n"
        "xor.b32 n, %t, 3; mad.lo.u32 n, n, 4, b; ld.shared::cluster.b32 r, [n];\n"
        "st.global.b32 [q+512], r;\n"
        "cvt.u64.u32 g, a; cvta.shared.u64 g, g; mapa.u64 h, g, you; ld.b32 r, [h+8];\n"
        "st.global.b32 [q+1024], r; getctarank.u64 r, h; st.global.b32 [q+1536], r;\n"
        "getctarank.shared::cluster.u32 r, b; st.global.b32 [q+2048], r;\n"
        "getctarank.shared::cluster.u32 r, a; st.global.b32 [q+2560], r;\n"
        "isspacep.shared::cluster c, h; isspacep.shared::cta d, h; selp.b32 r, 2, 0, c;\n"
        "@d add.u32 r, r, 1; st.global.b32 [q+3072], r;\n" + sync,
        (),
        (Part("u4", 64 * 2 * 7),),
        threads=64,
        blocks=2,
        cluster=2,
        shared=1024,
    )
    yield Case(
        "cluster: remote atomics",
        _FAMILY,
        head + "@first st.shared.b32 [a], 5;\n" + sync + "add.u32 n, %t, me;\n"
        "red.relaxed.cluster.shared::cluster.add.u32 [b], n;\n" + sync + "ld.shared.b32 r, [a];\n"
        "st.global.b32 [q], r;\n"
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
        "@first atom.relaxed.cluster.shared::cluster.exch.b32 r, [b], 3;\n"
        "st.global.b32 [q+512], r;\n"
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait;\n"
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;\n"
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;\n" + sync,
        (),
        (Part("u4", 64 * 2 * 2),),
        threads=64,
        blocks=2,
        cluster=2,
        shared=1024,
    )
    yield Case(
        "cluster: remote arrivals",
        _FAMILY,
        head
        + "@first mbarrier.init.shared::cta.b64 [a], 64; fence.mbarrier_init.release.cluster;\n"
        + sync
        + "mad.lo.u32 n, %t, 4, b; st.shared::cluster.b32 [n+64], %g;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [b];\n"
        "wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 c, [a], 0; @!c bra wait;\n"
        "mad.lo.u32 n, %t, 4, a; ld.shared.b32 r, [n+64]; st.global.b32 [q], r;\n" + sync,
        (),
        (Part("u4", 128),),
        threads=64,
        blocks=2,
        cluster=2,
        shared=1024,
    )
    for kind, width, vector in (("b32", 4, 1), ("b64", 8, 1), ("b32", 4, 2), ("b32", 4, 4),
                                ("s64", 8, 2), ("f32", 4, 4), ("u32", 4, 1), ("s32", 4, 2),
                                ("u64", 8, 1), ("f64", 8, 2)):  # fmt: skip
        size = width * vector
        suffix = {1: "", 2: ".v2", 4: ".v4"}[vector]
        register = f"b{8 * width}"
        names = [f"v{i}" for i in range(vector)]
        values = "{" + ", ".join(names) + "}" if vector > 1 else names[0]
        yield Case(
            f"st.async{suffix}.{kind}",
            "copy",
            head + f".reg .{register} {', '.join(names)}; .reg .b64 p;\n"
            "@first mbarrier.init.shared::cta.b64 [a], 1; fence.mbarrier_init.release.cluster;\n"
            f"@first mbarrier.arrive.expect_tx.shared::cta.b64 s, [a], {64 * size};\n"
            f"mad.wide.u32 p, %g, {size}, %in;\n"
            + "".join(f"ld.global.{register} v{i}, [p+{width * i}];\n" for i in range(vector))
            + sync
            + f"mad.lo.u32 n, %t, {size}, b;\n"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
            f"{suffix}.{kind} [n+64], {values}, [b];\n"
            "wait: mbarrier.try_wait.parity.shared::cta.b64 c, [a], 0; @!c bra wait;\n"
            f"mad.lo.u32 n, %t, {size}, a; mad.wide.u32 p, %g, {size}, %out;\n"
            + "".join(
                f"ld.shared.{register} v{i}, [n+{64 + width * i}];\n"
                f"st.global.{register} [p+{width * i}], v{i};\n"
                for i in range(vector)
            )
            + sync,
            (Part("raw8", 128 * size),),
            (Part("u4", 128 * size // 4),),
            threads=64,
            blocks=2,
            cluster=2,
            shared=2048,
        )
    for op in ("inc.u32", "dec.u32", "min.u32", "min.s32", "max.u32", "max.s32", "add.u32",
               "add.s32", "add.u64", "and.b32", "or.b32", "xor.b32"):  # fmt: skip
        wide = op.endswith("64")
        register, size = ("b64", 8) if wide else ("b32", 4)
        yield Case(
            f"red.async.{op}",
            "copy",
            head + f".reg .{register} v, w; .reg .b64 p;\n"
            "@first mbarrier.init.shared::cta.b64 [a], 1; fence.mbarrier_init.release.cluster;\n"
            f"@first mbarrier.arrive.expect_tx.shared::cta.b64 s, [a], {64 * size};\n"
            f"mad.wide.u32 p, %g, {size}, %in; ld.global.{register} v, [p];\n"
            f"ld.global.{register} w, [p+{128 * size}]; mad.lo.u32 n, %t, {size}, a;\n"
            f"st.shared.{register} [n+64], v;\n" + sync + f"mad.lo.u32 n, %t, {size}, b;\n"
            f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op} "
            "[n+64], w, [b];\n"
            "wait: mbarrier.try_wait.parity.shared::cta.b64 c, [a], 0; @!c bra wait;\n"
            f"mad.lo.u32 n, %t, {size}, a; mad.wide.u32 p, %g, {size}, %out;\n"
            f"ld.shared.{register} v, [n+64]; st.global.{register} [p], v;\n" + sync,
            (Part(register, 128), Part(register, 128)),
            (Part(f"u{size}", 128),),
            threads=64,
            blocks=2,
            cluster=2,
            shared=2048,
        )


def _fences() -> Iterator[Case]:
    """Fences and hints of all kinds, which have no result: they only have to run."""
    fences = [
        f"fence{order}.{scope};"
        for order in ("", ".sc", ".acq_rel", ".acquire", ".release")
        for scope in ("cta", "cluster", "gpu", "sys")
    ]
    fences += [f"membar.{scope};" for scope in ("cta", "gl", "sys")]
    fences += [
        f"fence.proxy.async{s};" for s in ("", ".global", ".shared::cta", ".shared::cluster")
    ]
    fences += [
        "fence.proxy.alias;", "fence.mbarrier_init.release.cluster;",
        "fence.acquire.sync_restrict::shared::cluster.cluster;",
        "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;",
        "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
        "membar.proxy.alias;",
        "fence.release.sync_restrict::shared::cta.cluster;",
        *(f"fence.proxy.tensormap::generic.release.{s};" for s in ("cta", "cluster", "gpu", "sys")),
        *(
            f"fence.proxy.tensormap::generic.acquire.{s} [%in], 128;"
            for s in ("cta", "cluster", "gpu", "sys")
        ),
        "nanosleep.u32 20;", "bar.warp.sync 0xFFFFFFFF;", "bar.sync 0;", "bar.cta.sync 3, 256;",
        "barrier.cta.sync.aligned 4;", "barrier.sync 5, 256;",
        "setmaxnreg.dec.sync.aligned.u32 32; setmaxnreg.inc.sync.aligned.u32 40;",
        "griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "prefetch.global.L2 [%in];",
        "prefetch.global.L1 [%in];", "prefetch.global.L2::evict_last [%in];",
        "prefetch.global.L2::evict_normal [%in];", "prefetchu.L1 [%in];",
        "applypriority.global.L2::evict_normal [%in], 128;", "pmevent 1;",
        "wgmma.fence.sync.aligned;",
        "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;",
    ]  # fmt: skip
    for fence in fences:
        yield Case(
            fence.rstrip(";"),
            "hint",
            f".reg .b64 q; {fence}\nmad.wide.u32 q, %t, 4, %out; st.global.b32 [q], %t;",
            (Part("raw8", 1024),),
            (Part("u4", 256),),
        )
