"""Cases: each is a small kernel, mostly of one instruction, with its operands."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .operands import make
from .tensormaps import TensorMap

DATA = Path(__file__).parents[2] / "data" / "silicon"
BITS = {"pred": 8, "b16": 16, "b32": 32, "b64": 64}
BLOCK_BYTES = 64  # of the parameter `block`
_ALIGNMENT = 128


@dataclass(frozen=True)
class Part:
    """A piece of the input or output buffer: `count` elements of a kind (see operands.py)."""

    kind: str
    count: int


@dataclass(frozen=True)
class Case:
    """A kernel.

    Attributes:
        name: unique; for a single instruction its opcode, mostly.
        family: of the engine's, or what is tried.
        body: PTX; %in and %out are the (global) addresses of the buffers, %t the thread in its
            block, %g in the grid, smem dynamic shared memory, map0 ... the tensor maps, block a
            parameter of 64 bytes. `$K` stands for the number of the kernel.
        given: what the input buffer holds; each part starts at a multiple of 128 bytes.
        wanted: likewise of the output buffer, with numpy's names of types. It is filled with 0xFF.
        header: PTX at module level.
        ulps: type of the results ("f32", "f16" ...) if they are approximations.
        refused: it is illegal: the GPU stops, and the emulator has to report an error.
    """

    name: str
    family: str
    body: str
    given: tuple[Part, ...]
    wanted: tuple[Part, ...]
    threads: int = 256
    blocks: int = 1
    cluster: int = 1
    shared: int = 0
    header: str = ""
    maps: tuple[TensorMap, ...] = ()
    block: bool = False
    ulps: str = ""
    refused: bool = False

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def input(self) -> np.ndarray:
        """The input buffer."""
        rng = np.random.Generator(np.random.PCG64(self.seed))
        pieces = []
        for part in self.given:
            data = np.ascontiguousarray(make(part.kind, part.count, rng)).view(np.uint8)
            pieces += [data, np.zeros(-len(data) % _ALIGNMENT, np.uint8)]
        return np.concatenate(pieces) if pieces else np.zeros(_ALIGNMENT, np.uint8)

    @property
    def checksum(self) -> int:
        """A checksum of the input, the kernel and its launch."""
        shape = self.threads, self.blocks, self.cluster, self.shared, self.maps
        text = f"{_kernel(self, 0)}{shape}".encode()
        return zlib.crc32(text, zlib.crc32(self.input().tobytes()))

    @property
    def output_bytes(self) -> int:
        return sum(_aligned(np.dtype(p.kind).itemsize * p.count) for p in self.wanted)

    def results(self, output: np.ndarray) -> list[np.ndarray]:
        """The output buffer as its parts."""
        parts, offset = [], 0
        for part in self.wanted:
            size = np.dtype(part.kind).itemsize * part.count
            parts.append(output[offset : offset + size].view(part.kind))
            offset += _aligned(size)
        return parts


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT


def offsets(sizes: Sequence[int]) -> list[int]:
    """The offsets of parts of these sizes in bytes."""
    found, offset = [], 0
    for size in sizes:
        found.append(offset)
        offset += _aligned(size)
    return found


# ---- one instruction


@dataclass(frozen=True)
class Instruction:
    """One instruction (or a few) from registers to registers.

    Attributes:
        text: with %o0 ... for outputs and %i0 ... for inputs.
        outputs: their register types: "b16", "b32", "b64" or "pred".
        inputs: likewise; after a colon may stand a kind of operands.
    """

    name: str
    text: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    family: str
    threads: int = 256
    ulps: str = ""

    def case(self) -> Case:
        lines, registers = [], []
        block = min(self.threads, 256)
        types = [kind.split(":")[0] for kind in self.inputs]
        starts = offsets([BITS[kind] // 8 * self.threads for kind in types])
        lines += [".reg .b64 %p;", ".reg .b16 %h;"]
        for j, (kind, start) in enumerate(zip(types, starts, strict=True)):
            size = BITS[kind] // 8
            lines.append(f"mad.wide.u32 %p, %g, {size}, %in;")
            if kind == "pred":
                lines.append(f"ld.global.u8 %h, [%p+{start}]; setp.ne.u16 %i{j}, %h, 0;")
            else:
                lines.append(f"ld.global.{kind} %i{j}, [%p+{start}];")
            registers.append(f".reg .{kind} %i{j};")
        registers += [f".reg .{kind} %o{j};" for j, kind in enumerate(self.outputs)]
        lines.append(self.text)
        starts = offsets([BITS[kind] // 8 * self.threads for kind in self.outputs])
        for j, (kind, start) in enumerate(zip(self.outputs, starts, strict=True)):
            size = BITS[kind] // 8
            lines.append(f"mad.wide.u32 %p, %g, {size}, %out;")
            if kind == "pred":
                lines.append(f"selp.b16 %h, 1, 0, %o{j}; st.global.u8 [%p+{start}], %h;")
            else:
                lines.append(f"st.global.{kind} [%p+{start}], %o{j};")
        kinds = [kind.split(":")[-1] for kind in self.inputs]
        return Case(
            self.name,
            self.family,
            "\n  ".join(registers + lines),
            tuple(Part(kind, self.threads) for kind in kinds),
            tuple(Part(f"u{BITS[kind] // 8}", self.threads) for kind in self.outputs),
            threads=block,
            blocks=self.threads // block,
            ulps=self.ulps,
        )


def save_scalar(instructions: Sequence[Instruction]) -> None:
    """Write scalar.json."""
    DATA.mkdir(parents=True, exist_ok=True)
    rows = (
        [i.name, i.text, i.outputs, i.inputs, i.family, i.threads, i.ulps] for i in instructions
    )
    lines = ",\n".join(json.dumps(row) for row in rows)
    (DATA / "scalar.json").write_text(f"[\n{lines}\n]\n")


def load_scalar() -> list[Instruction]:
    return [
        Instruction(name, text, tuple(outputs), tuple(inputs), family, threads, ulps)
        for name, text, outputs, inputs, family, threads, ulps in json.loads(
            (DATA / "scalar.json").read_text()
        )
    ]


@functools.cache
def load() -> tuple[Case, ...]:
    """All cases."""
    from . import barriers, copies, illegal, matrix, memory, warps

    found = [instruction.case() for instruction in load_scalar()]
    for module in (warps, memory, matrix, barriers, copies, illegal):
        found += module.cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})
    return tuple(found)


# ---- kernels


def kernel_name(number: int) -> str:
    return f"case_{number}"


def module(cases: Sequence[Case], first: int = 0, target: str = "sm_90a") -> str:
    """PTX with one kernel a case, numbered from `first`."""
    head = [
        f".version 8.7\n.target {target}\n.address_size 64",
        ".extern .shared .align 1024 .b8 smem[];",
    ]
    for number, case in enumerate(cases, first):
        head.append(_kernel(case, number).replace("$K", str(number)))
    return "\n".join(head)


def _kernel(case: Case, number: int) -> str:
    parameters = [".param .b64 in", ".param .b64 out"]
    parameters += [f".param .align 64 .b8 map{i}[128]" for i in range(len(case.maps))]
    if case.block:
        parameters.append(f".param .align 16 .b8 block[{BLOCK_BYTES}]")
    cluster = f".explicitcluster\n.reqnctapercluster {case.cluster}, 1, 1\n"
    body = [
        ".reg .b64 %in, %out;", ".reg .b32 %t, %g;",
        "ld.param.b64 %in, [in];", "ld.param.b64 %out, [out];",
        "cvta.to.global.u64 %in, %in;", "cvta.to.global.u64 %out, %out;",
        "mov.u32 %t, %ctaid.x;", "mov.u32 %g, %ntid.x;", "mul.lo.u32 %g, %t, %g;",
        "mov.u32 %t, %tid.x;", "add.u32 %g, %g, %t;",
        case.body.strip(), "ret;",
    ]  # fmt: skip
    return (
        (f"{case.header}\n" if case.header else "")
        + f".visible .entry {kernel_name(number)}({', '.join(parameters)})\n"
        + (cluster if case.cluster > 1 else "")
        + f".maxntid {case.threads}, 1, 1\n"
        + "{\n  "
        + "\n  ".join(body)
        + "\n}\n"
    )
