"""Instructions and rules that kernels beyond the peers brought up, each with a result worked out by
hand."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest

from cute_attn.emulator import build, host
from cute_attn.emulator.machine import Run
from cute_attn.emulator.runner import Buffer, run_ptx

from .planted_kernels import TCGEN05
from .silicon.pack import unpack
from .silicon.tensormaps import ADDRESS, INTERLEAVES, PROMOTIONS, SWIZZLES, TYPES, descriptors

REGISTERS = """
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<70>; .reg .b64 %rd<19>; .reg .f32 %f<9>;
    .reg .b32 %thread; .reg .b32 %warp; .reg .b32 %lane;
    mov.u32 %thread, %tid.x; shr.u32 %warp, %thread, 5; and.b32 %lane, %thread, 31;
"""


def module(body: str, target: str = "sm_100a") -> str:
    return f""".version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 x, .param .u64 out)
{{
{REGISTERS}
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
{body}
    ret;
}}
"""


def tensor_memory(columns: int) -> str:
    """The start of a kernel: warp 0 allocates tensor memory, whose address goes to [%r1+16], and an
    mbarrier at [%r1]. Data may begin at %r2."""
    return f"""
    mov.u32 %r1, dynamic; add.s32 %r2, %r1, 1024;
    setp.ne.u32 %p1, %warp, 0; setp.ne.u32 %p3, %thread, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+16], {columns};
    @%p3 bra ALLOCATED;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
ALLOCATED:"""


def notes(run: Run, check: str) -> list[str]:
    return [f.message for f in run.findings if f.check == check and f.severity == "note"]


# ---- asynchronous stores and reductions to global memory


@pytest.mark.parametrize(
    "instruction",
    ["st.async.release.gpu.global.b32", "st.async.mmio.release.sys.u32"],
)
def test_an_asynchronous_store_to_global_memory(instruction: str) -> None:
    body = f"""
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    ld.global.u32 %r1, [%rd4];
    {instruction} [%rd5], %r1;
"""
    x, out = np.arange(32, dtype=np.uint32) * 3 + 1, np.zeros(32, np.uint32)
    run = run_ptx(module(body), args=[x, Buffer(out, initialised=False)])
    assert run.findings == []
    assert out.tolist() == x.tolist()


REDUCTIONS = [  # of 1 to 32 (times 2^32 for 64 bits, to see both halves), into what is there
    ("add.u32", np.uint32(7), 528 + 7),
    ("add.s64", np.uint64(7), (528 << 32) + 7),
    ("min.u32", np.uint32(20), 1),
    ("max.s64", np.uint64(5), 32 << 32),
    ("and.b32", np.uint32(0xFF), 0),
    ("or.b64", np.uint64(1), (63 << 32) + 1),
    ("xor.b32", np.uint32(3), 35),  # of 1 to 32: only 32 is left over
    ("inc.u32", np.uint32(0), 2),  # all with the bound 5: 0 to 5 and again, 32 times
]


@pytest.mark.parametrize(("operation", "start", "expected"), REDUCTIONS)
def test_an_asynchronous_reduction_on_global_memory(
    operation: str, start: np.uint32 | np.uint64, expected: int
) -> None:
    value = "5" if operation == "inc.u32" else "%rd3" if operation.endswith("64") else "%r1"
    body = f"""
    add.u32 %r1, %thread, 1; cvt.u64.u32 %rd3, %r1; shl.b64 %rd3, %rd3, 32;
    red.async.release.gpu.global.{operation} [%rd2], {value};
"""
    out = np.array([start])
    run = run_ptx(module(body), args=[np.zeros(1, np.uint32), out])
    assert run.findings == []
    assert int(out[0]) == expected


def test_an_asynchronous_reduction_that_does_not_exist() -> None:
    """There is no inc of 64 bits: the launch ends with a finding, and changes nothing."""
    body = """
    mov.u32 %r1, dynamic; mov.u64 %rd3, 5;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    st.shared.u64 [%r1+8], %rd3;
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.inc.u64
        [%r1+8], %rd3, [%r1];
