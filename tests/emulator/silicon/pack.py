"""Keep what `collect` brought back: results.npz, compressed better.

    python -m tests.emulator.silicon.pack [--onto] OUT/results.npz

With --onto what is kept already stays, unless this run has it too; cases that are no more go.
"""

from __future__ import annotations

import json
import lzma
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .cases import load

KEPT = Path(__file__).parents[2] / "data" / "silicon" / "instructions.xz"


def read(source: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The index of a run, and each case's output buffer by name."""
    stored = np.load(source)
    index = json.loads(stored["index"].tobytes())
    return index, _split(index, stored["data"])


def pack(index: dict[str, Any], outputs: dict[str, np.ndarray]) -> None:
    """Write both. The outputs have to be in the order of the index."""
    head = json.dumps(index).encode()
    data = b"".join(outputs[name].tobytes() for name in index["cases"])
    content = len(head).to_bytes(8, "little") + head + data
    KEPT.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def add(
    index: dict[str, Any], outputs: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A run on top of what is kept."""
    old, old_outputs = unpack()
    names = {case.name for case in load()}
    cases = {
        name: entry for name, entry in (old["cases"] | index["cases"]).items() if name in names
    }
    failures = {
        name: text
        for name, text in (old["failures"] | index["failures"]).items()
        if name in names and name not in index["cases"]
    }
    cases = {name: entry for name, entry in cases.items() if name not in index["failures"]}
    return {**index, "cases": cases, "failures": failures}, old_outputs | outputs


def _split(index: dict[str, Any], data: np.ndarray) -> dict[str, np.ndarray]:
    outputs, at = {}, 0
    for name, (_, count, _) in index["cases"].items():
        outputs[name] = data[at : at + count]
        at += count
    return outputs


@cache
def unpack() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The index, and each case's output buffer by name."""
    content = lzma.decompress(KEPT.read_bytes())
    size = int.from_bytes(content[:8], "little")
    index = json.loads(content[8 : 8 + size])
    return index, _split(index, np.frombuffer(content, np.uint8, offset=8 + size))


if __name__ == "__main__":
    run = read(Path(sys.argv[-1]))
    pack(*(add(*run) if "--onto" in sys.argv else run))
