"""Matching opcodes and operands to the forms that the engine's families register.

A form is a pattern of opcode and modifiers, and a signature of operands; engine.h describes both.
An instruction without a form is an error; the message names the instruction and similar forms.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .operands import TYPE_BITS, PtxError


class UnsupportedInstruction(PtxError):
    """An instruction, a modifier or a combination of operands that no form matches."""


# ---- patterns of opcodes

_PATTERN_ERROR = "the form {!r} is malformed at {!r}"
_TOKEN = re.compile(r"([ds])(32|64|128|p|x)(l?)(p?)(\??)|([aTiLF])(\??)")


class _PatternReader:
    """Turns a pattern into a regular expression and the meaning of its groups."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0
        self.groups = 0
        self.slots: list[tuple[int, ...]] = []
        """Per modifier, the capturing groups of its alternatives; for `#` the negated group."""

    def read(self) -> str:
        expression = self._sequence("")
        if self.position != len(self.pattern):
            raise self._malformed()
        return expression

    def _malformed(self) -> ValueError:
        return ValueError(_PATTERN_ERROR.format(self.pattern, self.pattern[self.position :]))

    def _sequence(self, ends: str) -> str:
        parts = []
        while self.position < len(self.pattern):
            character = self.pattern[self.position]
            if character in ends:
                break
            self.position += 1
            if character in "{(":
                parts.append(self._group("}" if character == "{" else ")"))
            elif character == "#":
                self.groups += 1
                self.slots.append((-self.groups,))
                parts.append(r"(\d+)")
            elif character in "})|":
                self.position -= 1
                raise self._malformed()
            else:
                parts.append(re.escape(character))
        return "".join(parts)

    def _group(self, end: str) -> str:
        """Alternatives up to `end`. If the first alternative has a dot, all do: `{.rn|rz}`."""
        slot = len(self.slots)
        self.slots.append(())
        numbers, alternatives = [], []
        dotted = self.pattern.startswith(".", self.position)
        while True:
            self.groups += 1
            numbers.append(self.groups)
            dot = r"\." if dotted and not self.pattern.startswith(".", self.position) else ""
            alternatives.append(f"({dot}{self._sequence('|' + end)})")
            if self.position == len(self.pattern):
                raise self._malformed()
            self.position += 1
            if self.pattern[self.position - 1] == end:
                break
        self.slots[slot] = tuple(numbers)
        return f"(?:{'|'.join(alternatives)})" + ("?" if end == "}" else "")


# ---- signatures of operands


@dataclass(frozen=True, slots=True)
class Token:
    """One operand of a signature."""

    kind: str
    """`d` destination, `s` source, `a` address, `T`, `i`, `L`, `F` (see engine.h)."""
    width: str = ""
    """`"32"`, `"64"`, `"128"`, `"p"` predicate, `"x"` any register."""
    is_list: bool = False
    is_pair: bool = False
    optional: bool = False

    @property
    def entries(self) -> int:
        """The number of the token's entries in the packed instruction."""
        return 2 if self.is_pair or self.kind == "T" else 1


