"""Cases: one instruction each, its operands, and the kernel that runs it on many of them."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[2] / "data" / "silicon"
THREADS = 256  # of each case; whole warps, so that warp-level instructions have all lanes
BITS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}


@dataclass(frozen=True)
class Case:
    """One instruction.

    Attributes:
        name: unique; the opcode, mostly.
        text: the instruction, with %o0 ... for outputs and %i0 ... for inputs.
        outputs, inputs: their register types: "b16", "b32", "b64" or "pred".
        family: the engine's family that executes it.
    """

    name: str
    text: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    family: str

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())


def load() -> list[Case]:
    return [
        Case(c["name"], c["text"], tuple(c["outputs"]), tuple(c["inputs"]), c["family"])
        for c in json.loads((DATA / "cases.json").read_text())
    ]


def save(cases: list[Case]) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(case)) for case in cases)
    (DATA / "cases.json").write_text(f"[\n{lines}\n]\n")


# -- operands -----------------------------------------------------------------------------------

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
     0xFFF0000000000000, 0x7FF8000000000000, 0x7FF8000012345678, 0x1, 0x000FFFFFFFFFFFFF,
     0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0x3FEFFFFFFFFFFFFF, 0x43E0000000000000,
     0x41DFFFFFFFC00000, 0x36A0000000000000, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000],
    np.uint64,
)  # fmt: skip
_INTEGERS = np.array(
    [0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF,
     0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 63) - 1, (1 << 64) - 1],
    np.uint64,
)  # fmt: skip


def operands(case: Case) -> np.ndarray:
    """uint64 [inputs, THREADS]: specials of every type, integers, nice floats, and random bits."""
    rng = np.random.Generator(np.random.PCG64(case.seed))
    rows = [_row(rng, kind) for kind in case.inputs]
    return np.stack(rows) if rows else np.zeros((0, THREADS), np.uint64)


def _row(rng: np.random.Generator, kind: str) -> np.ndarray:
    n = THREADS
    raw = rng.integers(0, 1 << 64, n, np.uint64)
    if kind == "pred":
        return raw & np.uint64(1)
    integers = rng.choice(_INTEGERS, n)
    if kind == "b16":
        halves = (rng.standard_normal(n) * 4).astype(np.float16).view(np.uint16)
        brain = _bits32(rng, n) >> 16
        kinds = [raw, integers, rng.choice(_F16, n), halves, brain]
    elif kind == "b32":
        pairs = rng.choice(_F16, n).astype(np.uint64) << np.uint64(16)
        pairs |= (rng.standard_normal(n) * 4).astype(np.float16).view(np.uint16)
        near = rng.choice(_F32, n) + rng.integers(-2, 3, n).astype(np.uint32)
        kinds = [raw, integers, rng.choice(_F32, n), near, _bits32(rng, n), pairs, _bits32(rng, n)]
    else:
        doubles = (rng.standard_normal(n) * np.exp2(rng.integers(-40, 40, n))).view(np.uint64)
        both = _bits32(rng, n).astype(np.uint64) << np.uint64(32) | _bits32(rng, n)
        special = rng.choice(_F32, n).astype(np.uint64) << np.uint64(32) | _bits32(rng, n)
        kinds = [raw, integers, rng.choice(_F64, n), doubles, both, special]
    chosen = np.choose(rng.integers(0, len(kinds), n), [k.astype(np.uint64) for k in kinds])
    return chosen & np.uint64((1 << BITS[kind]) - 1)


def _bits32(rng: np.random.Generator, n: int) -> np.ndarray:
    scale = np.exp2(rng.integers(-12, 12, n))
    return (rng.standard_normal(n) * scale).astype(np.float32).view(np.uint32)


# -- kernels ------------------------------------------------------------------------------------


def kernel_name(number: int) -> str:
    return f"case_{number}"


def module(cases: list[Case], first: int = 0, target: str = "sm_90a") -> str:
    """PTX with one kernel a case: inputs u64 [inputs, THREADS], outputs u64 [outputs, THREADS]."""
    head = f".version 8.6\n.target {target}\n.address_size 64\n"
    return head + "\n".join(_kernel(c, kernel_name(first + i)) for i, c in enumerate(cases))


def _kernel(case: Case, name: str) -> str:
    body = [
        "ld.param.b64 %ip, [in];", "ld.param.b64 %op, [out];",
        "cvta.to.global.u64 %ip, %ip;", "cvta.to.global.u64 %op, %op;",
        "mov.u32 %t, %tid.x;", "mul.wide.u32 %off, %t, 8;",
        "add.s64 %ip, %ip, %off;", "add.s64 %op, %op, %off;",
    ]  # fmt: skip
    registers = [".reg .b64 %ip, %op, %off, %w;", ".reg .b32 %t, %n;", ".reg .b16 %h;"]
    for j, kind in enumerate(case.inputs):
        registers.append(f".reg .{kind} %i{j};")
        body.append(f"ld.global.b64 %w, [%ip+{j * THREADS * 8}];")
        if kind == "pred":
            body.append(f"setp.ne.b64 %i{j}, %w, 0;")
        elif kind == "b64":
            body.append(f"mov.b64 %i{j}, %w;")
        else:
            body.append(f"cvt.u{BITS[kind]}.u64 %i{j}, %w;")
    registers += [f".reg .{kind} %o{j};" for j, kind in enumerate(case.outputs)]
    body.append(case.text)
    for j, kind in enumerate(case.outputs):
        if kind == "pred":
            body.append(f"selp.b64 %w, 1, 0, %o{j};")
        elif kind == "b64":
            body.append(f"mov.b64 %w, %o{j};")
        else:
            body.append(f"cvt.u64.u{BITS[kind]} %w, %o{j};")
        body.append(f"st.global.b64 [%op+{j * THREADS * 8}], %w;")
    body.append("ret;")
    lines = "\n  ".join([*registers, *body])
    return f".visible .entry {name}(.param .b64 in, .param .b64 out)\n{{\n  {lines}\n}}\n"
