"""Cases of loads, stores, atomics and addresses; mostly each thread has 16 bytes of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .cases import Case, Part

_FAMILY = "memory"
_THREADS = 64
_SIZES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip

_PLACES = {
    "global": "mov.b64 a, s;",
    "": "mov.b64 a, s; cvta.global.u64 a, a;",
    "shared": "cvt.u64.u32 a, m; st.shared.v2.b64 [m], {x, y};",
    "shared::cta": "cvt.u64.u32 a, m; st.shared.v2.b64 [m], {x, y};",
    "shared::cluster": "cvt.u64.u32 a, m; st.shared.v2.b64 [m], {x, y};",
    "local": "mov.b64 a, mine; st.local.v2.b64 [a], {x, y};",
    "generic shared": "cvt.u64.u32 a, m; cvta.shared.u64 a, a; st.v2.b64 [a], {x, y};",
    "generic local": "mov.b64 a, mine; cvta.local.u64 a, a; st.v2.b64 [a], {x, y};",
}
"""How `a` comes to be the address of this thread's bytes, by state space."""


def cases() -> list[Case]:
    return [
        *_loads(), *_stores(), *_atomics(), *_contended(), *_parameters(), *_variables(),
        *_addresses(), *_policies(), _discarded(),
    ]  # fmt: skip


def _head(size: int = 16) -> str:
    return (
        ".reg .b64 a, s, q, x, y; .reg .b32 m; .local .align 16 .b8 mine[32];\n"
        f"mad.wide.u32 s, %t, {size}, %in; mad.wide.u32 q, %t, 64, %out;\n"
        f"mov.b32 m, smem; mad.lo.u32 m, %t, {size}, m; ld.global.v2.b64 {{x, y}}, [s];\n"
    )


def _case(
    name: str, body: str, *, given: tuple[Part, ...] | None = None, words: int = 16, **rest: object
) -> Case:
    return Case(
        name,
        _FAMILY,
        body,
        given or (Part("raw8", 16 * _THREADS),),
        (Part("u4", words * _THREADS),),
        threads=_THREADS,
        shared=4096,
        **rest,  # type: ignore[arg-type]
    )


def _load(opcode: str, place: str, kind: str, width: int, count: int) -> Case:
    names = [f"v{i}" for i in range(count)]
    register = f"b{width}"
    into = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    address = "m" if place.startswith("shared") else "a"
    body = _head() + _PLACES[place] + f"\n.reg .{register} {', '.join(names)};\n"
    body += f"{opcode}.{kind} {into}, [{address}];\n"
    body += "\n".join(f"st.global.{register} [q+{width // 8 * i}], v{i};" for i in range(count))
    return _case(f"{opcode}.{kind} to b{width} {place}".strip(), body)


