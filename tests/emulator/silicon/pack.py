"""Keep what `collect` brought back: results.npz, smaller, and which forms it compares.

    python -m tests.emulator.silicon.pack OUT/results.npz

Of a large output the beginning is kept and a digest of all of it. forms.json counts, for each of
the engine's forms, the cases whose kernels have it: it is what the table of instructions shows.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .cases import DATA, load, module

KEPT = DATA / "instructions.xz"
FORMS = DATA / "forms.json"
_WHOLE = 2048  # bytes: an output of up to this is kept whole


def read(source: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The index of a run, and each case's output buffer by name."""
    stored = np.load(source)
    index = json.loads(stored["index"].tobytes())
    data, outputs, at = stored["data"], {}, 0
    for name, (_, count, _) in index["cases"].items():
        outputs[name] = data[at : at + count]
        at += count
    return index, outputs


@dataclass(frozen=True)
class Output:
    """The beginning of an output buffer, and a digest of the whole if it is longer."""

    size: int
    start: np.ndarray
    digest: str

    def equals(self, output: np.ndarray) -> bool:
        """Whether all of it is the same."""
        return (
            output.nbytes == self.size
            and np.array_equal(output[: self.start.nbytes], self.start)
            and (not self.digest or digest(output) == self.digest)
        )


def digest(output: np.ndarray) -> str:
    return hashlib.sha256(output.tobytes()).hexdigest()[:32]


def pack(index: dict[str, Any], outputs: dict[str, np.ndarray]) -> None:
    """Write both."""
    names = {case.name for case in load()}
    index = {**index, "cases": {n: e for n, e in index["cases"].items() if n in names}}
    index["failures"] = {n: e for n, e in index["failures"].items() if n in names}
    index["digests"] = {n: digest(outputs[n]) for n in index["cases"] if _is_large(outputs[n])}
    head = json.dumps(index).encode()
    data = b"".join(outputs[name][:_WHOLE].tobytes() for name in index["cases"])
    content = len(head).to_bytes(8, "little") + head + data
    KEPT.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def _is_large(output: np.ndarray) -> bool:
    return output.nbytes > _WHOLE


@cache
def unpack() -> tuple[dict[str, Any], dict[str, Output]]:
    """The index, and each case's output buffer by name."""
    content = lzma.decompress(KEPT.read_bytes())
    at = 8 + int.from_bytes(content[:8], "little")
    index = json.loads(content[8:at])
    outputs = {}
    for name, (_, size, _) in index["cases"].items():
        start = np.frombuffer(content, np.uint8, min(size, _WHOLE), at)
        outputs[name] = Output(size, start, index["digests"].get(name, ""))
        at += start.nbytes
    return index, outputs


def forms(index: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """Pattern and signature of each form, with the cases that have it: compared, and only run."""
    from cute_attn.emulator import library, machine

    compared: Counter[int] = Counter()
    ran: Counter[int] = Counter()
    for case in load():
        if case.name in index["cases"]:
            (program,) = machine.programs(module([case])).values()
            (ran if case.family == "hint" else compared).update(set(program.forms))
    return [
        (form.pattern, form.signature, compared[form.index], ran[form.index])
        for form in library.engine().forms.forms
        if compared[form.index] or ran[form.index]
    ]


def save_forms(rows: list[tuple[str, str, int, int]]) -> None:
    lines = ",\n".join(json.dumps(row) for row in rows)
    FORMS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    run = read(Path(sys.argv[-1]))
    pack(*run)
    save_forms(forms(run[0]))
