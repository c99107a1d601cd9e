"""Lowering a parsed kernel to the packed program that the engine runs.

Registers get offsets in the register file. Labels become instruction numbers, and symbols become
offsets or addresses. Each instruction gets the form that executes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from .cubin import RegisterUse
from .forms import FormTable, Match, Plan, Token, UnsupportedInstruction
from .operands import (
    TYPE_BITS,
    Address,
    Immediate,
    Name,
    Negated,
    Operand,
    Pair,
    PtxError,
    Sink,
    TensorAddress,
    Vector,
    parse_operand,
)
from .program import (
    INSTRUCTION,
    K_ADDRESS,
    K_IMM,
    K_LIST,
    K_LOCAL_SYM,
    K_NONE,
    K_PARAM_SYM,
    K_PRED,
    K_REG,
    K_SHARED_SYM,
    K_SREG,
    OPERAND,
    SPECIAL_REGISTERS,
    Parameter,
    Program,
)
from .ptx import Function, Instruction, Module, Scope, Variable
from .registers import Register, place
from .variables import MASK64, ModuleMemory, align, immediate_bits

_SPECIAL_NUMBERS = {name: number for number, name in enumerate(SPECIAL_REGISTERS)}

_NO_OPERAND = bytes(OPERAND.size)

# These instructions access registers after the issue, or the engine tracks their registers one by
# one. Such registers must not share words with other registers.
_ASYNCHRONOUS = ("wgmma", "tcgen05")

_VECTOR_PARTS = {
    **dict(zip("xyzw", range(4), strict=True)),
    **dict(zip("rgba", range(4), strict=True)),
}


_TYPES = frozenset(TYPE_BITS)


@functools.cache
def _type_of(opcode: str, position: int) -> str:
    """The type of the source at a position: the opcode's last type in most cases."""
    head, *words = opcode.split(".")
    types = [word for word in words if word in _TYPES]
    if not types:
        return ""
    addend = position == (3 if head in ("fma", "mad") else 2)
    if head in ("fma", "add", "sub") and len(types) == 2 and addend:
        return types[0]  # mixed precision
    return "" if "wide" in words and addend and head == "mad" else types[-1]


# ---- resolved operands


class Value:
    """An operand with its names resolved. The choice of a form depends on its `shape`."""

    __slots__ = (
        "constant",
        "elements",
        "immediate",
        "kind",
        "label",
        "list_at",
        "negated",
        "parts",
        "record",
        "register",
        "shape",
        "sub",
        "variable",
    )

    def __init__(self, shape: str, kind: int) -> None:
        self.shape = shape
        self.kind = kind
        self.sub = 0
        self.negated = False
        self.register: Register | None = None
        self.immediate = 0
        self.constant: Immediate | None = None  # a constant as written; the form gives its type
        self.variable: Variable | None = None  # a .shared variable, whose offset is not known yet
        self.label: tuple[_Frame, int] | None = None
        self.elements: tuple[Value, ...] = ()
        self.parts: tuple[Value, ...] = ()  # the two entries of a pair or tensor address
        self.record: bytes | None = None
        self.list_at = -1

    def registers(self) -> Iterator[Register]:
        """The registers of the operand."""
        if self.register is not None:
            yield self.register
        for value in self.elements or self.parts:
            yield from value.registers()


_SINK = Value("_", K_NONE)
_SINK.record = _NO_OPERAND


def _register_shape(bits: int) -> str:
    return "p" if bits == 1 else "w" if bits <= 32 else "d" if bits == 64 else "q"


class _Frame:
    """One instance of a function: the kernel, or a device function inlined at a call."""

    def __init__(self, function: Function, parent: _Frame | None) -> None:
        self.function = function
        self.parent = parent
        self.values: dict[Scope, dict[Operand, Value]] = {}
        self.registers: dict[tuple[Scope, str], Register] = {}
        self.local: dict[Variable, int] = {}
        """Offsets of local variables and of call parameters in the thread's local memory."""
        self.positions: list[int] = []
        """Index of an instruction in the function -> its index in the program."""


