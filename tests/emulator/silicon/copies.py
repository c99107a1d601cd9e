"""Cases of asynchronous copies: cp.async, bulk copies and tensor copies, with reductions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .cases import Case, Part
from .tensormaps import ELEMENT_BYTES, TensorMap, extent, packed

_FAMILY = "copy"
_THREADS = 128
_BARRIER = (
    ".reg .b64 s, q, x, y, pol; .reg .b32 m, n, w, bar; .reg .pred c, first;\n"
    "mov.b32 bar, smem; add.u32 m, bar, 1024; setp.eq.u32 first, %t, 0;\n"
    "@first mbarrier.init.shared::cta.b64 [bar], 1;\n"
    "@first fence.mbarrier_init.release.cluster;\n"
)
_WAIT = (
    ".reg .b32 tries; mov.b32 tries, 0;\n"
    "wait: mbarrier.try_wait.parity.shared::cta.b64 c, [bar], 0; @c bra passed;\n"
    "add.u32 tries, tries, 1; setp.lt.u32 c, tries, 200; @c bra wait;\n"
    "passed: setp.lt.u32 c, tries, 200; selp.b32 tries, 1, 0, c;\n"
)
"""Until the barrier's phase is over, or it has been long; `tries` is then 1 or 0."""
_POLICY = "createpolicy.fractional.L2::evict_first.b64 pol, 1.0;\n"
_HINT = {False: "", True: ".L2::cache_hint"}
_REDUCTIONS = [
    *(f"add.{kind}" for kind in ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16")),
    *(f"{op}.{kind}" for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64", "f16",
                                                           "bf16")),
    *(f"{op}.b{n}" for op in ("and", "or", "xor") for n in (32, 64)),
    "inc.u32", "dec.u32",
]  # fmt: skip


def cases() -> list[Case]:
    return [
        *_cp_async(), *_bulk(), *_bulk_reductions(), *_clusters(), *_tensor_loads(),
        *_tensor_stores(), *_tensor_reductions(), *_im2col(), *_prefetches(), *_replaced(),
        *_replaced_in_global(),
    ]  # fmt: skip


def _fill(size: int, source: str | None = None, start: int = 1024) -> str:
    """Shared memory from `start` on: from an address, or 0xAA; with all threads, then a fence."""
    number = abs(hash_of(f"{size} {source} {start}"))
    value = "ld.global.v2.b64 {x, y}, [s];" if source else (
        "mov.b64 x, 0xAAAAAAAAAAAAAAAA; mov.b64 y, x;"
    )  # fmt: skip
    return (
        f"mad.wide.u32 s, %t, 16, {source or '%in'}; mov.b32 n, smem; add.u32 n, n, {start}; "
        "mad.lo.u32 n, %t, 16, n; mul.lo.u32 w, %t, 16;\n"
        f"fill{number}: setp.ge.u32 c, w, {size}; @c bra filled{number};\n"
        f"{value} st.shared.v2.b64 [n], {{x, y}}; add.s64 s, s, {16 * _THREADS};\n"
        f"add.u32 n, n, {16 * _THREADS}; add.u32 w, w, {16 * _THREADS}; bra fill{number};\n"
        f"filled{number}: fence.proxy.async; bar.sync 0;\n"
    )


def hash_of(text: str) -> int:
    """A number for labels, the same in every run."""
    return sum(ord(c) * (i + 1) for i, c in enumerate(text))


def _dump(size: int, to: str = "%out", start: int = 1024) -> str:
    """Shared memory from `start` on, to an address."""
    return (
        f"mad.wide.u32 q, %t, 16, {to}; mov.b32 n, smem; add.u32 n, n, {start}; "
        "mad.lo.u32 n, %t, 16, n; mul.lo.u32 w, %t, 16;\n"
        f"dump: setp.ge.u32 c, w, {size}; @c bra dumped;\n"
        f"ld.shared.v2.b64 {{x, y}}, [n]; st.global.v2.b64 [q], {{x, y}}; "
        f"add.s64 q, q, {16 * _THREADS};\n"
        f"add.u32 n, n, {16 * _THREADS}; add.u32 w, w, {16 * _THREADS}; bra dump;\n"
        "dumped:\n"
    )


def _copy(size: int) -> str:
    """The input buffer to the output buffer, by all threads, seen by the asynchronous proxy."""
    return (
        "mad.wide.u32 s, %t, 16, %in; mad.wide.u32 q, %t, 16, %out; mul.lo.u32 w, %t, 16;\n"
        f"copy: setp.ge.u32 c, w, {size}; @c bra copied;\n"
        "ld.global.v2.b64 {x, y}, [s]; st.global.v2.b64 [q], {x, y};\n"
        f"add.s64 s, s, {16 * _THREADS}; add.s64 q, q, {16 * _THREADS}; "
        f"add.u32 w, w, {16 * _THREADS}; bra copy;\n"
        "copied: fence.proxy.async; bar.sync 0;\n"
    )


