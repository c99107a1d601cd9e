"""Tensor maps as the driver makes them, and the combinations of parameters to ask it for."""

from __future__ import annotations

import ctypes
import itertools
import random
from dataclasses import dataclass

TYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32ftz", "tf32",
    "tf32ftz",
)  # fmt: skip
"""In the driver's order."""
ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8,
    "bf16": 2, "f32ftz": 4, "tf32": 4, "tf32ftz": 4,
}  # fmt: skip
INTERLEAVES = (0, 16, 32)
SWIZZLES = (0, 32, 64, 128)
PROMOTIONS = (0, 64, 128, 256)


@dataclass(frozen=True)
class TensorMap:
    """A map of a tensor in the input ("in") or output ("out") buffer.

    Attributes:
        sizes, box, steps: elements, innermost first; steps are the element strides.
        strides: bytes, of all dimensions but the innermost.
        nan_fill: out-of-bounds elements are NaN, not zero.
        corners: for im2col: lower and upper corner of the bounding box; `box` is then channels
            per pixel and pixels per column.
    """

    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    interleave: int = 0
    swizzle: int = 0
    promotion: int = 0
    nan_fill: bool = False
    buffer: str = "in"
    offset: int = 0
    corners: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def box_bytes(self) -> int:
        total = ELEMENT_BYTES[self.element]
        for n in self.box:
            total *= n
        return total


