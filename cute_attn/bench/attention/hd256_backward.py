"""Machine code of the backward at head_dim 256, ours and FlashAttention-4's, by specialisation.

Both packages have a kernel for dQ and a kernel for dK and dV. Tiles and clusters differ, so the
kernels are compared by the clocks for 128 queries and 128 keys on a pair of SMs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...kernels.attention.spec import Hd256BackwardSpec
from ...kernels.attention.table import find
from ...machine_code import tile_model as model
from ...machine_code.disassembly import version
from ...machine_code.tile_model import LOAD, MMA, Geometry, Product, Role
from ..harness.environment import describe
from ..harness.progress import track
from ..harness.report import Report, Row, Verdict
from . import programs
from .analysis import NOTES, Analysed, analyse, counts, no_spills, presumed_shapes, summary, units
from .programs import ARCH, OURS, THEIRS, Program

GOAL = 0.8  # share of FlashAttention-4's clocks, both kernels together
SEQLENS = (2048, 8192, 32768)
KIB = 1024


@dataclass(frozen=True)
class Specialisation:
    """A specialisation of our kernels, and FlashAttention-4's specialisation to compare with.

    Attributes:
        ours: fields of our spec that differ from the plain spec.
        theirs: options of FlashAttention-4's backward; None if FlashAttention-4 has no such
            specialisation.
        beside: if `theirs` is None, another specialisation; its `theirs` is compared with `ours`.
    """

    name: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] | None = None
    beside: str = ""


_VARLEN = {"varlen_q": True, "varlen_k": True}
_LENGTHS = {"seqlens_q": (256, 512)}
_CAUSAL = {"window_right": True}

BACKWARD = (
    Specialisation("dense", {}, {}),
    Specialisation("causal", _CAUSAL, {"causal": True}),
    Specialisation("varlen", _VARLEN, _LENGTHS),
    Specialisation("varlen causal", _VARLEN | _CAUSAL, {**_LENGTHS, "causal": True}),
    Specialisation("fp16", {"dtype": "float16"}, {"dtype": "float16"}),
    Specialisation("local", {**_CAUSAL, "window_left": True}, beside="causal"),
    Specialisation("softcap", {"softcap": True}, beside="dense"),
    Specialisation("one tile a cluster", {"scheduler": "single"}, beside="dense"),
    Specialisation("clc causal", {**_CAUSAL, "scheduler": "clc"}, beside="causal"),
)
SHORT = ("dense", "causal")

PLAIN = {
    "dtype": "bfloat16",
    "scheduler": "static",
    "window_left": False,
    "window_right": False,
    "softcap": False,
    "varlen_q": False,
    "varlen_k": False,
    "seqused_q": False,
    "seqused_k": False,
}

# -- what a tile of each kernel is ----------------------------------------------------------------

# In all kernels S and dP have 256 terms, and the product with P or dS has 128.
SCORES_256, SCORES_128 = Product((256, 128, 16), 16), Product((128, 128, 16), 16)
FROM_TMEM = Product((256, 256, 16), 8, a_in_tmem=True)
FROM_SHARED = Product((128, 256, 16), 8)

DQ, DKDV, VALUE, KEY = "dQ", "dK/dV", "dK/dV, value pair", "dK/dV, key pair"

# dQ, both: S = Q K^T, dP = dO V^T, dQ += dS K with dS in tensor memory. K, V and the columns of K
# arrive, 32 KiB each: ten boxes. FlashAttention-4's kernel has one thread for a row; our kernel has
# two.
THEIR_DQ = Geometry(
    tile=(256, 128),
    cluster=2,
    head_dim=256,
    ctas=2,
    products=(SCORES_256, SCORES_256, FROM_TMEM),
    loads=10,
    filled_bytes=96 * KIB,
    roles={"load": LOAD, "mma": MMA, "elementwise": Role(4, model.exponentiates, columns=256)},
)
OUR_DQ = Geometry(
    tile=(256, 128),
    cluster=2,
    head_dim=256,
    ctas=2,
    products=(SCORES_256, SCORES_256, FROM_TMEM),
    loads=10,
    filled_bytes=96 * KIB,
    roles={
        "load": LOAD,
        "mma": MMA,
        "elementwise": Role(8, partial(model.exponentiates, at_least=16), columns=128),
    },
)

# FlashAttention-4's dK/dV: every operand is in shared memory. Q and dO arrive twice, as rows and as
# columns.
THEIR_DKDV = Geometry(
    tile=(128, 128),
    cluster=2,
    head_dim=256,
    ctas=2,
    products=(SCORES_128, SCORES_128, FROM_SHARED, FROM_SHARED),
    loads=12,
    filled_bytes=128 * KIB,
    roles={
        "load": LOAD,
        "mma": MMA,
        "elementwise": Role(
            8, partial(model.exponentiates, at_least=16), columns=64, broadcast=2 * 32
        ),
    },
)


def _our_pair(owns: Any, exchanged: int) -> Geometry:
    """A pair of our dK/dV kernel: one pair makes S^T and dV, the other pair makes dP^T and dK. Each
    pair loads Q and dO.
    """
    return Geometry(
        tile=(128, 256),
        cluster=4,
        head_dim=256,
        ctas=2,
        products=(SCORES_256, FROM_TMEM),
        loads=6,
        filled_bytes=64 * KIB + 512 + exchanged,
        roles={"load": LOAD, "mma": MMA, "elementwise": Role(8, owns, columns=64, broadcast=64)},
    )


OUR_VALUE_PAIR = _our_pair(partial(model.exponentiates, at_least=16), 0)
OUR_KEY_PAIR = _our_pair(model.rescales, 32 * KIB)  # P of the value pair arrives

PARTS: dict[tuple[str, str], dict[str, Geometry]] = {
    (OURS, DQ): {DQ: OUR_DQ},
    (OURS, DKDV): {VALUE: OUR_VALUE_PAIR, KEY: OUR_KEY_PAIR},
    (THEIRS, DQ): {DQ: THEIR_DQ},
    (THEIRS, DKDV): {DKDV: THEIR_DKDV},
}

# -- compiling ------------------------------------------------------------------------------------


def our_programs(specialisation: Specialisation) -> dict[str, Program]:
    """Our dQ and dK/dV kernels."""
    spec = Hd256BackwardSpec(**{**PLAIN, **specialisation.ours})
    return {
        part: programs.our_program(find(direction, ARCH, 256).kernel, spec, specialisation.name)
        for part, direction in ((DQ, "backward_dq"), (DKDV, "backward_dkdv"))
    }


def their_programs(
    specialisations: Sequence[Specialisation], directory: Path
) -> tuple[list[tuple[str, Program]], list[str]]:
    """FlashAttention-4's dQ and dK/dV kernels, and notes on failures.

    Raises:
        ImportError: FlashAttention-4 is not installed.
    """
    from ..peers.flash_attention_4 import backward  # imports torch

    requests = [
        (s.name, backward(arch=ARCH, head_dim=256, seqlen_q=512, **s.theirs))
        for s in specialisations
        if s.theirs is not None
    ]
    found, missing = programs.their_programs(requests, directory, call=1)  # after the preprocess
    return [(DKDV if "dkdv" in p.name else DQ, p) for p in found], missing


# -- the report -----------------------------------------------------------------------------------

BACKWARD_NOTES = (
    "Counted is the way through a role's loop that a tile in the middle takes: no mask and no "
    "waiting. Predicated instructions count as if they were carried out: they take their issue "
    "slot either way.",
    "Shared memory: what TMA and st.async of other CTAs write, what MMAs read (each SM its part of "
    "A and B), and accesses of the warps themselves, of which a load of the same words by all "
    "lanes takes one clock. Tensor memory: accesses of the warps.",
    "Each kernel has its own tile: `square_clocks` are the busiest unit's clocks for 128 queries "
    "and 128 keys on a pair of SMs. In our dK/dV kernel two pairs share a tile of 256 keys: one "
    "makes dV, the other dK, and the slower of them counts.",
    "A step is both kernels over all tiles of a head that have a visible pair; the preprocess "
    "kernels, which read o and do once, are not in it. In causal steps all tiles cost as much as "
    "one without a mask.",
)


def analyse_parts(program: Program, part: str, nvdisasm: Path) -> list[Analysed]:
    """The analyses of each kind of CTA of a kernel, dQ or dK/dV."""
    kinds = PARTS[program.kernel, part]
    return [analyse(program, nvdisasm, geometry, name) for name, geometry in kinds.items()]


def report(options: argparse.Namespace, nvdisasm: Path, captures: Path) -> Report:
    specialisations = [s for s in BACKWARD if s.name in SHORT or not options.short]
    compiled: list[tuple[str, Program]] = []
    for specialisation in track(specialisations, f"compiling {OURS}"):
        compiled += our_programs(specialisation).items()
    notes: list[str] = []
    try:
        theirs, missing = their_programs(specialisations, captures)
        compiled += theirs
        notes += missing
    except ImportError as error:
        notes.append(f"without {THEIRS}: {error}")
    analysed = [
        a
        for part, program in track(compiled, "taking apart")
        for a in analyse_parts(program, part, nvdisasm)
    ]
    notes += presumed_shapes(analysed)
    order = [s.name for s in specialisations]
    analysed.sort(key=lambda a: (order.index(a.program.specialisation), a.program.kernel != OURS))
    name = f"sass-{options.kernel}"
    return Report(
        benchmark=name,
        title=f"{options.kernel}: what a tile costs, from machine code (nothing is measured)",
        environment=describe(options.argv, commit=options.commit),
        parameters={"arch": ARCH, "square": model.SQUARE, "nvdisasm": version(nvdisasm)},
        roofline={**model.RATES, "peak_tflops": model.PEAK_TFLOPS},
        rows=[_summary(a) for a in analysed],
        verdicts=verdicts(analysed, specialisations),
        notes=[*NOTES, *BACKWARD_NOTES, *notes],
        parts=[
            Report(
                f"{name}-counts",
                "Instructions of one warp for a tile, by role",
                environment={},
                rows=[row for a in analysed for row in counts(a)],
            ),
            Report(
                f"{name}-clocks",
                "Clocks that each unit of an SM is busy with a tile",
                environment={},
                rows=[units(a) for a in analysed],
            ),
            Report(
                f"{name}-steps",
                "Clocks of both kernels for a head of a training step, on a pair of SMs",
                environment={},
                rows=list(_steps(analysed)),
            ),
        ],
    )


def _summary(analysed: Analysed) -> Row:
    queries, keys = analysed.geometry.tile
    tile = {"tile": f"{queries}x{keys} on {analysed.geometry.cluster} SMs"}
    return summary(analysed) | tile | {"square_clocks": round(square_clocks(analysed))}


def square_clocks(analysed: Analysed) -> float:
    """The busiest unit's clocks for 128 queries and 128 keys on a pair of SMs."""
    return analysed.tile.clocks.bound / analysed.geometry.squares


