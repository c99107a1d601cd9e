"""Static analysis of attention kernels for Blackwell, ours beside FlashAttention-4's.

The machine code of each specialisation is taken apart with nvdisasm; `_sass_model` counts what a
K/V tile costs each warp role, and for how many clocks each unit of an SM is busy with it. Nothing
here is measured, and no GPU is needed: the bound says what a kernel cannot beat, not what it
reaches.

FlashAttention-4's kernels are left out where that package is missing (extras "test" and "bench").
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..emulator.cubin import cubins
from . import _sass_listing as listing
from . import _sass_model as model
from .environment import describe
from .progress import track
from .registry import Benchmark, Unavailable
from .report import Report, Row, Verdict

if TYPE_CHECKING:
    from . import peers

ARCH = "sm_100a"
OURS, THEIRS = "cute_attn", "FlashAttention-4"
SOFTMAX = "warp: softmax"

# FlashAttention-4 pull request 2454, B200 at 1965 MHz, head_dim 256, bf16, 8 heads, non-causal,
# half of the exponentials on the FMA units: TFLOP/s by sequence length.
PUBLISHED_TFLOPS = {4096: 1488, 8192: 1608, 16384: 1680, 32768: 1726}


@dataclass(frozen=True)
class Specialisation:
    """One form of a kernel.

    Attributes:
        ours: fields of our Spec that are not the plain one's.
        theirs: options of FlashAttention-4's forward; None: it has no such form.
        beside: the specialisation whose form of theirs this one is compared with.
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any] | None = None
    beside: str = ""


_VARLEN = {"varlen_q": True, "varlen_k": True}
_LENGTHS = {"seqlens_q": (256, 512)}
_LOCAL = {"window_left": True, "window_right": True}

FORWARD = (
    Specialisation("non-causal", {}, {}),
    Specialisation("causal", {"window_right": True}, {"causal": True}),
    Specialisation("local", _LOCAL, {"window": (256, 0)}),
    Specialisation("varlen", _VARLEN, _LENGTHS),
    Specialisation(
        "varlen causal", {**_VARLEN, "window_right": True}, {**_LENGTHS, "causal": True}
    ),
    Specialisation("softcap", {"softcap": True}, {"softcap": 30.0}),
    Specialisation("sink", {"sink_dtype": "bfloat16"}, {"learnable_sink": True}),
    Specialisation("fp16", {"dtype": "float16"}, {"dtype": "float16"}),
    Specialisation("packed heads", {"packed_heads": 8}, beside="non-causal"),
    Specialisation("without lse", {"lse": False}, {"lse": False}),
    Specialisation("one tile a cluster", {"scheduler": "single"}, beside="non-causal"),
    Specialisation("clc", {"scheduler": "clc"}, beside="non-causal"),
    Specialisation("clc causal", {"scheduler": "clc", "window_right": True}, beside="causal"),
    Specialisation(
        "clc varlen causal",
        {**_VARLEN, "scheduler": "clc", "window_right": True},
        beside="varlen causal",
    ),
)
SHORT = ("non-causal", "causal")
KERNELS = ("hd256-fwd",)

_PLAIN_FORWARD = {
    "dtype": "bfloat16",
    "scheduler": "static",
    "packed_heads": 1,
    "window_left": False,
    "window_right": False,
    "softcap": False,
    "sink_dtype": "none",
    "varlen_q": False,
    "varlen_k": False,
    "seqused_q": False,
    "seqused_k": False,
    "lse": True,
}


@dataclass(frozen=True)
class Program:
    """One compiled kernel.

    Attributes:
        spilled: bytes that ptxas says it spills; None if it was not asked.
        shared: bytes of shared memory of a CTA, static and dynamic.
    """

    kernel: str
    specialisation: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    registers: int
    stack: int
    spilled: int | None
    shared: int | None


