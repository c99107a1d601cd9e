"""The cost of a loop over tiles of scores on a Blackwell SM: instructions by kind, clocks by unit.

A role's loop over tiles is recognised by its instructions. The model counts instructions on the
path of a tile in the middle, without a mask, without rescaling and without waiting. A unit's count
divided by its published rate is the number of clocks for which the unit is busy; the busiest unit
bounds the kernel.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .listing import Function, Instruction, Loop, functions

WARP = 32
SCHEDULERS = 4  # schedulers of an SM; each issues one instruction per clock, for every fourth warp
SQUARE = 128  # queries and keys, on a pair of SMs: a common unit for kernels with different tiles


class AnalysisError(ValueError):
    """A kernel has unexpected loops, so that a count could be wrong."""


@dataclass(frozen=True)
class Product:
    """A matrix product of a tile, made of MMAs that accumulate.

    Attributes:
        mma: (M, N, K) of an MMA, over all CTAs that share the MMA.
        mmas: number of MMAs.
        a_in_tmem: whether the first operand is in tensor memory, rather than in shared memory.
    """

    mma: tuple[int, int, int]
    mmas: int
    a_in_tmem: bool = False

    def flop(self, ctas: int) -> int:
        """FLOP of the product in one CTA."""
        m, n, k = self.mma
        return self.mmas * 2 * m * n * k // ctas

    def operand_bytes(self, ctas: int) -> int:
        """Bytes that the MMAs read from the shared memory of one CTA: the CTA's parts of A and
        B."""
        m, n, k = self.mma
        return self.mmas * 2 * (n + (0 if self.a_in_tmem else m)) * k // ctas


@dataclass(frozen=True)
class Role:
    """A warp role.

    Attributes:
        warps: number of warps with the role.
        owns: whether a loop with these instructions is the role's.
        columns: columns of tensor memory that a warp reads for a tile; 0 if the loop's loads or
            MMAs give its number of tiles instead.
        broadcast: words that a warp reads from shared memory for a tile in vectors of four words
            that are equal in all lanes: such a load takes a clock, other loads one per 128 bytes.
    """

    warps: int
    owns: Callable[[list[Instruction]], bool]
    columns: int = 0
    broadcast: int = 0


@dataclass(frozen=True)
class Geometry:
    """The work of one tile in one CTA.

    Attributes:
        tile: (queries, keys) of a cluster.
        cluster: CTAs of a cluster.
        ctas: number of CTAs that share an MMA.
        products: products of the CTAs that share MMAs.
        loads: TMA loads per tile.
        filled_bytes: bytes that other units and other CTAs write to the CTA's shared memory for a
            tile.
    """

    tile: tuple[int, int]
    cluster: int
    head_dim: int
    ctas: int
    products: tuple[Product, ...]
    loads: int
    filled_bytes: int
    roles: Mapping[str, Role]

    @property
    def squares(self) -> float:
        """Tiles of 128 queries by 128 keys in a pair of CTAs' part of a cluster's tile."""
        queries, keys = self.tile
        return queries * keys / SQUARE**2 / (self.cluster / 2)

    def tiles(self, seqlen: int, causal: bool) -> int:
        """The number of a head's tiles in which a query sees a key, with as many queries as
        keys."""
        queries, keys = self.tile
        lasts = range(queries, seqlen + queries, queries)
        return sum(-(-(min(last, seqlen) if causal else seqlen) // keys) for last in lasts)

    @property
    def flop(self) -> int:
        """FLOP of a tile in one CTA."""
        return sum(product.flop(self.ctas) for product in self.products)

    @property
    def operand_bytes(self) -> int:
        """Bytes that the MMAs of a tile read from the shared memory of one CTA."""
        return sum(product.operand_bytes(self.ctas) for product in self.products)

    def mmas(self, a_in_tmem: bool) -> int:
        """Number of a tile's MMAs with this kind of first operand."""
        return sum(p.mmas for p in self.products if p.a_in_tmem == a_in_tmem)


# -- kinds of instructions ------------------------------------------------------------------------

