"""Parser of PTX modules: kernels, registers, variables, instructions, line information.

Nothing is interpreted here. Names stay names; `lowering` resolves them in the scope of the
instruction that uses them.
"""

from __future__ import annotations

import ast
import bisect
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .operands import (
    IDENTIFIER,
    TYPE_BITS,
    Operand,
    PtxError,
    parse_integer,
    parse_operand,
    split_operands,
)

# ---- declarations


@dataclass(frozen=True, slots=True)
class RegisterType:
    """The type that `.reg` gives a register: its name, bits, and 1, 2, 4 or 8 elements."""

    name: str
    bits: int
    elements: int = 1


@dataclass(eq=False, slots=True)
class Variable:
    """A variable or parameter of any state space."""

    name: str
    space: str
    """`"global"`, `"const"`, `"shared"`, `"local"`, `"param"` or `"reg"`."""
    type: str
    alignment: int
    bytes: int
    """0 for an array without a size, such as `.extern .shared`."""
    element_bytes: int
    linkage: str = ""
    initialiser: str = ""
    """The initialiser as written, without the equals sign."""
    pointer: bool = False
    """Whether the parameter is declared `.ptr`."""


@dataclass(frozen=True, slots=True)
class Location:
    """The source line of an instruction."""

    file: int
    line: int
    column: int
    function: str = ""
    inlined_at: Location | None = None


@dataclass(eq=False, slots=True)
class Scope:
    """The names declared between a pair of braces."""

    parent: Scope | None
    registers: dict[str, RegisterType] = field(default_factory=dict)
    ranges: dict[str, tuple[int, RegisterType]] = field(default_factory=dict)
    """Prefix -> number and type of the registers `prefix0`, `prefix1` ..."""
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    """Name -> index of the instruction that follows."""
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name -> the labels of a `.branchtargets` or functions of a `.calltargets` list."""

    def find_register(self, name: str) -> tuple[Scope, RegisterType] | None:
        """The register that `name` means in this scope, and the scope that declares it."""
        scope: Scope | None = self
        prefix = name.rstrip("0123456789")
        number = name[len(prefix) :]
        plain = bool(number) and (number == "0" or number[0] != "0")
        while scope is not None:
            kind = scope.registers.get(name)
            if kind is not None:
                return scope, kind
            if plain:
                numbered = scope.ranges.get(prefix)
                if numbered is not None and int(number) < numbered[0]:
                    return scope, numbered[1]
            scope = scope.parent
        return None

    def outwards(self) -> Iterator[Scope]:
        """This scope and the scopes around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


@dataclass(eq=False, slots=True)
class Instruction:
    """One instruction: `@guard opcode operands;`"""

    opcode: str
    operands: tuple[Operand, ...]
    guard: str
    """Name of the guard predicate, or empty."""
    guard_negated: bool
    line: int
    """Line in the PTX text, from 1."""
    location: Location | None
    scope: Scope


@dataclass(eq=False, slots=True)
class Function:
    """A kernel or device function. Without `scope` the function is only declared."""

    name: str
    is_kernel: bool
    parameters: list[Variable]
    returns: list[Variable]
    line: int
    linkage: str = ""
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """`reqntid`, `maxntid`, `maxnreg`, `minnctapersm` ... -> their numbers."""
    instructions: list[Instruction] = field(default_factory=list)
    scope: Scope | None = None

    def directive(self, name: str) -> tuple[int, ...]:
        """The numbers given with a directive, or ()."""
        return self.directives.get(name, ())


@dataclass(eq=False)
class Module:
    """A parsed PTX text."""

    text: str
    version: str = ""
    target: str = ""
    """`"sm_100a"`"""
    files: dict[int, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)

    @property
    def kernels(self) -> list[Function]:
        """The kernels, in order."""
        return [function for function in self.functions.values() if function.is_kernel]

    @property
    def arch(self) -> int:
        """The architecture that the module targets: 80, 90, 100 ..."""
        match = re.match(r"sm_(\d+)", self.target)
        if match is None:
            raise PtxError(f"the PTX names no target: .target is {self.target!r}")
        return int(match[1])

    def kernel(self, name: str | None = None) -> Function:
        """The kernel called `name`, or the only one."""
        if name is None:
            if len(self.kernels) != 1:
                names = ", ".join(kernel.name for kernel in self.kernels) or "none"
                raise PtxError(f"the module has not one kernel; name one of: {names}")
            return self.kernels[0]
        found = self.functions.get(name)
        if found is None or not found.is_kernel:
            names = ", ".join(kernel.name for kernel in self.kernels)
            raise PtxError(f"the module has no kernel {name!r}; it has: {names}")
        return found

    @functools.cached_property
    def lines(self) -> list[str]:
        """The lines of the text."""
        return self.text.split("\n")

    def line_text(self, line: int) -> str:
        """Line `line` of the text, without surrounding blanks."""
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""

    def source(self, location: Location | None) -> str:
        """`"kernel.py:45"`, or "" where there is no line information."""
        if location is None:
            return ""
        return f"{self.files.get(location.file, '?')}:{location.line}"


