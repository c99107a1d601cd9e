"""Keep what `collect` brought back: results.npz, compressed better.

python -m tests.emulator.silicon.pack OUT/results.npz
"""

from __future__ import annotations

import json
import lzma
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

KEPT = Path(__file__).parents[2] / "data" / "silicon" / "instructions.xz"


def pack(source: Path) -> None:
    stored = np.load(source)
    index = stored["index"].tobytes()
    content = len(index).to_bytes(8, "little") + index + stored["data"].tobytes()
    KEPT.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


@cache
def unpack() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The index, and each case's output buffer by name."""
    content = lzma.decompress(KEPT.read_bytes())
    size = int.from_bytes(content[:8], "little")
    index = json.loads(content[8 : 8 + size])
    data, at = np.frombuffer(content, np.uint8, offset=8 + size), 0
    outputs = {}
    for name, (_, count, _) in index["cases"].items():
        outputs[name] = data[at : at + count]
        at += count
    return index, outputs


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
