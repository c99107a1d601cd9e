"""Cases at which the GPU stops: the emulator has to report an error.

Illegal coordinates and types of tensor copies are in copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from .cases import Case, Part
from .tensormaps import TensorMap, packed

_HEAD = (
    ".reg .b64 s, x, y; .reg .b32 m, n, r, bar; .reg .pred c, first;\n"
    "mov.b32 bar, smem; add.u32 m, bar, 1024; setp.eq.u32 first, %t, 0;\n"
    "mov.b64 x, 0; mov.b64 y, 0; mov.b64 s, %in; mov.b32 r, 0;\n"
    "mad.lo.u32 n, %t, 32, m; st.shared.v2.b64 [n], {x, y}; st.shared.v2.b64 [n+16], {x, y};\n"
    "fence.proxy.async;\n"
    "@first mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;\n"
    "bar.sync 0;\n"
)
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_TENSOR = "cp.async.bulk.tensor.{}d.shared::cluster.global.{}.mbarrier::complete_tx::bytes"
_WAIT = (
    "mov.b32 r, 0;\n"
    "wait: mbarrier.try_wait.parity.shared::cta.b64 c, [bar], 0; @c bra over;\n"
    "add.u32 r, r, 1; setp.lt.u32 c, r, 200; @c bra wait;\nover:\n"
)
_STORED = "@first cp.async.bulk.commit_group; @first cp.async.bulk.wait_group 0;\n"


def cases() -> list[Case]:
    return [*_accesses(), *_bulk_copies(), *_tensor_copies()]


def _case(name: str, body: str, maps: tuple[TensorMap, ...] = ()) -> Case:
    return Case(
        f"illegal: {name}", "illegal", _HEAD + body, (Part("raw8", 16384),), (Part("u4", 1024),),
        threads=32, shared=8192, maps=maps, refused=True,
    )  # fmt: skip


def _accesses() -> Iterator[Case]:
    texts = {
        "trap": "trap;",
        "load of address 0": "ld.global.b32 r, [x];",
        "store to address 0": "st.global.b32 [x], r;",
        "atomic on address 0": "atom.global.add.u32 r, [x], 1;",
        "load beyond shared memory": "ld.shared.b32 r, [bar+245760];",
        "store beyond shared memory": "st.shared.b32 [bar+245760], %t;",
        "misaligned global load": "ld.global.b32 r, [%in+2];",
        "misaligned vector load": "ld.global.v2.b64 {x, y}, [%in+8]; st.global.b64 [%out+8], y;",
        "misaligned shared load": "ld.shared.b64 x, [m+4];",
        "misaligned shared store": "st.shared.v2.b64 [m+8], {x, y};",
        "misaligned atomic": "atom.global.add.u32 r, [%out+2], 1;",
        "misaligned generic load": "cvta.global.u64 x, %in; ld.b32 r, [x+1];",
        "misaligned ldmatrix": (
            "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {r}, [m+8]; st.global.b32 [%out], r;"
        ),
        "misaligned cp.async": "cp.async.cg.shared.global [m], [s+8], 16; cp.async.wait_all;",
        "misaligned cp.async target": (
            "cp.async.ca.shared.global [m+2], [s], 4; cp.async.wait_all;"
        ),
        "misaligned mbarrier": "mbarrier.init.shared::cta.b64 [bar+12], 1;",
    }
    for name, text in texts.items():
        if "b32 r," in text:
            text += " st.global.b32 [%out], r;"
        elif "b64 x," in text or "{x, y}, [" in text:
            text += " st.global.b64 [%out], x;"
        yield _case(name, text)


def _bulk_copies() -> Iterator[Case]:
    expect = "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;\n"
    # A size that is no multiple of 16 the H100 does not stop at; the ISA leaves undefined what
    # happens.
    for what, target, source, size in (("source", "m", "s+8", 64), ("target", "m+8", "s", 64)):
        yield _case(
            f"{what} of a bulk copy",
            f"mov.b32 n, {size}; {expect}@first {_BULK} [{target}], [{source}], n, [bar];\n{_WAIT}",
        )
        yield _case(
            f"{what} of a bulk store",
            f"mov.b32 n, {size}; @first cp.async.bulk.global.shared::cta.bulk_group "
            f"[{source.replace('s', '%out')}], [{target}], n;\n{_STORED}",
        )
        yield _case(
            f"{what} of a bulk reduction",
            f"mov.b32 n, {size}; @first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 "
            f"[{source.replace('s', '%out')}], [{target}], n;\n{_STORED}",
        )


def _tensor_copies() -> Iterator[Case]:
    flat = packed("u16", (80, 6), (32, 4))
    image = packed("u16", (16, 10, 9, 3), (16, 16), corners=((-1, -1), (-1, -1)))
    expect = "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;\n"
    address = "mov.b64 s, map0; cvta.param.u64 s, s; .reg .b16 o; mov.b16 o, 0;\n"
    for name, tensor_map, rank, mode, target, tail in (
        ("target at 16", flat, 2, "tile", "m+16", ""),
        ("target at 64", flat, 2, "tile", "m+64", ""),
        ("rank above the map's", flat, 3, "tile", "m", ""),
        ("rank below the map's", packed("u16", (80, 6, 4), (32, 4, 1)), 2, "tile", "m", ""),
        ("tile with a map for im2col", image, 4, "tile", "m", ""),
        ("im2col with a map for tiles", packed("u16", (16, 10, 9, 3), (16, 4, 2, 1)), 4, "im2col",
         "m", ", {o, o}"),
    ):  # fmt: skip
        place = ", ".join(["0"] * rank)
        yield _case(
            f"tensor copy, {name}",
            f"{address}{expect}@first {_TENSOR.format(rank, mode)} [{target}], "
            f"[s, {{{place}}}], [bar]{tail};\n{_WAIT}",
            (tensor_map,),
        )
    yield _case(
        "tensor store, source at 16",
        f"{address}@first cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group "
        f"[s, {{0, 0}}], [m+16];\n{_STORED}",
        (packed("u16", (80, 6), (32, 4), buffer="out"),),
    )
    yield _case(
        "tensor copy, what is no map",
        f"mov.b64 s, %in; cvta.global.u64 s, s;\n{expect}@first {_TENSOR.format(2, 'tile')} [m], "
        f"[s, {{0, 0}}], [bar];\n{_WAIT}",
    )