# An instruction's kind is the first that matches. The kinds are the columns of the table of counts.
KINDS: dict[str, str] = {
    "mma": r"UTC\w*MMA",
    "mufu_ex2": r"MUFU\.EX2",
    "mufu_other": r"MUFU",
    "packed_fma": r"FFMA2",
    "packed_add": r"FADD2",
    "packed_mul": r"FMUL2",
    "fp32_other": r"FADD|FMUL|FFMA|FMNMX3?|FSEL|FSETP|FSET|FCHK",
    "convert": r"F2FP|F2F|F2I|I2F|I2FP|FRND",
    "int_multiply": r"IMAD|IDP",  # its forms .MOV, .U32, .SHL copy and shift
    "move": r"MOV|CS2R|HFMA2|R2UR|S2R|S2UR",  # HFMA2 with -RZ, RZ loads a constant
    "uniform": r"U(?!TMA|TC|CGABAR)\w+|LDCU",
    "tmem_load": r"LDTM",
    "tmem_store": r"STTM",
    "shared": r"LDS|STS|ATOMS|LDSM|STSM",
    "barrier": r"SYNCS|BAR|UTCBAR|UCGABAR_\w+|DEPBAR|WARPSYNC|ELECT|FENCE|MEMBAR|STAS",
    "tma": r"UTMA\w+",
    "local": r"LDL|STL",
    "control": r"BRA|BRX|BSSY|BSYNC|NOP|EXIT|CALL|RET|NANOSLEEP|BREAK|VOTE|VOTEU",
    "integer": r"\w+",
}
_KINDS = {kind: re.compile(rf"(?:{pattern})(?:\.|$)") for kind, pattern in KINDS.items()}


def kind(instruction: Instruction) -> str:
    return next(k for k, pattern in _KINDS.items() if pattern.match(instruction.opcode))


# -- rates ----------------------------------------------------------------------------------------

# Rates of one SM per clock. Sources:
#   MMA, MUFU, shared memory: FlashAttention-4 (Zadouri et al., 2026), "feeds and speeds" of B200:
#     8192 dense bf16 FLOP, 16 MUFU operations, 128 bytes.
#   fp32, int: CUDA C++ Programming Guide, arithmetic throughput, compute capability 10.0: 128 lanes
#     for fp32 add, multiply and fma (a packed instruction has two of each lane), 64 for integer
#     multiplication, comparison, minimum, logic, shifts and conversions.
#   tensor memory: 57 bytes a clock for a warp of each of the four schedulers, as measured on a B300
#     for tcgen05.ld .x16 (github.com/ademeure/QuickRunCUDA, "D7"); times 148 SMs this is
#     the 16 TB/s of arXiv:2512.02189 for reading, if one warp of an SM did it. For writing the
# paper has half as much. The paper's text says "per SM", which no register file could take.
MMA_FLOP = 8192
MUFU_LANES = 16
FP32_LANES = 128
INT_LANES = 64
SHARED_BYTES = 128
TMEM_READ_BYTES = SCHEDULERS * 57
TMEM_WRITE_BYTES = TMEM_READ_BYTES / 2
SMS, BOOST_MHZ = 148, 1965  # B200, at the clock of the published numbers

RATES: dict[str, float | None] = {
    "mma_flop_per_clock_and_sm": MMA_FLOP,
    "mufu_per_clock_and_sm": MUFU_LANES,
    "fp32_lanes_per_clock_and_sm": FP32_LANES,
    "int_lanes_per_clock_and_sm": INT_LANES,
    "shared_bytes_per_clock_and_sm": SHARED_BYTES,
    "tmem_read_bytes_per_clock_and_sm": TMEM_READ_BYTES,
    "tmem_write_bytes_per_clock_and_sm": TMEM_WRITE_BYTES,
    "issue_slots_per_clock_and_sm": SCHEDULERS,
    "sms": SMS,
    "mhz": BOOST_MHZ,
}
PEAK_TFLOPS = MMA_FLOP * SMS * BOOST_MHZ / 1e6