def step_clocks(
    analysed: Sequence[Analysed], kernel: str, specialisation: str, seqlen: int, causal: bool
) -> float | None:
    """Both kernels' clocks for the backward of one head on a pair of SMs; None if a kernel is
    missing."""
    clocks = {
        a.part: a.tile.clocks.bound
        * a.geometry.tiles(seqlen, causal)
        * (a.geometry.cluster / 2)  # pairs of SMs that the tile takes
        for a in analysed
        if (a.program.kernel, a.program.specialisation) == (kernel, specialisation)
    }
    if DQ not in clocks or len(clocks) == 1:
        return None
    return clocks.pop(DQ) + max(clocks.values())


def _steps(analysed: Sequence[Analysed]) -> Iterator[Row]:
    for specialisation in SHORT:
        for seqlen in SEQLENS:
            causal = specialisation == "causal"
            ours, theirs = (
                step_clocks(analysed, kernel, specialisation, seqlen, causal)
                for kernel in (OURS, THEIRS)
            )
            yield {
                "specialisation": specialisation,
                "seqlen": seqlen,
                "ours_clocks": None if ours is None else round(ours),
                "their_clocks": None if theirs is None else round(theirs),
                "clocks_ratio": ours / theirs if ours and theirs else None,
            }


def verdicts(
    analysed: Sequence[Analysed], specialisations: Sequence[Specialisation]
) -> list[Verdict]:
    """Our kernels do not spill, and take at most `GOAL` of the clocks of FlashAttention-4's
    kernels."""
    found = [no_spills(analysed)]
    for specialisation in specialisations:
        name, beside = specialisation.name, specialisation.beside or specialisation.name
        question = f"{name}: busiest units of both kernels, at most {GOAL:g} of theirs"
        if specialisation.beside:
            question += f" (theirs {beside})"
        # The clocks of one tile of each kernel, scaled to 128 queries and 128 keys.
        ours, theirs = (
            step_clocks(analysed, kernel, which, 2 * model.SQUARE, causal=False)
            for kernel, which in ((OURS, name), (THEIRS, beside))
        )
        found.append(_at_most(question, ours, theirs, 4))
    for short in SHORT:
        ours, theirs = (
            step_clocks(analysed, kernel, short, 8192, short == "causal")
            for kernel in (OURS, THEIRS)
        )
        found.append(_at_most(f"{short} step, 8192 tokens: at most {GOAL:g}", ours, theirs, 1))
    return found


def _at_most(question: str, ours: float | None, theirs: float | None, of: int) -> Verdict:
    if theirs is None or ours is None:
        return Verdict(question, None, f"{THEIRS if theirs is None else OURS} has none")
    detail = f"{ours / of:.0f} clocks, theirs {theirs / of:.0f}: {ours / theirs:.3f}"
    return Verdict(question, ours <= GOAL * theirs, detail)
