"""Write scalar.json: the engine's scalar forms with their modifiers, as far as ptxas takes them.

    python -m tests.emulator.silicon.generate [--ptxas PATH] [--arch sm_90a]

Of a form with many modifiers it keeps opcodes that show every pair of modifiers together at least
once, where ptxas takes such a pair.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cute_attn.emulator import library
from cute_attn.emulator.forms import Form, Token, parse_signature

from .cases import Instruction, load, module, save_scalar

_FAMILIES = ("integer", "float", "convert")
_AT_MOST = 16  # opcodes of one form
_TRIED = 700
_CARRY = re.compile(r"(add|sub|mad\.lo|mad\.hi)\.cc|(addc|subc|madc)\b")
_TYPE = re.compile(r"^(u|s|b|f|bf|tf)\d+(x\d+)?$|^(e\dm\d|ue8m0)(x\d+)?$")
_APPROXIMATE = re.compile(r"\.(approx|full)\b")


def register(type_name: str) -> str:
    """The register type that holds a value of a PTX type."""
    if type_name.startswith("e"):
        return "b32" if type_name.endswith("x4") else "b16"
    if type_name.startswith("ue8m0"):
        return "b16"
    lanes = int(type_name[-1]) if re.search(r"x\d$", type_name) else 1
    bits = int(re.search(r"\d+", type_name)[0]) * lanes  # type: ignore[index]
    return {8: "b16", 16: "b16", 32: "b32", 64: "b64"}.get(bits, "b32")


def expand(pattern: str) -> Iterator[tuple[str, ...]]:
    """Every opcode that a form's pattern matches, in pieces."""
    pieces = re.findall(r"\{[^{}]*\}|\([^()]*\)|[^{}()]+", pattern)
    choices = []
    for piece in pieces:
        if piece[0] not in "{(":
            choices.append([piece])
            continue
        dot = "." if piece[1] == "." else ""
        words = [w.removeprefix(".") for w in piece[1:-1].split("|")]
        choices.append([dot + w for w in words] + ([""] if piece[0] == "{" else []))
    return itertools.product(*choices)


def widths(opcode: str, tokens: Sequence[Token]) -> Iterator[list[str]]:
    """Candidate register types of the operands that may have several, best first."""
    open_tokens = [t for t in tokens if t.width in ("32", "x")]
    count = len(open_tokens)
    types = [register(w) for w in opcode.split(".")[1:] if _TYPE.match(w)]
    guesses: list[list[str]] = []
    if types:
        destination, source = types[0], types[-1]
        if opcode.split(".")[1] == "wide":
            destination = {"b16": "b32", "b32": "b64"}[destination]
        guesses.append([destination if t.kind == "d" else source for t in open_tokens])
        guesses.append([*guesses[0][:-1], "b32"] if count else [])
    guesses += [["b32"] * count, ["b16"] * count]
    guesses += [list(g) for g in itertools.product(("b16", "b32"), repeat=min(count, 4))]
    seen: list[list[str]] = []
    for guess in guesses:
        if guess not in seen and len(guess) == count:
            seen.append(guess)
            yield guess


_SOURCES = {  # kinds of operands, by opcode and number of the source
    "shl 1": "small", "shr 1": "small", "shf 2": "small", "bfe 1": "small", "bfe 2": "small",
    "bfi 2": "small", "bfi 3": "small", "bmsk 0": "small", "bmsk 1": "small", "szext 1": "small",
    "fns 1": "lane", "fns 2": "lane",
}  # fmt: skip


