"""Every field of tcgen05.mma's instruction descriptors: what each kind computes by it, and what is
refused. The fields are those of the PTX ISA, "Instruction descriptor"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cute_attn.emulator.machine import Run
from cute_attn.emulator.runner import Buffer, run_ptx

from .test_instructions import module, tensor_memory

M, N = 128, 16
K_BYTES = 32
SCALES_A, SCALES_B = 32, 36  # their columns of tensor memory, four each
MATRIX_BYTES = 128 * K_BYTES  # of A and of B, which may have fewer rows


# ---- formats


@dataclass(frozen=True)
class Format:
    """A floating-point format: the code of each kind's descriptor, and how its bits are read."""

    code: int
    exponent_bits: int
    mantissa_bits: int
    storage: int  # bits of an element in shared memory

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    def values(self, codes: np.ndarray) -> np.ndarray:
        """The values of finite codes, in float64."""
        mantissa = codes & ((1 << self.mantissa_bits) - 1)
        exponent = codes >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        bias = (1 << (self.exponent_bits - 1)) - 1
        normal = (exponent > 0).astype(np.float64)
        significand = normal + mantissa / (1 << self.mantissa_bits)
        sign = 1.0 - 2.0 * (codes >> (self.bits - 1) & 1)
        return np.asarray(sign * significand * 2.0 ** (np.maximum(exponent, 1) - float(bias)))

    def near_one(self, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        """Random codes of values below 8, so that sums of products of them are exact in float32."""
        bias = (1 << (self.exponent_bits - 1)) - 1
        exponent = rng.integers(max(bias - 1, 0), min(bias + 3, 1 << self.exponent_bits), shape)
        kept = min(self.mantissa_bits, 3)
        mantissa = rng.integers(0, 1 << kept, shape) << (self.mantissa_bits - kept)
        sign = rng.integers(0, 2, shape) << (self.bits - 1)
        return np.asarray(sign | exponent << self.mantissa_bits | mantissa)


F16, BF16 = Format(0, 5, 10, 16), Format(1, 8, 7, 16)
TF32 = Format(2, 8, 23, 32)
E4M3, E5M2 = Format(0, 4, 3, 8), Format(1, 5, 2, 8)
E2M3, E3M2, E2M1 = Format(3, 2, 3, 8), Format(4, 3, 2, 8), Format(5, 2, 1, 8)
FP4 = Format(1, 2, 1, 4)  # E2M1 of kind::mxf4 and kind::mxf4nvf4


def rows_of(codes: np.ndarray, element: Format) -> np.ndarray:
    """Codes [rows, K] as the bytes [rows, 32] of shared memory."""
    if element.storage > 8:
        return codes.astype(f"<u{element.storage // 8}").view(np.uint8)
    if element.storage == 4:
        return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if element.bits == 8:
        return codes.astype(np.uint8)
    # Sixteen elements of 4 or 6 bits are packed at the start of 16 bytes.
    bits = codes.reshape(len(codes), 2, 16, 1) >> np.arange(element.bits) & 1
    packed = np.packbits(bits.reshape(len(codes), 2, -1), axis=-1, bitorder="little")
    padded = np.zeros((len(codes), 2, 16), np.uint8)
    padded[:, :, : packed.shape[-1]] = packed
    return padded.reshape(len(codes), K_BYTES)


def k_major(rows: np.ndarray) -> np.ndarray:
    """Without a swizzle: units of 8 rows x 16 bytes, two along K."""
    return rows.reshape(-1, 8, 2, 16).swapaxes(1, 2).ravel()


def mn_major(rows: np.ndarray, size: int) -> np.ndarray:
    """A matrix whose 16-byte runs go along M or N, in units of 8 runs along K."""
    columns = rows.reshape(len(rows), K_BYTES // size, size).swapaxes(0, 1)
    return columns.reshape(K_BYTES // size // 8, 8, -1, 16).transpose(2, 0, 1, 3).ravel()


# ---- a kernel of one operation

# Scale factors of a row, by what chooses them.
VECTORS = {"mxf8f6f4": 1, "mxf4": 2, ".scale_vec::2X": 2, ".block32": 2}
VECTORS |= {".scale_vec::4X": 4, ".block16": 4}


@dataclass(frozen=True)
class Operation:
    """A tcgen05.mma of `kind`, and the fields of its descriptor."""

    kind: str
    a: Format = F16
    b: Format = F16
    m: int = M
    n: int = N
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    d_type: int = 1  # of kinds without scale factors
    suffix: str = ""  # .scale_vec::2X ...
    ue8m0: bool = True
    scale_a_id: int = 0
    scale_b_id: int = 0
    more: int = 0  # further bits
    mask: int | None = None  # of columns of B: with .ws, M = 32 and N = 64

    @property
    def scaled(self) -> bool:
        return self.kind.startswith("mx")

    @property
    def descriptor(self) -> int:
        d = self.a.code << 7 | self.b.code << 10 | self.negate_a << 13 | self.negate_b << 14
        d |= self.transpose_a << 15 | self.transpose_b << 16 | self.n // 8 << 17
        d |= self.m // 16 << 24 | self.more
        if self.scaled:
            return d | self.scale_b_id << 4 | self.ue8m0 << 23 | self.scale_a_id << 29
        return d | self.d_type << 4

    @property
    def k(self) -> int:
        return K_BYTES * 8 // self.a.storage


def kernel(operation: Operation) -> str:
    """A and B from x to shared memory, scale factors to tensor memory, and D to out."""
    scales = ", [%r41], [%r42], %p4" if operation.scaled else ", %p4"
    mask = "" if operation.mask is None else f", {operation.mask:#x}"
    ws = "" if operation.mask is None else ".ws"
    block = f".block_scale{operation.suffix}" if operation.scaled else ""
    strides = [
        16 * operation.k if t else 256 for t in (operation.transpose_a, operation.transpose_b)
    ]
    matrix_a, matrix_b = (1 << 46 | stride >> 4 << 32 | 128 >> 4 << 16 for stride in strides)
    copies = "".join(
        f"    ld.global.v4.b32 {{%r50, %r51, %r52, %r53}}, [%rd3+{offset}];\n"
        f"    st.shared.v4.b32 [%r3+{offset}], {{%r50, %r51, %r52, %r53}};\n"
        for offset in range(0, 2 * MATRIX_BYTES, 16 * 128)
    )
    load = ", ".join(f"%r{10 + i}" for i in range(N))
    stores = "".join(f"    st.global.b32 [%rd3+{4 * i}], %r{10 + i};\n" for i in range(N))
    return module(f"""{tensor_memory(64)}
    shl.b32 %r4, %thread, 4; cvt.u64.u32 %rd4, %r4; add.s64 %rd3, %rd1, %rd4; add.s32 %r3, %r2, %r4;
{copies}
    bar.sync 0;
    ld.shared.u32 %r5, [%r1+16];
    shl.b32 %r6, %warp, 21; add.s32 %r6, %r6, %r5;
    // Scale factors of row r are in lane r % 32 and column r / 32, again in every 32 lanes.
    mul.wide.u32 %rd3, %lane, 32; add.s64 %rd3, %rd3, %rd1;
    ld.global.v4.b32 {{%r50, %r51, %r52, %r53}}, [%rd3+{2 * MATRIX_BYTES}];
    ld.global.v4.b32 {{%r54, %r55, %r56, %r57}}, [%rd3+{2 * MATRIX_BYTES + 16}];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r6+{SCALES_A}],
        {{%r50, %r51, %r52, %r53, %r54, %r55, %r56, %r57}};
    tcgen05.wait::st.sync.aligned;
    fence.proxy.async.shared::cta;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    shr.u32 %r4, %r2, 4; cvt.u64.u32 %rd12, %r4; or.b64 %rd10, %rd12, {matrix_a:#x};
    add.s64 %rd12, %rd12, {MATRIX_BYTES >> 4}; or.b64 %rd11, %rd12, {matrix_b:#x};
    add.s32 %r41, %r5, {SCALES_A}; add.s32 %r42, %r5, {SCALES_B};
    mov.u32 %r40, {operation.descriptor:#x};
    @%p3 bra ISSUED;
    setp.ne.u32 %p4, %r5, %r5;
    tcgen05.mma{ws}.cta_group::1.kind::{operation.kind}{block}
        [%r5], %rd10, %rd11, %r40{scales}{mask};
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
ISSUED:
    mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r1], 0;
    @!%p5 bra ISSUED;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {{{load}}}, [%r6];
    tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    @%p1 bra FREED;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 64;
FREED:
    mul.wide.u32 %rd3, %thread, {4 * N}; add.s64 %rd3, %rd2, %rd3;
{stores}""")


def scale_words(rng: np.random.Generator, count: int, ue8m0: bool) -> np.ndarray:
    """Four scale factors a row, 0.5 to 2, as bytes [count, 4]."""
    if ue8m0:
        return rng.integers(126, 129, (count, 4)).astype(np.uint8)
    return (rng.integers(6, 8, (count, 4)) << 3 | rng.integers(0, 8, (count, 4))).astype(np.uint8)


def scale_values(words: np.ndarray, ue8m0: bool, first: int, k: int, vectors: int) -> np.ndarray:
    """The scale of each element along K, from `vectors` bytes of each word."""
    chosen = words[:, first : first + vectors].astype(np.int64)
    values = 2.0 ** (chosen - 127.0) if ue8m0 else E4M3.values(chosen)
    return np.asarray(np.repeat(values, k // vectors, axis=1))


def run(operation: Operation) -> tuple[Run, np.ndarray, np.ndarray]:
    """The run, D, and D by the definition in float64: of all rows of B where columns are masked."""
    rng = np.random.default_rng(operation.descriptor)
    integers = operation.kind == "i8"
    values, images = [], []
    for element, rows, negate, transpose in (
        (operation.a, operation.m, operation.negate_a, operation.transpose_a),
        (
            operation.b,
            N if operation.mask is None else 128,
            operation.negate_b,
            operation.transpose_b,
        ),
    ):
        shape = (rows, operation.k)
        if integers:
            bits = rng.integers(0, 256, shape)
            value = (bits - 256 * (bits > 127) if element.code else bits).astype(np.float64)
        else:
            bits = element.near_one(rng, shape)
            value = element.values(bits)
        values.append(-value if negate else value)
        bytes_ = rows_of(bits, element)
        image = mn_major(bytes_, element.storage // 8) if transpose else k_major(bytes_)
        images.append(np.pad(image, (0, MATRIX_BYTES - len(image))))
    words = [scale_words(rng, rows, operation.ue8m0) for rows in (M, 128)]
    if operation.scaled:
        vectors = VECTORS[operation.suffix or operation.kind]
        for i, first in enumerate((operation.scale_a_id, operation.scale_b_id)):
            scales = scale_values(words[i], operation.ue8m0, first, operation.k, vectors)
            values[i] = values[i] * scales[: len(values[i])]
    lanes = np.concatenate(
        [w.reshape(4, 32, 4).swapaxes(0, 1).reshape(32, 16) for w in words], axis=1
    )
    x = np.concatenate([*images, lanes.ravel()])
    out = np.zeros((M, N), np.int32 if integers else np.float32)
    result = run_ptx(
        kernel(operation),
        block=128,
        args=[x, Buffer(out, initialised=False)],
        dynamic_shared=1 << 14,
    )
    return result, out, values[0] @ values[1].T


HALF, TENSOR_FLOAT = Operation("f16", F16, F16), Operation("tf32", TF32, TF32)
UNSIGNED_SIGNED = Operation("i8", E4M3, E5M2, d_type=2)  # by the codes of these formats
F8, MXF8 = Operation("f8f6f4", E4M3, E5M2), Operation("mxf8f6f4", E5M2, E4M3)
MXF4, NVF4 = Operation("mxf4", FP4, FP4), Operation("mxf4nvf4", FP4, FP4, suffix=".scale_vec::4X")
DENSE_FP4 = [
    MXF4,
    replace(MXF4, suffix=".scale_vec::2X", scale_a_id=2),
    replace(MXF4, suffix=".block32", scale_b_id=2),
    replace(NVF4, suffix=".scale_vec::2X", scale_a_id=2, scale_b_id=2),
    NVF4,
    replace(NVF4, ue8m0=False),
    replace(NVF4, suffix=".block16", ue8m0=False),
]
KINDS = [
    HALF,
    replace(HALF, a=BF16, b=BF16),
    TENSOR_FLOAT,
    UNSIGNED_SIGNED,
    replace(UNSIGNED_SIGNED, a=E5M2, b=E4M3),
    *(replace(F8, a=a) for a in (E4M3, E5M2, E2M3, E3M2, E2M1)),
    *(replace(F8, b=b) for b in (E2M3, E3M2, E2M1)),
    *(replace(MXF8, a=a, b=b) for a, b in ((E4M3, E5M2), (E2M1, E3M2), (E2M3, E2M1))),
    *(replace(MXF8, scale_a_id=i, scale_b_id=3 - i) for i in range(4)),
    *DENSE_FP4,
]


def name(operation: Operation) -> str:
    return f"{operation.kind}-{operation.descriptor:08x}{operation.suffix}"


def check(operation: Operation) -> None:
    result, out, expected = run(operation)
    assert result.findings == []
    assert np.array_equal(out.astype(np.float64), expected)
    assert len(np.unique(expected)) > 100


@pytest.mark.parametrize("operation", KINDS, ids=name)
def test_types_and_scale_factors(operation: Operation) -> None:
    check(operation)


FLIPPED = [HALF, TENSOR_FLOAT, F8, MXF8, MXF4, NVF4]


@pytest.mark.parametrize("operation", FLIPPED, ids=name)
@pytest.mark.parametrize("operand", ["a", "b"])
def test_an_operand_is_negated(operation: Operation, operand: str) -> None:
    check(replace(operation, **{f"negate_{operand}": True}))


@pytest.mark.parametrize("operation", [HALF, UNSIGNED_SIGNED, F8, MXF8], ids=name)
@pytest.mark.parametrize("operand", ["a", "b"])
def test_an_operand_is_transposed(operation: Operation, operand: str) -> None:
    check(replace(operation, **{f"transpose_{operand}": True}))


# ---- columns of B that count as 0, with .ws

WS = [
    replace(o, m=32, n=64, mask=0, more=1 << 30) for o in (HALF, TENSOR_FLOAT, UNSIGNED_SIGNED, F8)
]
# The fourth example of the PTX ISA, "Zero-column mask descriptor": a string for each 16 columns.
STARTS, FIRST_SKIPPED, SKIP, USE, SHIFT = (0, 1, 2, 1), (1, 1, 0, 0), 2, 3, 2
MASK = (
    sum(
        start << 8 * i | skipped << 32 + i
        for i, (start, skipped) in enumerate(zip(STARTS, FIRST_SKIPPED, strict=True))
    )
    | 1 << 39
    | SKIP << 40
    | USE << 48
    | SHIFT << 56
)
ZEROS = "1110000111000011110000111000011100111000011100000001110000111000"


@pytest.mark.parametrize("operation", WS, ids=name)
@pytest.mark.parametrize("masked", [False, True])
def test_columns_that_count_as_0(operation: Operation, masked: bool) -> None:
    """Each 32 lanes have all rows and a quarter of the columns."""
    result, out, every = run(replace(operation, mask=MASK if masked else 0))
    assert result.findings == []
    expected = every[:, SHIFT : SHIFT + 64] if masked else every[:, :64]
    if masked:
        expected = np.where(np.array(list(ZEROS)) == "1", 0, expected)
    d = out.reshape(4, 32, 16).swapaxes(0, 1).reshape(32, 64)
    assert np.array_equal(d.astype(np.float64), expected)
    assert len(np.unique(expected)) > 100


# ---- the sparsity version: bit 12 of kind::mxf4 and kind::mxf4nvf4, whose type of B has two bits


@pytest.mark.parametrize("operation", DENSE_FP4, ids=name)
def test_a_dense_product_has_any_sparsity_version(operation: Operation) -> None:
    check(replace(operation, more=1 << 12))


@pytest.mark.parametrize("operation", DENSE_FP4, ids=name)
def test_descriptors_that_the_dsl_makes(operation: Operation) -> None:
    """By default the DSL's builder sets the sparsity version to 1."""
    from cutlass import Float4E2M1FN
    from cutlass.experimental.primitives import Tcgen05MxOmmaInstrDesc

    made = Tcgen05MxOmmaInstrDesc.build(
        a_dtype=Float4E2M1FN,
        b_dtype=Float4E2M1FN,
        scale_format=int(operation.ue8m0),
        a_sf_id=operation.scale_a_id,
        b_sf_id=operation.scale_b_id,
        a_negate=1,
        n_dim=N,
        m_dim=M,
    )
    negated = replace(operation, negate_a=True)
    more = int(made.value) ^ negated.descriptor
    assert more == 1 << 12
    check(replace(negated, more=more))


# ---- what is refused


def messages(
    operation: Operation,
    group: int = 1,
    *,
    more: str = "",
    mask: str = "",
    target: str = "sm_100a",
) -> list[str]:
    """What is said of the descriptors of an operation that only one thread of one CTA issues.

    Args:
        more: ".ws" or ".ashift".
        mask: of columns of B, for ".ws".
    """
    scales = ", [%r3], [%r3]" if operation.scaled else ""
    kind = f"kind::{operation.kind}" + (".block_scale" if operation.scaled else "")
    where = f"{more}.cta_group::{group}" if more == ".ws" else f".cta_group::{group}"
    suffix = operation.suffix + (more if more == ".ashift" else "")
    text = module(
        f"""
    mov.u32 %r1, dynamic;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r1], 64;
    ld.shared.u32 %r2, [%r1];
    mov.u32 %r4, %ctaid.x; add.u32 %r4, %r4, %thread; setp.ne.u32 %p1, %r4, 0;
    setp.ne.u32 %p4, %r2, %r2; add.u32 %r3, %r2, 32;
    mov.u64 %rd3, {1 << 46 | 256 >> 4 << 32 | 128 >> 4 << 16 | 2048 >> 4:#x};
    @!%p1 tcgen05.mma{where}.{kind}{suffix} [%r2], %rd3, %rd3, {operation.descriptor:#x}{scales},
        %p4{mask and ", " + mask};
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
""",
        target,
    )
    args = [np.zeros(1, np.uint32), np.zeros(1, np.uint32)]
    result = run_ptx(text, grid=group, cluster=group, args=args, dynamic_shared=1 << 16)
    return [f.message for f in result.errors if f.check == "descriptor"]


def reserved() -> list[Any]:
    """Bits that must be 0, one at a time."""
    plain = (HALF, TENSOR_FLOAT, UNSIGNED_SIGNED, F8)
    cases = [(o, bit) for o in plain for bit in (6, 23, 29, 30, 31)]
    cases += [(MXF8, bit) for bit in (0, 1, 3, 6, 31)]
    cases += [(o, bit) for o in (MXF4, NVF4) for bit in (0, 1, 3, 6)]
    return [pytest.param(o, bit, id=f"{o.kind}-{bit}") for o, bit in cases]


@pytest.mark.parametrize(("operation", "bit"), reserved())
def test_reserved_bits_are_0(operation: Operation, bit: int) -> None:
    assert messages(operation) == []
    (message,) = messages(replace(operation, more=1 << bit))
    assert "reserved bits" in message


REFUSED = [
    *((replace(o, more=1 << 3), "saturation") for o in (HALF, TENSOR_FLOAT, F8)),
    *((replace(o, more=1 << 2), "sparse") for o in (HALF, F8, MXF8, MXF4, NVF4)),
    *((replace(o, more=1 << bit), "no shape M") for o in (MXF8, MXF4) for bit in (24, 25, 26)),
    *((replace(o, more=1 << 31), "K = 96 is for sm_103a only") for o in (MXF4, NVF4)),
    *((replace(F8, b=replace(E4M3, code=code)), "types") for code in (2, 6, 7)),
    *((replace(MXF4, b=replace(FP4, code=code)), "types 1 of A") for code in (0, 2, 3)),
    *((replace(MXF4, a=replace(FP4, code=code)), "and 1 of B") for code in (0, 2, 3, 5)),
    *((replace(MXF4, scale_a_id=i), f"ids {i} and 0") for i in (1, 3)),
    *((replace(MXF4, scale_b_id=i), f"ids 0 and {i}") for i in (1, 3)),
    *((replace(NVF4, scale_a_id=i), f"ids {i} and 0") for i in (1, 2, 3)),
    *((replace(o, ue8m0=False), "ue4m3") for o in (MXF8, MXF4, DENSE_FP4[3])),
    *((replace(o, transpose_b=True), "transpose") for o in (MXF4, NVF4)),
    *((replace(F8, b=b, transpose_b=True), "transposed") for b in (E2M3, E2M1)),
    *((replace(UNSIGNED_SIGNED, **{f"negate_{x}": True}), "negate") for x in ("a", "b")),
    *((replace(o, d_type=2), "no D of type 2") for o in (HALF, TENSOR_FLOAT, F8)),
    *(
        (replace(o, d_type=0), "no D of type 0")
        for o in (replace(HALF, a=BF16), TENSOR_FLOAT, UNSIGNED_SIGNED)
    ),
    *((replace(o, m=64), "no shape M 64") for o in (MXF8, MXF4, NVF4)),
    *((replace(UNSIGNED_SIGNED, n=n), "no shape") for n in (40, 56)),
]


@pytest.mark.parametrize(
    ("operation", "text"), [pytest.param(o, text, id=f"{name(o)}: {text}") for o, text in REFUSED]
)
def test_what_a_kind_does_not_have(operation: Operation, text: str) -> None:
    assert any(text in message for message in messages(operation))


def test_96_columns_of_fp4_are_not_emulated() -> None:
    assert any(
        "K = 96 is not emulated" in x
        for x in messages(replace(MXF4, more=1 << 31), target="sm_103a")
    )


@pytest.mark.parametrize(
    ("operation", "good", "bad"),
    [
        (HALF, (16, 48, 256), (8, 24)),
        (MXF8, (16, 48, 256), (8, 24)),
        (UNSIGNED_SIGNED, (32, 96, 256), (8, 16, 48)),  # kind::i8 takes steps of 32
    ],
    ids=["f16", "mxf8f6f4", "i8"],
)
def test_columns_of_two_ctas(
    operation: Operation, good: tuple[int, ...], bad: tuple[int, ...]
) -> None:
    pair = replace(operation, m=256)
    assert [messages(replace(pair, n=n), 2) for n in good] == [[]] * len(good)
    for n in bad:
        assert f"no shape M 256, N {n}" in messages(replace(pair, n=n), 2)[0]


@pytest.mark.parametrize("operation", [HALF, TENSOR_FLOAT, UNSIGNED_SIGNED, F8], ids=name)
def test_the_largest_shift_is_for_ws(operation: Operation) -> None:
    for shift in range(4):
        assert messages(replace(operation, n=64, more=shift << 30), more=".ws") == []


@pytest.mark.parametrize(("m", "most"), [(32, 16), (64, 32), (128, 32)])
def test_columns_of_b_are_shifted_by_at_most(m: int, most: int) -> None:
    operation = replace(HALF, m=m, n=64)
    assert messages(operation, more=".ws", mask=f"{most << 56:#x}") == []
    (message,) = messages(operation, more=".ws", mask=f"{(most + 1) << 56:#x}")
    assert f"shifted by {most + 1}, with M = {m} by at most {most}" in message


def test_rows_of_a_are_shifted_in_tensor_memory_only() -> None:
    (message,) = messages(HALF, more=".ashift")
    assert ".ashift with A in shared memory" in message