def _loads() -> Iterator[Case]:
    for place in ("global", "", "shared", "local", "generic shared", "generic local"):
        opcode = f"ld.{place}" if place and not place.startswith("generic") else "ld"
        for kind, size in _SIZES.items():
            full = place in ("global", "shared")
            widths = (16, 32, 64) if full and kind not in ("f32", "f64") else (max(16, 8 * size),)
            for width in widths:
                if width >= 8 * size:
                    yield _load(opcode, place, kind, width, 1)
            for count in (2, 4):
                if size * count <= 16 and (full or kind in ("b32", "s8", "u16")):
                    yield _load(f"{opcode}.v{count}", place, kind, max(16, 8 * size), count)
                    if full and kind in ("s8", "u8", "s16", "b16"):
                        yield _load(f"{opcode}.v{count}", place, kind, 32, count)
    for words in (
        "ld.global.ca", "ld.global.cg", "ld.global.cs", "ld.global.lu", "ld.global.cv",
        "ld.global.nc", "ld.global.ca.nc", "ld.global.nc.L1::no_allocate.L2::128B",
        "ld.volatile.global", "ld.relaxed.cta.global", "ld.relaxed.gpu.global",
        "ld.acquire.gpu.global", "ld.acquire.sys.global", "ld.weak.global",
        "ld.global.L1::evict_last", "ld.global.L1::evict_first", "ld.global.L2::256B",
        "ld.mmio.relaxed.sys.global",
    ):  # fmt: skip
        yield _load(words, "global", "u32", 32, 1)
    for words in ("ld.volatile.shared", "ld.relaxed.cta.shared::cta", "ld.acquire.cta.shared",
                  "ld.weak.shared::cluster", "ld.relaxed.cluster.shared::cluster"):  # fmt: skip
        yield _load(words, "shared", "s16", 32, 1)
    yield _case(
        "ld.global.b128",
        _head() + ".reg .b128 w; ld.global.b128 w, [s]; mov.b128 {y, x}, w;\n"
        "st.global.v2.b64 [q], {x, y}; st.global.b128 [q+16], w;",
    )
    yield _case(
        "ld.shared.b128",
        _head() + ".reg .b128 w; st.shared.v2.b64 [m], {x, y}; ld.shared.b128 w, [m];\n"
        "st.shared.b128 [m], w; ld.shared.v2.b64 {y, x}, [m]; st.global.v2.b64 [q], {x, y};",
    )
    yield _case(
        "ldu.global.v4.u32",
        _head() + ".reg .b32 v, w, c, d; ldu.global.v4.u32 {v, w, c, d}, [%in];\n"
        "st.global.v4.b32 [q], {d, c, w, v};",
    )
    for kind, count in (("u8", 1), ("s16", 1), ("b32", 1), ("f64", 1), ("b64", 2), ("f32", 2)):
        for place in ("global", ""):
            opcode = f"ldu{'.global' if place else ''}{f'.v{count}' if count > 1 else ''}"
            yield _load(opcode, place, kind, max(16, 8 * _SIZES[kind]), count)
    for words, kind in (("ld.volatile", "u32"), ("ld.relaxed.gpu", "b64"), ("ld.acquire.sys", "s8"),
                        ("ld.weak", "f32"), ("ld.L1::no_allocate", "b32")):  # fmt: skip
        width = max(16, 8 * _SIZES[kind])
        yield _load(words, "", kind, width, 1)
        if "L1" not in words:
            yield _load(words, "generic shared", kind, width, 1)
    for words in ("ld.acquire.cta.global", "ld.relaxed.cluster.global", "ld.acquire.cluster.global",
                  "ld.relaxed.sys.global", "ld.global.L1::evict_unchanged",
                  "ld.global.L1::evict_normal", "ld.global.L2::64B"):  # fmt: skip
        yield _load(words, "global", "u16", 32, 1)
    for words in ("ld.acquire.cluster.shared::cluster", "ld.relaxed.gpu.shared::cta",
                  "ld.acquire.gpu.shared::cta"):  # fmt: skip
        yield _load(words, "shared", "b32", 32, 1)


def _stores() -> Iterator[Case]:
    for place in ("global", "", "shared", "local", "generic shared", "generic local"):
        opcode = f"st.{place}" if place and not place.startswith("generic") else "st"
        for kind, size in _SIZES.items():
            full = place in ("global", "shared")
            widths = (16, 32, 64) if full and kind not in ("f32", "f64") else (max(16, 8 * size),)
            choices = [(w, 1) for w in widths if w >= 8 * size]
            choices += [
                (max(16, 8 * size), n)
                for n in (2, 4)
                if size * n <= 16 and (full or kind in ("b32", "s8", "u16"))
            ]
            for width, count in choices:
                yield _store(opcode, place, kind, width, count)
    for words in ("st.global.wb", "st.global.cg", "st.global.cs", "st.global.wt",
                  "st.volatile.global", "st.relaxed.gpu.global", "st.release.gpu.global",
                  "st.weak.global", "st.global.L1::no_allocate", "st.global.L1::evict_last",
                  "st.mmio.relaxed.sys.global", "st.relaxed.sys.global"):  # fmt: skip
        yield _store(words, "global", "u32", 32, 1)
    for words in ("st.volatile.shared", "st.relaxed.cta.shared::cta", "st.release.cta.shared",
                  "st.weak.shared::cluster"):  # fmt: skip
        yield _store(words, "shared", "s16", 32, 1)