def instruction(
    opcode: str, form: Form, narrow: list[str], *, pair: bool = True
) -> Instruction | None:
    """The instruction for one opcode, or None if its operands cannot be made here."""
    rng = random.Random(opcode)
    outputs: list[str] = []
    inputs: list[str] = []
    words = []
    queue = list(narrow)
    head = opcode.split(".")[0]
    combines = re.search(r"\.(and|or|xor)\b", opcode) is not None
    approximate = _APPROXIMATE.search(opcode) is not None
    ulps = ""
    for token in parse_signature(form.signature):
        if token.is_list or token.kind in "aTLF" or token.width == "128":
            return None
        if token.optional and not (token.width == "p" and combines):
            continue
        if token.kind == "i":
            words.append(str(rng.randrange(256)))
            continue
        kind = {"64": "b64", "p": "pred"}.get(token.width) or queue.pop(0)
        if token.kind == "d":
            words.append(f"%o{len(outputs)}")
            outputs.append(kind)
            if token.is_pair and pair:
                words[-1] += f"|%o{len(outputs)}"
                outputs.append("pred")
            continue
        name = _SOURCES.get(f"{head} {len(inputs)}")
        words.append(f"%i{len(inputs)}")
        if name and kind == "b32":
            kind += f":{'small32' if name == 'small' else name}"
        elif approximate and kind in ("b16", "b32"):
            halves = "f16range" if kind == "b16" else "f16x2range"
            kind += ":f32range" if opcode.endswith(".f32") else f":{halves}"
        inputs.append(kind)
    if approximate:
        ulps = opcode.split(".")[-1]
    return Instruction(
        opcode,
        f"{opcode} {', '.join(words)};",
        tuple(outputs),
        tuple(inputs),
        form.family,
        threads=2048 if approximate else 256,
        ulps=ulps,
    )


