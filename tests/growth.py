"""What a process holds, to find what grows from step to step of a loop."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PACKAGE = "*/cute_attn/distributed/*"


class Held(NamedTuple):
    """What the process holds at one moment.

    Attributes:
        memory: bytes by name: "allocated" and "reserved" on the GPU, "allocator retries", and
            "resident on the host".
        tensors: live tensors by device, dtype and shape.
        objects: Python objects that the garbage collector knows, by type.
        lines: bytes that each line of cute_attn.distributed holds, if tracemalloc runs.
    """

    memory: dict[str, int]
    tensors: Counter[str]
    objects: Counter[str]
    lines: Counter[str]

    @classmethod
    def now(cls) -> Held:
        """After a collection of garbage. On a GPU, the work of all streams is done first."""
        memory = {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        gc.collect()
        if torch.cuda.is_available():
            memory = {
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "allocator retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
            }
        memory["resident on the host"] = _resident()
        lines: Counter[str] = Counter()
        if tracemalloc.is_tracing():
            of_package = [tracemalloc.Filter(True, PACKAGE)]
            found = tracemalloc.take_snapshot().filter_traces(of_package).statistics("lineno")
            lines.update({str(x.traceback): x.size for x in found})
        everything = gc.get_objects()
        types = Counter(map(type, everything))
        objects: Counter[str] = Counter()
        for of_type, count in types.items():
            objects[f"{of_type.__module__}.{of_type.__qualname__}"] += count
        kinds = {of_type for of_type in types if issubclass(of_type, Tensor)}
        tensors = Counter(
            f"{x.device.type} {x.dtype} {list(x.shape)}" for x in everything if type(x) in kinds
        )
        return cls(memory, tensors, objects, lines)

    def grew(self, before: Held, least: int = 1) -> str:
        """What has grown since `before`: a line for each number. Objects and lines count only if
        they grew by at least `least`."""
        found = [
            f"{name}: {before.memory[name]} -> {size} bytes ({size - before.memory[name]:+})"
            for name, size in self.memory.items()
            if size > before.memory[name]
        ]
        for what in ("tensors", "objects", "lines"):
            old, new = getattr(before, what), getattr(self, what)
            found += [
                f"{what}: {name}: {old[name]} -> {new[name]}"
                for name, more in (new - old).most_common(20)
                if more >= least
            ]
        return "\n".join(found)


def _resident() -> int:
    """Bytes of the process in the host's memory."""
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")
    )