def _case(
    name: str, body: str, given: Sequence[Part], wanted: int, *, shared: int = 16384,
    **rest: object,
) -> Case:  # fmt: skip
    parts = [Part("u1", wanted)]
    if _WAIT in body:
        body += f"@first st.global.b32 [%out+{-(-wanted // 128) * 128}], tries;\n"
        parts.append(Part("u4", 1))
    return Case(
        name,
        _FAMILY,
        body,
        tuple(given),
        tuple(parts),
        threads=_THREADS,
        shared=shared,
        **rest,  # type: ignore[arg-type]
    )


# ---- cp.async


def _cp_async() -> Iterator[Case]:
    size = 16 * _THREADS
    texts = [f"cp.async.ca.shared.global [n], [s], {n};" for n in (4, 8, 16)]
    texts += [
        "cp.async.cg.shared::cta.global [n], [s], 16;",
        "cp.async.cg.shared.global.L2::128B [n], [s], 16;",
        "cp.async.ca.shared.global.L2::256B [n], [s], 8;",
        "cp.async.cg.shared.global.L2::64B [n], [s], 16, r;",
        "cp.async.ca.shared.global.L2::cache_hint [n], [s], 4, pol;",
        "cp.async.cg.shared.global.L2::cache_hint [n], [s], 16, r, pol;",
        "cp.async.ca.shared.global.L2::cache_hint [n], [s], 8, p, pol;",
        "cp.async.cg.shared::cta.global.L2::cache_hint.L2::128B [n], [s], 16, !p, pol;",
        "cp.async.cg.shared::cta.global.L2::cache_hint.L2::256B [n], [s], 16, pol;",
        "cp.async.ca.shared::cta.global.L2::64B [n], [s], 8, p;",
    ]
    texts += [f"cp.async.ca.shared.global [n], [s], {n}, r;" for n in (4, 8, 16)]
    texts += [f"cp.async.ca.shared.global [n], [s], {n}, p;" for n in (4, 8, 16)]
    texts += ["cp.async.cg.shared.global [n], [s], 16, !p;"]
    for number, text in enumerate(texts):
        width = next(n for n in (16, 8, 4) if f"[s], {n}" in text)
        yield _case(
            f"{text.split()[0]} {number}",
            _BARRIER + _fill(size)
            + "createpolicy.fractional.L2::evict_first.b64 pol, 1.0;\n"
            ".reg .b32 r; .reg .pred p; mad.wide.u32 s, %t, 16, %in; mad.lo.u32 n, %t, 16, m;\n"
            f"rem.u32 r, %t, {width + 1}; and.b32 w, %t, 1; setp.eq.u32 p, w, 0;\n"
            f"{text} cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;\n" + _dump(size),
            [Part("raw8", size)],
            size,
        )  # fmt: skip
    yield _case(
        "cp.async.wait_all",
        _BARRIER + _fill(size)
        + "mad.wide.u32 s, %t, 16, %in; mad.lo.u32 n, %t, 16, m;\n"
        "cp.async.ca.shared.global [n], [s], 4; cp.async.commit_group;\n"
        "cp.async.ca.shared.global [n+8], [s+8], 4; cp.async.wait_group 1;\n"
        "cp.async.wait_all; bar.sync 0;\n" + _dump(size),
        [Part("raw8", size)],
        size,
    )  # fmt: skip
    for noinc, count in (("", 1), (".noinc", _THREADS)):
        yield _case(
            f"cp.async.mbarrier.arrive{noinc}.shared.b64",
            _BARRIER.replace("[bar], 1;", f"[bar], {count};") + _fill(size)
            + "mad.wide.u32 s, %t, 16, %in; mad.lo.u32 n, %t, 16, m;\n"
            "cp.async.cg.shared.global [n], [s], 16;\n"
            f"cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [bar];\n"
            + ("bar.sync 0; @first mbarrier.arrive.shared::cta.b64 _, [bar];\n" if count == 1
               else "")
            + _WAIT + _dump(size),
            [Part("raw8", size)],
            size,
        )  # fmt: skip


# ---- bulk copies


def _bulk() -> Iterator[Case]:
    for size, hint in itertools.product((16, 48, 1024, 4096), ("", ".L2::cache_hint")):
        policy = ", pol" if hint else ""
        head = _BARRIER + "createpolicy.fractional.L2::evict_last.b64 pol, 1.0;\n"
        for space in ("shared::cluster", "shared::cta"):
            if space == "shared::cta" and size != 48:
                continue
            yield _case(
                f"cp.async.bulk.{space}.global{hint} {size}",
                head + _fill(4096)
                + f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {size};\n"
                f"@first cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes{hint} "
                f"[m], [%in+32], {size}, [bar]{policy};\n" + _WAIT + _dump(4096),
                [Part("raw8", 4224)],
                4096,
            )  # fmt: skip
        yield _case(
            f"cp.async.bulk.global.shared::cta{hint} {size}",
            head + _fill(4096, "%in")
            + f"@first cp.async.bulk.global.shared::cta.bulk_group{hint} [%out+16], [m+16], "
            f"{size - 16 or 16}{policy};\n"
            "@first cp.async.bulk.commit_group; @first cp.async.bulk.wait_group.read 0;\n"
            "@first cp.async.bulk.wait_group 0;\n",
            [Part("raw8", 4096)],
            4224,
        )  # fmt: skip