# ---- the parser

_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_BLANKS = re.compile(r"\s*")
_STATEMENT = re.compile(
    rf"""\s*(?:
      (?P<brace>[{{}}])
    | (?P<label>{IDENTIFIER})\s*:(?!:)
    | \.(?P<directive>\w+)
    | (?:@\s*(?P<not>!?)\s*(?P<guard>{IDENTIFIER})\s+)?
      (?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);
    | (?P<empty>;)
    )""",
    re.VERBOSE,
)
_LOC = re.compile(r"\s+(\d+)\s+(\d+)\s+(\d+)([^\n]*)")
_INLINED = re.compile(
    rf"function_name\s+({IDENTIFIER})(?:\s*\+\s*(\d+))?|inlined_at\s+(\d+)\s+(\d+)\s+(\d+)"
)
_TO_SEMICOLON = re.compile(r'((?:"(?:[^"\\]|\\.)*"|[^;"])*);')
_ATTRIBUTE = re.compile(r"\s*\.(\w+)(?:\s*\(([^)]*)\))?")
_DECLARATOR = re.compile(
    rf"\s*(?P<name>{IDENTIFIER})\s*(?P<dimensions>(?:\[[^\]]*\]\s*)*)(?:=\s*(?P<value>.*))?",
    re.DOTALL,
)
_RANGE = re.compile(rf"({IDENTIFIER})\s*<\s*(\d+)\s*>")
_LINKAGE = ("extern", "visible", "weak", "common")


def parse(text: str) -> Module:
    """Parse the text of a PTX module."""
    return _Parser(text).module()