@dataclass(frozen=True)
class Analysed:
    program: Program
    counted: model.KernelCount
    clocks: model.Clocks
    rescaling: model.Clocks  # where every tile moves the maximum
    shapes_checked: bool  # of the MMAs, by what the PTX says; else they are only presumed


# -- programs -------------------------------------------------------------------------------------


def our_program(specialisation: Specialisation) -> Program:
    """Compile ours, or take it from the cache.

    Raises:
        Unavailable: there is no compiler.
        cute_attn.cache.CompileError: it does not compile.
    """
    if importlib.util.find_spec("cutlass") is None:
        raise Unavailable("needs nvidia-cutlass-dsl, which is not installed")
    from .. import cache, launch
    from ..kernels.attention.spec import Hd256ForwardSpec

    spec = Hd256ForwardSpec(**{**_PLAIN_FORWARD, **specialisation.ours})
    entry = cache.compile(launch.HD256_FORWARD, spec, arch=ARCH)
    (cubin,) = cubins(entry.read("kernel.o"))
    (use,) = entry.kernels
    dynamic = use.dynamic_shared
    return Program(
        OURS,
        specialisation.name,
        cubin,
        entry.read("kernel.ptx").decode(),
        use.registers,
        use.stack,
        use.spills,
        None if dynamic is None else use.static_shared + dynamic,
    )


def their_programs(
    specialisations: Sequence[Specialisation], directory: Path
) -> tuple[list[Program], list[str]]:
    """FlashAttention-4's, compiled into `directory` where they are not there, and what is missing.

    Raises:
        ImportError: FlashAttention-4 is not here.
    """
    from . import peers  # imports torch

    if reason := peers.missing("flash_attention_4"):
        raise ImportError(reason)
    programs, missing = [], []
    for specialisation in specialisations:
        if specialisation.theirs is None:
            continue
        request = peers.flash_attention_4.forward(
            arch=ARCH, head_dim=256, seqlen_q=512, **specialisation.theirs
        )
        try:
            captured = request.capture(directory)
        except peers.CaptureError as error:
            last = str(error).strip().splitlines()[-1]
            missing.append(f"{THEIRS} has no {specialisation.name}: {last}")
            continue
        programs.append(_their_program(specialisation.name, captured))
    return programs, missing


def _their_program(name: str, captured: peers.Captured) -> Program:
    from ..cache.cubin import kernel_uses

    (call,) = captured.calls
    (cubin,) = cubins(Path(call.function.object_file).read_bytes())
    (use,) = kernel_uses(cubin, ptxas_log="", host_code="")
    dynamic = _dynamic_shared(captured)
    return Program(
        THEIRS,
        name,
        cubin,
        call.function.ptx,
        use.registers,
        use.stack,
        use.spills,
        None if dynamic is None else use.static_shared + dynamic,
    )


def _dynamic_shared(captured: peers.Captured) -> int | None:
    """What the host code asks for when it launches: it is run, but nothing is launched."""
    from ..emulator import EmulatorUnavailable
    from ..emulator.host import HostFunction, Launch

    (call,) = captured.calls
    launches: list[Launch] = []
    try:
        function = HostFunction(
            Path(call.function.object_file).read_bytes(),
            "k",
            launches.append,
            num_sms=model.SMS,
            capability=(10, 0),
        )
    except EmulatorUnavailable:  # no C compiler to link with
        return None
    memory = captured.materialise(captured.random_inputs())
    function(*memory.arguments(call))
    (launch,) = launches
    return launch.dynamic_shared


# -- disassembly ----------------------------------------------------------------------------------