# -- roles ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoleCount:
    """Counts for one warp of a role and one K/V tile; they may be fractions if a loop is unrolled.

    Attributes:
        kinds: instructions by kind.
        opcodes: instructions by opcode without modifiers.
        tmem_read, tmem_written, shared: bytes that the warp's own instructions move.
        schedule: sum of the compiler's stall counts in clocks: the least time of a warp that has
            its scheduler to itself and never waits. 0 if the listing has no counts.
    """

    instructions: float
    kinds: Mapping[str, float]
    opcodes: Mapping[str, float]
    tmem_read: float
    tmem_written: float
    shared: float
    schedule: float


@dataclass(frozen=True)
class KernelCount:
    """Counts of a kernel's roles.

    Attributes:
        rescale: counts of the correction role for a tile that rescales O; None if no tile does.
        local_accesses: loads and stores of local memory anywhere in the kernel: spills or arrays.
    """

    roles: Mapping[str, RoleCount]
    rescale: RoleCount | None
    local_accesses: int
    instructions: int


def _is(instruction: Instruction, *opcodes: str) -> bool:
    return any(instruction.opcode == o or instruction.opcode.startswith(f"{o}.") for o in opcodes)


def _is_mma(instruction: Instruction) -> bool:
    return kind(instruction) == "mma"


def _hands_over(instructions: Iterable[Instruction]) -> bool:
    """Whether the instructions wait for another role or signal another role, as in every tile."""
    return any(_is(i, "SYNCS", "BAR") for i in instructions)


def _columns(instructions: Iterable[Instruction], opcode: str) -> int:
    return sum(i.width for i in instructions if _is(i, opcode))


def count_kernel(function: Function, geometry: Geometry) -> KernelCount:
    """Find the roles' loops over tiles, and count one tile's instructions in each.

    Raises:
        AnalysisError: a role has no such loop, or its work is not a whole number of tiles.
    """
    loops = [(loop, function.within(loop)) for loop in function.loops()]
    tiled = [(loop, body) for loop, body in loops if _hands_over(body)]
    found: dict[str, RoleCount] = {}
    rescale = None
    for role, what in geometry.roles.items():
        inner = _innermost([loop for loop, body in tiled if what.owns(body)])
        if not inner:
            raise AnalysisError(f"{function.name}: no loop of the role {role}")
        ways = [_way(function, loop, role, geometry) for loop in inner]
        # Masked and unmasked tiles have a loop each; most tiles need no mask.
        loop, chosen = min(zip(inner, ways, strict=True), key=lambda w: w[1].instructions)
        found[role] = chosen
        if role == "correction":
            rescale = _rescaling(function, loop, geometry)
    local = sum(kind(i) == "local" for i in function.instructions)
    return KernelCount(found, rescale, local, len(function.instructions))


def _innermost(loops: list[Loop]) -> list[Loop]:
    return [a for a in loops if not any(b.blocks < a.blocks for b in loops)]


def _way(function: Function, loop: Loop, role: str, geometry: Geometry) -> RoleCount:
    """Counts of a tile in the middle: the shortest path with all of the role's work."""
    what = geometry.roles[role]
    body = function.within(loop)
    if any(_is_mma(i) for i in body):
        return _way_of_mmas(function, loop, role, geometry)
    if what.columns:
        blocks = function.path(loop, lambda i: float(_is(i, "LDTM", "STTM")))
        work = _columns(_of(function, blocks), "LDTM") / what.columns
    elif any(_is(i, "UTMALDG") for i in body):
        # Tiles in the middle load less than the first tile, which may load other operands too.
        exact = function.path_with(loop, lambda i: _is(i, "UTMALDG"), geometry.loads)
        blocks = exact or function.path(loop, lambda i: float(_is(i, "UTMALDG")))
        work = sum(_is(i, "UTMALDG") for i in _of(function, blocks)) / geometry.loads
    else:
        blocks = function.path(loop, lambda i: 0.0)
        work = 1
    if work < 1 or work != int(work):
        raise AnalysisError(f"{function.name}: the loop of the role {role} does {work:g} tiles")
    return _count(function, blocks, what, tiles=int(work))