def _blank_comment(match: re.Match[str]) -> str:
    found = match[0]
    return found if found[0] == '"' else "\n" * found.count("\n") or " "


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(_blank_comment, text) if "/" in text else text
        self.position = 0
        self.result = Module(text)
        self.line_starts = [0]
        self.line_starts += [match.end() for match in re.finditer("\n", self.text)]
        self.names: dict[str, str] = {}  # labels of .debug_str -> names of functions

    # -- small steps

    def line_at(self, position: int) -> int:
        return bisect.bisect_right(self.line_starts, position)

    def error(self, message: str, position: int | None = None) -> PtxError:
        line = self.line_at(self.position if position is None else position)
        return PtxError(f"PTX line {line}: {message}: {self.result.line_text(line)[:200]!r}")

    def take(self, pattern: str) -> re.Match[str]:
        match = re.compile(pattern, re.DOTALL).match(self.text, self.position)
        if match is None:
            raise self.error("cannot read this")
        self.position = match.end()
        return match

    def skip_blanks(self) -> None:
        match = _BLANKS.match(self.text, self.position)
        assert match is not None
        self.position = match.end()

    def to_semicolon(self) -> str:
        match = _TO_SEMICOLON.match(self.text, self.position)
        if match is None:
            raise self.error("no semicolon ends this")
        self.position = match.end()
        return match[1]

    # -- the module

    def module(self) -> Module:
        self._read_names()
        try:
            while True:
                self.skip_blanks()
                if self.position == len(self.text):
                    return self.result
                self._top_level()
        except PtxError as error:
            if str(error).startswith("PTX line"):
                raise
            raise self.error(str(error)) from None

    def _read_names(self) -> None:
        """Names of inlined functions, which .loc gives as labels in .debug_str."""
        start = self.text.find(".debug_str")
        if start < 0:
            return
        block = self.text[start : self.text.find("}", start)]
        for label, data in re.findall(rf"({IDENTIFIER}):\s*((?:\.b8\s+[\d,\s]+)+)", block):
            codes = bytes(int(code) & 255 for code in re.findall(r"\d+", data.replace(".b8", "")))
            self.names[label] = codes.split(b"\0")[0].decode("utf-8", "replace")

    def _top_level(self) -> None:
        start = self.position
        word = self.take(r"\.?\w+|.")[0]
        match word:
            case ".version":
                self.result.version = self.take(r"\s*([\d.]+)")[1]
            case ".target":
                self.result.target = self.take(r"\s*([^\n]*)")[1].split(",")[0].strip()
            case ".address_size":
                if self.take(r"\s*(\d+)")[1] != "64":
                    raise self.error("only 64-bit addresses are emulated")
            case ".file":
                self._file()
            case ".section":
                self.take(r"[^{]*\{[^}]*\}")
            case ".loc":
                self.take(r"[^\n]*")
            case ".pragma" | ".alias":
                self.to_semicolon()
            case ";":
                pass
            case _ if word[0] == ".":
                self.position = start
                self._declaration()
            case _:
                raise self.error("cannot read this", start)

    def _file(self) -> None:
        match = self.take(r'\s*(\d+)\s*"((?:[^"\\]|\\.)*)"[^\n]*')
        self.result.files[int(match[1])] = match[2].replace("\\\\", "\\").replace('\\"', '"')

    def _declaration(self) -> None:
        start = self.position
        linkage = ""
        while match := re.compile(rf"\s*\.({'|'.join(_LINKAGE)})\b").match(
            self.text, self.position
        ):
            linkage = match[1]
            self.position = match.end()
        self.skip_blanks()
        word = self.take(r"\.\w+")[0]
        if word in (".entry", ".func"):
            self._function(word == ".entry", linkage, start)
            return
        for variable in _parse_variables(word + self.to_semicolon(), linkage):
            self.result.variables[variable.name] = variable

    def _function(self, is_kernel: bool, linkage: str, start: int) -> None:
        returns: list[Variable] = []
        while (attribute := self.take(r"\s*(\.\w+)?\s*(\(?)"))[1]:  # .noreturn, .attribute(...)
            if attribute[2]:
                self.take(r"[^)]*\)")
        if attribute[2]:
            returns = self._parameters()
        name = self.take(rf"\s*({IDENTIFIER})\s*")[1]
        parameters: list[Variable] = []
        if self.text.startswith("(", self.position):
            self.position += 1
            parameters = self._parameters()
        function = Function(name, is_kernel, parameters, returns, self.line_at(start), linkage)
        while True:
            match = self.take(r"\s*(?:([{;])|\.pragma[^;]*;|\.(\w+)\s*((?:\d+\s*,?\s*)*))")
            if match[1]:
                break
            if match[2]:
                numbers = tuple(int(number) for number in re.findall(r"\d+", match[3]))
                function.directives[match[2]] = numbers
        if match[1] == "{":
            self._body(function)
        if function.scope is not None or name not in self.result.functions:
            self.result.functions[name] = function

    def _parameters(self) -> list[Variable]:
        """The list up to the closing parenthesis; the opening parenthesis has been consumed."""
        inner = self.take(r"((?:[^()]|\([^()]*\))*)\)")[1]
        found = []
        for piece in split_operands(inner):
            found += _parse_variables(piece, "")
        return found

    # -- function bodies

    def _body(self, function: Function) -> None:
        """Everything up to the closing brace. This is the hot loop of the parser."""
        scope = function.scope = Scope(None)
        for variable in (*function.parameters, *function.returns):
            if variable.space == "reg":
                kind = RegisterType(variable.type, TYPE_BITS[variable.type])
                scope.registers[variable.name] = kind
            else:
                scope.variables[variable.name] = variable
        instructions = function.instructions
        text = self.text
        statement = _STATEMENT.match
        bounds = self.line_starts
        line = 0
        location: Location | None = None
        locations: dict[str, Location] = {}
        while True:
            match = statement(text, self.position)
            if match is None:
                self.skip_blanks()
                raise self.error("cannot read this")
            self.position = match.end()
            opcode = match["opcode"]
            if opcode is not None:
                begin = match.start("guard" if match["guard"] else "opcode")
                if line >= len(bounds) or not bounds[line - 1] <= begin < bounds[line]:
                    line = bisect.bisect_right(bounds, begin)
                operands = match["operands"].strip()
                instructions.append(
                    Instruction(
                        opcode,
                        tuple(parse_operand(piece) for piece in split_operands(operands)),
                        match["guard"] or "",
                        match["not"] == "!",
                        line,
                        location,
                        scope,
                    )
                )
            elif match["label"] is not None:
                self._label(match["label"], scope, len(instructions))
            elif match["directive"] is not None:
                if match["directive"] == "loc":
                    location = self._location(locations)
                else:
                    self._body_directive(match["directive"], scope)
            elif match["brace"] == "{":
                scope = Scope(scope)
            elif match["brace"] == "}":
                if scope.parent is None:
                    return
                scope = scope.parent

    def _label(self, name: str, scope: Scope, index: int) -> None:
        match = re.compile(r"\s*\.(branchtargets|calltargets|callprototype)\b").match(
            self.text, self.position
        )
        if match is None:
            if name in scope.labels:
                raise self.error(f"the label {name!r} occurs twice")
            scope.labels[name] = index
            return
        self.position = match.end()
        names = self.to_semicolon()
        if match[1] != "callprototype":
            scope.targets[name] = tuple(split_operands(names))

    def _location(self, known: dict[str, Location]) -> Location:
        match = _LOC.match(self.text, self.position)
        if match is None:
            raise self.error("cannot read this .loc")
        self.position = match.end()
        key = match[0]
        if key not in known:
            function, inlined = "", None
            for label, _, file, line, column in _INLINED.findall(match[4]):
                if label:
                    function = self.names.get(label, label)
                else:
                    inlined = Location(int(file), int(line), int(column))
            known[key] = Location(int(match[1]), int(match[2]), int(match[3]), function, inlined)
        return known[key]

    def _body_directive(self, word: str, scope: Scope) -> None:
        if word == "reg":
            self._registers(scope)
        elif word == "file":
            self._file()
        elif word in ("local", "shared", "param", "global", "const"):
            for variable in _parse_variables(f".{word}{self.to_semicolon()}", ""):
                scope.variables[variable.name] = variable
        elif word == "pragma":
            self.to_semicolon()
        else:
            raise self.error(f"the directive .{word} is not known here")

    def _registers(self, scope: Scope) -> None:
        declared = self.to_semicolon()
        elements = 1
        position = 0
        kind = ""
        while match := _ATTRIBUTE.match(declared, position):
            position = match.end()
            if match[1] in ("v2", "v4"):
                elements = int(match[1][1:])
                continue
            kind = match[1]
            if kind not in TYPE_BITS:
                raise self.error(f"registers of type .{kind} are not emulated")
        if not kind:
            raise self.error(f"registers without a type: {declared}")
        register = RegisterType(kind, TYPE_BITS[kind], elements)
        for piece in declared[position:].split(","):
            name = piece.strip()
            numbered = _RANGE.fullmatch(name)
            if numbered is not None:
                scope.ranges[numbered[1]] = (int(numbered[2]), register)
            else:
                scope.registers[name] = register