def _store(opcode: str, place: str, kind: str, width: int, count: int) -> Case:
    """Load the thread's bytes, store over them from the middle on, and load the result."""
    vector = f".v{count}" if count > 1 else ""
    register = f"b{width}"
    names = [f"v{i}" for i in range(count)]
    source = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    shared = place.startswith("shared")
    address = "m" if shared else "a"
    place_text = _PLACES[place]
    if place in ("global", ""):
        generic = "cvta.global.u64 a, a;" if not place else ""
        place_text = f"add.s64 a, q, 32; {generic} st.global.v2.b64 [q+32], {{x, y}};"
    body = _head() + place_text + f"\n.reg .{register} {', '.join(names)}; .reg .b64 w;\n"
    for i in range(count):
        body += f"ld.global.b64 w, [s+{1024 + 8 * (i % 2)}]; shr.u64 w, w, {8 * (i // 2)};\n"
        body += f"cvt.u{width}.u64 v{i}, w;\n" if width < 64 else f"mov.b64 v{i}, w;\n"
    body += f"{opcode}{vector}.{kind} [{address}], {source};\n"
    if place not in ("global", ""):
        back = {"shared": "ld.shared", "local": "ld.local"}.get(place, "ld")
        back = "ld.shared" if shared else back
        body += f"{back}.v2.b64 {{x, y}}, [{address}]; st.global.v2.b64 [q+32], {{x, y}};"
    return _case(
        f"{opcode}{vector}.{kind} from b{width} {place}".strip(),
        body,
        given=(Part("raw8", 16 * _THREADS), Part("raw8", 16 * _THREADS)),
    )


# ---- atomics

