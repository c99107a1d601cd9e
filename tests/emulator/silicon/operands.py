"""Operands by kind: specials of every type, integers, nice floats, random bits; from a seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Random = np.random.Generator

_F32 = np.array(
    [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000,
     0xFFC12345, 0x7F812345, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00800001,
     0x7F7FFFFF, 0xFF7FFFFF, 0x3F000000, 0x3F7FFFFF, 0x4B000000, 0x4B800001, 0x4F000000,
     0xCF000000, 0x4EFFFFFF, 0x5F000000, 0x477FE000, 0x477FF000, 0x33000000, 0x38800000,
     0x387FC000, 0x43E00000, 0x43E80000, 0x42FE0000, 0xC3000000, 0x40490FDB, 0x3FC90FDB],
    np.uint32,
)  # fmt: skip
_F16 = np.array(
    [0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 0x0001, 0x8001, 0x03FF,
     0x0400, 0x7BFF, 0xFBFF, 0x3555, 0x3BFF, 0x3C01, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0,
     0x0080, 0x007F, 0x7F7F, 0x4000],
    np.uint16,
)  # fmt: skip
_F64 = np.array(
    [0x0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000,
     0xFFF0000000000000, 0x7FF8000000000000, 0x7FF8000012345678, 0x7FF0000000000001, 0x1,
     0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0x3FEFFFFFFFFFFFFF,
     0x43E0000000000000, 0x41DFFFFFFFC00000, 0x36A0000000000000, 0x47EFFFFFE0000000,
     0x47EFFFFFF0000000],
    np.uint64,
)  # fmt: skip
_INTEGERS = np.array(
    [0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF,
     0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 63) - 1, (1 << 64) - 1],
    np.uint64,
)  # fmt: skip


def make(kind: str, count: int, rng: Random) -> np.ndarray:
    """`count` operands of a kind, in the smallest array type that holds one."""
    if "/" in kind:
        element, sort = kind.split("/")
        return encode(element, values(element, sort, count, rng))
    return _PLAIN[kind](count, rng)


# ---- operands of scalar instructions


def _mixture(rng: Random, kinds: list[np.ndarray], dtype: type) -> np.ndarray:
    chosen = rng.integers(0, len(kinds), len(kinds[0]))
    return np.choose(chosen, [k.astype(np.uint64) for k in kinds]).astype(dtype)


def _raw(n: int, rng: Random) -> np.ndarray:
    return rng.integers(0, 1 << 64, n, np.uint64)


def _power(exponent: np.ndarray) -> np.ndarray:
    """Powers of two, exact everywhere."""
    return np.ldexp(1.0, exponent)


def _floats(rng: Random, n: int) -> np.ndarray:
    scale = _power(rng.integers(-12, 12, n))
    return (rng.standard_normal(n) * scale).astype(np.float32).view(np.uint32)


def _halves(rng: Random, n: int) -> np.ndarray:
    return (rng.standard_normal(n) * 4).astype(np.float16).view(np.uint16)


def _b16(n: int, rng: Random) -> np.ndarray:
    brain = _floats(rng, n) >> 16
    kinds = [_raw(n, rng), rng.choice(_INTEGERS, n), rng.choice(_F16, n), _halves(rng, n), brain]
    return _mixture(rng, kinds, np.uint16)


def _b32(n: int, rng: Random) -> np.ndarray:
    pairs = rng.choice(_F16, n).astype(np.uint64) << np.uint64(16) | _halves(rng, n)
    near = rng.choice(_F32, n) + rng.integers(-2, 3, n).astype(np.uint32)
    kinds = [
        _raw(n, rng), rng.choice(_INTEGERS, n), rng.choice(_F32, n), near, _floats(rng, n), pairs,
        _floats(rng, n),
    ]  # fmt: skip
    return _mixture(rng, kinds, np.uint32)


def _b64(n: int, rng: Random) -> np.ndarray:
    doubles = (rng.standard_normal(n) * _power(rng.integers(-40, 40, n))).view(np.uint64)
    both = _floats(rng, n).astype(np.uint64) << np.uint64(32) | _floats(rng, n)
    special = rng.choice(_F32, n).astype(np.uint64) << np.uint64(32) | _floats(rng, n)
    kinds = [
        _raw(n, rng), rng.choice(_INTEGERS, n), rng.choice(_F64, n), doubles, both, special,
        doubles,
    ]  # fmt: skip
    return _mixture(rng, kinds, np.uint64)


def _f32_range(n: int, rng: Random) -> np.ndarray:
    """For approximations: all exponents, the usual range, and the neighbourhood of specials."""
    near = rng.choice(_F32, n) + rng.integers(-4, 5, n).astype(np.uint32)
    small = (rng.random(n) * 200 - 100).astype(np.float32).view(np.uint32)
    return _mixture(rng, [_raw(n, rng), near, small, _floats(rng, n), _floats(rng, n)], np.uint32)


def _f16_range(n: int, rng: Random) -> np.ndarray:
    brain = _floats(rng, n) >> 16
    return _mixture(rng, [_raw(n, rng), _halves(rng, n), brain], np.uint16)


def _f16x2_range(n: int, rng: Random) -> np.ndarray:
    return _f16_range(2 * n, rng).view(np.uint32)


def _with_nans(
    n: int, rng: Random, dtype: type, plain: np.ndarray, mantissa: int, special: np.ndarray
) -> np.ndarray:
    """Many NaNs, quiet and signalling, of both signs; infinities; plain numbers."""
    bits = np.dtype(dtype).itemsize * 8
    sign = rng.integers(0, 2, n).astype(np.uint64) << np.uint64(bits - 1)
    infinity = np.uint64((1 << bits - 1) - (1 << mantissa))
    payload = _raw(n, rng) % np.uint64(1 << mantissa - 1) | np.uint64(1)
    quiet = infinity | np.uint64(1 << mantissa - 1) | payload | sign
    kinds = [quiet, infinity | payload | sign, infinity | sign, plain, rng.choice(special, n)]
    return _mixture(rng, kinds, dtype)


def _pick(*values: int, dtype: type = np.uint32) -> Callable[[int, Random], np.ndarray]:
    return lambda n, rng: rng.choice(np.array(values, dtype), n)


_PLAIN: dict[str, Callable[[int, Random], np.ndarray]] = {
    "pred": lambda n, rng: rng.integers(0, 2, n).astype(np.uint8),
    "b16": _b16,
    "b32": _b32,
    "b64": _b64,
    "f32range": _f32_range,
    "f16range": _f16_range,
    "f16x2range": _f16x2_range,
    "raw8": lambda n, rng: _raw(n, rng).astype(np.uint8),
    "raw16": lambda n, rng: _raw(n, rng).astype(np.uint16),
    "raw32": lambda n, rng: _raw(n, rng).astype(np.uint32),
    "raw64": _raw,
    "nan16": lambda n, rng: _with_nans(n, rng, np.uint16, _halves(rng, n), 10, _F16),
    "nan32": lambda n, rng: _with_nans(n, rng, np.uint32, _floats(rng, n), 23, _F32),
    "nan64": lambda n, rng: _with_nans(
        n, rng, np.uint64, rng.standard_normal(n).view(np.uint64), 52, _F64
    ),
    "zero8": lambda n, rng: np.zeros(n, np.uint8),
    "few32": _pick(7, 8, 0xFFFFFFFF),
    "few64": _pick(7, 8, 7 << 32, dtype=np.uint64),
    "ones32": _pick(0x3F800000),
    "small32": lambda n, rng: rng.integers(0, 72, n).astype(np.uint32),
    "small64": lambda n, rng: rng.integers(0, 72, n).astype(np.uint64),
    "lane": lambda n, rng: rng.integers(0, 40, n).astype(np.uint32),
    # clamp in bits 0 to 4, segment mask in bits 8 to 12
    "segment": _pick(0x1F, 0x0, 0x1C1F, 0x181F, 0x101F, 0x1E1F, 0x1C00, 0x1800, 0x1000, 0x0A1F,
                     0x070F, 0x1F1F),
    # few values a warp, so that some warps agree and some do not
    "bywarp": lambda n, rng: np.where(
        np.repeat(rng.random(-(-n // 32)) < 0.4, 32)[:n], 5, rng.integers(4, 6, n)
    ).astype(np.uint32),
    "bywarp64": lambda n, rng: np.where(
        np.repeat(rng.random(-(-n // 32)) < 0.4, 32)[:n], 5 << 33, rng.integers(4, 6, n) << 33
    ).astype(np.uint64),
    "predbywarp": lambda n, rng: np.where(
        np.repeat(rng.random(-(-n // 32)) < 0.6, 32)[:n],
        np.repeat(rng.integers(0, 2, -(-n // 32)), 32)[:n],
        rng.integers(0, 2, n),
    ).astype(np.uint8),
}  # fmt: skip


# ---- elements of matrices

# exponent bits, fraction bits, bias, whether there are infinities
_SMALL = {"e4m3": (4, 3, 7, False), "e5m2": (5, 2, 15, True)}
_RANGE = {"f16": 10, "bf16": 30, "tf32": 30, "f32": 30, "f64": 100, "e4m3": 5, "e5m2": 9}
_PROBES = {"f16": 22, "bf16": 40, "tf32": 40, "f32": 40, "f64": 60, "e4m3": 8, "e5m2": 15}
_INTEGER = {"s8": np.int8, "u8": np.uint8, "s32": np.int32}


def values(element: str, sort: str, n: int, rng: Random) -> np.ndarray:
    """Values, as float64 (integers as bytes are random bits whatever the sort).

    Sorts: "ints" small integers, exact in whatever order they are added; "normal"; "wide" a wide
    range of exponents with cancellations; "probe" powers of two and zeros, which show what is cut
    off when products are aligned; "ones"; "special" with NaN, infinities, denormals; "raw" bits.
    """
    normal = rng.standard_normal(n)
    if sort == "zeros":
        return np.zeros(n)
    if sort == "ones":
        return np.ones(n)
    if sort == "ints":
        return rng.integers(-4, 5, n).astype(np.float64)
    if sort == "wide":
        reach = _RANGE[element]
        wide = normal * _power(rng.integers(-reach, reach + 1, n))
        wide[1::2] = np.where(rng.random(n // 2) < 0.3, -wide[: n // 2 * 2 : 2], wide[1::2])
        return wide
    if sort == "probe":
        power = _power(-rng.integers(0, _PROBES[element] + 1, n)) * rng.choice([-1.0, 1.0], n)
        power *= np.where(rng.random(n) < 0.3, 1.5, 1.0)
        return np.where(rng.random(n) < 0.4, 0.0, power)
    if sort == "special":
        special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], n, p=[0.1, 0.1, 0.1, 0.4, 0.3])
        tiny = rng.integers(-7, 8, n) * _smallest(element)
        return np.select([rng.random(n) < 0.06, rng.random(n) < 0.2], [special, tiny], normal)
    if sort in ("normal", "raw"):
        return normal
    raise ValueError(sort)


def _smallest(element: str) -> float:
    powers = {"f16": -24, "bf16": -133, "tf32": -136, "f32": -149, "f64": -1074, "e4m3": -9}
    return 2.0 ** powers.get(element, -16)


def encode(element: str, x: np.ndarray) -> np.ndarray:
    """The bits of values in a type of matrix elements. tf32: all bits of a float32."""
    if element in ("f32", "tf32"):
        return x.astype(np.float32).view(np.uint32)
    if element == "f64":
        return x.astype(np.float64).view(np.uint64)
    if element == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    if element == "bf16":
        bits = x.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
    if element in _SMALL:
        return _encode_small(element, x)
    return x.astype(_INTEGER[element])


def _encode_small(element: str, x: np.ndarray) -> np.ndarray:
    exponent, fraction, bias, infinities = _SMALL[element]
    code = np.arange(128)
    e, m = code >> fraction, code & ((1 << fraction) - 1)
    table = np.where(
        e == 0,
        m * 2.0 ** (1 - bias - fraction),
        (1 + m / (1 << fraction)) * _power(e - bias),
    )
    finite = int((((1 << exponent) - 1) << fraction) - 1 if infinities else 126)
    magnitude = np.abs(np.nan_to_num(x, nan=0.0, posinf=1e30))
    between = (table[:finite] + table[1 : finite + 1]) / 2
    bits = np.searchsorted(between, magnitude).astype(np.uint8)
    if infinities:
        bits = np.where(np.isinf(x), np.uint8(0x7C), bits)
    bits = np.where(np.isnan(x), np.uint8(0x7F), bits)
    return (bits | (np.signbit(x).astype(np.uint8) << 7)).astype(np.uint8)