def _parse_variables(text: str, linkage: str) -> list[Variable]:
    """The variables of one declaration, which begins with its state space."""
    space = kind = ""
    alignment, elements, pointer = 0, 1, False
    position = 0
    while match := _ATTRIBUTE.match(text, position):
        position = match.end()
        word = match[1]
        if word in ("global", "const", "shared", "local", "param", "reg", "tex"):
            space = space or word  # after .ptr: the state space that the pointer points to
        elif word == "align":
            number = re.compile(r"\s*(\d+)").match(text, position)
            if number is None:
                raise PtxError(f"cannot read the declaration {text!r}")
            position = number.end()
            if not pointer:
                alignment = int(number[1])
        elif word in ("v2", "v4", "v8"):
            elements = int(word[1:])
        elif word == "ptr":
            pointer = True
        elif word in TYPE_BITS:
            kind = word
        elif word in ("texref", "samplerref", "surfref"):
            raise PtxError("textures and surfaces are not emulated")
    if not space or not kind:
        raise PtxError(f"cannot read the declaration {text.strip()!r}")
    element_bytes = max(TYPE_BITS[kind], 8) // 8 * elements
    found = []
    for piece in _split_declarators(text[position:]):
        match = _DECLARATOR.fullmatch(piece)
        if match is None:
            raise PtxError(f"cannot read the declaration {text.strip()!r}")
        value = (match["value"] or "").strip()
        count = 1
        for dimension in re.findall(r"\[\s*([^\]]*?)\s*\]", match["dimensions"]):
            count *= parse_integer(dimension) if dimension else _initialiser_length(value)
        found.append(
            Variable(
                match["name"],
                space,
                kind,
                alignment or element_bytes,
                element_bytes * count,
                element_bytes,
                linkage,
                value,
                pointer,
            )
        )
    return found


def _split_declarators(text: str) -> list[str]:
    """Declarators, each with its initialiser, which may hold nested braces."""
    if "=" not in text:
        return text.split(",")
    pieces, depth, begin = [], 0, 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}(),]', text):
        if match[0] in "{(":
            depth += 1
        elif match[0] in "})":
            depth -= 1
        elif match[0] == "," and depth == 0:
            pieces.append(text[begin : match.start()])
            begin = match.end()
    return [*pieces, text[begin:]]


def _initialiser_length(value: str) -> int:
    """Elements of an array declared as `[]`, counted from its initialiser."""
    if value.startswith('"'):
        return len(ast.literal_eval("b" + value)) + 1
    return len(initialiser_items(value)) if value else 0


def initialiser_items(value: str) -> list[str]:
    """The items of an initialiser, nested braces flattened."""
    return [item.strip() for item in re.split(r"[{},]", value) if item.strip()]