def find_nvdisasm() -> Path:
    """nvdisasm: $NVDISASM, the one on PATH, that of a CUDA toolkit, of nvidia-cuda-nvdisasm, or of
    triton.

    Raises:
        Unavailable: there is none.
    """
    if (named := os.environ.get("NVDISASM")) and Path(named).is_file():
        return Path(named)
    if found := shutil.which("nvdisasm"):
        return Path(found)
    candidates = [
        Path(home) / "bin"
        for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
        if home
    ]
    for package, folder in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        places = (spec.submodule_search_locations or ()) if spec else ()
        candidates += [Path(place) / folder for place in places]
    for candidate in candidates:
        if (candidate / "nvdisasm").is_file():
            return candidate / "nvdisasm"
    raise Unavailable(
        "needs nvdisasm, of a CUDA toolkit 12.8 or later (on PATH, or in $CUDA_HOME/bin), of "
        "nvidia-cuda-nvdisasm (the extra test) or triton 3.6 (the extra bench), or named by "
        "$NVDISASM"
    )


def disassemble(cubin: bytes, nvdisasm: Path) -> str:
    """The listing of a cubin, with encodings.

    Raises:
        Unavailable: this nvdisasm does not know the architecture.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [nvdisasm, "-c", "-hex", file.name],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode:
        raise Unavailable(f"{nvdisasm} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def analyse(program: Program, nvdisasm: Path, geometry: model.Geometry) -> Analysed:
    """Raises AnalysisError where the kernel is not of the expected form."""
    (function,) = listing.functions(disassemble(program.cubin, nvdisasm))
    checked = model.check_shapes(program.ptx, geometry)
    counted = model.count_kernel(function, geometry)
    return Analysed(
        program,
        counted,
        model.clocks(counted, geometry),
        model.clocks(counted, geometry, rescale=1.0),
        checked,
    )


# -- the report -----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", choices=KERNELS, help="which kernel")
    parser.add_argument(
        "--captures",
        type=Path,
        help="directory that keeps FlashAttention-4's compiled kernels (default: a temporary one)",
    )


@contextmanager
def _captures(options: argparse.Namespace) -> Iterator[Path]:
    if options.captures is not None:
        options.captures.mkdir(parents=True, exist_ok=True)
        yield options.captures
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


def run(options: argparse.Namespace) -> Report:
    nvdisasm = find_nvdisasm()
    specialisations = [s for s in FORWARD if s.name in SHORT or not options.short]
    geometry = model.HD256_FORWARD
    programs = [our_program(s) for s in track(specialisations, f"compiling {OURS}")]
    notes: list[str] = []
    try:
        with _captures(options) as directory:
            theirs, missing = their_programs(specialisations, directory)
        programs += theirs
        notes += missing
    except ImportError as error:
        notes.append(f"without {THEIRS}: {error}")
    analysed = [analyse(p, nvdisasm, geometry) for p in track(programs, "taking apart")]
    if presumed := [a.program for a in analysed if not a.shapes_checked]:
        names = ", ".join(f"{p.kernel} {p.specialisation}" for p in presumed)
        notes.append(f"the shapes of the MMAs are presumed, not read from the PTX: {names}")
    order = [s.name for s in specialisations]
    analysed.sort(key=lambda a: (order.index(a.program.specialisation), a.program.kernel != OURS))
    environment = describe(options.argv, commit=options.commit)
    return Report(
        benchmark=f"sass-{options.kernel}",
        title=f"{options.kernel}: what a K/V tile costs, from machine code (nothing is measured)",
        environment=environment,
        parameters={
            "arch": ARCH,
            "rows_of_a_cta": geometry.rows,
            "keys_of_a_tile": geometry.keys,
            "mma_score": geometry.score_mma,
            "mma_output": geometry.output_mma,
            "nvdisasm": _version(nvdisasm),
        },
        roofline={**model.RATES, "peak_tflops": model.PEAK_TFLOPS},
        rows=[_summary(a) for a in analysed],
        verdicts=verdicts(analysed, specialisations),
        notes=[*NOTES, *notes, *_calibration_notes(analysed)],
        parts=[
            Report(
                f"sass-{options.kernel}-counts",
                "Instructions of one warp for a K/V tile, by role",
                environment={},
                rows=[row for a in analysed for row in _counts(a)],
            ),
            Report(
                f"sass-{options.kernel}-clocks",
                "Clocks that each unit of an SM is busy with a K/V tile",
                environment={},
                rows=[_units(a) for a in analysed],
            ),
            Report(
                f"sass-{options.kernel}-calibration",
                f"The model beside what was published for {THEIRS}, non-causal",
                environment={},
                rows=_calibration(analysed),
            ),
        ],
    )


NOTES = (
    "A static analysis of machine code. The bound is the busiest unit's time, as if all units "
    "overlapped without a gap, at the boost clock. Latencies, barriers between roles, launch, "
    "prologue, epilogue, partial waves, caches and power are not in it.",
    "Counted is the way through a role's loop that a tile in the middle takes: no mask, no "
    "waiting, and no rescaling of O, which follows from a maximum that grows by a factor of more "
    "than 2^8. `bound_if_rescaling` is for the case that every tile rescales. Predicated "
    "instructions count as if they were carried out: they take their issue slot either way.",
    '"warp: ROLE" adds up the stall counts that the compiler wrote into the instructions: the '
    "time that a warp with a scheduler to itself needs for a tile if it never waits for a result "
    "of the SFU, tensor memory or a barrier. How they are encoded is not NVIDIA's word, but that "
    "of those who took the encoding apart (arXiv:1804.06826).",
    "A packed instruction (FFMA2, FADD2, FMUL2) has two lanes of fp32 for each thread. Issue slots "
    "are those of the scheduler that has a softmax, a correction and the busier of the load and "
    "mma warps. Shared memory: what TMA writes, what MMAs read (each SM its own half of B), and "
    "accesses of the warps themselves. Tensor memory: accesses of the warps.",
    "Both kernels give the tensor cores the same work, so that where these are the busiest unit "
    "the bounds are equal by construction; what may then differ is the slack of the others.",
    "Rates: MMA, SFU, shared memory as in FlashAttention-4's paper; fp32 and integer as in the "
    "CUDA C++ Programming Guide; tensor memory 57 bytes a clock and warp as measured by "
    "github.com/ademeure/QuickRunCUDA, half of that for writing as in arXiv:2512.02189 (16 and "
    "8 TB/s).",
)


def _summary(analysed: Analysed) -> Row:
    program, clocks = analysed.program, analysed.clocks
    first, second = clocks.order[:2]
    return {
        "specialisation": program.specialisation,
        "kernel": program.kernel,
        "registers": program.registers,
        "spilled_bytes": program.spilled,
        "local_accesses": analysed.counted.local_accesses,
        "shared_bytes": program.shared,
        "instructions": analysed.counted.instructions,
        "busiest": first,
        "bound_clocks": round(clocks.bound),
        "next_busiest": second,
        "next_clocks": round(clocks.units[second]),
        "share_of_peak": clocks.share_of_peak,
        "bound_tflops": clocks.share_of_peak * model.PEAK_TFLOPS,
        "bound_if_rescaling": round(analysed.rescaling.bound),
    }


def _counts(analysed: Analysed) -> Iterator[Row]:
    roles = dict(analysed.counted.roles)
    if analysed.counted.rescale is not None:
        roles["correction, rescaling"] = analysed.counted.rescale
    for role, counted in roles.items():
        yield {
            "specialisation": analysed.program.specialisation,
            "kernel": analysed.program.kernel,
            "role": role,
            "instructions": round(counted.instructions),
            **{kind: round(counted.kinds[kind]) for kind in model.KINDS},
            "tmem_load_columns": round(counted.tmem_read / (4 * model.WARP)),
            "tmem_store_columns": round(counted.tmem_written / (4 * model.WARP)),
            "scheduled_clocks": round(counted.schedule),
        }


def _units(analysed: Analysed) -> Row:
    return {
        "specialisation": analysed.program.specialisation,
        "kernel": analysed.program.kernel,
        **{unit: round(time) for unit, time in analysed.clocks.units.items()},
    }


def _plain(analysed: Sequence[Analysed], kernel: str) -> Analysed | None:
    return next(
        (
            a
            for a in analysed
            if a.program.kernel == kernel and a.program.specialisation == "non-causal"
        ),
        None,
    )


def _calibration(analysed: Sequence[Analysed]) -> list[Row]:
    theirs = _plain(analysed, THEIRS)
    if theirs is None:
        return []
    predicted = theirs.clocks.share_of_peak * model.PEAK_TFLOPS
    return [
        {
            "seqlen": seqlen,
            "published_tflops": published,
            "published_share_of_peak_ratio": published / model.PEAK_TFLOPS,
            "bound_tflops": predicted,
            "bound_to_published_ratio": predicted / published,
        }
        for seqlen, published in PUBLISHED_TFLOPS.items()
    ]


def _calibration_notes(analysed: Sequence[Analysed]) -> list[str]:
    theirs = _plain(analysed, THEIRS)
    if theirs is None:
        return []
    predicted = theirs.clocks.share_of_peak * model.PEAK_TFLOPS
    off = [predicted / published for published in PUBLISHED_TFLOPS.values()]
    return [
        f"How far off: for {THEIRS} the bound is {min(off):.2f} to {max(off):.2f} times what was "
        f"published at {min(PUBLISHED_TFLOPS)} to {max(PUBLISHED_TFLOPS)} keys. Those numbers are "
        "of an earlier kernel of theirs (pull request 2454), which emulated half of the "
        "exponentials; the one analysed here emulates fewer. What the model leaves out costs that "
        "much: a bound that two kernels share does not make them equally fast."
    ]


def verdicts(
    analysed: Sequence[Analysed], specialisations: Sequence[Specialisation]
) -> list[Verdict]:
    """That ours does not spill, and is not above theirs on the unit that limits it."""
    at = {(a.program.kernel, a.program.specialisation): a for a in analysed}
    ours = [a for a in analysed if a.program.kernel == OURS]
    spilling = [
        a.program.specialisation
        for a in ours
        if a.program.spilled != 0 or a.counted.local_accesses or a.program.stack
    ]
    found = [
        Verdict(
            f"none of {len(ours)} specialisations of ours spills",
            not spilling,
            ", ".join(spilling) or "no spilled bytes, no stack, no local memory",
        )
    ]
    for specialisation in specialisations:
        name = specialisation.name
        other = at.get((THEIRS, specialisation.beside or name))
        question = f"{name}: ours is not above theirs on the busiest unit"
        if specialisation.beside:
            question += f" (theirs {specialisation.beside})"
        if other is None:
            found.append(Verdict(question, None, f"{THEIRS} has none"))
            continue
        mine, its = at[OURS, name].clocks, other.clocks
        found.append(
            Verdict(
                question,
                round(mine.bound) <= round(its.bound),
                f"{mine.order[0]} {mine.bound:.0f} clocks, theirs {its.order[0]} {its.bound:.0f}",
            )
        )
    pairs = [
        (s.name, at[OURS, s.name], at[THEIRS, s.beside or s.name])
        for s in specialisations
        if (THEIRS, s.beside or s.name) in at
    ]
    longer = [
        f"{name} {mine.clocks.units[SOFTMAX]:.0f} to {its.clocks.units[SOFTMAX]:.0f}"
        for name, mine, its in pairs
        if round(mine.clocks.units[SOFTMAX]) > round(its.clocks.units[SOFTMAX])
    ]
    found.append(
        Verdict(
            "a softmax warp of ours takes no longer for a tile than theirs",
            not longer if pairs else None,
            "clocks: " + ", ".join(longer) if longer else f"in none of {len(pairs)}",
        )
    )
    return found


def _version(nvdisasm: Path) -> str:
    done = subprocess.run(
        [nvdisasm, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip().splitlines()[-1] if done.stdout else str(nvdisasm.name)


BENCHMARK = Benchmark(
    name="sass",
    summary="static analysis of a kernel's machine code beside FlashAttention-4's; needs no GPU",
    run=run,
    needs_gpu=False,
    add_arguments=add_arguments,
)
