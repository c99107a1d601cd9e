"""Write cases.json: the engine's forms with all their modifiers, as far as ptxas takes them.

    python -m tests.emulator.silicon.generate [--ptxas PATH] [--arch sm_90a]
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cute_attn.emulator import machine
from cute_attn.emulator.forms import Form, parse_signature

from .cases import Case, module, save

_FAMILIES = ("integer", "float", "convert", "warp")
_AT_MOST = 48  # opcodes of one form: beyond that, a fixed random choice
_LEFT_OUT = re.compile(
    r"^(bar|barrier|setmaxnreg|griddep|nanosleep|elect|activemask|mbarrier|fence|membar|mapa|"
    r"getctarank|brkpt|pmevent|trap|add\.cc|addc|sub\.cc|subc|mad\.(lo|hi)\.cc|madc)"
)
_NARROW = re.compile(r"^(u16|s16|b16|f16|bf16|e4m3x2|e5m2x2|ue8m0x2)$")
_TYPE = re.compile(r"^(u|s|b|f|bf|tf)\d+(x\d+)?$|^(e\dm\d|ue8m0)(x\d+)?$")


def expand(pattern: str) -> Iterator[str]:
    """Every opcode that a form's pattern matches."""
    pieces = re.findall(r"\{[^{}]*\}|\([^()]*\)|[^{}()]+", pattern)
    choices = []
    for piece in pieces:
        if piece[0] not in "{(":
            choices.append([piece])
            continue
        dot = "." if piece[1] == "." else ""
        words = [w.removeprefix(".") for w in piece[1:-1].split("|")]
        choices.append([dot + w for w in words] + ([""] if piece[0] == "{" else []))
    for words in itertools.product(*choices):
        yield "".join(words)


def widths(opcode: str, form: Form) -> Iterator[list[str]]:
    """Guesses, best first, at the register types of the tokens that may be 16 or 32 bits wide."""
    tokens = parse_signature(form.signature)
    types = [w for w in opcode.split(".")[1:] if _TYPE.match(w)]
    narrow = ["b16" if _NARROW.match(t) else "b32" for t in types]
    count = sum(t.width == "32" for t in tokens)
    guesses: list[list[str]] = []
    if narrow:
        destination, source = narrow[0], narrow[-1]
        if opcode.split(".")[1] == "wide":
            destination = "b32"
        guesses.append([destination if t.kind == "d" else source for t in tokens if t.width == "32"])
        guesses.append([*guesses[0][:-1], "b32"] if count else [])
    guesses += [["b32"] * count, ["b16"] * count]
    guesses += [list(g) for g in itertools.product(("b16", "b32"), repeat=min(count, 4))]
    seen: list[list[str]] = []
    for guess in guesses:
        if guess not in seen and len(guess) == count:
            seen.append(guess)
            yield guess


def case_for(opcode: str, form: Form, narrow: list[str]) -> Case | None:
    """The case that runs one opcode, or None if its operands cannot be made here."""
    rng = random.Random(opcode)
    outputs, inputs, words = [], [], []
    queue = list(narrow)
    for token in parse_signature(form.signature):
        if token.optional or token.is_list or token.kind in "aTLF":
            return None
        if token.kind == "i":
            words.append(str(rng.randrange(256)))
            continue
        kind = {"32": "", "64": "b64", "p": "pred"}.get(token.width)
        if kind is None:
            return None
        kind = kind or queue.pop(0)
        if token.kind == "d":
            words.append(f"%o{len(outputs)}")
            outputs.append(kind)
            if token.is_pair:
                words[-1] += f"|%o{len(outputs)}"
                outputs.append("pred")
        else:
            words.append(f"%i{len(inputs)}")
            inputs.append(kind)
    if opcode.split(".")[0] in ("shfl", "vote", "match", "redux"):
        inputs.pop()  # the member mask: all lanes
        words[-1] = "0xFFFFFFFF"
    if not outputs:
        return None
    return Case(opcode, f"{opcode} {', '.join(words)};", tuple(outputs), tuple(inputs), form.family)


def accepted(cases: list[Case], ptxas: Path, arch: str) -> set[int]:
    """Which cases ptxas assembles: bisected, since it stops at the first bad kernels."""
    if not cases:
        return set()
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(module(cases, target=arch))
        file.flush()
        command = [str(ptxas), "-arch", arch, "-O0", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return set(range(len(cases)))
    if len(cases) == 1:
        return set()
    bad_lines = [int(n) for n in re.findall(r", line (\d+)", done.stderr + done.stdout)]
    if bad_lines:
        text = module(cases, target=arch).split("\n")
        starts = [i + 1 for i, line in enumerate(text) if line.startswith(".visible")]
        bad = {max(k for k, s in enumerate(starts) if s <= n) for n in bad_lines if n >= starts[0]}
        good = [i for i in range(len(cases)) if i not in bad]
        if len(good) < len(cases):
            return {good[i] for i in accepted([cases[i] for i in good], ptxas, arch)}
    half = len(cases) // 2
    return accepted(cases[:half], ptxas, arch) | {
        half + i for i in accepted(cases[half:], ptxas, arch)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ptxas", type=Path, required=True)
    parser.add_argument("--arch", default="sm_90a")
    options = parser.parse_args()
    wanted: dict[str, list[Case]] = {}
    for form in machine.engine().forms.forms:
        if form.family not in _FAMILIES:
            continue
        opcodes = [o for o in expand(form.pattern) if not _LEFT_OUT.match(o) and "#" not in o]
        if len(opcodes) > _AT_MOST:
            opcodes = sorted(random.Random(form.pattern).sample(opcodes, _AT_MOST))
        for opcode in opcodes:
            for guess in widths(opcode, form):
                case = case_for(opcode, form, guess)
                if case is not None:
                    wanted.setdefault(opcode, []).append(case)
    found: dict[str, Case] = {}
    for attempt in range(max(map(len, wanted.values()))):
        trial = [c[attempt] for o, c in wanted.items() if o not in found and attempt < len(c)]
        for i in accepted(trial, options.ptxas, options.arch):
            found[trial[i].name] = trial[i]
        print(f"attempt {attempt}: {len(found)} of {len(wanted)} opcodes", flush=True)
    save([found[opcode] for opcode in wanted if opcode in found])


if __name__ == "__main__":
    main()