"""
    args = [np.zeros(1, np.uint32), np.zeros(1, np.uint32)]
    run = run_ptx(module(body), block=1, args=args, dynamic_shared=64)
    assert run.stopped
    assert [(f.check, f.message) for f in run.errors] == [
        ("descriptor", "there is no such reduction of elements of type u64")
    ]


def test_an_asynchronous_store_releases() -> None:
    """Another CTA sees what was stored before it."""
    body = """
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra CONSUMER;
    st.global.u32 [%rd1], 42;
    mov.u32 %r2, 1;
    st.async.release.gpu.global.u32 [%rd1+4], %r2;
    bra END;
CONSUMER:
    ld.acquire.gpu.global.u32 %r2, [%rd1+4];
    setp.ne.u32 %p2, %r2, 1;
    @%p2 bra CONSUMER;
    ld.global.u32 %r3, [%rd1];
    st.global.u32 [%rd2], %r3;
END:
"""
    for schedule in range(3):
        x, out = np.zeros(2, np.uint32), np.zeros(1, np.uint32)
        run = run_ptx(module(body), grid=2, block=1, args=[x, out], schedule=schedule)
        assert run.findings == []
        assert out[0] == 42


@pytest.mark.parametrize(
    "instruction",
    [
        "st.async.relaxed.gpu.global.b32",
        "st.async.release.cta.global.b32",
        "st.async.release.gpu.b8",
    ],
)
def test_what_ptxas_refuses_too(instruction: str) -> None:
    with pytest.raises(Exception, match="unsupported"):
        run_ptx(module(f"{instruction} [%rd2], %r1;"), args=[0, 0])


# ---- tcgen05


def product(m: int, n: int, *, wait: str = "", address: str = "add.s32 %r8, %r4, %r7;") -> str:
    """D = A B^T of ones, K = 16, so that D is 16; `n` columns of it to out, and TMEM freed by a
    warp that has waited as `wait` says."""
    registers = ", ".join(f"%r{20 + i}" for i in range(n))
    stores = "".join(f"    st.global.b32 [%rd3+{4 * i}], %r{20 + i};\n" for i in range(n))
    return module(f"""{tensor_memory(32)}
    // A and B are the same rows: 16 elements of 1.0 each, as 8 x 16-byte units
    shl.b32 %r3, %thread, 5; add.s32 %r3, %r3, %r2; mov.u32 %r5, 0x3C003C00;
    st.shared.v4.b32 [%r3], {{%r5, %r5, %r5, %r5}};
    st.shared.v4.b32 [%r3+16], {{%r5, %r5, %r5, %r5}};
    fence.proxy.async.shared::cta;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.u32 %r4, [%r1+16];
    shr.u32 %r5, %r2, 4; cvt.u64.u32 %rd10, %r5;
    or.b64 %rd10, %rd10, {1 << 46 | 256 >> 4 << 32 | (128 >> 4) << 16:#x};
    mov.u32 %r6, {1 << 4 | n >> 3 << 17 | m >> 4 << 24:#x};
    @%p3 bra ISSUED;
    setp.ne.u32 %p4, %r4, %r4;
    tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd10, %rd10, %r6, %p4;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
ISSUED:
    mbarrier.try_wait.parity{wait}.shared::cta.b64 %p5, [%r1], 0;
    @!%p5 bra ISSUED;
    tcgen05.fence::after_thread_sync;
    shl.b32 %r7, %warp, 21; {address}
    tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {{{registers}}}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    @%p1 bra FREED;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
FREED:
    mul.wide.u32 %rd3, %thread, {4 * n}; add.s64 %rd3, %rd2, %rd3;
{stores}""")


def run_product(text: str, n: int, schedule: int = 0) -> tuple[Run, np.ndarray]:
    out = np.zeros((128, n), np.float32)
    run = run_ptx(
        text,
        block=128,
        args=[np.zeros(1, np.uint32), Buffer(out, initialised=False)],
        dynamic_shared=1 << 13,
        schedule=schedule,
    )
    return run, out


@pytest.mark.parametrize("n", [8, 16])
def test_128_rows_take_columns_in_steps_of_8(n: int) -> None:
    run, out = run_product(product(128, n), n)
    assert run.findings == []
    assert (out == 16).all()


@pytest.mark.parametrize("schedule", range(3))
def test_relaxed_waits_and_tcgen05_fences_order_the_freeing(schedule: int) -> None:
    run, out = run_product(product(128, 8, wait=".relaxed.cta"), 8, schedule)
    assert run.findings == []
    assert (out == 16).all()


def test_relaxed_waits_without_a_fence_do_not() -> None:
    text = product(128, 8, wait=".relaxed.cta")
    head, fence, tail = text.rpartition("    tcgen05.fence::after_thread_sync;\n")
    assert fence
    run, _ = run_product(head + tail, 8)
    assert {f.check for f in run.errors} == {"race"}


@pytest.mark.parametrize("schedule", range(3))
def test_a_warp_that_names_no_lanes_gets_its_own(schedule: int) -> None:
    named = "add.s32 %r8, %r4, %r7; // the warp's lanes"
    assert named in TCGEN05.text
    *inputs, out = TCGEN05.arguments()
    run = run_ptx(
        TCGEN05.text.replace(named, "mov.u32 %r8, %r4;"),
        block=TCGEN05.block,
        args=[*inputs, out],
        dynamic_shared=TCGEN05.dynamic_shared,
        schedule=schedule,
    )
    assert {(f.check, f.severity) for f in run.findings} == {("tmem", "note")}
    assert len(run.findings) == 3  # two loads and a store
    assert np.array_equal(out.array, TCGEN05.expected)


def test_addresses_that_differ_between_lanes_are_noted() -> None:
    address = "shl.b32 %r9, %lane, 16; add.s32 %r8, %r4, %r7; add.s32 %r8, %r8, %r9;"
    run, out = run_product(product(128, 8, address=address), 8)
    assert run.errors == []
    assert any("different addresses (0x" in m for m in notes(run, "tcgen05-sync"))
    assert (out == 16).all()


# ---- minimum and maximum of several values

SPECIAL = [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x00000001]
NAN = 0x7FFFFFFF  # the canonical one


def extreme(codes: list[int], larger: bool, absolute: bool, nan_wins: bool) -> int:
    """The extreme of f32 codes: -0 is less than +0; a NaN loses, or with `nan_wins` wins."""
    codes = [code & 0x7FFFFFFF if absolute else code for code in codes]
    numbers = [code for code in codes if code & 0x7FFFFFFF <= 0x7F800000]
    if not numbers or (nan_wins and len(numbers) < len(codes)):
        return NAN
    best = max if larger else min
    return best(numbers, key=lambda code: -(code & 0x7FFFFFFF) - 1 if code >> 31 else code)


@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("absolute", ["", ".abs"])
@pytest.mark.parametrize("operation", ["min", "max"])
def test_the_extreme_of_a_warp(operation: str, absolute: str, nan: str) -> None:
    """CTA b has the special values from the b-th on; the tenth has only NaNs."""
    body = f"""
    mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 5; add.u32 %r1, %r1, %thread;
    mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    redux.sync.{operation}{absolute}{nan}.f32 %f2, %f1, 0xffffffff;
    st.global.f32 [%rd5], %f2;
"""
    values = [*SPECIAL, 0x7FC00001, 0xFFFFFFFF]
    x = np.array([[v[i % len(v)] for i in range(32)] for b in range(9) for v in [values[b:]]])
    x = np.concatenate([x, [[0xFFC00000] * 32], x[:, ::-1] & 0x7F7FFFFF]).astype(np.uint32)
    out = np.zeros_like(x)
    run = run_ptx(module(body), grid=len(x), block=32, args=[x, Buffer(out, initialised=False)])
    assert run.findings == []
    expected = [extreme(row, operation == "max", bool(absolute), bool(nan)) for row in x.tolist()]
    assert out.tolist() == [[value] * 32 for value in expected]


@pytest.mark.parametrize(
    "modifiers", ["min.f32", "max.f32", "max.abs.NaN.f32", "min.NaN.f32", "max.u32", "min.s32"]
)
def test_the_extreme_of_a_row_of_tensor_memory(modifiers: str) -> None:
    body = f"""
    mov.u32 %r1, dynamic;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
    ld.shared.u32 %r2, [%r1];
    shl.b32 %r3, %thread, 4; cvt.u64.u32 %rd3, %r3; add.s64 %rd4, %rd1, %rd3;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd4];
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x4.{modifiers} {{%r8, %r9, %r10, %r11}}, %r12, [%r2];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd5, %thread, 4; add.s64 %rd5, %rd2, %rd5;
    st.global.b32 [%rd5], %r12;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""
    values = [*SPECIAL, 0x7FC00001, 0xFFFFFFFF]
    x = np.array([[values[(lane + i * i) % 9] for i in range(4)] for lane in range(31)])
    x = np.concatenate([x, [[0x7FC00000] * 4]]).astype(np.uint32)
    out = np.zeros(32, np.uint32)
    args = [x, Buffer(out, initialised=False)]
    run = run_ptx(module(body), block=32, args=args, dynamic_shared=1024)
    assert run.findings == []
    best, *rest, kind = modifiers.split(".")
    if kind == "f32":
        rows = [extreme(row, best == "max", "abs" in rest, "NaN" in rest) for row in x.tolist()]
    elif kind == "u32":
        rows = x.max(axis=1).tolist()
    else:
        rows = x.view(np.int32).min(axis=1).view(np.uint32).tolist()
    assert out.tolist() == rows


# ---- tensor maps made on device


@pytest.mark.parametrize(("value", "severity"), [("64", "note"), ("%r1", "error")])
def test_warps_that_write_the_same_into_a_tensor_map(value: str, severity: str) -> None:
    body = f"""
    setp.ne.u32 %p1, %lane, 0;
    @%p1 bra END;
    add.u32 %r1, %warp, 5; mov.u32 %r2, {value};
    tensormap.replace.tile.global_dim.global.b1024.b32 [%rd2], 1, %r2;
END:
"""
    memory = np.zeros(64, np.uint32)
    out = memory[(-memory.ctypes.data % 128) // 4 :][:32]
    run = run_ptx(module(body), block=64, args=[np.zeros(1, np.uint32), out])
    assert [(f.check, f.severity) for f in run.findings] == [("race", severity)]
    if severity == "note":
        assert out.nonzero()[0].tolist() == [9]  # the word of the size of dimension 1
        assert out[9] == 63


# ---- host code


@pytest.fixture(scope="module")
def encode(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stand-in's cuTensorMapEncodeTiled."""
    import tvm_ffi  # noqa: F401 - brings a symbol that the stand-in needs

    library = tmp_path_factory.mktemp("runtime") / "runtime.so"
    build.link(library, [build.object_file(host.STAND_IN)])
    return ctypes.CDLL(str(library))._cuTensorMapEncodeTiled


UINT8, B4X16_P64, B6X16_P32 = 0, 14, 15  # in the driver's order


def matrix_map(
    encode: Any, address: int, kind: int, shape: tuple[int, int], row_bytes: int
) -> np.ndarray[Any, Any]:
    """A tensor map of a matrix, whose box is all of it."""
    rows, columns = shape
    room = np.zeros(64, np.uint32)
    tensor_map = room[(-room.ctypes.data % 128) // 4 :][:32]
    failed = encode(
        ctypes.c_void_p(tensor_map.ctypes.data), kind, 2, ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1), 0, 0, 0, 0,
    )  # fmt: skip
    assert not failed
    return tensor_map


@pytest.mark.parametrize(("kind", "bits"), [(B4X16_P64, 4), (B6X16_P32, 6)])
def test_a_copy_that_pads_counts_the_bytes_of_global_memory(
    encode: Any, kind: int, bits: int
) -> None:
    """16 elements of 4 (6) bits take 8 (12) bytes there, 16 in shared memory."""
    rows, row_bytes = 8, 128 * bits // 8
    x = np.arange(rows * row_bytes + 128, dtype=np.uint8)
    x = x[-x.ctypes.data % 128 :][: rows * row_bytes]
    tensor_map = matrix_map(encode, x.ctypes.data, kind, (rows, 128), row_bytes)
    body = f"""
    .reg .b64 %map; ld.param.u64 %map, [map];
    mov.u32 %r1, dynamic; add.s32 %r2, %r1, 4096; mov.u32 %r3, 0;
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {rows * row_bytes};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%map, {{%r3, %r3}}], [%r2];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
    // thread t stores the first word of unit t and its last
    shl.b32 %r4, %thread, 4; add.s32 %r4, %r4, %r1;
    ld.shared.u32 %r5, [%r4]; ld.shared.u32 %r6, [%r4+{bits * 2 - 4}];
    mul.wide.u32 %rd3, %thread, 8; add.s64 %rd3, %rd2, %rd3;
    st.global.v2.u32 [%rd3], {{%r5, %r6}};
"""
    text = module(body).replace(".param .u64 out)", ".param .u64 out, .param .u64 map)")
    out = np.zeros((64, 2), np.uint32)
    run = run_ptx(text, block=64, args=[x, out, tensor_map], dynamic_shared=8192)
    assert run.findings == []
    units = x.reshape(64, 2 * bits).view(np.uint32)
    assert (out == units[:, [0, -1]]).all()


@pytest.mark.parametrize(
    ("before", "row", "faults"), [(4, 8, True), (4, -8, True), (4, 4, False), (0, 8, False)]
)
def test_a_load_of_no_element_touches_the_start_of_its_tensor(
    encode: Any, before: int, row: int, faults: bool
) -> None:
    """The tensor map starts so many rows before the memory that there is."""
    rows, row_bytes = 8, 128
    x = np.arange(rows * row_bytes + 128, dtype=np.uint8)
    x = x[-x.ctypes.data % 128 :][: rows * row_bytes]
    start = x.ctypes.data - before * row_bytes
    tensor_map = matrix_map(encode, start, UINT8, (rows, row_bytes), row_bytes)
    body = f"""
    .reg .b64 %map; ld.param.u64 %map, [map];
    mov.u32 %r1, dynamic; add.s32 %r2, %r1, 4096; mov.u32 %r3, 0; mov.s32 %r4, {row};
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {rows * row_bytes};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%map, {{%r3, %r4}}], [%r2];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
"""
    text = module(body).replace(".param .u64 out)", ".param .u64 out, .param .u64 map)")
    run = run_ptx(text, block=32, args=[x, np.zeros(1, np.uint32), tensor_map], dynamic_shared=8192)
    assert [finding.check for finding in run.findings] == ["out-of-bounds"] * faults


def test_the_stand_in_makes_tensor_maps_as_the_driver_does(encode: Any) -> None:
    """Equal except for a hint in word 2, and the words after the first 16."""
    index, _ = unpack()
    seen = 0
    for m, text in zip(descriptors(), index["descriptors"], strict=True):
        if m.corners is not None or "refuses" in text:
            continue
        seen += 1
        address, expected = ADDRESS + m.offset, bytes.fromhex(text)
        words, rank = (ctypes.c_uint32 * 32)(), m.rank
        failed = encode(
            words,
            TYPES.index(m.element),
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*m.sizes),
            (ctypes.c_uint64 * max(rank - 1, 1))(*m.strides),
            (ctypes.c_uint32 * rank)(*m.box),
            (ctypes.c_uint32 * rank)(*(m.steps or (1,) * rank)),
            INTERLEAVES.index(m.interleave),
            SWIZZLES.index(m.swizzle),
            PROMOTIONS.index(m.promotion),
            int(m.nan_fill),
        )
        assert not failed, m
        hint = 1 << 21
        made, right = list(words[:16]), list(struct.unpack("<16I", expected[:64]))
        assert made[2] & ~hint == right[2] & ~hint, m
        assert made[:2] + made[3:] == right[:2] + right[3:], m
    assert seen > 200


# ---- values that nothing has written

# 8 of the 32 lanes read a word that is there. %r10 is 2 where it is above 0, else 1: so much is
# certain of the others too.
CHOSEN = """
    mov.u32 %r1, dynamic; shl.b32 %r2, %thread, 2; add.s32 %r2, %r2, %r1;
    setp.gt.u32 %p1, %thread, 7;
    @%p1 bra WRITTEN;
    st.shared.u32 [%r2], %thread;
WRITTEN:
    bar.sync 0;
    ld.shared.u32 %r3, [%r2];
    setp.gt.s32 %p2, %r3, 0;
    selp.b32 %r10, 2, 1, %p2;
"""
# As a loop's bound it goes through shuffles, arithmetic and shared memory. Lanes store %r20.
PASSED_ON = """
    shfl.sync.bfly.b32 %r11, %r10, 1, 31, -1;
    max.s32 %r11, %r11, %r10; add.s32 %r11, %r11, 1; mov.b32 %r12, %r11;
    st.shared.u32 [%r2+512], %r12;
    bar.sync 0;
    ld.shared.u32 %r13, [%r2+512];
    mov.u32 %r20, 0; mov.u32 %r14, 0;
LOOP:
    setp.eq.u32 %p3, %thread, 0;
    @%p3 add.s32 %r20, %r20, 1;
    add.s32 %r14, %r14, 1;
    setp.lt.s32 %p4, %r14, %r13;
    @%p4 bra LOOP;
"""
STORED = "mul.wide.u32 %rd3, %thread, 4; add.s64 %rd3, %rd2, %rd3; st.global.u32 [%rd3], %r20;"


def branching(body: str) -> tuple[list[tuple[str, str]], np.ndarray]:
    """Kinds and PTX of findings, and the output."""
    out = np.zeros(32, np.uint32)
    args = [np.zeros(1, np.uint32), Buffer(out, initialised=False)]
    run = run_ptx(module(CHOSEN + body), args=args, dynamic_shared=1024)
    assert {f.check for f in run.findings} <= {"uninitialised"}
    return [(f.severity, f.ptx) for f in run.findings], out


def test_a_branch_on_what_the_program_has_chosen_is_a_note() -> None:
    found, out = branching(PASSED_ON + STORED)
    assert found == [("note", "@%p4 bra LOOP;")]
    assert out.tolist() == [3] + [0] * 31


def test_a_branch_on_what_nothing_has_written_is_an_error() -> None:
    found, _ = branching("mov.u32 %r20, 5; @%p2 bra OUT; mov.u32 %r20, 6; OUT: " + STORED)
    assert [severity for severity, _ in found] == ["error"]
    assert "bra OUT" in found[0][1]


def test_one_chosen_and_one_unwritten_operand_make_an_unwritten_value() -> None:
    found, _ = branching("add.s32 %r11, %r10, %r3; setp.gt.s32 %p3, %r11, 0; @%p3 bra OUT; OUT:")
    assert [severity for severity, _ in found] == ["error"]


@pytest.mark.parametrize(
    "use",
    [
        "mov.u32 %r20, %r10; " + STORED,
        "mul.wide.u32 %rd3, %r10, 4; add.s64 %rd3, %rd2, %rd3; st.global.u32 [%rd3], 1;",
        "setp.eq.s32 %p3, %r10, 1; @%p3 st.global.u32 [%rd2], 1;",
        "selp.b32 %r11, %r3, %r3, %p2; setp.gt.s32 %p3, %r11, 0; @%p3 bra OUT; OUT:",
        # What is stored over it counts, not what was there.
        "st.shared.u32 [%r2], %r10; st.shared.u32 [%r2], %r3; ld.shared.u32 %r11, [%r2]; "
        "setp.gt.s32 %p3, %r11, 0; @%p3 bra OUT; OUT:",
    ],
    ids=["stored", "address", "guard", "not chosen", "overwritten"],
)
def test_any_other_use_is_an_error(use: str) -> None:
    found, _ = branching(use)
    assert {severity for severity, _ in found} == {"error"}


# ---- what hardware may do later than the program says


@pytest.mark.parametrize("schedule", range(3))
@pytest.mark.parametrize(
    ("before", "after", "late"),
    [
        ("", "", True),
        ("mov.b32 %r11, %r10;", "", True),  # machine code may not have a copy
        ("", "add.s32 %r12, %r10, 1;", True),
        ("add.s32 %r12, %r10, 1;", "", False),
        ("mov.b32 %r11, %r10; add.s32 %r12, %r11, 1;", "", False),
        ("fence.proxy.async;", "", False),
    ],
)
def test_an_arrival_that_overtakes_ldmatrix(
    before: str, after: str, late: bool, schedule: int
) -> None:
    """Warp 0 has matrices in registers and says so; warp 1 then has their memory overwritten."""
    body = f"""
    mov.u32 %r1, dynamic; add.s32 %r2, %r1, 4096; add.s32 %r3, %r1, 4104;
    setp.eq.u32 %p1, %lane, 0;
    setp.ne.u32 %p2, %thread, 0;
    @%p2 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
READY:
    shl.b32 %r4, %thread, 2; add.s32 %r4, %r4, %r1; st.shared.u32 [%r4], %thread;
    fence.proxy.async;
    bar.sync 0;
    setp.ne.u32 %p3, %warp, 0;
    @%p3 bra LOAD;
    and.b32 %r5, %lane, 7; shl.b32 %r5, %r5, 4; add.s32 %r5, %r5, %r1;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r10}}, [%r5];
    {before}
    bar.warp.sync -1;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];
    {after}
FULL:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 0;
    @!%p4 bra FULL;
    mul.wide.u32 %rd3, %thread, 4; add.s64 %rd3, %rd2, %rd3; st.global.u32 [%rd3], %r10;
    bra END;
LOAD:
    @!%p1 bra END;
EMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0;
    @!%p4 bra EMPTY;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r1], [%rd1], 128, [%r3];
END:
"""
    args = [np.zeros(32, np.uint32), np.zeros(32, np.uint32)]
    run = run_ptx(module(body), block=64, args=args, dynamic_shared=8192, schedule=schedule)
    assert {f.check for f in run.findings} == ({"proxy-fence"} if late else set()), run.findings
    assert all("arrives before it uses a register" in f.message for f in run.findings)


def test_an_arrival_that_a_named_barrier_holds_at_the_end() -> None:
    args = [np.zeros(1, np.uint32), np.zeros(1, np.uint32)]
    run = run_ptx(module("bar.arrive 3, 64;"), block=32, args=args)
    assert [(f.check, f.severity, f.message) for f in run.findings] == [
        ("barrier", "note",
         "the CTA exits while named barrier 3 has 32 of the 64 threads that it waits for")
    ]  # fmt: skip