def parse_signature(text: str) -> tuple[Token, ...]:
    """The tokens of an operand signature."""
    tokens = []
    for word in text.split():
        match = _TOKEN.fullmatch(word)
        if match is None:
            raise ValueError(f"the operand signature {text!r} is malformed at {word!r}")
        if match[6]:
            tokens.append(Token(match[6], optional=bool(match[7])))
        else:
            tokens.append(Token(match[1], match[2], bool(match[3]), bool(match[4]), bool(match[5])))
    return tuple(tokens)


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the engine: a line in a table of a family's file."""

    index: int
    pattern: str
    signature: str
    flags: int = 0
    family: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """A form that matches an opcode, with the values of the opcode's modifiers."""

    form: Form
    tokens: tuple[Token, ...]
    modifiers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The form chosen for an instruction, and the operand that each token takes."""

    match: Match
    sources: tuple[int, ...]
    """For each token the index of its operand, or -1."""


# The choice of a form depends on the shapes of the operands, which are strings:
#   w d q     register of at most 32, of 64, of 128 bits
#   p !       predicate, negated predicate
#   i f       integer, floating-point constant
#   s y       special register, address of a variable
#   _ a T     sink, address, tensor address
#   L F       label or list of labels, function
#   {..}      list; a pair is its two shapes with | between
_REGISTER_OF_WIDTH = {"32": "w", "64": "d", "128": "q"}


def _scalar_cost(token: Token, shape: str) -> int | None:
    """How badly a single operand fits a token: 0 is an exact fit, None no fit."""
    width = token.width
    if shape == "_":
        return 0 if token.kind == "d" else None
    if token.kind == "d":
        if width == "p":
            return 0 if shape == "p" else None
        if width == "x":
            return 1 if shape in "wdq" else 2 if shape == "y" and token.is_list else None
        if shape == _REGISTER_OF_WIDTH[width]:
            return 0
        # A destination may be wider than the instruction, or (ld, cvt) narrower, because the engine
        # extends or truncates. A form of equal width is preferred.
        return 10 if {shape, _REGISTER_OF_WIDTH[width]} == {"w", "d"} else None
    if width == "p":
        return 0 if shape in "p!is" else None
    if shape in "ifsy":
        return 0
    if width == "x":
        return 1 if shape in "wdq" or (shape == "L" and token.is_list) else None
    if shape == _REGISTER_OF_WIDTH[width]:
        return 0
    return 10 if (width, shape) == ("64", "w") else None


def _cost(token: Token, shape: str) -> int | None:
    """How badly an operand of this shape fits a token: 0 is an exact fit, None no fit."""
    match token.kind:
        case "a" | "T" | "L" | "F":
            return 0 if shape == token.kind else None
        case "i":
            return 0 if shape in "if" else None
    if token.is_pair:
        first, bar, second = shape.partition("|")
        if bar and second not in ("p", "_"):
            return None
        return _scalar_cost(token, first) if first[:1] != "{" else None
    if shape[0] == "{":
        if not token.is_list:
            return None
        total = 0
        for element in shape[1:-1]:
            cost = _scalar_cost(token, element)
            if cost is None:
                return None
            total = max(total, cost)
        return total
    if len(shape) != 1:
        return None
    cost = _scalar_cost(token, shape)
    return cost if cost is None or not token.is_list else cost + 1


def _assign(tokens: Sequence[Token], shapes: Sequence[str]) -> tuple[int, tuple[int, ...]] | None:
    """The cheapest assignment of operands to tokens in order; optional tokens may get none."""
    if not tokens:
        return None if shapes else (0, ())
    best: tuple[int, tuple[int, ...]] | None = None
    first, rest = tokens[0], tokens[1:]
    if shapes:
        cost = _cost(first, shapes[0])
        if cost is not None and (found := _assign(rest, shapes[1:])) is not None:
            taken = tuple(number + 1 if number >= 0 else -1 for number in found[1])
            best = (found[0] + cost, (0, *taken))
    if first.optional and len(tokens) > len(shapes):
        found = _assign(rest, shapes)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], (-1, *found[1]))
    return best


# ---- the table


@dataclass(slots=True)
class _Candidate:
    form: Form
    expression: str | re.Pattern[str]  # compiled when first needed
    slots: list[tuple[int, ...]]
    tokens: tuple[Token, ...]


@dataclass
class FormTable:
    """All forms of an engine, and the search for the form that fits an instruction."""

    forms: Sequence[Form]
    _by_head: dict[str, list[_Candidate]] = field(init=False, repr=False, default_factory=dict)
    _matches: dict[str, tuple[Match, ...]] = field(init=False, repr=False, default_factory=dict)
    _plans: dict[tuple[str, tuple[str, ...]], Plan] = field(
        init=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for form in self.forms:
            reader = _PatternReader(form.pattern)
            expression = reader.read()
            if len(reader.slots) > 12:
                raise ValueError(f"the form {form.pattern!r} has more than 12 modifiers")
            candidate = _Candidate(form, expression, reader.slots, parse_signature(form.signature))
            for head in _heads(form.pattern):
                self._by_head.setdefault(head, []).append(candidate)

    def matches(self, opcode: str) -> tuple[Match, ...]:
        """Every form that matches the opcode, whatever its operands."""
        found = self._matches.get(opcode)
        if found is None:
            found = tuple(self._search(opcode))
            if not found and "." in opcode:
                found = self._search_reordered(opcode)
            self._matches[opcode] = found
        return found

    def _search_reordered(self, opcode: str) -> tuple[Match, ...]:
        """Matches with the modifiers in another order, which the assembler accepts."""
        for other in _reorderings(opcode):
            found = tuple(self._search(other))
            if found:
                return found
        return ()

    def _search(self, opcode: str) -> Iterator[Match]:
        for candidate in self._by_head.get(opcode.split(".", 1)[0], ()):
            if isinstance(candidate.expression, str):
                candidate.expression = re.compile(candidate.expression)
            match = candidate.expression.fullmatch(opcode)
            if match is not None:
                modifiers = tuple(_modifier(match, slot) for slot in candidate.slots)
                yield Match(candidate.form, candidate.tokens, modifiers)

    def plan(self, opcode: str, shapes: tuple[str, ...]) -> Plan:
        """The best fitting form for an opcode with operands of these shapes; of several, the
        first."""
        key = (opcode, shapes)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._choose(opcode, shapes)
        return found

    def _choose(self, opcode: str, shapes: tuple[str, ...]) -> Plan:
        best: tuple[int, Plan] | None = None
        matches = self.matches(opcode)
        for match in matches:
            assigned = _assign(match.tokens, shapes)
            if assigned is not None and (best is None or assigned[0] < best[0]):
                best = (assigned[0], Plan(match, assigned[1]))
        if best is not None:
            return best[1]
        if matches:
            taken = " or ".join(f"({describe(match.tokens)})" for match in matches)
            given = ", ".join(map(_describe_shape, shapes)) or "none"
            raise UnsupportedInstruction(
                f"unsupported operands of {opcode!r}: it takes {taken}; here they are ({given})"
            )
        raise UnsupportedInstruction(
            f"unsupported instruction: {opcode!r}{self._known_forms(opcode)}"
        )

    def _known_forms(self, opcode: str) -> str:
        head = opcode.split(".", 1)[0]
        patterns = list(dict.fromkeys(c.form.pattern for c in self._by_head.get(head, ())))
        if not patterns:
            return f"; no form of {head!r} is known"
        shown = patterns
        if len(patterns) > 8:
            shown = difflib.get_close_matches(opcode, patterns, 8, 0.0)
        more = f" and {len(patterns) - len(shown)} more" if len(shown) < len(patterns) else ""
        return f"; known forms of {head}: {'  '.join(shown)}{more}"


def _heads(pattern: str) -> Iterable[str]:
    """The first words of the opcodes that match a pattern: `(and|or).b32` has two."""
    match = re.match(r"[\w:]+", pattern)
    if match is not None:
        following = pattern[match.end() : match.end() + 1]
        inner = pattern[match.end() : match.end() + 2]
        if following in ("", ".") or inner in ("{.", "(."):
            return (match[0],)
    head = re.match(r"([\w:]*)\(([\w:|]+)\)([\w:]*)(?=[.{(]|$)", pattern)
    if head is None:
        raise ValueError(_PATTERN_ERROR.format(pattern, pattern[:20]))
    return tuple(f"{head[1]}{middle}{head[3]}" for middle in head[2].split("|"))


# Modifiers whose order matters: `cvt.f32.s32`, `.row.col`, `.shared::cta.global`.
_ORDERED = re.compile(
    rf"{'|'.join(TYPE_BITS)}|[es]\d+m\d+(x\d+)?|ue\d+m\d+(x\d+)?|[bs]?\d+x\d+\w*|row|col"
    r"|(shared|global|local|param|const|generic)(::\w+)?"
)


def _reorderings(opcode: str) -> Iterator[str]:
    """The opcode with one or two of its modifiers moved."""
    seen = {opcode}
    frontier = [opcode]
    for _ in range(2):
        following = []
        for text in frontier:
            head, *words = text.split(".")
            for number, word in enumerate(words):
                if _ORDERED.fullmatch(word):
                    continue
                rest = words[:number] + words[number + 1 :]
                for place in range(len(words)):
                    moved = ".".join([head, *rest[:place], word, *rest[place:]])
                    if moved not in seen:
                        seen.add(moved)
                        following.append(moved)
                        yield moved
        frontier = following


def _modifier(match: re.Match[str], slot: tuple[int, ...]) -> int:
    if slot[0] < 0:
        return int(match[-slot[0]] or 0)
    for number, group in enumerate(slot, start=1):
        if match[group] is not None:
            return number
    return 0


def describe(tokens: Iterable[Token]) -> str:
    """A signature in words."""
    words = []
    for token in tokens:
        word = {
            "a": "[address]",
            "T": "[descriptor, {coordinates}]",
            "i": "constant",
            "L": "label",
            "F": "function",
        }.get(token.kind)
        if word is None:
            kind = {"p": "predicate", "x": "register"}.get(token.width, f"b{token.width}")
            word = f"{{{kind} ...}}" if token.is_list else kind
            word += "|predicate" if token.is_pair else ""
        words.append(f"[{word}]" if token.optional and word[0] != "[" else word)
    return ", ".join(words)


_SHAPE_WORDS = {
    "w": "b32",
    "d": "b64",
    "q": "b128",
    "p": "predicate",
    "!": "!predicate",
    "i": "integer",
    "f": "float",
    "s": "special register",
    "y": "variable",
    "_": "_",
    "a": "[address]",
    "T": "[descriptor, {coordinates}]",
    "L": "label",
    "F": "function",
}


def _describe_shape(shape: str) -> str:
    if shape[0] == "{":
        return "{" + ", ".join(_SHAPE_WORDS[element] for element in shape[1:-1]) + "}"
    return "|".join(_SHAPE_WORDS.get(part, part) for part in shape.split("|"))
