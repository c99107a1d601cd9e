"""Parsing of PTX operands."""

from __future__ import annotations

import ast
import operator
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

TYPE_BITS = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "b128": 128,
}


class PtxError(ValueError):
    """PTX that cannot be parsed, or that the emulator cannot run."""


@dataclass(frozen=True, eq=False, slots=True)
class Operand:
    """An operand as written. Equal texts share one object within the process."""

    text: str


@dataclass(frozen=True, eq=False, slots=True)
class Name(Operand):
    """A register, special register, variable, parameter, label or function, plus an offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Immediate(Operand):
    """A number. `kind` is `"int"`, or how a float was written: `"f32"` (0f...) or `"f64"`."""

    value: int | float
    kind: str = "int"


@dataclass(frozen=True, eq=False, slots=True)
class Sink(Operand):
    """`_`: a result that is discarded."""


@dataclass(frozen=True, eq=False, slots=True)
class Negated(Operand):
    """A negated predicate: `!p`"""

    operand: Operand


@dataclass(frozen=True, eq=False, slots=True)
class Pair(Operand):
    """A pair of a register and a predicate: `d|p`"""

    first: Operand
    second: Operand


@dataclass(frozen=True, eq=False, slots=True)
class Vector(Operand):
    """A list of operands: `{a, b}`, or the parenthesised list of a call."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Address(Operand):
    """An address: `[base + offset]`"""

    base: Operand
    offset: int


@dataclass(frozen=True, eq=False, slots=True)
class TensorAddress(Operand):
    """A tensor's descriptor and coordinates: `[descriptor, {c0, c1}]`"""

    address: Address
    coordinates: Vector


IDENTIFIER = r"[A-Za-z_$%][\w$%]*"
_INTEGER = re.compile(r"(-?)\s*(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|(0[0-7]*)|([1-9]\d*))U?")
_FLOAT_BITS = re.compile(r"(-?)\s*0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))")
_FLOAT = re.compile(r"-?\s*(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)")
_NAME = re.compile(rf"({IDENTIFIER}(?:\.\w+)?)\s*(?:([+-])\s*(\S.*))?", re.DOTALL)
_PIECE = re.compile(r"\s*((?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,{\[(])*)(?:,|$)")
_EXPRESSION_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}

_parsed: dict[str, Operand] = {"_": Sink("_")}


def parse_operand(text: str) -> Operand:
    """The operand that `text`, without surrounding blanks, stands for."""
    found = _parsed.get(text)
    if found is None:
        if len(_parsed) > 1_000_000:  # a process that emulates very many modules
            _parsed.clear()
            _parsed["_"] = Sink("_")
        found = _parsed[text] = _parse_new_operand(text)
    return found


def _parse_new_operand(text: str) -> Operand:
    first = text[:1]
    if first == "{":
        return Vector(text, _parse_list(text))
    if first == "[":
        return _parse_address(text)
    if first == "!":
        return Negated(text, parse_operand(text[1:].strip()))
    if "|" in text and first != "(":
        left, right = text.split("|", 1)
        return Pair(text, parse_operand(left.strip()), parse_operand(right.strip()))
    if text == "WARP_SZ":
        return Immediate(text, 32)
    match = _NAME.fullmatch(text)
    if match is not None:
        name, sign, offset = match.groups()
        if sign is None:
            return Name(text, name)
        return Name(text, name, (-1 if sign == "-" else 1) * parse_integer(offset))
    if first == "(" and (text == "()" or re.match(r"\(\s*[A-Za-z_$%]", text)):
        return Vector(text, _parse_list(text))
    return _parse_number(text)


def _parse_list(text: str) -> tuple[Operand, ...]:
    return tuple(parse_operand(piece) for piece in split_operands(text[1:-1]))


def _parse_address(text: str) -> Operand:
    inner = text[1:-1].strip()
    if "{" in inner:
        pieces = split_operands(inner)
        if len(pieces) != 2 or not text.endswith("]"):
            raise PtxError(f"cannot read the address {text!r}")
        address = _parse_address(f"[{pieces[0]}]")
        coordinates = parse_operand(pieces[1])
        assert isinstance(address, Address) and isinstance(coordinates, Vector)
        return TensorAddress(text, address, coordinates)
    base = parse_operand(inner)
    if isinstance(base, Name):
        return Address(text, parse_operand(base.name) if base.offset else base, base.offset)
    if isinstance(base, Immediate) and isinstance(base.value, int):
        return Address(text, Immediate(inner, 0), base.value)
    raise PtxError(f"cannot read the address {text!r}")


def _parse_number(text: str) -> Immediate:
    if match := _INTEGER.fullmatch(text):
        return Immediate(text, _integer_of(match))
    if match := _FLOAT_BITS.fullmatch(text):
        sign = -1.0 if match[1] else 1.0
        if match[2]:
            value: float = struct.unpack(">f", bytes.fromhex(match[2]))[0]
            bits = int(match[2], 16) ^ (0x80000000 if match[1] else 0)
            # A NaN keeps its bits, since a float would lose its payload.
            return Immediate(text, bits if value != value else sign * value, "f32")
        value = struct.unpack(">d", bytes.fromhex(match[3]))[0]
        bits = int(match[3], 16) ^ (1 << 63 if match[1] else 0)
        return Immediate(text, bits if value != value else sign * value, "f64")
    if _FLOAT.fullmatch(text):
        return Immediate(text, float(text.replace(" ", "")), "f64")
    return Immediate(text, parse_integer(text))


def _integer_of(match: re.Match[str]) -> int:
    sign, hexadecimal, binary, octal, decimal = match.groups()
    base = 16 if hexadecimal else 2 if binary else 8 if octal else 10
    value = int(hexadecimal or binary or octal or decimal, base)
    return -value if sign else value


def parse_integer(text: str) -> int:
    """An integer constant, or a constant expression of integers."""
    match = _INTEGER.fullmatch(text.strip())
    if match is not None:
        return _integer_of(match)
    try:
        plain = re.sub(r"\b0([0-7]+)\b", r"0o\1", re.sub(r"(?<=[0-9a-fA-F])U\b", "", text))
        return _evaluate(ast.parse(plain.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
        raise PtxError(f"cannot read the operand {text!r}") from None


def _evaluate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return _EXPRESSION_OPERATORS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp):
        return _EXPRESSION_OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise TypeError


def split_operands(text: str) -> list[str]:
    """The operands of a list, without surrounding blanks; brackets keep their commas."""
    text = text.strip()
    if not text:
        return []
    if "{" not in text and "[" not in text and "(" not in text:
        return [piece.strip() for piece in text.split(",")]
    pieces = []
    position = 0
    while position < len(text):
        match = _PIECE.match(text, position)
        if match is None or match.end() == position:
            raise PtxError(f"cannot read the operands {text!r}")
        pieces.append(match[1].rstrip())
        position = match.end()
    return pieces