def _way_of_mmas(function: Function, loop: Loop, role: str, geometry: Geometry) -> RoleCount:
    """Counts of a tile in a loop of MMAs. An inner loop, over parts of a product, counts as often
    as the tile's MMAs require."""
    blocks = function.path(loop, lambda i: float(_is_mma(i)))
    nested = _nested(function, loop, blocks)
    for tiles, times in itertools.product(range(1, 5), range(1, 9 if nested else 2)):
        repeated = dict.fromkeys(nested, times)
        made = Counter(
            _a_in_tmem(i, geometry)
            for block in blocks
            for _ in range(repeated.get(block, 1))
            for i in function.blocks[block]
            if _is_mma(i)
        )
        if all(made[kind] == tiles * geometry.mmas(kind) for kind in (False, True)):
            return _count(function, blocks, geometry.roles[role], tiles=tiles, times=repeated)
    mmas = sum(_is_mma(i) for i in _of(function, blocks))
    work = mmas / sum(product.mmas for product in geometry.products)
    raise AnalysisError(f"{function.name}: the loop of the role {role} does {work:g} tiles")


def _nested(function: Function, loop: Loop, blocks: Iterable[int]) -> list[int]:
    """The blocks that are in an inner loop without a wait for another role."""
    inner = [
        other.blocks
        for other in function.loops()
        if other.blocks < loop.blocks and not _hands_over(function.within(other))
    ]
    return [b for b in blocks if any(b in body for body in inner)]


