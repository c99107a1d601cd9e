"""The packed program that the engine runs, with the names that reports need."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from .ptx import Function, Instruction, Location, Module
from .variables import ModuleMemory

_TID = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
_CLUSTER = [
    f"%{name}.{axis}"
    for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
    for axis in "xyz"
]
# In the order of the enumeration SR_ in engine.h.
SPECIAL_REGISTERS = tuple(
    [*_TID, *_CLUSTER, "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster"]
    + ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid"]
    + [f"%lanemask_{order}" for order in ("eq", "le", "lt", "ge", "gt")]
    + ["%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"]
    + ["%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size"]
)

# OperandKind of engine.h.
K_NONE, K_REG, K_PRED, K_IMM, K_LIST = range(5)
K_SREG, K_ADDRESS, K_SHARED_SYM, K_LOCAL_SYM, K_PARAM_SYM = range(5, 10)

OPERAND = struct.Struct("<BBBBiiiQ")
INSTRUCTION = struct.Struct("<10i12h")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel: its place in the parameter memory of a launch."""

    name: str
    type: str
    offset: int
    bytes: int
    element_bytes: int


@dataclass(eq=False)
class Program:
    """A kernel packed for the engine, with the PTX names that reports need."""

    name: str
    module: Module
    kernel: Function
    memory: ModuleMemory
    records: bytes
    operands: bytes
    header: tuple[int, ...]
    """nregs, reg_words, local_bytes, param_bytes, static_shared, reqntid, maxnreg, arch,
    launch_registers, keeps_registers"""
    parameters: tuple[Parameter, ...]
    strings: tuple[str, ...]
    """Names of called functions (F operands)."""
    opcodes: tuple[str, ...]
    """The distinct opcodes; `opcode_numbers` holds each instruction's index in this list."""
    opcode_numbers: tuple[int, ...]
    register_names: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    shared: dict[str, int]
    """Offsets of the shared variables; all dynamic variables begin at `static_shared`."""
    handles: dict[object, int] = field(default_factory=dict, repr=False)
    """Copies of the program, by engine; see `library.Engine.program`."""

    @property
    def static_shared(self) -> int:
        """Bytes of static shared memory, up to where the dynamic part begins."""
        return self.header[4]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, including padding."""
        return self.header[3]

    @property
    def forms(self) -> tuple[int, ...]:
        """The index of the form that executes each instruction."""
        return tuple(record[0] for record in INSTRUCTION.iter_unpack(self.records))

    def opcode(self, instruction: int) -> str:
        """The opcode of an instruction, with its modifiers."""
        return self.opcodes[self.opcode_numbers[instruction]]

    def line(self, instruction: int) -> int:
        """The line of the PTX text that an instruction is on."""
        return self.instructions[instruction].line

    def text(self, instruction: int) -> str:
        """The PTX of an instruction."""
        return self.module.line_text(self.line(instruction))

    def location(self, instruction: int) -> Location | None:
        """The source line of an instruction, if the PTX has line information."""
        return self.instructions[instruction].location