def packed(element: str, sizes: tuple[int, ...], box: tuple[int, ...], **rest: object) -> TensorMap:
    """A map of a tensor without gaps, but for rows padded to 16 bytes."""
    strides, stride = [], ELEMENT_BYTES[element]
    for n in sizes[:-1]:
        stride = -(-stride * n // 16) * 16
        strides.append(stride)
    return TensorMap(element, sizes, tuple(strides), box, **rest)  # type: ignore[arg-type]


def extent(tensor_map: TensorMap) -> int:
    """Bytes from the first to past the last element."""
    last = ELEMENT_BYTES[tensor_map.element] * tensor_map.sizes[0]
    return last + sum(
        (n - 1) * s for n, s in zip(tensor_map.sizes[1:], tensor_map.strides, strict=True)
    )


class Encoder:
    """cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col of a loaded libcuda."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda = cuda

    def encode(self, m: TensorMap, address: int) -> bytes:
        """The 128 bytes.

        Raises:
            ValueError: the driver refuses.
        """
        room = (ctypes.c_uint64 * 31)()
        start = ctypes.addressof(room)
        start += -start % 64
        rank = m.rank
        sizes = (ctypes.c_uint64 * rank)(*m.sizes)
        strides = (ctypes.c_uint64 * max(rank - 1, 1))(*m.strides)
        steps = (ctypes.c_uint32 * rank)(*(m.steps or (1,) * rank))
        tail = (
            INTERLEAVES.index(m.interleave), SWIZZLES.index(m.swizzle),
            PROMOTIONS.index(m.promotion), int(m.nan_fill),
        )  # fmt: skip
        common = (
            ctypes.c_void_p(start), TYPES.index(m.element), rank, ctypes.c_void_p(address), sizes,
            strides,
        )  # fmt: skip
        if m.corners is None:
            box = (ctypes.c_uint32 * rank)(*m.box)
            code = self._cuda.cuTensorMapEncodeTiled(*common, box, steps, *tail)
        else:
            lower, upper = (ctypes.c_int * (rank - 2))(*m.corners[0]), m.corners[1]
            code = self._cuda.cuTensorMapEncodeIm2col(
                *common, lower, (ctypes.c_int * (rank - 2))(*upper), m.box[0], m.box[1], steps,
                *tail,
            )  # fmt: skip
        if code:
            raise ValueError(f"the driver refuses with {code}")
        return ctypes.string_at(start, 128)


ADDRESS = 0x123456789000  # of what `descriptors` describes; nothing need be there


def descriptors() -> list[TensorMap]:
    """Maps whose encoding by the driver is kept: each parameter varied alone, and mixtures."""
    plain = packed("f16", (256, 64, 32), (64, 8, 4))
    found = [plain]
    for element in TYPES:
        found += [packed(element, (64, 32), (16, 8), nan_fill=n) for n in (False, True)]
    for rank in range(1, 6):
        sizes, box = (256, 33, 17, 9, 5)[:rank], (32, 4, 3, 2, 2)[:rank]
        found.append(packed("u32", sizes, box))
        for d in range(rank):
            steps = tuple(1 + 2 * (i == d) for i in range(rank))
            found.append(packed("u32", sizes, box, steps=steps))
            bigger = tuple(n + 77 * (i == d) for i, n in enumerate(sizes))
            found.append(packed("u32", bigger, box))
            wider = tuple(n + (4 if d == 0 else 3) * (i == d) for i, n in enumerate(box))
            found.append(packed("u32", sizes, wider))
    found += [packed("u8", (128, 64, 8), (s or 16, 8, 2), swizzle=s) for s in SWIZZLES]
    found += [packed("u8", (64, 64), (32, 8), promotion=p) for p in PROMOTIONS]
    found += [
        packed("u16", (64, 9, 9, 3), (16 if i == 16 else 64, 2, 2, 1), interleave=i, swizzle=s)
        for i in INTERLEAVES for s in SWIZZLES
    ]  # fmt: skip
    found += [
        TensorMap("bf16", (1 << 20, 1 << 16, 100), (1 << 22, (1 << 39) + 16), (64, 256, 1)),
        TensorMap("u8", (1 << 32, 2), (1 << 33,), (256, 1)),
        TensorMap("u8", (64, (1 << 32) - 5), (64,), (64, 1)),
        TensorMap("f32", (16, 16), (64,), (4, 4), steps=(1, 8)),
        TensorMap("f32", (16, 16, 4), (1 << 36, 1 << 37), (4, 4, 4), steps=(2, 8, 7)),
    ]
    rng = random.Random(3)
    for _ in range(160):
        element, rank = rng.choice(TYPES), rng.randrange(1, 6)
        width = ELEMENT_BYTES[element]
        swizzle = rng.choice(SWIZZLES)
        inner = rng.choice([n for n in (16, 32, 64, 128) if n <= (swizzle or 128)]) // width
        sizes = (rng.randrange(1, 500) * max(1, 16 // width),)
        sizes += tuple(rng.randrange(1, 70) for _ in range(rank - 1))
        box = (max(inner, 1), *(rng.randrange(1, 9) for _ in range(rank - 1)))
        steps = (1, *(rng.randrange(1, 9) for _ in range(rank - 1)))
        found.append(
            packed(
                element, sizes, box, steps=steps, swizzle=swizzle,
                promotion=rng.choice(PROMOTIONS),
                nan_fill=element.startswith(("f", "b", "t")) and rng.random() < 0.5,
                offset=16 * rng.randrange(100),
            )
        )  # fmt: skip
    for rank, corner in itertools.product((3, 4, 5), (0, -1, 2)):
        lower, upper = (corner,) * (rank - 2), (-corner - 1,) * (rank - 2)
        found.append(packed("f16", (*(64, 20, 18, 16, 3)[: rank - 1], 4), (32, 16),
                            corners=(lower, upper)))  # fmt: skip
    return found


# ---- the encoding, as found out: what the emulator reads is compared with this and the driver's

_CODES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32ftz", "f64", "bf16")


def encode(m: TensorMap, address: int) -> bytes:
    """The first 64 bytes of what the driver makes of a map; zeros behind them."""
    code, rounded = m.element, m.element.startswith("tf32")
    code = code.replace("tf32", "f32")
    words = [0] * 32
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = (
        (m.corners is not None) | (m.rank - 1) << 4 | _CODES.index(code) << 7
        | INTERLEAVES.index(m.interleave) << 11 | SWIZZLES.index(m.swizzle) << 13
        | m.nan_fill << 15 | rounded << 16 | PROMOTIONS.index(m.promotion) << 17
    )  # fmt: skip
    for d, stride in enumerate(m.strides):
        words[3 + d] = stride >> 4 & 0xFFFFFFFF
        words[7] |= stride >> 36 << 4 * d
    for d, size in enumerate(m.sizes):
        words[8 + d] = size - 1
        words[13] |= ((m.steps[d] if m.steps else 1) - 1) << 3 * d
    words[13] |= m.box[0] - 1 << 24
    if m.corners is None:
        for d, size in enumerate(m.box[1:]):
            words[14] |= size - 1 << 8 * d
    else:
        bits = {1: 16, 2: 8, 3: 5}[m.rank - 2]
        for half, corner in enumerate(m.corners):
            for d, place in enumerate(corner):
                words[14] |= (place & (1 << bits) - 1) << 16 * half + bits * d
        words[15] = m.box[1] - 1
    return b"".join(word.to_bytes(4, "little") for word in words)