def _rescaling(function: Function, loop: Loop, geometry: Geometry) -> RoleCount | None:
    """Counts of a tile that rescales O, with inner loops counted as often as they run."""
    blocks = function.path(loop, lambda i: float(_is(i, "LDTM", "STTM")))
    nested = _nested(function, loop, blocks)
    columns = _columns(_of(function, nested or blocks), "LDTM")
    if not columns or geometry.head_dim % columns:
        raise AnalysisError(f"{function.name}: rescaling reads {columns} columns of O at a time")
    times = dict.fromkeys(nested, geometry.head_dim // columns)
    return _count(function, blocks, geometry.roles["correction"], times=times)


def _of(function: Function, blocks: list[int]) -> list[Instruction]:
    return [i for block in blocks for i in function.blocks[block]]


def _count(
    function: Function,
    blocks: list[int],
    role: Role,
    tiles: int = 1,
    times: Mapping[int, int] | None = None,
) -> RoleCount:
    kinds: Counter[str] = Counter()
    opcodes: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for block in blocks:
        factor = (times or {}).get(block, 1)
        for instruction in function.blocks[block]:
            name = kind(instruction)
            moved = factor * WARP * 4 * instruction.width
            kinds[name] += factor
            opcodes[instruction.base] += factor
            totals["instructions"] += factor
            totals["schedule"] += factor * (instruction.stall or 0)
            if name in ("tmem_load", "tmem_store", "shared") and instruction.predicate != "!PT":
                totals[name] += moved
    return RoleCount(
        instructions=totals["instructions"] / tiles,
        kinds={name: kinds[name] / tiles for name in KINDS},
        opcodes={name: count / tiles for name, count in opcodes.items()},
        tmem_read=totals["tmem_load"] / tiles,
        tmem_written=totals["tmem_store"] / tiles,
        shared=totals["shared"] / tiles - role.broadcast * (WARP - 8) * 4,
        schedule=totals["schedule"] / tiles,
    )


def _a_in_tmem(instruction: Instruction, geometry: Geometry) -> bool:
    """Whether the first operand of an MMA is in tensor memory."""
    first = instruction.operands.partition("[")[0].strip()
    if first not in ("gdesc", "tmem") or ".2CTA" not in instruction.opcode or geometry.ctas != 2:
        raise AnalysisError(f"an MMA of another kind: {instruction.opcode} {instruction.operands}")
    return first == "tmem"


_DEFINED = re.compile(r"\s(mov|selp|or)\.b32\s+(\S+)\s*,\s*([^;]*);")
_MMA = re.compile(r"tcgen05\.mma\.cta_group::\S+\s+\[[^\]]*\]\s*,\s*([^,]+),[^,]+,\s*([^,\s]+)\s*,")


def check_shapes(ptx: str, geometry: Geometry) -> bool:
    """Compare the MMA shapes of `geometry` with the instruction descriptors in a kernel's PTX.

    A descriptor may be one of several constants, as long as the shape is the same in all constants.

    Returns:
        Whether all descriptors are known; descriptors that a kernel computes are not checked.

    Raises:
        AnalysisError: an MMA has a shape that no product of the geometry has.
    """
    constants: dict[str, frozenset[int]] = {}

    def values(operand: str) -> frozenset[int]:
        try:
            return frozenset({int(operand, 0)})
        except ValueError:
            return constants.get(operand, frozenset())

    known, mmas = 0, 0
    for line in ptx.splitlines():
        if match := _DEFINED.search(line):
            first, second, *_ = (*(o.strip() for o in match[3].split(",")), "")
            if match[1] == "or":
                found = frozenset(a | b for a in values(first) for b in values(second))
            elif match[1] == "selp":
                both = values(first), values(second)
                found = both[0] | both[1] if all(both) else frozenset()
            else:
                found = values(first)
            constants[match[2]] = found
        elif match := _MMA.search(line):
            mmas += 1
            in_tmem = match[1].startswith("[")
            expected = {p.mma for p in geometry.products if p.a_in_tmem == in_tmem}
            # PTX ISA, instruction descriptor of kind::f16: N / 8 in bits 17-22, M / 16 in 24-28.
            shapes = {((d >> 24 & 0x1F) * 16, (d >> 17 & 0x3F) * 8, 16) for d in values(match[2])}
            known += len(shapes) == 1
            if len(shapes) == 1 and not shapes <= expected:
                of_products = " or ".join(map(str, sorted(expected)))
                raise AnalysisError(
                    f"an MMA of shape {shapes.pop()}, not {of_products}: {line.strip()}"
                )
    return 0 < known == mmas


# -- geometries -----------------------------------------------------------------------------------


def loads(body: list[Instruction]) -> bool:
    """Whether the loop has TMA loads."""
    return any(_is(i, "UTMALDG") for i in body)


def multiplies(body: list[Instruction]) -> bool:
    """Whether the loop has MMAs."""
    return any(_is_mma(i) for i in body)


def exponentiates(body: list[Instruction], at_least: int = WARP) -> bool:
    """Whether the loop reads tensor memory, and has this many exponentials on the SFU."""
    found = sum(_is(i, "MUFU.EX2") for i in body)
    return found >= at_least and any(_is(i, "LDTM") for i in body)


def rescales(body: list[Instruction]) -> bool:
    """Whether the loop reads and writes tensor memory, without exponentials.

    The forward's epilogue also reads O, but does not write O back.
    """
    both = all(any(_is(i, o) for i in body) for o in ("LDTM", "STTM"))
    return both and not any(_is(i, "MUFU.EX2") for i in body)


LOAD, MMA = Role(1, loads), Role(1, multiplies)
KIB = 1024

# Both forwards: clusters of two CTAs with 128 rows each, 128 keys at a time. A TMA box is 128 bytes
# wide, so that half of the keys (K) come in four boxes, and half of the columns (V) in two boxes.
HD256_FORWARD = Geometry(
    tile=(256, 128),
    cluster=2,
    head_dim=256,
    ctas=2,
    products=(Product((256, 128, 16), 16), Product((256, 256, 16), 8, a_in_tmem=True)),
    loads=6,
    filled_bytes=64 * KIB,
    roles={
        "load": LOAD,
        "mma": MMA,
        "softmax": Role(4, exponentiates, columns=128),
        "correction": Role(4, rescales),
    },
)


# -- clocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clocks:
    """Clocks for which each unit of an SM is busy with one tile.

    Attributes:
        units: clocks by name. "warp: ROLE" is the time of a warp of the role alone.
        floor: clocks of the MMAs, a lower bound for every kernel.
    """

    units: Mapping[str, float]
    floor: float = field(repr=False)

    @property
    def order(self) -> list[str]:
        """The units, busiest first; of equally busy units, the MMA comes first."""
        return sorted(self.units, key=lambda unit: (-self.units[unit], unit != "mma"))

    @property
    def bound(self) -> float:
        return self.units[self.order[0]]

    @property
    def share_of_peak(self) -> float:
        return self.floor / self.bound


def clocks(counted: KernelCount, geometry: Geometry, *, rescale: float = 0.0) -> Clocks:
    """The clocks of a kernel.

    Args:
        rescale: the share of tiles after which O is rescaled.
    """
    mufu = lanes = integer = read = written = shared = 0.0
    issued: dict[str, float] = {}
    schedule: dict[str, float] = {}
    for role, plain in counted.roles.items():
        parts = [(1.0, plain)]
        if role == "correction" and counted.rescale is not None:
            parts = [(1.0 - rescale, plain), (rescale, counted.rescale)]
        warps = geometry.roles[role].warps
        # A scheduler has every fourth warp of a role.
        issued[role] = sum(w * part.instructions for w, part in parts) * max(1, warps // SCHEDULERS)
        schedule[role] = sum(w * part.schedule for w, part in parts)
        for weight, part in ((w * warps, part) for w, part in parts):
            kinds = part.kinds
            packed = kinds["packed_fma"] + kinds["packed_add"] + kinds["packed_mul"]
            plain_fp32 = sum(part.opcodes.get(o, 0.0) for o in ("FADD", "FMUL", "FFMA", "HFMA2"))
            mufu += weight * WARP * (kinds["mufu_ex2"] + kinds["mufu_other"])
            lanes += weight * WARP * (2 * packed + plain_fp32)
            # The integer multiplier is part of the fp32 pipe, at half of its width.
            lanes += weight * WARP * kinds["int_multiply"] * FP32_LANES / INT_LANES
            others = kinds["fp32_other"] - plain_fp32 + part.opcodes.get("HFMA2", 0.0)
            integer += weight * WARP * (others + kinds["convert"] + kinds["integer"])
            integer += weight * WARP * part.opcodes.get("MOV", 0.0)
            read += weight * part.tmem_read
            written += weight * part.tmem_written
            shared += weight * part.shared
    shared += geometry.filled_bytes + geometry.operand_bytes
    by_scheduler = [
        sum(issued[r] for r in issued if geometry.roles[r].warps >= SCHEDULERS),
        max((issued[r] for r in issued if geometry.roles[r].warps < SCHEDULERS), default=0.0),
    ]
    floor = geometry.flop / MMA_FLOP
    units = {
        "mma": floor,
        "mufu": mufu / MUFU_LANES,
        "fp32": lanes / FP32_LANES,
        "int": integer / INT_LANES,
        "issue": sum(by_scheduler),
        "shared memory": shared / SHARED_BYTES,
        "tmem read": read / TMEM_READ_BYTES,
        "tmem write": written / TMEM_WRITE_BYTES,
        **{f"warp: {role}": time for role, time in schedule.items()},
    }
    return Clocks(units, floor)


@dataclass(frozen=True)
class TileCost:
    """The cost of a tile in a kernel.

    Attributes:
        clocks: clocks of a tile after which O is not rescaled.
        rescaling: clocks of a tile after which O is rescaled.
        shapes_checked: whether the PTX confirms the shapes of all MMAs; else the shapes are
            assumed.
    """

    counted: KernelCount
    clocks: Clocks
    rescaling: Clocks
    shapes_checked: bool


def tile_cost(listing: str, ptx: str, geometry: Geometry, kernel: str = "") -> TileCost:
    """The cost of a tile in a kernel.

    Args:
        listing: output of `nvdisasm -c -hex`.
        ptx: PTX of the kernel's module.
        kernel: part of the kernel's name, if the listing and the module have several kernels.

    Raises:
        AnalysisError: the kernel does not match `geometry`.
        ListingError: the listing cannot be parsed.
    """
    (function,) = (f for f in functions(listing) if kernel in f.name)
    entries = ptx.split(".entry ")[1:] or [ptx]
    (own,) = (entry for entry in entries if kernel in entry.partition("(")[0])
    checked = check_shapes(own, geometry)
    counted = count_kernel(function, geometry)
    return TileCost(
        counted,
        clocks(counted, geometry),
        clocks(counted, geometry, rescale=1.0),
        checked,
    )