class _Item:
    """An instruction of the program, before it is packed."""

    __slots__ = ("guard", "instruction", "match", "opcode", "values")

    def __init__(
        self,
        instruction: Instruction,
        opcode: str,
        guard: tuple[Register, bool] | None,
        match: Match,
        values: list[Value],
    ) -> None:
        self.instruction = instruction
        self.opcode = opcode
        self.guard = guard
        self.match = match
        self.values = values


def lower(
    module: Module,
    table: FormTable,
    kernel: str | None = None,
    memory: ModuleMemory | None = None,
    registers: RegisterUse | None = None,
) -> Program:
    """The program of one kernel of a module; `kernel` may be omitted if there is only one.

    `memory` holds the module's variables; kernels of one module share it. `registers` is the
    machine code's use of registers, if known.
    """
    function = module.kernel(kernel)
    return _Lowering(module, function, table, memory or ModuleMemory(module)).program(registers)


class _Lowering:
    def __init__(
        self, module: Module, kernel: Function, table: FormTable, memory: ModuleMemory
    ) -> None:
        self.module = module
        self.kernel = kernel
        self.table = table
        self.memory = memory
        self.items: list[_Item] = []
        self.registers: list[Register] = []
        self.strings: dict[str, int] = {}
        self.local_bytes = 0
        self.shared_used: dict[Variable, None] = {}
        self.shared_offsets: dict[Variable, int] = {}
        self.boundaries: set[int] = set()  # instructions that follow a label
        self.parameters = tuple(_parameter_layout(kernel.parameters))
        self.parameter_offsets = {item.name: item.offset for item in self.parameters}

    # -- the steps

    def program(self, registers: RegisterUse | None) -> Program:
        frame = _Frame(self.kernel, None)
        self._append_function(frame)
        self._append_exit(frame)
        self._place_shared()
        self._find_lives()
        register_words = place(self.registers)
        records, operands, opcodes = self._pack()
        end = max((item.offset + item.bytes for item in self.parameters), default=0)
        threads = 1
        for number in self.kernel.directive("reqntid"):
            threads *= number
        header = (
            len(self.registers),
            register_words,
            align(self.local_bytes, 16),
            end,
            self.static_shared,
            threads if self.kernel.directive("reqntid") else 0,
            self._most_registers(),
            self.module.arch,
            registers.registers if registers is not None else 0,
            int(registers is not None and not registers.sets_registers),
        )
        return Program(
            self.kernel.name,
            self.module,
            self.kernel,
            self.memory,
            records,
            operands,
            header,
            self.parameters,
            tuple(self.strings),
            tuple(opcodes),
            tuple(opcodes[item.opcode] for item in self.items),
            tuple(register.name for register in self.registers),
            tuple(item.instruction for item in self.items),
            {variable.name: offset for variable, offset in self.shared_offsets.items()},
        )

    def _append_function(self, frame: _Frame) -> None:
        """Append the instructions of a function. This is the hot loop of the lowering."""
        function = frame.function
        items = self.items
        table_plan = self.table.plan
        plans: dict[tuple[str, tuple[str, ...]], Plan] = {}
        for instruction in function.instructions:
            frame.positions.append(len(items))
            scope = instruction.scope
            cache = frame.values.get(scope)
            if cache is None:
                cache = self._enter(frame, scope)
            try:
                opcode = instruction.opcode
                if opcode[:4] == "call" and self._inline(frame, instruction):
                    continue
                guard = self._guard(frame, instruction) if instruction.guard else None
                if frame.parent is not None and opcode[:3] == "ret":
                    self._branch(frame, instruction, guard, len(function.instructions))
                    continue
                values = [
                    cache.get(operand) or self._value(frame, scope, operand)
                    for operand in instruction.operands
                ]
                key = (opcode, tuple([value.shape for value in values]))
                plan = plans.get(key)
                if plan is None:
                    plan = plans[key] = table_plan(*key)
            except PtxError as error:
                raise self._located(error, instruction) from None
            items.append(
                _Item(instruction, opcode, guard, plan.match, self._arrange(plan, values, opcode))
            )
        frame.positions.append(len(items))
        for scope in frame.values:
            self.boundaries.update(frame.positions[index] for index in scope.labels.values())

    def _most_registers(self) -> int:
        """The most registers that a thread has at launch; 0 is no limit.

        Only called if there is no machine code. The assembler gives a kernel no more registers than
        its largest setmaxnreg.inc.
        """
        limits = list(self.kernel.directive("maxnreg"))
        increases = [
            operand.value
            for item in self.items
            if item.opcode.startswith("setmaxnreg.inc")
            for operand in item.instruction.operands
            if isinstance(operand, Immediate)
        ]
        if increases:
            limits.append(int(max(increases)))
        return min(limits, default=0)

    def _located(self, error: PtxError, instruction: Instruction) -> PtxError:
        source = self.module.source(instruction.location)
        where = f"PTX line {instruction.line}" + (f", {source}" if source else "")
        text = self.module.line_text(instruction.line)
        message = str(error)
        if message.startswith("PTX line"):
            return error
        return type(error)(f"{message} ({where}: {text[:300]!r})")

    def _append_exit(self, frame: _Frame) -> None:
        """Append an exit, unless control cannot reach the end of the kernel."""
        items = self.items
        if len(items) not in self.boundaries and items and _ends(items[-1]):
            return
        line = items[-1].instruction.line if items else self.kernel.line
        scope = self.kernel.scope
        if scope is None:
            raise PtxError(f"the kernel {self.kernel.name!r} is only declared")
        instruction = Instruction("exit", (), "", False, line, None, scope)
        items.append(_Item(instruction, "exit", None, self.table.plan("exit", ()).match, []))

    # -- names

    def _enter(self, frame: _Frame, scope: Scope) -> dict[Operand, Value]:
        """Reserve memory, once, for the variables of a scope and of the scopes around it."""
        for outer in scope.outwards():
            if outer in frame.values:
                break
            frame.values[outer] = {}
            for variable in outer.variables.values():
                if variable in frame.local or variable in self.kernel.parameters:
                    continue
                if variable.space in ("local", "param"):
                    self.local_bytes = align(self.local_bytes, variable.alignment)
                    frame.local[variable] = self.local_bytes
                    self.local_bytes += variable.bytes
                elif variable.space != "shared" and self.memory.address(variable.name) is None:
                    self.memory.add(variable)
                    self.memory.initialise(variable)
        return frame.values[scope]

    def _guard(self, frame: _Frame, instruction: Instruction) -> tuple[Register, bool]:
        value = self._value(frame, instruction.scope, parse_operand(instruction.guard))
        if value.kind != K_PRED or value.register is None:
            raise PtxError(f"the guard {instruction.guard!r} is not a predicate")
        return value.register, instruction.guard_negated

    def _register(self, frame: _Frame, scope: Scope, name: str, bits: int) -> Register:
        key = (scope, name)
        register = frame.registers.get(key)
        if register is None:
            register = frame.registers[key] = Register(len(self.registers), name, bits)
            self.registers.append(register)
        return register

    def _register_value(self, register: Register) -> Value:
        value = Value(_register_shape(register.bits), K_PRED if register.bits == 1 else K_REG)
        value.register = register
        return value

    def _named(self, frame: _Frame, scope: Scope, name: str) -> Value | None:
        """A register, a vector register or an element of a vector register; None for any other
        name."""
        found = scope.find_register(name)
        if found is not None:
            declared, kind = found
            if kind.elements == 1:
                return self._register_value(self._register(frame, declared, name, kind.bits))
            parts = [f"{name}.{'xyzw'[i]}" for i in range(kind.elements)]
            return _list(
                [
                    self._register_value(self._register(frame, declared, part, kind.bits))
                    for part in parts
                ]
            )
        base, dot, part = name.partition(".")
        if dot and part in _VECTOR_PARTS and (found := scope.find_register(base)) is not None:
            declared, kind = found
            if _VECTOR_PARTS[part] < kind.elements:
                full = f"{base}.{'xyzw'[_VECTOR_PARTS[part]]}"
                return self._register_value(self._register(frame, declared, full, kind.bits))
        return None

    def _value(self, frame: _Frame, scope: Scope, operand: Operand) -> Value:
        """The meaning of an operand in a scope. Equal operands share one object."""
        cache = frame.values[scope]
        value = cache.get(operand)
        if value is None:
            value = cache[operand] = self._resolve(frame, scope, operand)
        return value

    def _resolve(self, frame: _Frame, scope: Scope, operand: Operand) -> Value:
        match operand:
            case Name():
                return self._resolve_name(frame, scope, operand)
            case Immediate():
                value = Value("i" if operand.kind == "int" else "f", K_IMM)
                value.constant = operand
                return value
            case Sink():
                return _SINK
            case Negated():
                inner = self._value(frame, scope, operand.operand)
                if inner.kind != K_PRED:
                    raise PtxError(f"{operand.text!r} negates what is no predicate")
                value = Value("!", K_PRED)
                value.register, value.negated = inner.register, True
                return value
            case Pair():
                parts = tuple(
                    self._value(frame, scope, part) for part in (operand.first, operand.second)
                )
                value = Value("|".join(part.shape for part in parts), K_NONE)
                value.parts = parts
                return value
            case Vector():
                return _list([self._value(frame, scope, item) for item in operand.elements])
            case Address():
                return self._resolve_address(frame, scope, operand)
            case TensorAddress():
                value = Value("T", K_NONE)
                value.parts = (
                    self._value(frame, scope, operand.address),
                    self._value(frame, scope, operand.coordinates),
                )
                return value
        raise PtxError(f"cannot read the operand {operand.text!r}")

    def _resolve_name(self, frame: _Frame, scope: Scope, operand: Name) -> Value:
        name = operand.name
        value = self._named(frame, scope, name)
        if value is None and name[0] == "%" and name in _SPECIAL_NUMBERS:
            value = Value("s", K_SREG)
            value.immediate = _SPECIAL_NUMBERS[name]
            value.sub = 64 if "64" in name or name in ("%globaltimer", "%gridid") else 32
        if value is not None:
            if operand.offset:
                raise PtxError(f"{operand.text!r} adds to a register outside of an address")
            return value
        for outer in scope.outwards():
            variable = outer.variables.get(name)
            if variable is not None:
                return self._symbol(frame, variable, operand.offset)
            if name in outer.labels:
                return _label(frame, outer.labels[name])
            if name in outer.targets:
                targets = [parse_operand(target) for target in outer.targets[name]]
                return _list([self._value(frame, scope, target) for target in targets])
        variable = self.module.variables.get(name)
        if variable is not None:
            return self._symbol(frame, variable, operand.offset)
        if name in self.module.functions:
            value = Value("F", K_IMM)
            value.immediate = self.strings.setdefault(name, len(self.strings))
            return value
        if name[0] == "%":
            raise UnsupportedInstruction(f"no register {name!r} is declared or emulated")
        raise PtxError(f"the name {name!r} is not declared")

    def _symbol(self, frame: _Frame, variable: Variable, offset: int) -> Value:
        """The address of a variable."""
        value = Value("y", K_IMM)
        value.immediate = offset
        if variable in frame.local:
            value.kind = K_LOCAL_SYM
            value.immediate += frame.local[variable]
        elif variable.space == "param":
            value.kind = K_PARAM_SYM
            value.immediate += self.parameter_offsets[variable.name]
        elif variable.space == "shared":
            value.kind = K_SHARED_SYM
            value.variable = variable
            self.shared_used[variable] = None
        else:
            address = self.memory.address(variable.name)
            if address is None:
                raise PtxError(f"the variable {variable.name!r} is declared but not defined")
            value.immediate += address
        return value

    def _resolve_address(self, frame: _Frame, scope: Scope, operand: Address) -> Value:
        base = self._value(frame, scope, operand.base)
        if base.kind not in (K_REG, K_IMM, K_SHARED_SYM, K_LOCAL_SYM, K_PARAM_SYM) or (
            base.shape not in ("w", "d", "i", "y")
        ):
            raise PtxError(f"{operand.text!r} is no address")
        value = Value("a", K_ADDRESS)
        value.sub = base.kind
        value.register = base.register
        value.variable = base.variable
        value.immediate = base.immediate + operand.offset
        return value

    # -- calls of device functions, inlined

    def _inline(self, frame: _Frame, instruction: Instruction) -> bool:
        """Inline a call. False if the module only declares the function."""
        operands = list(instruction.operands)
        returns: tuple[Operand, ...] = ()
        if operands and isinstance(operands[0], Vector):
            returns = operands.pop(0).elements  # type: ignore[attr-defined]
        if not operands or not isinstance(operands[0], Name):
            raise PtxError("cannot read this call")
        function = self.module.functions.get(operands[0].name)
        if function is None:
            raise UnsupportedInstruction("indirect calls are not emulated")
        if function.scope is None:
            return False
        outer: _Frame | None = frame
        while outer is not None:
            if outer.function is function:
                raise UnsupportedInstruction(f"{function.name!r} is recursive")
            outer = outer.parent
        arguments: tuple[Operand, ...] = ()
        if len(operands) > 1 and isinstance(operands[1], Vector):
            arguments = operands[1].elements
        inlined = _Frame(function, frame)
        self._bind(frame, inlined, instruction, function.returns, returns)
        self._bind(frame, inlined, instruction, function.parameters, arguments)
        guard = self._guard(frame, instruction) if instruction.guard else None
        if guard is not None:
            skip = (guard[0], not guard[1])
            self._branch(inlined, instruction, skip, len(function.instructions))
        self._append_function(inlined)
        self.boundaries.add(len(self.items))
        return True

    def _bind(
        self,
        caller: _Frame,
        inlined: _Frame,
        instruction: Instruction,
        formals: list[Variable],
        actuals: Iterable[Operand],
    ) -> None:
        """Let a function's parameters use the memory of the caller's arguments."""
        values = [self._value(caller, instruction.scope, actual) for actual in actuals]
        if len(values) != len(formals):
            raise PtxError(f"{inlined.function.name!r} takes {len(formals)} parameters here")
        for formal, value in zip(formals, values, strict=True):
            if formal.space != "param" or value.kind != K_LOCAL_SYM:
                raise UnsupportedInstruction(
                    "only parameters in .param space can be passed to device functions"
                )
            inlined.local[formal] = value.immediate

    def _branch(
        self,
        frame: _Frame,
        instruction: Instruction,
        guard: tuple[Register, bool] | None,
        index: int,
    ) -> None:
        match = self.table.plan("bra", ("L",)).match
        self.items.append(_Item(instruction, "bra", guard, match, [_label(frame, index)]))

    # -- operands in the order of the form

    def _arrange(self, plan: Plan, values: list[Value], opcode: str) -> list[Value]:
        arranged: list[Value] = []
        for token, source in zip(plan.match.tokens, plan.sources, strict=True):
            if source < 0:
                arranged += [_SINK] * token.entries
                continue
            value = values[source]
            if value.constant is not None or value.elements:
                value = _typed(value, token, opcode, source)
            if token.entries == 1:
                arranged.append(value)
            elif value.parts:
                coordinates = Token("s", "32", is_list=True)
                arranged += [_typed(part, coordinates, opcode, source) for part in value.parts]
            else:
                arranged += [value, _SINK]
        return arranged

    # -- places

    def _place_shared(self) -> None:
        """Place static variables in order of declaration, all dynamic variables at one offset."""
        offset = 0
        used = self.shared_used
        static = [v for v in self.module.variables.values() if v in used]
        static += [v for v in used if v.name not in self.module.variables]
        dynamic = [v for v in static if v.linkage == "extern" or not v.bytes]
        for variable in static:
            if variable not in dynamic:
                offset = align(offset, variable.alignment)
                self.shared_offsets[variable] = offset
                offset += variable.bytes
        offset = align(offset, max((v.alignment for v in dynamic), default=1))
        for variable in dynamic:
            self.shared_offsets[variable] = offset
        self.static_shared = offset

    def _find_lives(self) -> None:
        """Record the accesses of every register, in program order."""
        region = 0
        for index, item in enumerate(self.items):
            if index in self.boundaries:
                region += 1
            kept = item.opcode.startswith(_ASYNCHRONOUS)
            written: list[Register] = []
            position = 0
            for token in item.match.tokens:
                for value in item.values[position : position + token.entries]:
                    for register in value.registers():
                        if kept:
                            register.shared = False
                        if token.kind == "d":
                            written.append(register)
                        else:
                            register.touch(index, region, defines=False)
                position += token.entries
            for register in written:
                register.touch(index, region, defines=item.guard is None)

    # -- packing

    def _pack(self) -> tuple[bytes, bytes, dict[str, int]]:
        records: list[bytes] = []
        operands: list[bytes] = []
        opcodes: dict[str, int] = {}
        pack = INSTRUCTION.pack
        for item in self.items:
            for value in item.values:
                if value.elements and value.list_at < 0:
                    value.list_at = len(operands)
                    operands += [self._record(element) for element in value.elements]
            begin = len(operands)
            for value in item.values:
                operands.append(value.record or self._record(value))
            instruction = item.instruction
            guard = item.guard
            location = instruction.location
            modifiers = item.match.modifiers
            records.append(
                pack(
                    item.match.form.index,
                    guard[0].offset if guard else -1,
                    guard[0].number if guard else -1,
                    guard[1] if guard else 0,
                    begin,
                    len(item.values),
                    instruction.line,
                    location.file if location else -1,
                    location.line if location else -1,
                    opcodes.setdefault(item.opcode, len(opcodes)),
                    *modifiers,
                    *(0,) * (12 - len(modifiers)),
                )
            )
        return b"".join(records), b"".join(operands), opcodes

    def _record(self, value: Value) -> bytes:
        if value.record is None:
            value.record = self._new_record(value)
        return value.record

    def _new_record(self, value: Value) -> bytes:
        count, place, number, bits = 0, 0, 0, 64
        immediate = value.immediate
        register = value.register
        sub = value.sub
        if value.kind == K_LIST:
            count, place = len(value.elements), max(value.list_at, 0)
            bits = max((e.register.bits for e in value.elements if e.register), default=32)
        elif register is not None:
            bits, place, number = register.bits, register.offset, register.number
        elif value.kind == K_SREG:
            place, bits, immediate, sub = value.immediate, value.sub, 0, 0
        elif value.label is not None:
            frame, index = value.label
            immediate = frame.positions[index]
        elif value.constant is not None:
            immediate = immediate_bits(value.constant, "", 64)
        if value.variable is not None:
            immediate += self.shared_offsets[value.variable]
            bits = 32
        return OPERAND.pack(
            value.kind, bits, value.negated, sub, count, place, number, immediate & MASK64
        )


