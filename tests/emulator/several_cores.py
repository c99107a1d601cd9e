"""Seconds of launches on one core and on two: `python -m tests.emulator.several_cores`.

The kernels are quack's GEMM and FlashAttention-4's forward for sm_90a, and runs on one core and on
two alternate. Results must be equal bit for bit. Other programs may share the machine, so that the
table also has the processor's seconds: of all threads, and of the busiest thread, which is how long
the launch takes on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cute_attn.bench.peers import capture_all
from cute_attn.bench.peers.flash_attention_4 import forward
from cute_attn.bench.peers.quack_kernels import gemm
from cute_attn.emulator import Emulator
from cute_attn.emulator.machine import Machine

REQUESTS = {
    "GEMM of 1024 cubed": gemm(arch="sm_90a", m=1024, n=1024, k=1024),
    "GEMM of 2048 cubed": gemm(arch="sm_90a", m=2048, n=2048, k=2048),
    "attention, 4 heads of 1024": forward(
        arch="sm_90a", head_dim=128, heads=4, seqlen_q=1024, seqlen_k=1024
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs on each number of cores")
    parser.add_argument("--checks", default="none", help="all, none or a check")
    given = parser.parse_args()
    print(f"{'kernel':<28} {'cores':>5} {'CPU s':>7} {'busiest':>7} {'wall s':>7}")
    with tempfile.TemporaryDirectory() as scratch:
        captures = capture_all(Path(scratch), list(REQUESTS.values()))
        for name, captured in zip(REQUESTS, captures, strict=True):
            inputs = captured.random_inputs()
            times: dict[int, list[tuple[float, ...]]] = {1: [], 2: []}
            written = []
            for cores in (1, 2) * given.repeats:
                memory = captured.materialise(inputs)
                emulator = Emulator(checks=given.checks, cores=cores)
                (call,) = captured.calls
                function = emulator.load_object(
                    call.function.object_file.read_bytes(), call.function.ptx
                )
                busy = timed(emulator._machine)
                used, started = time.process_time(), time.perf_counter()
                function(*memory.arguments(call))
                wall = time.perf_counter() - started
                times[cores].append((time.process_time() - used, max(busy), wall))
                written.append(
                    {key: x.view(torch.uint8).clone() for key, x in memory.tensors.items()}
                )
            assert all(torch.equal(x, one[key]) for one in written for key, x in written[0].items())
            for cores, pairs in times.items():
                cpu, busiest, wall = map(statistics.median, zip(*pairs, strict=True))
                print(f"{name:<28} {cores:>5} {cpu:>7.2f} {busiest:>7.2f} {wall:>7.2f}", flush=True)


def timed(machine: Machine) -> list[float]:
    """The processor's seconds of each thread of the machine's next launches."""
    seconds: list[float] = []
    start = machine._start

    def started(*arguments: Any) -> int:
        before = time.thread_time()
        code = start(*arguments)
        seconds.append(time.thread_time() - before)
        return code

    machine._start = started  # type: ignore[method-assign]
    return seconds


if __name__ == "__main__":
    main()