def accepted(instructions: Sequence[Instruction], ptxas: Path, arch: str) -> set[int]:
    """Which ones ptxas assembles: bisected, since it does not name all bad ones at once."""
    if not instructions:
        return set()
    text = module([i.case() for i in instructions], target=arch)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [str(ptxas), "-arch", arch, "-O0", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return set(range(len(instructions)))
    if len(instructions) == 1:
        return set()
    bad_lines = [int(n) for n in re.findall(r", line (\d+)", done.stderr + done.stdout)]
    if bad_lines:
        starts = [
            i + 1 for i, line in enumerate(text.split("\n")) if line.startswith(".visible .entry")
        ]
        bad = {max(k for k, s in enumerate(starts) if s <= n) for n in bad_lines if n >= starts[0]}
        good = [i for i in range(len(instructions)) if i not in bad]
        if len(good) < len(instructions):
            kept = [instructions[i] for i in good]
            return {good[i] for i in accepted(kept, ptxas, arch)}
    half = len(instructions) // 2
    return accepted(instructions[:half], ptxas, arch) | {
        half + i for i in accepted(instructions[half:], ptxas, arch)
    }


def covering(opcodes: Sequence[tuple[str, ...]], most: int) -> list[tuple[str, ...]]:
    """Opcodes that together show as many pairs of alternatives as can be, greedily."""

    def pairs(pieces: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        numbered = list(enumerate(pieces))
        return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}

    left = dict.fromkeys(opcodes)
    chosen: list[tuple[str, ...]] = []
    seen: set[tuple[int, str, int, str]] = set()
    while left and len(chosen) < most:
        best = max(left, key=lambda o: (len(pairs(o) - seen), -len("".join(o))))
        if chosen and not pairs(best) - seen:
            break
        seen |= pairs(best)
        chosen.append(best)
        del left[best]
    return chosen


def candidates(form: Form) -> Iterator[tuple[tuple[str, ...], list[Instruction]]]:
    """The opcodes of a form, with the ways to write their operands, best first."""
    opcodes = list(expand(form.pattern))
    if len(opcodes) > _TRIED:
        opcodes = sorted(random.Random(form.pattern).sample(opcodes, _TRIED))
    tokens = parse_signature(form.signature)
    for pieces in opcodes:
        opcode = "".join(pieces)
        if _CARRY.match(opcode):
            continue
        ways = []
        for guess in widths(opcode, tokens):
            for pair in (True, False) if any(t.is_pair for t in tokens) else (True,):
                made = instruction(opcode, form, guess, pair=pair)
                if made is not None:
                    ways.append(made)
        if ways:
            yield pieces, ways


def by_form(ptxas: Path, arch: str) -> list[Instruction]:
    """Cases of all scalar forms."""
    forms = [f for f in library.engine().forms.forms if f.family in _FAMILIES]
    wanted = {(form.index, pieces): ways for form in forms for pieces, ways in candidates(form)}
    found: dict[tuple[int, tuple[str, ...]], Instruction] = {}
    for attempt in range(max(map(len, wanted.values()))):
        keys = [k for k, w in wanted.items() if k not in found and attempt < len(w)]
        trial = [wanted[k][attempt] for k in keys]
        for start in range(0, len(trial), 500):
            for i in accepted(trial[start : start + 500], ptxas, arch):
                found[keys[start + i]] = trial[start + i]
        print(f"attempt {attempt}: {len(found)} of {len(wanted)} opcodes", flush=True)
    kept: dict[str, Instruction] = {}
    for form in forms:
        good = [pieces for number, pieces in found if number == form.index]
        for pieces in covering(good, _AT_MOST):
            one = found[form.index, pieces]
            kept.setdefault(one.name, one)
    return list(kept.values())


# ---- what the forms do not lead to


def carry_chains() -> Iterator[Instruction]:
    """Pairs of instructions that hand the carry on."""
    for kind, types in {"b32": ("u32", "s32"), "b64": ("u64", "s64")}.items():
        for type_name in types:
            for head in ("add", "sub"):
                for last in ("", ".cc"):
                    yield Instruction(
                        f"{head}.cc.{type_name}+{head}c{last}.{type_name}",
                        f"{head}.cc.{type_name} %o0, %i0, %i1; "
                        f"{head}c{last}.{type_name} %o1, %i2, %i3; "
                        f"addc.{type_name} %o2, %i0, %i3;",
                        (kind,) * 3,
                        (kind,) * 4,
                        "integer",
                    )
            for first, second in itertools.product(("lo", "hi"), repeat=2):
                yield Instruction(
                    f"mad.{first}.cc.{type_name}+madc.{second}.{type_name}",
                    f"mad.{first}.cc.{type_name} %o0, %i0, %i1, %i2; "
                    f"madc.{second}.cc.{type_name} %o1, %i0, %i1, %i3; "
                    f"madc.{second}.{type_name} %o2, %i1, %i2, %i0;",
                    (kind,) * 3,
                    (kind,) * 4,
                    "integer",
                )


def moves() -> Iterator[Instruction]:
    """Vectors packed into registers and taken apart."""
    shapes = [("b32", "b16", 2), ("b64", "b32", 2), ("b64", "b16", 4)]
    for whole, part, count in shapes:
        pieces = ", ".join(f"%i{j}" for j in range(count))
        yield Instruction(
            f"mov.{whole} pack {count}", f"mov.{whole} %o0, {{{pieces}}};", (whole,),
            (part,) * count, "integer",
        )  # fmt: skip
        pieces = ", ".join(f"%o{j}" for j in range(count))
        yield Instruction(
            f"mov.{whole} unpack {count}", f"mov.{whole} {{{pieces}}}, %i0;", (part,) * count,
            (whole,), "integer",
        )  # fmt: skip
    yield Instruction(
        "mov.b16 pack 2",
        "{ .reg .b8 a, b; cvt.u8.u16 a, %i0; cvt.u8.u16 b, %i1; mov.b16 %o0, {a, b}; }",
        ("b16",), ("b16", "b16"), "integer",
    )  # fmt: skip
    yield Instruction(
        "mov.b16 unpack 2",
        "{ .reg .b8 a, b; mov.b16 {a, b}, %i0; cvt.u16.u8 %o0, a; cvt.s16.s8 %o1, b; }",
        ("b16", "b16"), ("b16",), "integer",
    )  # fmt: skip
    yield Instruction(
        "mov.b64 unpack sink", "mov.b64 {_, %o0}, %i0;", ("b32",), ("b64",), "integer"
    )
    yield Instruction(
        "mov.b32 unpack sink", "mov.b32 {%o0, _}, %i0;", ("b16",), ("b32",), "integer"
    )
    yield Instruction(
        "mov.b128 two", "{ .reg .b128 q, r; mov.b128 q, {%i0, %i1}; mov.b128 r, q; "
        "mov.b128 {%o1, %o0}, r; }", ("b64", "b64"), ("b64", "b64"), "integer",
    )  # fmt: skip
    yield Instruction(
        "mov.b128 four", "{ .reg .b128 q; mov.b128 q, {%i0, %i1, %i2, %i3}; "
        "mov.b128 {%o3, %o2, %o1, %o0}, q; }", ("b32",) * 4, ("b32",) * 4, "integer",
    )  # fmt: skip


def wide_conversions() -> Iterator[Instruction]:
    """cvt into and from registers wider than the type."""
    for source, destination in itertools.product(("u8", "s8", "u16", "s16"), repeat=2):
        for saturate in ("", ".sat"):
            opcode = f"cvt{saturate}.{destination}.{source}"
            yield Instruction(
                f"{opcode} wide", f"{opcode} %o0, %i0;", ("b32",), ("b32",), "convert"
            )
    for destination, source in itertools.product(("u8", "s8", "u16", "s16"), ("f32", "f16")):
        opcode = f"cvt.rni.{destination}.{source}"
        yield Instruction(
            f"{opcode} wide", f"{opcode} %o0, %i0;", ("b32",), (register(source),), "convert"
        )
    for source, destination in itertools.product(("u8", "s8", "u16", "s16"), ("f32", "f16")):
        opcode = f"cvt.rn.{destination}.{source}"
        yield Instruction(
            f"{opcode} wide", f"{opcode} %o0, %i0;", (register(destination),), ("b32",), "convert"
        )
    for source, destination in itertools.product(("u32", "s32", "s8"), ("u64", "s64")):
        opcode = f"cvt.{destination}.{source}"
        yield Instruction(f"{opcode} wide", f"{opcode} %o0, %i0;", ("b64",), ("b32",), "convert")


def immediates() -> Iterator[Instruction]:
    """Constants as operands, in the notations of PTX."""
    floats = ("0f3F8CCCCD", "1.1", "-2.5", "0d3FF199999999999A", "1e-3", "1")
    for number, text in enumerate(floats):
        yield Instruction(
            f"add.f32 constant {number}", f"add.f32 %o0, %i0, {text};", ("b32",), ("b32",), "float"
        )
        yield Instruction(
            f"add.f64 constant {number}", f"add.f64 %o0, %i0, {text};", ("b64",), ("b64",), "float"
        )
    for number, text in enumerate(("-1", "0x80000000", "0b101", "017", "(1 << 4) | 3", "~7")):
        for type_name in ("u32", "s32", "u64", "s64", "s16"):
            kind = register(type_name)
            if kind == "b16" and text == "0x80000000":
                continue
            yield Instruction(
                f"mad.lo.{type_name} constant {number}",
                f"mad.lo.{type_name} %o0, %i0, %i0, {text};", (kind,), (kind,), "integer",
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ptxas", type=Path, default=Path("ptxas"))
    parser.add_argument("--arch", default="sm_90a")
    options = parser.parse_args()
    extra = [*carry_chains(), *moves(), *wide_conversions(), *immediates()]
    good = accepted(extra, options.ptxas, options.arch)
    for i, one in enumerate(extra):
        if i not in good:
            print(f"not accepted: {one.text}")
    found = by_form(options.ptxas, options.arch)
    save_scalar([*found, *(extra[i] for i in sorted(good))])
    load.cache_clear()
    print(f"{len(found)} of the forms, {len(good)} others")


if __name__ == "__main__":
    main()