def _ends(item: _Item) -> bool:
    return item.opcode in ("ret", "exit") and item.guard is None


def _list(values: list[Value]) -> Value:
    value = Value("{" + "".join(element.shape for element in values) + "}", K_LIST)
    if any(element.shape not in "wdqp!ifsy_L" for element in values):
        raise PtxError("a list within a list")
    value.elements = tuple(values)
    return value


def _label(frame: _Frame, index: int) -> Value:
    value = Value("L", K_IMM)
    value.label = (frame, index)
    return value


def _typed(value: Value, token: Token, opcode: str, position: int) -> Value:
    """A value with its constants converted to the type of the instruction."""
    if value.elements:
        if all(element.constant is None for element in value.elements):
            return value
        copy = Value(value.shape, K_LIST)
        copy.elements = tuple(_typed(e, token, opcode, position) for e in value.elements)
        return copy
    if value.constant is None:
        return value
    kind = _type_of(opcode, position) if token.kind == "s" else ""
    bits = int(token.width) if token.width.isdigit() else TYPE_BITS.get(kind, 32)
    return _typed_constant(value.constant, kind, bits)


@functools.lru_cache(maxsize=65536)
def _typed_constant(constant: Immediate, kind: str, bits: int) -> Value:
    value = Value("i", K_IMM)
    value.immediate = immediate_bits(constant, kind, bits)
    return value


def _parameter_layout(parameters: Iterable[Variable]) -> Iterator[Parameter]:
    offset = 0
    for variable in parameters:
        offset = align(offset, variable.alignment)
        yield Parameter(
            variable.name, variable.type, offset, variable.bytes, variable.element_bytes
        )
        offset += variable.bytes
