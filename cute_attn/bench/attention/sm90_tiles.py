"""Instructions that a warp of an SM90 kernel executes for a tile, ours and FlashAttention-4's. The
kernels are the forward, and the backward's kernel of five products at head_dim 64 and 128."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...emulator.cubin import cubins
from ...kernels.attention.configs import SM90, head_dims
from ...kernels.attention.heuristics import backward_spec, forward_spec
from ...kernels.attention.table import find
from ...machine_code.disassembly import version
from ...machine_code.listing import Instruction
from ...machine_code.middle_tile import MMAS, middle_tile
from ..harness.environment import describe
from ..harness.progress import track
from ..harness.report import Report, Row
from . import programs
from .programs import OURS, THEIRS

if TYPE_CHECKING:
    from .. import peers

ARCH = "sm_90a"
SEQLEN = 4096  # length for FlashAttention-4's kernels; a tile depends only on the mask

# Opcodes by column. "uniform" has opcodes of the uniform data path, "other" all further opcodes.
KINDS = {
    "mma": MMAS,
    "exponentials": ("MUFU",),
    "fp32": ("FADD", "FMUL", "FFMA", "FMNMX"),
    "conversions": ("F2FP",),
    "masks": ("FSEL", "ISETP"),
    "branches": ("BRA",),
}
_KIND = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes}
COLUMNS = (*KINDS, "uniform", "other")

# Opcodes by which a middle tile is recognised beside its MMAs. The forward rounds P, and the
# rescaling of O has exponentials too. In the backward the stores of dK and dV round.
THROUGH = {"forward": ("F2FP",), "backward": ("MUFU",)}
ROUNDED = {"forward": 1, "backward": 2}  # tiles: P, and dS

NOTES = (
    "Counted is the shortest way of a consumer warp through its loop that has all MMAs of a tile: "
    "no mask where a branch avoids it, no waiting, no change of the tile of keys. A warp's share "
    "of a tile is `scores` for each lane.",
    '"fixed_clocks" adds up the stall counts that the compiler wrote into the instructions: the '
    "time that a warp with a scheduler to itself needs if it never waits. How they are encoded is "
    "not NVIDIA's word, but that of those who took the encoding apart (arXiv:1804.06826).",
    "Times depend on how the warps of an SM meet at its units; these counts do not show that.",
)


@dataclass(frozen=True)
class Case:
    """A kernel that both packages have."""

    direction: str
    head_dim: int
    causal: bool

    @property
    def name(self) -> str:
        return f"{self.direction} {self.head_dim} {'causal' if self.causal else 'dense'}"


CASES = tuple(
    Case(direction, head_dim, causal)
    for direction in ("forward", "backward")
    for head_dim in head_dims("backward_dq", SM90)
    for causal in (False, True)
    if (direction, head_dim) != ("backward", 256)  # FlashAttention-4's has other products
)
SHORT = (Case("backward", 128, False),)


def report(options: argparse.Namespace, nvdisasm: Path, captures: Path) -> Report:
    """The counts of all cases; with `options.short`, of a few cases."""
    cases = SHORT if options.short else CASES
    rows = [_of_ours(case) for case in track(cases, f"compiling {OURS}")]
    theirs, notes = _of_theirs(cases, captures)
    rows += theirs
    order = [case.name for case in cases]
    rows.sort(key=lambda row: (order.index(str(row["case"])), row["kernel"] != OURS))
    return Report(
        benchmark="sass-sm90",
        title="sm90: instructions of a warp for a tile, from machine code (nothing is measured)",
        environment=describe(options.argv, commit=options.commit),
        parameters={"arch": ARCH, "dtype": "bfloat16", "nvdisasm": version(nvdisasm)},
        rows=rows,
        notes=[*NOTES, *notes],
    )


def count(case: Case, kernel: str, cubin: bytes) -> Row:
    """Raises DisassemblyError, or ListingError if the kernel does not have the expected form."""
    instructions = middle_tile(cubin, THROUGH[case.direction])
    counts = Counter(map(_kind, instructions))
    scores = 2 * counts["conversions"] // ROUNDED[case.direction]
    return {
        "case": case.name,
        "kernel": kernel,
        "scores": scores,
        "instructions": len(instructions),
        "instructions_ratio": round(len(instructions) / scores, 2),
        "fixed_clocks": sum(i.stall or 0 for i in instructions),
        **{kind: counts[kind] for kind in COLUMNS},
    }


def _kind(instruction: Instruction) -> str:
    base = instruction.base
    return _KIND.get(base, "uniform" if base.startswith(("U", "R2UR")) else "other")


def _of_ours(case: Case) -> Row:
    fields: dict[str, Any] = dict.fromkeys(
        ("window_left", "softcap", "varlen_q", "varlen_k", "seqused_q", "seqused_k"), False
    )
    fields |= {"dtype": "bfloat16", "window_right": case.causal}
    spec: Any
    if case.direction == "forward":
        spec = forward_spec(
            ARCH, case.head_dim, scheduler="static", page_size=None, split=False, few=False,
            packed_heads=1, sink_dtype="none", lse=False, **fields,
        )  # fmt: skip
        kernel = find("forward", ARCH, case.head_dim)
    else:
        spec = backward_spec(ARCH, case.head_dim, of_keys=True, fused=True, partial=False, **fields)
        kernel = find("backward_fused", ARCH, case.head_dim)
    program = programs.our_program(kernel.kernel, spec, case.name, arch=ARCH)
    return count(case, OURS, program.cubin)


def _of_theirs(cases: Sequence[Case], captures: Path) -> tuple[list[Row], list[str]]:
    """The counts of FlashAttention-4, and notes on missing kernels. `captures` holds
    FlashAttention-4's compiled kernels; missing kernels are compiled first.
    """
    from .. import peers  # imports torch

    if reason := peers.missing("flash_attention_4"):
        return [], [f"without {THEIRS}: {reason}"]
    rows, missing = [], []
    for case, request in track(list(_requests(cases)), f"compiling {THEIRS}"):
        try:
            captured = request.capture(captures)
        except peers.CaptureError as error:
            last = str(error).strip().splitlines()[-1]
            missing.append(f"{THEIRS} has no {case.name}: {last}")
            continue
        function = captured.calls[0 if case.direction == "forward" else 1].function
        (cubin,) = cubins(Path(function.object_file).read_bytes())
        rows.append(count(case, THEIRS, cubin))
    return rows, missing


def _requests(cases: Sequence[Case]) -> Iterator[tuple[Case, peers.Request]]:
    from ..peers.flash_attention_4 import backward, forward

    for case in cases:
        given: dict[str, Any] = {
            "arch": ARCH, "head_dim": case.head_dim, "causal": case.causal, "seqlen_q": SEQLEN
        }  # fmt: skip
        if case.direction == "forward":
            yield case, forward(lse=False, **given)
        else:
            yield case, backward(**given)