def _width(kind: str) -> int:
    return 2 if kind in ("f16", "bf16") else int(kind[1:]) // 8


def _bulk_reductions() -> Iterator[Case]:
    for operation in _REDUCTIONS:
        kind = operation.split(".")[-1]
        yield _bulk_reduction(operation, f"b{8 * _width(kind)}")
    for operation in ("add.u32", "add.noftz.bf16"):
        yield _bulk_reduction(operation, f"b{8 * _width(operation.split('.')[-1])}", hint=True)
    yield _bulk_reduction("add.f64", "nan64")
    for operation in ("add.f16", "add.bf16"):
        yield _bulk_reduction(operation.replace(".", ".noftz."), "nan16")
    yield _bulk_reduction("add.f32", "nan32")
    for operation in ("min.f16", "max.bf16"):
        yield _bulk_reduction(operation, "nan16")


def _bulk_reduction(operation: str, given: str, *, hint: bool = False) -> Case:
    size, width = 1024, _width(operation.split(".")[-1])
    opcode = f"cp.reduce.async.bulk.global.shared::cta.bulk_group{_HINT[hint]}.{operation}"
    return _case(
        opcode + (f" {given}" if given.startswith("nan") else ""),
        _BARRIER + _copy(size) + f"add.s64 pol, %in, {size};\n" + _fill(size, "pol")
        + (_POLICY if hint else "")
        + f"@first {opcode} [%out], [m], {size}{', pol' if hint else ''};\n"
        "@first cp.async.bulk.commit_group; @first cp.async.bulk.wait_group 0;\n",
        [Part(given, size // width)] * 2,
        size,
    )  # fmt: skip


def _clusters() -> Iterator[Case]:
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    ranks = (
        ".reg .b32 me, you, there, half; mov.u32 me, %cluster_ctarank; xor.b32 you, me, 1;\n"
        "mad.wide.u32 pol, me, 2048, %out;\n"
    )
    tail = _dump(2048, "pol") + sync
    yield _case(
        "cp.async.bulk.shared::cluster.shared::cta",
        _BARRIER + ranks + "mad.wide.u32 x, me, 2048, %in;\n" + _fill(2048, "x", 4096)
        + _fill(2048)
        + "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n" + sync
        + "mapa.shared::cluster.u32 there, m, you; mapa.shared::cluster.u32 half, bar, you;\n"
        "@first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[there+512], [m+3072], 1024, [half];\n" + _WAIT + tail,
        [Part("raw8", 4096)],
        4096, blocks=2, cluster=2,
    )  # fmt: skip
    for operation, peer in itertools.product(
        ("add.u32", "add.s32", "add.u64", "inc.u32", "dec.u32", "min.u32", "min.s32", "max.u32",
         "max.s32", "and.b32", "or.b32", "xor.b32"), ("me", "you"),
    ):  # fmt: skip
        if peer == "me" and operation != "add.u32":
            continue
        width = _width(operation.split(".")[-1])
        yield _case(
            f"cp.reduce.async.bulk.shared::cluster.shared::cta.{operation} {peer}",
            _BARRIER + ranks + "mad.wide.u32 x, me, 2048, %in;\n" + _fill(2048, "x", 4096)
            + "add.s64 pol, %in, 4096; mad.wide.u32 x, me, 2048, pol;\n" + _fill(2048, "x")
            + "mad.wide.u32 pol, me, 2048, %out;\n"
            "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n" + sync
            + f"mapa.shared::cluster.u32 there, m, {peer}; "
            f"mapa.shared::cluster.u32 half, bar, {peer};\n"
            "@first cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes."
            f"{operation} [there+512], [m+3072], 1024, [half];\n" + _WAIT + tail,
            [Part(f"b{8 * width}", 4096 // width)] * 2,
            4096, blocks=2, cluster=2,
        )  # fmt: skip
    for hint in (False, True):
        policy = ", pol" if hint else ""
        words = " with a cache hint" if hint else ""
        # pol is the address of the output until then
        start = _BARRIER + ranks + _fill(2048) + (
            ".reg .b64 to; mov.b64 to, pol; " + _POLICY if hint else ""
        )  # fmt: skip
        end = _WAIT + (_dump(2048, "to") + sync if hint else tail)
        yield _case(
            f"cp.async.bulk.shared::cluster.global.multicast::cluster{words}",
            start
            + "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n" + sync
            + ".reg .b16 mask; mov.b16 mask, 3; mad.wide.u32 s, me, 1024, %in; "
            "mad.lo.u32 there, me, 512, m;\n"
            "@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            f".multicast::cluster{_HINT[hint]} [there], [s], 512, [bar], mask{policy};\n" + end,
            [Part("raw8", 4096)],
            4096, blocks=2, cluster=2,
        )  # fmt: skip
        tensor_map = packed("u8", (64, 64), (32, 16), swizzle=32)
        yield _case(
            f"cp.async.bulk.tensor.2d multicast{words}",
            start
            + "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n" + sync
            + ".reg .b16 mask; mov.b16 mask, 3; mov.b64 s, map0; cvta.param.u64 s, s; "
            "mad.lo.u32 there, me, 512, m; mul.lo.u32 you, me, 16;\n"
            "@first cp.async.bulk.tensor.2d.shared::cluster.global.tile"
            f".mbarrier::complete_tx::bytes.multicast::cluster{_HINT[hint]} "
            f"[there], [s, {{you, 7}}], [bar], mask{policy};\n" + end,
            [Part("raw8", 4096)],
            4096, blocks=2, cluster=2, maps=(tensor_map,),
        )  # fmt: skip
    image = packed("u16", (16, 10, 9, 3), (16, 16), corners=((-1, -1), (-1, -1)))
    yield _case(
        "cp.async.bulk.tensor.4d.im2col multicast",
        _BARRIER + ranks + _fill(2048)
        + "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 1024;\n" + sync
        + ".reg .b16 mask; mov.b16 mask, 3; mov.b64 s, map0; cvta.param.u64 s, s; "
        "mad.lo.u32 there, me, 512, m; mul.lo.u32 you, me, 3; .reg .b16 o0, o1; "
        "mov.b16 o0, 1; mov.b16 o1, 2;\n"
        "@first cp.async.bulk.tensor.4d.shared::cluster.global.im2col"
        ".mbarrier::complete_tx::bytes.multicast::cluster "
        "[there], [s, {0, you, 4, 1}], [bar], {o0, o1}, mask;\n" + _WAIT + tail,
        [_source(image)],
        4096, blocks=2, cluster=2, maps=(image,),
    )  # fmt: skip


# ---- tensor copies


def _kind_of(element: str) -> str:
    return f"b{8 * ELEMENT_BYTES[element]}" if ELEMENT_BYTES[element] > 1 else "raw8"


def _source(tensor_map: TensorMap) -> Part:
    return Part(
        _kind_of(tensor_map.element), extent(tensor_map) // ELEMENT_BYTES[tensor_map.element]
    )


def _unit(tensor_map: TensorMap) -> int:
    """Elements in 16 bytes: innermost coordinates are multiples of it."""
    return max(1, 16 // ELEMENT_BYTES[tensor_map.element])


def _places(tensor_map: TensorMap) -> list[tuple[int, ...]]:
    """Coordinates: inside, across the low edge, across the high one, far outside.

    Those of the innermost dimension are multiples of 16 bytes.
    """
    sizes, box = tensor_map.sizes, tensor_map.box
    rank = len(sizes)
    unit = _unit(tensor_map)
    high = [max(0, n - b // 2 - 1) for n, b in zip(sizes, box, strict=True)]
    high[0] = high[0] // unit * unit
    low = [-1 - i for i in range(rank)]
    low[0] = -unit
    return [
        (0,) * rank,
        tuple(low),
        tuple(high),
        (unit, *high[1:-1], -1) if rank > 1 else (-2 * unit,),
        (-(-sizes[0] // unit) * unit, *(0,) * (rank - 1)),
    ]


def _stored_places(tensor_map: TensorMap) -> list[tuple[int, ...]]:
    """Coordinates that stores and reductions may have, which are not negative."""
    unit = _unit(tensor_map)
    found = _places(tensor_map)
    inside = (unit, *(1 for _ in tensor_map.sizes[1:]))
    beyond = (0, *tensor_map.sizes[1:]) if tensor_map.rank > 1 else (unit * 1000,)
    return [found[0], inside, found[2], found[4], beyond]


def _describe(m: TensorMap) -> str:
    words = [m.element, "x".join(map(str, m.sizes)), "box", "x".join(map(str, m.box))]
    if m.strides != packed(m.element, m.sizes, m.box).strides:
        words += ["strides", "x".join(map(str, m.strides))]
    if m.steps:
        words += ["steps", "x".join(map(str, m.steps))]
    if m.interleave:
        words.append(f"interleaved {m.interleave}B")
    if m.swizzle:
        words.append(f"swizzle {m.swizzle}B")
    if m.nan_fill:
        words.append("NaN")
    return " ".join(words)


def _coordinates(place: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, place)) + "}"


def _tile_bytes(tensor_map: TensorMap) -> int:
    """Bytes in shared memory: with element strides fewer rows than the box spans.

    TMA ignores the element stride of the innermost dimension.
    """
    total = ELEMENT_BYTES[tensor_map.element]
    steps = tensor_map.steps or (1,) * tensor_map.rank
    for i, (n, step) in enumerate(zip(tensor_map.box, steps, strict=True)):
        total *= -(-n // step) if i else n
    return total


def _room(tensor_map: TensorMap) -> int:
    """Bytes of shared memory to set aside for a tile: as if its rows were a swizzle span each."""
    inner = ELEMENT_BYTES[tensor_map.element] * tensor_map.box[0]
    padded = tensor_map.box_bytes // inner * max(inner, tensor_map.swizzle)
    return -(-padded // 1024) * 1024


def _load(
    tensor_map: TensorMap, places: Sequence[tuple[int, ...]], *, start: int = 0, note: str = "",
    space: str = "shared::cluster", hint: bool = False,
) -> Case:  # fmt: skip
    tile = _tile_bytes(tensor_map)
    room = _room(tensor_map) + (1024 if start else 0)
    places = places[-(40000 // room) :]
    body = _BARRIER + _fill(room * len(places))
    body += "mov.b64 s, map0; cvta.param.u64 s, s; @first prefetch.tensormap [s];\n"
    body += _POLICY if hint else ""
    body += f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {tile * len(places)};\n"
    for i, place in enumerate(places):
        body += (
            f"@first cp.async.bulk.tensor.{tensor_map.rank}d.{space}.global.tile"
            f".mbarrier::complete_tx::bytes{_HINT[hint]} [m+{room * i + start}], "
            f"[s, {_coordinates(place)}], [bar]{', pol' if hint else ''};\n"
        )
    unit = _unit(tensor_map)
    size = room * len(places)
    return _case(
        f"tensor load {_describe(tensor_map)}{note}", body + _WAIT + _dump(size),
        [_source(tensor_map)], size, shared=1024 + size, maps=(tensor_map,),
        refused=any(place[0] % unit for place in places),
    )  # fmt: skip


def _load_maps() -> Iterator[TensorMap]:
    floats = ("f16", "bf16", "f32", "f64", "f32ftz", "tf32", "tf32ftz")
    for element in ELEMENT_BYTES:
        width = ELEMENT_BYTES[element]
        for nan in (False, True) if element in floats else (False,):
            yield packed(element, (160 // width, 6), (64 // width, 4), nan_fill=nan)
    for rank in range(1, 6):
        sizes, box = (40, 9, 7, 5, 4)[:rank], (16, 4, 3, 2, 2)[:rank]
        for swizzle in (0, 32, 64):
            yield packed("u16", sizes, box, swizzle=swizzle if swizzle >= 32 else 0)
    for swizzle, inner, rows in itertools.product((32, 64, 128), (16, 32, 48, 64, 128), (8, 11)):
        if inner <= swizzle:
            yield packed("u8", (144, 20), (inner, rows), swizzle=swizzle)
    yield packed("u8", (144, 20, 3), (128, 7, 2), swizzle=128)
    yield packed("u32", (40, 20, 3), (32, 3, 3), swizzle=128)
    yield packed("u64", (20, 20), (16, 8), swizzle=128, promotion=256)
    for steps in ((1, 2), (1, 3), (2, 1), (2, 2), (3, 2)):
        yield packed("u32", (40, 20), (16, 8), steps=steps)
        yield packed("u32", (40, 20), (16, 8), steps=steps, swizzle=64)
    yield packed("u16", (40, 9, 7, 6), (16, 4, 3, 4), steps=(1, 1, 3, 2))
    yield TensorMap("u16", (40, 5, 3), (160, 32 * 30), (32, 4, 2))  # gaps in the tensor
    yield TensorMap("u16", (40, 5, 3), (0, 80), (32, 4, 2))  # a dimension that repeats
    yield packed("u8", (400,), (256,))
    yield packed("u32", (300, 2), (256, 1))


_SINGLES = (
    (0, 0), (8, 0), (-8, 0), (-32, 0), (0, -2), (0, -4), (72, 5), (80, 0), (88, 9), (1, 0), (4, 1),
    (-1, 0), (79, 0), (2, 5),
)  # fmt: skip
"""Coordinates to try one by one in a tensor of 80 x 6 halves with a box of 32 x 4."""
_UNALIGNED = (("u8", 8), ("u8", 3), ("u32", 1), ("u32", 2), ("f64", 1), ("f64", -1))
"""Innermost coordinates that are not at a multiple of 16 bytes."""


def _small(element: str) -> TensorMap:
    """6 rows of 160 bytes, in boxes of 4 rows of 64."""
    width = ELEMENT_BYTES[element]
    return packed(element, (160 // width, 6), (64 // width, 4))


def _tensor_loads() -> Iterator[Case]:
    for tensor_map in dict.fromkeys(_load_maps()):
        yield _load(tensor_map, _places(tensor_map))
    for start, swizzle in itertools.product((128, 256, 640), (32, 64, 128)):
        plain = packed("u8", (144, 20), (swizzle, 9), swizzle=swizzle)
        yield _load(plain, _places(plain), start=start, note=f" at {start}")
    for swizzle, place in itertools.product((0, 64), _SINGLES):
        plain = packed("u16", (80, 6), (32, 4), swizzle=swizzle)
        yield _load(plain, [place], note=f" one {place}")
    for element, first in _UNALIGNED:
        yield _load(_small(element), [(first, 1)], note=f" one {first}")
    plain = packed("u16", (80, 6), (32, 4), swizzle=64)
    yield _load(plain, _places(plain), hint=True, note=" with a cache hint")
    yield _load(plain, _places(plain), space="shared::cta", note=" to shared::cta")


def _store_maps() -> Iterator[TensorMap]:
    for element in ELEMENT_BYTES:
        yield _small(element)
    for element in ("u8", "f16", "f32"):  # rows that end within 16 bytes
        width = ELEMENT_BYTES[element]
        yield packed(element, (148 // width, 6), (64 // width, 4))
    for rank in range(1, 6):
        yield packed("u16", (40, 9, 7, 5, 4)[:rank], (16, 4, 3, 2, 2)[:rank])
    for swizzle, inner in itertools.product((32, 64, 128), (32, 64, 128)):
        if inner <= swizzle:
            yield packed("u8", (144, 20), (inner, 11), swizzle=swizzle)
    yield packed("u32", (40, 20), (16, 8), steps=(1, 2))
    yield packed("u32", (40, 20), (16, 8), steps=(2, 1))
    yield packed("u32", (40, 20), (16, 8), steps=(3, 2), swizzle=64)
    yield packed("u16", (40, 9, 7, 6), (16, 4, 3, 4), steps=(1, 1, 3, 2))
    yield packed("u8", (144, 20, 3), (128, 7, 2), swizzle=128)
    yield packed("u8", (400,), (256,))
    yield TensorMap("u16", (40, 5, 3), (160, 32 * 30), (32, 4, 2))  # gaps in the tensor


def _store(
    tensor_map: TensorMap, places: Sequence[tuple[int, ...]], operation: str = "", note: str = "",
    *, mode: str = ".tile", hint: bool = False, refused: bool = False,
) -> Case:  # fmt: skip
    tensor_map = replace(tensor_map, buffer="out")
    room = _room(tensor_map)
    total = -(-extent(tensor_map) // 128) * 128
    body = _BARRIER
    given = [Part(_kind_of(tensor_map.element), total // ELEMENT_BYTES[tensor_map.element])]
    if operation:
        body += _copy(total)
    given.append(Part(_kind_of(tensor_map.element), room // ELEMENT_BYTES[tensor_map.element]))
    body += f"add.s64 pol, %in, {total};\n" + _fill(room, "pol")
    body += "mov.b64 s, map0; cvta.param.u64 s, s;\n"
    body += _POLICY if hint else ""
    head = "cp.reduce.async" if operation else "cp.async"
    for place in places:
        body += (
            f"@first {head}.bulk.tensor.{tensor_map.rank}d.global.shared::cta"
            f"{operation}{mode}.bulk_group{_HINT[hint]} [s, {_coordinates(place)}], [m]"
            f"{', pol' if hint else ''};\n"
            "@first cp.async.bulk.commit_group; @first cp.async.bulk.wait_group 0;\n"
        )
    return _case(
        f"tensor {'reduce' + operation if operation else 'store'} {_describe(tensor_map)}{note}",
        body,
        given, total, shared=1024 + room, maps=(tensor_map,),
        refused=refused or any(p[0] % _unit(tensor_map) or min(p) < 0 for p in places),
    )  # fmt: skip


def _tensor_stores() -> Iterator[Case]:
    for tensor_map in dict.fromkeys(_store_maps()):
        yield _store(tensor_map, _stored_places(tensor_map))
    for swizzle, place in itertools.product((0, 64), _SINGLES):
        plain = packed("u16", (80, 6), (32, 4), swizzle=swizzle)
        yield _store(plain, [place], note=f" one {place}")
    for element, first in _UNALIGNED:
        yield _store(_small(element), [(first, 1)], note=f" one {first}")
    plain = packed("u16", (80, 6), (32, 4), swizzle=64)
    yield _store(plain, _stored_places(plain), hint=True, note=" with a cache hint")
    for operation in ("", ".add"):
        image = packed("f16", (16, 10, 9, 3), (16, 24), corners=((0, 0), (0, 0)))
        for place in ((0, 0, 0, 0), (0, 3, 4, 1), (0, 9, 8, 2)):
            yield _store(image, [place], operation, f" im2col {place}", mode=".im2col_no_offs")
    image = packed("u16", (16, 10, 9, 3), (16, 24), corners=((-1, -1), (-1, -1)))
    yield _store(image, [(0, 3, 4, 1)], note=" im2col corners", mode=".im2col_no_offs",
                 refused=True)  # fmt: skip


_REDUCIBLE = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16", "f32ftz", "tf32", "tf32ftz"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",), "dec": ("u32",),
    "and": ("u32", "s32", "u64"), "or": ("u32", "s32", "u64"), "xor": ("u32", "s32", "u64"),
}  # fmt: skip
"""The types that each tensor reduction takes."""


def _tensor_reductions() -> Iterator[Case]:
    for operation, elements in _REDUCIBLE.items():
        for element in ELEMENT_BYTES:
            plain = _small(element)
            legal = element in elements
            places = _stored_places(plain) if legal else [(0, 1)]
            yield _store(plain, places, f".{operation}", refused=not legal)
    plain = packed("f16", (144, 20), (64, 11), swizzle=128)
    yield _store(plain, _stored_places(plain), ".add")
    yield _store(plain, _stored_places(plain), ".add", " with a cache hint", hint=True)
    plain = packed("f32", (37, 9, 3), (16, 4, 2), steps=(1, 2, 1))
    yield _store(plain, _stored_places(plain), ".add")
    repeats = TensorMap("u32", (40, 5, 3), (0, 160), (32, 4, 2))  # rows that add up
    yield _store(repeats, [(0, 0, 0), (4, 1, 1)], ".add")
    yield _store(_small("f16"), [(-8, 1)], ".add", " one (-8, 1)")


def _im2col() -> Iterator[Case]:
    choices = [
        (packed("u16", (16, 10, 9, 3), (16, 24), corners=((0, 0), (0, 0))), (0, 0, 0, 0), (0, 0)),
        (packed("u16", (16, 10, 9, 3), (16, 24), corners=((-1, -1), (-1, -1))), (0, 3, 4, 0),
         (2, 1)),
        (packed("u16", (16, 10, 9, 3), (8, 40), corners=((-1, -2), (1, 0)), steps=(1, 2, 1, 1)),
         (8, 0, -1, 1), (1, 0)),
        (packed("u8", (32, 10, 3), (32, 12), corners=((-1,), (-1,)), swizzle=32), (0, 4, 1), (1,)),
        (packed("u8", (64, 5, 4, 6, 2), (64, 30), corners=((0, 0, 0), (-1, -1, -1)), swizzle=64),
         (0, 1, 1, 1, 0), (1, 0, 1)),
    ]  # fmt: skip
    for number, (tensor_map, place, shifts) in enumerate(choices):
        tile = ELEMENT_BYTES[tensor_map.element] * tensor_map.box[0] * tensor_map.box[1]
        room = -(-tile // 1024) * 1024
        body = _BARRIER + _fill(room) + "mov.b64 s, map0; cvta.param.u64 s, s;\n"
        body += f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {tile};\n"
        halves = ", ".join(f"o{i}" for i in range(len(shifts)))
        body += f".reg .b16 {halves};\n"
        body += "".join(f"mov.b16 o{i}, {n};\n" for i, n in enumerate(shifts))
        body += (
            f"@first cp.async.bulk.tensor.{tensor_map.rank}d.shared::cluster.global.im2col"
            f".mbarrier::complete_tx::bytes [m], [s, {_coordinates(place)}], [bar], "
            f"{{{halves}}};\n"
        )
        yield _case(
            f"tensor load im2col {number}", body + _WAIT + _dump(room), [_source(tensor_map)], room,
            shared=1024 + room, maps=(tensor_map,),
        )  # fmt: skip


def _prefetches() -> Iterator[Case]:
    """They have no result: they only have to run."""
    image = packed("u16", (16, 10, 9, 3), (16, 24), corners=((-1, -1), (-1, -1)))
    flat = packed("u16", (80, 6), (32, 4))
    for hint in (False, True):
        policy = ", pol" if hint else ""
        for tensor_map, text in (
            (flat, f"cp.async.bulk.prefetch.tensor.2d.L2.global.tile{_HINT[hint]} "
                   f"[s, {{8, 1}}]{policy};"),
            (image, f"cp.async.bulk.prefetch.tensor.4d.L2.global.im2col{_HINT[hint]} "
                    f"[s, {{0, 3, 4, 0}}], {{o, o}}{policy};"),
            (flat, f"cp.async.bulk.prefetch.L2.global{_HINT[hint]} [%in], 64{policy};"),
        ):  # fmt: skip
            yield replace(
                _case(
                    text.split()[0],
                    f"{_BARRIER}mov.b64 s, map0; cvta.param.u64 s, s; .reg .b16 o; "
                    f"mov.b16 o, 1;\n{_POLICY}@first {text}\n"
                    "mad.wide.u32 q, %t, 4, %out; st.global.b32 [q], %t;\n",
                    [_source(tensor_map)], 512, maps=(tensor_map,),
                ),
                family="hint",
            )  # fmt: skip
    for space in ("param", "const"):
        yield replace(
            _case(
                f"prefetch.{space}.tensormap",
                f"{_BARRIER}mov.b64 s, {'map0' if space == 'param' else 'held$K'};\n"
                f"@first prefetch.{space}.tensormap [s];\n"
                "mad.wide.u32 q, %t, 4, %out; st.global.b32 [q], %t;\n",
                [_source(flat)], 512, maps=(flat,), header=".const .align 64 .b8 held$K[128];",
            ),
            family="hint",
        )  # fmt: skip


# ---- tensor maps that the kernel changes


def _replaced() -> Iterator[Case]:
    plain = packed("f16", (64, 33, 17), (16, 5, 3))
    mine = (
        _BARRIER + "mov.b64 s, map0; cvta.param.u64 s, s; setp.lt.u32 c, %t, 8;\n"
        "mad.wide.u32 s, %t, 16, s; mad.lo.u32 n, %t, 16, m;\n"
        "@c ld.v2.b64 {x, y}, [s]; @c st.shared.v2.b64 [n], {x, y}; bar.sync 0;\n"
    )
    address = (
        "mov.b64 x, 0x123456789000;\n"
        "@first tensormap.replace.tile.global_address.shared::cta.b1024.b64 [m], x;\n"
    )
    changes = {
        "rank": ("b32", "", ("0", "3", "4")),
        "box_dim": ("b32", "1", ("7", "200")),
        "global_dim": ("b32", "2", ("18", "100000")),
        "global_stride": ("b64", "1", ("4096", "1048592")),
        "element_stride": ("b32", "1", ("2", "6")),
        "elemtype": ("b32", "", tuple(map(str, range(13)))),
        "interleave_layout": ("b32", "", ("0", "1", "2")),
        "swizzle_mode": ("b32", "", ("0", "1", "2", "3")),
        "fill_mode": ("b32", "", ("0", "1")),
    }
    for field, (kind, ordinal, values) in changes.items():
        for value in values:
            where = f" {ordinal}," if ordinal else ""
            opcode = f"tensormap.replace.tile.{field}.shared::cta.b1024.{kind}"
            yield _case(
                f"{opcode} {value}", mine + address + f"@first {opcode} [m],{where} {value};\n"
                "bar.sync 0;\n" + _dump(128), [Part("raw8", extent(plain))], 128, maps=(plain,),
            )  # fmt: skip
    for field, ordinals, value in (
        ("box_dim", (0, 1, 2, 3, 4), "9"), ("global_dim", (0, 1, 3, 4), "77"),
        ("element_stride", (0, 2, 3, 4), "3"), ("global_stride", (0, 2, 3), "65536"),
    ):  # fmt: skip
        kind = "b64" if field == "global_stride" else "b32"
        for ordinal in ordinals:
            opcode = f"tensormap.replace.tile.{field}.shared::cta.b1024.{kind}"
            yield _case(
                f"{opcode} {ordinal}: {value}",
                mine + address + f"@first {opcode} [m], {ordinal}, {value};\nbar.sync 0;\n"
                + _dump(128), [Part("raw8", extent(plain))], 128, maps=(plain,),
            )  # fmt: skip
    flat = packed("u8", (64, 16), (32, 8))
    yield _case(
        "tensormap.cp_fenceproxy",
        mine + "mov.b64 x, %in; cvta.global.u64 x, x; add.s64 x, x, 128;\n"
        "@first tensormap.replace.tile.global_address.shared::cta.b1024.b64 [m], x;\n"
        "@first tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [m], 0, 48;\n"
        "bar.warp.sync 0xFFFFFFFF; setp.lt.u32 c, %t, 32; add.s64 q, %out, 1024;\n"
        "@!c bra made;\n"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[q], [m], 128;\n"
        "made: bar.sync 0; cvta.global.u64 q, q;\n"
        "@first fence.proxy.tensormap::generic.acquire.gpu [q], 128;\n"
        "fence.proxy.async; bar.sync 0;\n"
        "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;\n"
        "@first cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[m+1024], [q, {32, 3}], [bar];\n" + _WAIT + _dump(256, start=2048)
        + "setp.lt.u32 c, %t, 16; mad.wide.u32 q, %t, 8, %out; @c st.global.b64 [q+1024], 0;\n",
        [Part("raw8", 2048)], 1152, maps=(flat,),
    )  # fmt: skip


def _replaced_in_global() -> Iterator[Case]:
    """tensormap.replace on a map in global memory: the input's map, changed in place."""
    changes = (
        ("global_address", "b64", "", "0x123456789000"), ("global_stride", "b64", " 0,", "65536"),
        ("box_dim", "b32", " 1,", "9"), ("global_dim", "b32", " 2,", "77"),
        ("element_stride", "b32", " 3,", "3"), ("rank", "b32", "", "4"),
        ("elemtype", "b32", "", "9"), ("interleave_layout", "b32", "", "0"),
        ("swizzle_mode", "b32", "", "3"), ("fill_mode", "b32", "", "1"),
    )  # fmt: skip
    for field, kind, ordinal, value in changes:
        opcode = f"tensormap.replace.tile.{field}.global.b1024.{kind}"
        value = value if kind == "b32" else "x"
        given = next(v for f, _, _, v in changes if f == field)
        yield _case(
            f"{opcode} {given}",
            _BARRIER + "mov.b64 s, map0; cvta.param.u64 s, s; setp.lt.u32 c, %t, 8;\n"
            "mad.wide.u32 s, %t, 16, s; mad.wide.u32 q, %t, 16, %out;\n"
            "@c ld.v2.b64 {x, y}, [s]; @c st.global.v2.b64 [q], {x, y}; bar.sync 0;\n"
            "mov.b64 x, 0x123456789000;\n"
            "@first tensormap.replace.tile.global_address.global.b1024.b64 [%out], x;\n"
            f"mov.b64 x, {given};\n@first {opcode} [%out],{ordinal} {value};\n",
            [Part("raw8", 128)], 128, maps=(packed("f16", (64, 33, 17, 5), (16, 5, 3, 2)),),
        )  # fmt: skip
