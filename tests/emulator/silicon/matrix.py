"""Cases of matrix instructions: fragments and tiles of random elements, whatever their layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cases import Case, Part

_BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8,
    "u8": 8, "s32": 32, "s4": 4, "u4": 4, "b1": 1,
}  # fmt: skip
_FLOAT_SORTS = ("ints", "normal", "wide", "probe", "special")


def cases() -> list[Case]:
    return [*_load_store(), *_mma_floats(), *_mma_doubles(), *_mma_integers(), *_wgmmas()]


def _elements(kind: str, sort: str, count: int) -> Part:
    """`count` elements; integers narrower than a byte, and all of the sort "raw", as bits.

    Of the sort "nan" many are NaNs.
    """
    if sort == "raw" or kind in ("s4", "u4", "b1", "s8", "u8"):
        return Part("raw8", count * _BITS[kind] // 8)
    if sort == "nan":
        return Part(f"nan{_BITS[kind]}", count)
    return Part(f"{kind}/{sort}", count)


# ---- ldmatrix, stmatrix, movmatrix


def _load_store() -> Iterator[Case]:
    head = (
        ".reg .b32 r0, r1, r2, r3, m, n; .reg .b64 s, q;\n"
        "mad.wide.u32 s, %t, 64, %in; mov.b32 m, smem; mad.lo.u32 n, %t, 64, m;\n"
        ".reg .b64 x, y;\n"
    )
    fill = "".join(
        f"ld.global.v2.b64 {{x, y}}, [s+{i}]; st.shared.v2.b64 [n+{i}], {{x, y}};\n"
        for i in (0, 16, 32, 48)
    )
    for count, trans, kind in itertools.product(
        (1, 2, 4), ("", ".trans"), ("shared", "shared::cta", "")
    ):
        if not kind and (count, trans) != (4, ""):
            continue
        registers = "{" + ", ".join(f"r{i}" for i in range(count)) + "}"
        # Each thread gives the address of a row: 16-byte units in an order of its own.
        row = "mad.lo.u32 n, %t, 37, 11; and.b32 n, n, 127; mad.lo.u32 n, n, 16, m;\n"
        space = f".{kind}" if kind else ""
        opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16"
        address = "n" if kind else "x"
        generic = "" if kind else "cvt.u64.u32 x, n; cvta.shared.u64 x, x;\n"
        yield Case(
            opcode,
            "mma",
            head + fill + "bar.sync 0;\n" + row + generic
            + f"{opcode} {registers}, [{address}];\nmad.wide.u32 q, %t, {4 * count}, %out;\n"
            + "".join(f"st.global.b32 [q+{4 * i}], r{i};\n" for i in range(count)),
            (Part("raw8", 2048),), (Part("u4", 32 * count),), threads=32, shared=2048,
        )  # fmt: skip
        opcode = f"stmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16"
        back = "".join(
            f"ld.shared.v2.b64 {{x, y}}, [n+{i}]; st.global.v2.b64 [q+{i}], {{x, y}};\n"
            for i in (0, 16, 32, 48)
        )
        yield Case(
            opcode,
            "mma",
            head + fill + "ld.global.v4.b32 {r0, r1, r2, r3}, [s+2048];\nbar.sync 0;\n" + row
            + generic + f"{opcode} [{address}], {registers};\nbar.sync 0;\n"
            "mad.wide.u32 q, %t, 64, %out; mad.lo.u32 n, %t, 64, m;\n" + back,
            (Part("raw8", 2048), Part("raw8", 2048)), (Part("u4", 512),), threads=32, shared=2048,
        )  # fmt: skip
    yield Case(
        "movmatrix.sync.aligned.m8n8.trans.b16", "mma",
        ".reg .b64 s, q; .reg .b32 r; mad.wide.u32 s, %t, 4, %in; mad.wide.u32 q, %t, 4, %out;\n"
        "ld.global.b32 r, [s]; movmatrix.sync.aligned.m8n8.trans.b16 r, r; st.global.b32 [q], r;",
        (Part("raw32", 128),), (Part("u4", 128),), threads=128,
    )  # fmt: skip


# ---- mma.sync


def _fragment(names: Sequence[str]) -> str:
    return "{" + ", ".join(names) + "}"


def _mma(
    opcode: str,
    shape: tuple[int, int, int],
    types: tuple[str, str, str, str],  # of D, A, B, C
    sorts: tuple[str, str, str],  # of A, B, C
    label: str,
    warps: int = 4,
) -> Case:
    """One instruction in each warp, its fragments filled register by register."""
    m, n, k = shape
    register = "b64" if types[0] == "f64" else "b32"
    width = 8 if register == "b64" else 4
    threads = 32 * warps
    counts = [
        size * _BITS[kind] // (8 * width * 32)
        for size, kind in zip((m * n, m * k, n * k, m * n), types, strict=True)
    ]
    body, given, offset = [f".reg .b64 s, q; mad.wide.u32 s, %t, {width}, %in;"], [], 0
    groups = []
    for letter, count, kind, sort, size in zip(
        "abc", counts[1:], types[1:], sorts, (m * k, n * k, m * n), strict=True
    ):
        names = [f"{letter}{i}" for i in range(count)]
        groups.append(_fragment(names))
        body.append(f".reg .{register} {', '.join(names)};")
        for name in names:
            body.append(f"ld.global.{register} {name}, [s+{offset}];")
            offset += width * threads
        given.append(_elements(kind, sort, warps * size))
    names = [f"d{i}" for i in range(counts[0])]
    body.append(f".reg .{register} {', '.join(names)};")
    body.append(f"{opcode} {_fragment(names)}, {', '.join(groups)};")
    body.append(f"mad.wide.u32 q, %t, {width}, %out;")
    body += [
        f"st.global.{register} [q+{width * threads * i}], {name};" for i, name in enumerate(names)
    ]
    element = {"f16": "u2", "f64": "u8"}.get(types[0], "u4")
    total = width * counts[0] * threads // int(element[1])
    return Case(
        f"{opcode} {label}", "mma", "\n".join(body), tuple(given), (Part(element, total),),
        threads=threads,
    )  # fmt: skip


def _sorts_of(sort: str) -> tuple[str, str, str]:
    """The sorts of A, B and C."""
    return {
        "probe": ("probe", "ones", "normal"),
        "probe0": ("probe", "ones", "zeros"),
        "probe2": ("probe", "probe", "wide"),
    }.get(sort, (sort, sort, sort))  # type: ignore[return-value]


_MMA_SORTS = (*_FLOAT_SORTS, "probe0", "probe2", "raw")


def _mma_floats() -> Iterator[Case]:
    kinds: list[tuple[str, str, tuple[int, ...], tuple[str, ...]]] = [
        ("f16", "f16", (8, 16), ("f16", "f32")),
        ("bf16", "bf16", (8, 16), ("f32",)),
        ("tf32", "tf32", (4, 8), ("f32",)),
    ]
    kinds += [
        (a, b, (16, 32), ("f16", "f32")) for a, b in itertools.product(("e4m3", "e5m2"), repeat=2)
    ]
    for a, b, ks, accumulators in kinds:
        for k, accumulator in itertools.product(ks, accumulators):
            for sort in _MMA_SORTS:
                if a[0] == "e" and a != b and sort not in ("normal", "special", "probe2"):
                    continue
                yield _mma(
                    f"mma.sync.aligned.m16n8k{k}.row.col.{accumulator}.{a}.{b}.{accumulator}",
                    (16, 8, k), (accumulator, a, b, accumulator), _sorts_of(sort), sort,
                )  # fmt: skip


def _mma_doubles() -> Iterator[Case]:
    for shape in ((8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)):
        for rounding in ("", ".rn", ".rz", ".rm", ".rp"):
            for sort in ("normal", "wide", "special") if rounding else ("normal",):
                if shape != (8, 8, 4) and sort == "special" and rounding != ".rn":
                    continue
                m, n, k = shape
                yield _mma(
                    f"mma.sync.aligned.m{m}n{n}k{k}.row.col{rounding}.f64.f64.f64.f64", shape,
                    ("f64",) * 4, _sorts_of(sort), sort, warps=1,
                )  # fmt: skip
        m, n, k = shape
        yield _mma(
            f"mma.sync.aligned.m{m}n{n}k{k}.row.col.f64.f64.f64.f64", shape, ("f64",) * 4,
            ("nan",) * 3, "NaNs", warps=1,
        )  # fmt: skip


def _mma_integers() -> Iterator[Case]:
    shapes = {
        8: ((8, 8, 16), (16, 8, 16), (16, 8, 32)),
        4: ((8, 8, 32), (16, 8, 32), (16, 8, 64)),
    }
    for bits, sizes in shapes.items():
        for (m, n, k), a, b, saturate in itertools.product(sizes, "us", "us", ("", ".satfinite")):
            a, b = f"{a}{bits}", f"{b}{bits}"
            for sort in ("raw", "ints") if saturate else ("raw",):
                yield _mma(
                    f"mma.sync.aligned.m{m}n{n}k{k}.row.col{saturate}.s32.{a}.{b}.s32", (m, n, k),
                    ("s32", a, b, "s32"), ("raw", "raw", sort), f"{sort} sums", warps=2,
                )  # fmt: skip
    for (m, n, k), op in itertools.product(
        ((8, 8, 128), (16, 8, 128), (16, 8, 256)), ("xor", "and")
    ):
        yield _mma(
            f"mma.sync.aligned.m{m}n{n}k{k}.row.col.s32.b1.b1.s32.{op}.popc", (m, n, k),
            ("s32", "b1", "b1", "s32"), ("raw", "raw", "ints"), "bits", warps=2,
        )  # fmt: skip


# ---- wgmma


@dataclass(frozen=True)
class _Wgmma:
    """A wgmma, or two of which the second adds to the first, by one warpgroup.

    Swizzles are 0, 32, 64, 128 bytes; `major` says which of A and B are M- or N-major.
    """

    a: str
    b: str
    d: str
    n: int
    sort: str = "normal"
    registers: bool = False  # A from registers
    swizzle: tuple[int, int] = (128, 128)
    major: tuple[int, int] = (0, 0)
    negate: tuple[int, int] = (1, 1)
    satfinite: bool = False
    scale: tuple[int, ...] = (1,)  # of each instruction: whether D is added

    @property
    def opcode(self) -> str:
        k = 256 // _BITS[self.a]
        saturate = ".satfinite" if self.satfinite else ""
        head = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{k}{saturate}"
        return f"{head}.{self.d}.{self.a}.{self.b}{'.and.popc' if self.a == 'b1' else ''}"

    def case(self) -> Case:
        words = [self.opcode, self.sort, "RS" if self.registers else "SS"]
        words += [f"{self.swizzle[0]}/{self.swizzle[1]}B"]
        if self.major != (0, 0):
            words.append("major" + "".join("KM"[x] for x in self.major))
        if self.negate != (1, 1):
            words.append("negated" + "".join("-  +"[x + 1] for x in self.negate))
        if self.scale != (1,):
            words.append("scale" + "".join(map(str, self.scale)))
        return Case(
            " ".join(words), "wgmma", self._body(), self._given(), (self._wanted(),),
            threads=128, shared=_A_BYTES + _B_BYTES,
        )  # fmt: skip

    @property
    def _counts(self) -> tuple[int, int]:
        """Registers of D and of A."""
        return self.n * _BITS["f16" if self.d == "f16" else "f32"] // 64, 4

    def _given(self) -> tuple[Part, ...]:
        a, b, c = _sorts_of(self.sort)
        tiles = [
            _elements(kind, sort, size * 8 // _BITS[kind])
            for kind, sort, size in ((self.a, a, _A_BYTES), (self.b, b, _B_BYTES))
        ]
        count_d, count_a = self._counts
        sums = self.d
        if self.d == "s32":
            c = "raw" if self.satfinite else "ints"
        return (
            *tiles,
            _elements(sums, c, count_d * 128 * 32 // _BITS[sums]),
            _elements(self.a, a, count_a * 128 * 32 // _BITS[self.a]),
        )

    def _wanted(self) -> Part:
        total = self._counts[0] * 128
        return Part("u2", 2 * total) if self.d == "f16" else Part("u4", total)

    def _body(self) -> str:
        count_d, count_a = self._counts
        ds, fragment = [f"d{i}" for i in range(count_d)], [f"a{i}" for i in range(count_a)]
        total = _A_BYTES + _B_BYTES
        lines = [
            ".reg .b64 s, q, x, y, da, db; .reg .b32 m, n, w; .reg .pred add, c;",
            f".reg .{'f32' if self.d == 'f32' else 'b32'} {', '.join(ds)};",
            f".reg .b32 {', '.join(fragment)};",
            "mad.wide.u32 s, %t, 16, %in; mov.b32 m, smem; mad.lo.u32 n, %t, 16, m; mov.b32 w, 0;",
            "fill: ld.global.v2.b64 {x, y}, [s]; st.shared.v2.b64 [n], {x, y};",
            f"add.s64 s, s, 2048; add.u32 n, n, 2048; add.u32 w, w, 2048; "
            f"setp.lt.u32 c, w, {total}; @c bra fill;",
            f"mad.wide.u32 s, %t, 4, %in; add.s64 s, s, {total};",
        ]
        lines += [f"ld.global.b32 {name}, [s+{512 * i}];" for i, name in enumerate(ds)]
        lines += [
            f"ld.global.b32 {name}, [s+{512 * (i + count_d)}];" for i, name in enumerate(fragment)
        ]
        if self.d == "f32":
            lines = [line.replace("ld.global.b32 d", "ld.global.f32 d") for line in lines]
        lines += ["fence.proxy.async; bar.sync 0;"]
        for name, tile in (("da", 0), ("db", 1)):
            low, high = self._descriptor(tile)
            start = f"add.u32 n, m, {_A_BYTES};" if tile else "mov.b32 n, m;"
            lines.append(
                f"{start} shr.u32 n, n, 4; and.b32 n, n, 0x3FFF; or.b32 n, n, {low:#x}; "
                f"mov.b32 w, {high:#x}; mov.b64 {name}, {{n, w}};"
            )
        lines.append("wgmma.fence.sync.aligned;")
        for number, scale in enumerate(self.scale):
            if number:  # the next step along K
                lines.append("add.s64 da, da, 2; add.s64 db, db, 2;")
            lines.append(f"setp.ne.b32 add, {scale}, 0;")
            a = _fragment(fragment) if self.registers else "da"
            tail = "" if self.d == "s32" else f", {self.negate[0]}, {self.negate[1]}"
            if _BITS[self.a] == 16:
                tail += (
                    f", {self.major[1]}"
                    if self.registers
                    else (f", {self.major[0]}, {self.major[1]}")
                )
            lines.append(f"{self.opcode} {_fragment(ds)}, {a}, db, add{tail};")
        lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        lines.append("mad.wide.u32 q, %t, 4, %out;")
        kind = "f32" if self.d == "f32" else "b32"
        lines += [f"st.global.{kind} [q+{512 * i}], {name};" for i, name in enumerate(ds)]
        return "\n".join(lines)

    def _descriptor(self, tile: int) -> tuple[int, int]:
        """Lower half without the address, and upper half."""
        swizzle = self.swizzle[tile]
        rows = 64 if tile == 0 else self.n
        if self.major[tile]:
            # Atoms of `swizzle` bytes along M or N by 8 of K (without a swizzle 16 bytes), those
            # along K one after the other; the two distances differ, so that they cannot be mixed
            # up unseen.
            atom = 8 * (swizzle or 16)
            leading, stride = 2 * atom, atom
            if not swizzle:
                leading, stride = stride, leading
        elif swizzle:
            leading, stride = 16, 8 * swizzle
        else:
            leading, stride = 128 * (rows // 8), 128
        code = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
        return leading >> 4 << 16, stride >> 4 | code << 30


_A_BYTES = 16384
_B_BYTES = 32768


def _wgmmas() -> Iterator[Case]:
    seen = set()
    for one in _wgmma_choices():
        if one not in seen:
            seen.add(one)
            yield one.case()


def _wgmma_choices() -> Iterator[_Wgmma]:
    floats = [("f16", "f16", "f16"), ("f16", "f16", "f32"), ("bf16", "bf16", "f32"),
              ("tf32", "tf32", "f32")]  # fmt: skip
    floats += [
        (a, b, d)
        for a, b, d in itertools.product(("e4m3", "e5m2"), ("e4m3", "e5m2"), ("f16", "f32"))
    ]
    for registers, n in ((False, 8), (True, 8), (False, 64), (True, 128)):
        yield _Wgmma("b1", "b1", "s32", n, "raw", registers, scale=(0, 1))
    integers = [(a, b, "s32") for a, b in itertools.product(("s8", "u8"), repeat=2)]
    for kinds in floats:
        for sort in _MMA_SORTS:
            if kinds[0] != kinds[1] and sort not in ("normal", "special"):
                continue
            for registers in (False, True):
                yield _Wgmma(*kinds, 16, sort, registers)
        for n in (8, 24, 64, 128, 256):
            yield _Wgmma(*kinds, n)
        yield _Wgmma(*kinds, 16, scale=(0,))
        yield _Wgmma(*kinds, 16, scale=(0, 1))
        yield _Wgmma(*kinds, 16, "wide", scale=(1, 1))
        for negate in ((-1, 1), (1, -1), (-1, -1)):
            yield _Wgmma(*kinds, 16, "special", negate=negate)
    for kinds in integers:
        for saturate, registers in itertools.product((False, True), repeat=2):
            yield _Wgmma(*kinds, 16, "raw", registers, satfinite=saturate, scale=(0, 1))
            yield _Wgmma(*kinds, 32, "raw", registers, satfinite=saturate)
        for n in (8, 24, 64, 128, 256):
            yield _Wgmma(*kinds, n, "raw")
    for kind in ("f16", "tf32", "e4m3", "s8"):
        d = "s32" if kind == "s8" else "f32"
        for pair in itertools.product((0, 32, 64, 128), repeat=2):
            yield _Wgmma(kind, kind, d, 64, "ints", swizzle=pair)
        for swizzle in (0, 32, 64, 128):
            yield _Wgmma(kind, kind, d, 48, "ints", True, swizzle=(swizzle, swizzle))
    for kind, majors, swizzle in itertools.product(
        ("f16", "bf16"), ((0, 1), (1, 0), (1, 1)), (0, 32, 64, 128)
    ):
        for n in (64, 128):
            yield _Wgmma(kind, kind, "f32", n, "ints", swizzle=(swizzle, swizzle), major=majors)
        if majors == (0, 1):
            yield _Wgmma(
                kind, kind, "f32", 64, "ints", True, swizzle=(swizzle, swizzle), major=majors
            )