_OPERATIONS = [
    *(f"{op}.b{n}" for op in ("and", "or", "xor", "exch") for n in (32, 64)),
    "add.u32", "add.s32", "add.u64", "add.f32", "add.f64", "inc.u32", "dec.u32",
    *(f"{op}.{kind}" for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    "add.noftz.f16", "add.noftz.f16x2", "add.noftz.bf16", "add.noftz.bf16x2",
    "cas.b16", "cas.b32", "cas.b64",
]  # fmt: skip
_REGISTER = {
    "b16": "b16", "b32": "b32", "u32": "b32", "s32": "b32", "f32": "b32", "b64": "b64",
    "u64": "b64", "s64": "b64", "f64": "b64", "f16": "b16", "bf16": "b16", "f16x2": "b32",
    "bf16x2": "b32",
}  # fmt: skip


def _atomics() -> Iterator[Case]:
    for place in ("global", "", "shared", "generic shared"):
        space = f".{place}" if place and not place.startswith("generic") else ""
        for operation in _OPERATIONS:
            full = place in ("global", "shared")
            if full or operation in ("add.f32", "cas.b32", "add.noftz.bf16x2", "max.s64"):
                yield _atomic(f"atom{space}.{operation}", place, operation)
            if not operation.startswith(("cas", "exch")) and (full or operation == "add.f32"):
                yield _atomic(f"red{space}.{operation}", place, operation, red=True)
    for words in ("atom.relaxed.gpu.global", "atom.acquire.gpu.global", "atom.release.sys.global",
                  "atom.acq_rel.cta.global"):  # fmt: skip
        yield _atomic(f"{words}.add.u32", "global", "add.u32")
    for words in ("atom.relaxed.cta.shared::cta", "atom.acq_rel.cluster.shared::cluster"):
        yield _atomic(f"{words}.add.u32", "shared", "add.u32")
    yield _atomic("red.release.gpu.global.add.u32", "global", "add.u32", red=True)
    scopes = ("relaxed.cta", "acquire.cluster", "release.gpu", "acq_rel.sys")
    for words, operation in itertools.product(
        scopes, ("or.b32", "exch.b64", "cas.b32", "max.s64", "inc.u32", "add.noftz.f16x2")
    ):
        yield _atomic(f"atom.{words}.global.{operation}", "global", operation)
        if not words.startswith("acq") and not operation.startswith(("exch", "cas")):
            yield _atomic(f"red.{words}.global.{operation}", "global", operation, red=True)
    for operation in ("and.b64", "cas.b64", "exch.b32", "min.u32", "dec.u32", "add.f32"):
        yield _atomic(f"atom.acq_rel.cta.shared::cta.{operation}", "shared", operation)
    for operation in ("add.f64", "add.f32", "add.noftz.f16", "add.noftz.bf16"):
        yield _atomic(f"atom.global.{operation}", "global", operation, kind="nan")
        yield _atomic(f"red.global.{operation}", "global", operation, red=True, kind="nan")
    for operation in ("add.u32", "or.b32", "exch.b64", "min.s32", "add.noftz.bf16x2"):
        yield _atomic(f"atom.global.{operation}", "global", operation, hint=True)
        if not operation.startswith(("exch", "cas")):
            yield _atomic(f"red.global.{operation}", "global", operation, red=True, hint=True)
    for operation, count in itertools.product(("add.noftz", "min.noftz", "max.noftz"), (2, 4, 8)):
        for kind in ("f16", "bf16", "f16x2", "bf16x2"):
            if count * (4 if kind.endswith("x2") else 2) <= 16:
                yield from _vector_atomics(operation, count, kind)
    for count in (2, 4):
        yield from _vector_atomics("add", count, "f32")
    for what in ("exch", "cas"):
        operands = {"exch": "w", "cas": "o, w"}[what]
        for place in ("global", "shared"):
            address = "q" if place == "global" else "m"
            yield _case(
                f"atom.{place}.{what}.b128",
                _head() + ".reg .b128 o, w, r; .reg .pred c;\n"
                f"st.{place}.v2.b64 [{address}], {{x, y}}; and.b32 m, m, -1;\n"
                ".reg .b32 n; and.b32 n, %t, 1; setp.eq.u32 c, n, 1; @c add.s64 y, y, 1;\n"
                f"mov.b128 o, {{x, y}}; ld.global.v2.b64 {{x, y}}, [s+1024]; "
                "mov.b128 w, {x, y};\n"
                f"atom.{place}.{what}.b128 r, [{address}], {operands};\n"
                f"mov.b128 {{x, y}}, r; st.global.v2.b64 [q+16], {{x, y}};\n"
                f"ld.{place}.v2.b64 {{x, y}}, [{address}]; st.global.v2.b64 [q+32], {{x, y}};",
                given=(Part("raw8", 16 * _THREADS), Part("raw8", 16 * _THREADS)),
            )


def _atomic(
    opcode: str, place: str, operation: str, *, red: bool = False, kind: str = "",
    hint: bool = False,
) -> Case:  # fmt: skip
    note = f" {kind}" if kind else " with a cache hint" if hint else ""
    register = _REGISTER[operation.split(".")[-1]]
    size = int(register[1:]) // 8
    offset = -(-size // 4) * 4
    if kind:
        kind += str(8 * size)
    elif operation.startswith("cas"):
        kind = "raw16" if size == 2 else f"small{8 * size}"
    else:
        kind = register
    shared = place in ("shared", "generic shared")
    body = (
        f".reg .b64 a, s, q; .reg .b32 m; .reg .{register} x, y, z, r; .reg .pred c;\n"
        f"mad.wide.u32 s, %t, {size}, %in; mad.wide.u32 q, %t, 16, %out;\n"
        "mov.b32 m, smem; mad.lo.u32 m, %t, 16, m;\n"
    )
    span = -(-size * _ATOMIC_THREADS // 128) * 128
    for i, name in enumerate("xyz"):
        body += f"ld.global.{register} {name}, [s+{span * i}];\n"
    body += f"setp.gt.u32 c, %t, 60; @!c mov.{register} z, x;\n"  # cas mostly succeeds
    if shared:
        body += f"st.shared.{register} [m], x; cvt.u64.u32 a, m; cvta.shared.u64 a, a;\n"
    else:
        body += f"st.global.{register} [q], x; mov.b64 a, q;"
        body += " cvta.global.u64 a, a;\n" if not place else "\n"
    address = "m" if place == "shared" else "a"
    operands = "z, y" if operation.startswith("cas") else "y"
    if hint:
        body += ".reg .b64 pol; createpolicy.fractional.L2::evict_first.b64 pol, 1.0;\n"
        operands += ", pol"
        words = opcode.split(".")
        opcode = ".".join([*words[:-1], "L2::cache_hint", words[-1]])
    body += (
        f"{opcode} [{address}], {operands};\n"
        if red
        else (f"{opcode} r, [{address}], {operands};\nst.global.{register} [q+{offset}], r;\n")
    )
    if shared:
        body += f"ld.shared.{register} x, [m]; st.global.{register} [q], x;\n"
    return Case(
        f"{opcode} {place}{note}".strip(),
        _FAMILY,
        body,
        (Part(kind, _ATOMIC_THREADS),) * 3,
        (Part("u4", 4 * _ATOMIC_THREADS),),
        threads=_ATOMIC_THREADS,
        shared=16 * _ATOMIC_THREADS,
    )


_ATOMIC_THREADS = 128


def _vector_atomics(operation: str, count: int, kind: str) -> Iterator[Case]:
    register = _REGISTER[kind]
    size = int(register[1:]) // 8
    xs, rs = [f"x{i}" for i in range(count)], [f"r{i}" for i in range(count)]
    group = "{" + ", ".join(xs) + "}"
    result = "{" + ", ".join(rs) + "}"
    body = (
        f".reg .b64 s, q; .reg .{register} {', '.join(xs + rs)};\n"
        f"mad.wide.u32 s, %t, {size * count}, %in; mad.wide.u32 q, %t, 32, %out;\n"
    )
    for i in range(count):
        body += f"ld.global.{register} x{i}, [s+{size * i}]; "
        body += f"st.global.{register} [q+{size * i}], x{i};\n"
    span = -(-size * count * _THREADS // 128) * 128
    body += "".join(f"ld.global.{register} x{i}, [s+{span + size * i}];\n" for i in range(count))
    words = operation.split(".")
    for head in ("atom", "red"):
        opcode = f"{head}.global.{words[0]}"
        opcode += (f".{words[1]}" if len(words) > 1 else "") + f".v{count}.{kind}"
        text = body
        if head == "atom":
            text += f"{opcode} {result}, [q], {group};\n"
            text += "".join(
                f"st.global.{register} [q+{16 + size * i}], r{i};\n" for i in range(count)
            )
        else:
            text += f"{opcode} [q], {group};\n"
        part = Part(register, count * _THREADS)
        yield Case(
            opcode, _FAMILY, text, (part, part), (Part("u4", 8 * _THREADS),), threads=_THREADS
        )


def _contended() -> Iterator[Case]:
    """All threads on a few words, where the order does not matter."""
    for place in ("global", "shared"):
        for operation in ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32",
                          "inc.u32", "dec.u32", "add.u64", "max.s64"):  # fmt: skip
            register = _REGISTER[operation.split(".")[1]]
            address = "a" if place == "global" else "m"
            base = "cvt.u64.u32 a, n; add.s64 a, a, %out;" if place == "global" else (
                "mov.b32 m, smem; add.u32 m, m, n;"
            )  # fmt: skip
            kind = "raw" + register[1:]
            start = "7" if operation.startswith(("inc", "dec")) else "9"
            if start == "7":
                kind = "ones32"  # the bound; larger than the count, so that no order shows
            body = (
                f".reg .b64 a, s; .reg .b32 m, n; .reg .{register} x; .reg .pred c;\n"
                f"mad.wide.u32 s, %t, {int(register[1:]) // 8}, %in;\n"
                f"ld.global.{register} x, [s]; and.b32 n, %t, 24; {base}\n"
                f"setp.eq.u32 c, n, %t; @c st.{place}.{register} [{address}], {start};\n"
                "bar.sync 0; "
                f"red.{place}.{operation} [{address}], x;\n"
            )
            if place == "shared":
                body += (
                    f"bar.sync 0; cvt.u64.u32 a, n; add.s64 a, a, %out; "
                    f"ld.shared.{register} x, [m]; setp.eq.u32 c, n, %t; "
                    f"@c st.global.{register} [a], x;"
                )
            yield Case(
                f"red.{place}.{operation} contended",
                _FAMILY,
                body,
                (Part(kind, 256),),
                (Part("u4", 8),),
                shared=128,
            )


# ---- parameters, variables, addresses


def _parameters() -> Iterator[Case]:
    for kind, size in _SIZES.items():
        register = f"b{max(16, 8 * size)}"
        for count in (1, 2, 4):
            if size * count > 16:
                continue
            vector = f".v{count}" if count > 1 else ""
            names = [f"v{i}" for i in range(count)]
            into = "{" + ", ".join(names) + "}" if count > 1 else names[0]
            body = f".reg .{register} {', '.join(names)};\n"
            body += f"ld.param{vector}.{kind} {into}, [block+{16 + 16 * (count == 1)}];\n"
            width = int(register[1:]) // 8
            body += "\n".join(
                f"st.global.{register} [%out+{width * i}], v{i};" for i in range(count)
            )
            yield Case(
                f"ld.param{vector}.{kind}", _FAMILY, body, (Part("raw8", 64),), (Part("u4", 8),),
                threads=1, block=True,
            )  # fmt: skip
    yield Case(
        "cvta.param",
        _FAMILY,
        ".reg .b64 a, q; .reg .b32 r; .reg .pred c;\n"
        "mov.b64 a, block; cvta.param.u64 a, a; mad.wide.u32 a, %t, 4, a; ld.b32 r, [a];\n"
        "mad.wide.u32 q, %t, 4, %out; st.global.b32 [q], r; isspacep.param c, a;\n"
        "selp.b32 r, 1, 0, c; st.global.b32 [q+64], r;\n"
        "isspacep.global c, a; selp.b32 r, 1, 0, c; st.global.b32 [q+128], r;",
        (Part("raw8", 64),),
        (Part("u4", 48),),
        threads=16,
        block=True,
    )


def _discarded() -> Case:
    """What is discarded is undefined until it is written again."""
    return _case(
        "discard.global.L2",
        _head() + ".reg .pred c; setp.eq.u32 c, %t, 0; @c discard.global.L2 [%out], 128;\n"
        "bar.sync 0; st.global.v2.b64 [q], {y, x};",
    )


def _variables() -> Iterator[Case]:
    header = (
        ".const .align 16 .b8 table$K[16] = {1, 2, 3, 250, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};\n"
        ".const .f32 halves$K[4] = {0f3F000000, 1.5, -2.5, 0.1};\n"
        ".global .align 8 .u16 words$K[8] = {1, 65535, -3, 4};\n"
        ".global .u32 scalar$K = 77;\n"
        ".global .u64 pointers$K[2] = {words$K+4, generic(scalar$K)};"
    )
    read = (
        ".reg .b64 a, q; .reg .b32 r, n; .reg .b16 h; mad.wide.u32 q, %t, 4, %out; "
        "and.b32 n, %t, 3;\n"
    )
    yield Case(
        "variables: const and global",
        _FAMILY,
        read + "cvt.u64.u32 a, n; .reg .b64 b, c;\n"
        "mov.u64 b, table$K; add.s64 b, b, a; ld.const.s8 r, [b]; st.global.b32 [q], r;\n"
        "ld.const.u8 r, [b+8]; st.global.b32 [q+128], r;\n"
        "mov.u64 b, halves$K; mad.wide.u32 b, n, 4, b; ld.const.f32 r, [b]; "
        "st.global.b32 [q+256], r;\n"
        "ld.const.v4.b32 {r, _, _, _}, [table$K]; st.global.b32 [q+384], r;\n"
        "mov.u64 b, words$K; mad.wide.u32 b, n, 2, b; ld.global.s16 r, [b]; "
        "st.global.b32 [q+512], r;\n"
        "ld.global.u32 r, [scalar$K]; st.global.b32 [q+640], r;\n"
        "ld.global.u64 b, [pointers$K]; ld.global.u16 h, [b]; cvt.u32.u16 r, h; "
        "st.global.b32 [q+768], r;\n"
        "ld.global.u64 b, [pointers$K+8]; ld.u32 r, [b]; st.global.b32 [q+896], r;\n"
        "cvta.const.u64 b, table$K; ld.b32 r, [b+4]; st.global.b32 [q+1024], r;",
        (),
        (Part("u4", 32 * 9),),
        threads=32,
        header=header,
    )
    yield Case(
        "variables: shared and local",
        _FAMILY,
        ".shared .align 8 .b8 first[24]; .shared .align 16 .b32 second[64]; "
        ".local .b16 near[4];\n"
        + read
        + "mov.b32 r, second; mad.lo.u32 r, %t, 4, r; st.shared.u32 [r], %t; bar.sync 0;\n"
        "xor.b32 n, %t, 7; mov.b32 r, second; mad.lo.u32 r, n, 4, r; ld.shared.u32 r, [r]; "
        "st.global.b32 [q], r;\n"
        "mov.b32 r, first; mov.b32 n, second; sub.u32 r, n, r; and.b32 r, r, 15; "
        "st.global.b32 [q+128], n; st.global.b32 [q+128], r;\n"
        "cvt.u16.u32 h, %t; st.local.u16 [near+6], h; st.local.u16 [near+4], 9; "
        "ld.local.s16 r, [near+6]; st.global.b32 [q+256], r;\n"
        "mov.u64 a, near; cvta.local.u64 a, a; ld.u16 h, [a+4]; cvt.u32.u16 r, h; "
        "st.global.b32 [q+384], r;",
        (),
        (Part("u4", 32 * 4),),
        threads=32,
    )


def _addresses() -> Iterator[Case]:
    spaces = ("const", "global", "local", "shared", "shared::cta", "shared::cluster", "param")
    lines = [_head(), ".reg .pred c; .reg .b64 g; .reg .b32 r; .reg .b64 z;"]
    number = 0
    for place in ("", "generic shared", "generic local"):
        lines.append(_PLACES[place] + " mov.b64 g, a;")
        for space in spaces:
            lines.append(
                f"isspacep.{space} c, g; selp.b32 r, 1, 0, c; st.global.b32 [q+{number}], r;"
            )
            number += 4
    number = 0
    for into in ("global", "shared", "local"):  # there and back
        place = "" if into == "global" else f"generic {into}"
        lines.append(
            f"{_PLACES[place]} cvta.to.{into}.u64 z, a; cvta.{into}.u64 z, z; "
            f"sub.s64 z, z, a; st.global.b64 [q+{96 + number}], z;"
        )
        number += 8
    body = "\n".join(lines).replace("mad.wide.u32 q, %t, 64", "mad.wide.u32 q, %t, 128")
    yield _case("isspacep and cvta", body, words=32)
    yield _case(
        "cvta.shared and cvt",
        _head() + ".reg .b32 r; cvt.u64.u32 a, m; cvta.shared.u64 a, a; st.b32 [a], %t;\n"
        "cvta.to.shared.u64 x, a; cvt.u32.u64 r, x; sub.u32 r, r, m; st.global.b32 [q], r;\n"
        "ld.shared.b32 r, [m]; st.global.b32 [q+4], r; sub.u32 m, m, 64; mov.b32 r, smem;\n"
        "sub.u32 r, m, r; st.global.b32 [q+8], r; mov.b32 r, smem; st.global.b32 [q+12], r;",
    )


def _policies() -> Iterator[Case]:
    """Cache policies are numbers without a meaning; the loads that take them have one."""
    primary = ("evict_last", "evict_normal", "evict_first", "evict_unchanged")
    texts = [f"createpolicy.fractional.L2::{p}.b64 x, 0.5;" for p in primary]
    texts += [f"createpolicy.fractional.L2::{p}.L2::evict_unchanged.b64 x;" for p in primary]
    texts += ["createpolicy.range.global.L2::evict_last.L2::evict_first.b64 x, [%in], 512, 1024;"]
    texts += [
        f"createpolicy.range.global.L2::{p}.L2::evict_unchanged.b64 x, [%in], 512, 1024;"
        for p in primary[1:]
    ]
    texts += ["createpolicy.fractional.L2::evict_last.L2::evict_first.b64 x, 0.25;"]
    texts += ["createpolicy.fractional.L2::evict_last.b64 x; createpolicy.cvt.L2.b64 x, x;"]
    for number, text in enumerate(texts):
        opcode = text.split()[0]
        yield _case(
            f"{opcode} {number}",
            _head() + f"{text} ld.global.L2::cache_hint.b64 y, [s], x;\n"
            "st.global.L2::cache_hint.b64 [q], y, x;",
        )
