"""Threads and forked processes that run emulators concurrently, shared or one each."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from elftools.elf.elffile import ELFFile

import cute_attn
from cute_attn import cache
from cute_attn.emulator import Emulator, build
from cute_attn.emulator.ptx import Module, parse
from cute_attn.emulator.runner import Buffer, run_ptx
from cute_attn.ops.lightning import plan_decode

from . import planted_kernels as small
from .mutations import Ptx

T = TypeVar("T")
THREADS = 4
CTAS = 16  # of each small kernel: a launch has to last for others to come in between
KERNELS = {
    name: kernel for name, kernel in sorted(vars(small).items()) if isinstance(kernel, small.Small)
}


def at_once(function: Callable[[int], T], threads: int = THREADS) -> list[T]:
    """What `function` returns for 0, 1 ..., called by as many threads that start together."""
    start = threading.Barrier(threads)

    def run(number: int) -> T:
        start.wait()
        return function(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


def outcome(name: str, module: Module, schedule: int) -> tuple[Any, ...]:
    """The whole report of a launch, and the bits that it has written."""
    kernel = KERNELS[name]
    arguments = kernel.arguments()
    run = run_ptx(
        module,
        grid=kernel.grid * CTAS,
        block=kernel.block,
        args=arguments,
        dynamic_shared=kernel.dynamic_shared,
        schedule=schedule,
        seed=5,
    )
    out = arguments[-1].array if isinstance(arguments[-1], Buffer) else arguments[-1]
    findings = [(f.check, f.severity, f.message, f.line, f.count) for f in run.findings]
    return name, schedule, out.tobytes(), findings, run.by_instruction, run.mma


def without(kernel: small.Small, mark: str) -> str:
    text = Ptx(kernel.text)
    return text.drop(*text.marked(mark)).text


# Whose CTAs all do the same: as they are, and with a race, of which marks and messages tell.
CASES = [
    (name, parse(text))
    for name, text in [
        ("PIPELINE", small.PIPELINE.text),
        ("WGMMA", small.WGMMA.text),
        ("TCGEN05", small.TCGEN05.text),
        ("PIPELINE", without(small.PIPELINE, "empty_wait")),
        ("CP_ASYNC", without(small.CP_ASYNC, "free")),
    ]
]


def test_machines_of_several_threads_do_not_meet() -> None:
    def all_cases(number: int) -> list[Any]:
        order = [(i + number) % len(CASES) for i in range(len(CASES))]  # different ones at once
        found = {
            (i, schedule): outcome(*CASES[i], schedule)
            for _ in range(2)
            for i in order
            for schedule in (0, 1)
        }
        return [found[key] for key in sorted(found)]

    alone = all_cases(0)
    for together in at_once(all_cases):
        for one, other in zip(together, alone, strict=True):
            assert one == other


def lightning_step(emulator: Emulator) -> list[torch.Tensor]:
    q, k, v, _, state, decay, *_ = decode_arguments(7)
    with cute_attn.emulated("sm_90a", emulator):
        return [cute_attn.lightning_attn_decode(q, k, v, state, decay), state]


def kda_step_with_a_race(emulator: Emulator) -> list[torch.Tensor]:
    """Two sequences update the same slot of the state."""
    generator = torch.Generator().manual_seed(8)
    q, k, v, g = torch.randn(4, 2, 2, 128, generator=generator).to(torch.bfloat16)
    beta = torch.rand(2, 2, generator=generator).to(torch.bfloat16)
    state = torch.randn(2, 2, 128, 128, generator=generator)
    slots = torch.zeros(2, dtype=torch.int32)
    with cute_attn.emulated("sm_100a", emulator):
        o = cute_attn.kda_decode(
            q, k, v, g, beta, state, use_gate_in_kernel=False, state_indices=slots
        )
    return [o, state]


def told(step: Callable[[Emulator], list[torch.Tensor]]) -> tuple[Any, ...]:
    """The results of a step in an emulator of its own, and the emulator's report."""
    emulator = Emulator(on_findings="collect")
    outputs = [tensor.view(torch.uint8).numpy().tobytes() for tensor in step(emulator)]
    report = emulator.report
    launches = [(launch.kernel, launch.grid, launch.instructions) for launch in report.launches]
    findings = [(f.check, f.severity, f.message, f.line, f.count) for f in report.findings]
    counts = report.by_opcode, report.by_warp, report.bytes, report.counters, report.mma
    return findings, outputs, launches, counts


@pytest.mark.slow  # the small kernels of the test above stand for it
def test_two_emulators_run_different_kernels_at_once() -> None:
    steps = (lightning_step, kda_step_with_a_race)
    alone = [told(step) for step in steps]
    assert alone[0][0] == []
    assert {check for check, *_ in alone[1][0]} == {"race"}
    for _ in range(3):
        assert at_once(lambda number: told(steps[number]), threads=2) == alone


def test_the_engine_keeps_nothing_outside_of_its_machines() -> None:
    """The engine has no writable variables that machines or threads share."""
    kept = set()
    for source in build.ENGINE.glob("*.c"):
        with build.object_file(source).open("rb") as file:
            elf = ELFFile(file)
            for symbol in elf.get_section_by_name(".symtab").iter_symbols():
                at = symbol["st_shndx"]
                section = "" if isinstance(at, str) else elf.get_section(at).name
                written = section.startswith((".data", ".bss")) and "rel.ro" not in section
                if written and symbol["st_info"]["type"] == "STT_OBJECT":
                    kept.add(symbol.name)
    assert kept == set()


@pytest.fixture(scope="module")
def entry() -> cache.Entry:
    """Lightning decode, compiled and stored."""
    ((kernel, spec),) = plan_decode("sm_90a", head_dim_k=64, head_dim_v=64, indexed=False)
    return cache.compile(kernel, spec, arch="sm_90a")


def decode_arguments(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 2, 64, generator=generator).to(torch.bfloat16)
    o, state = torch.empty_like(v), torch.randn(2, 2, 64, 64, generator=generator)
    return [q, k, v, o, state, torch.rand(2, generator=generator), *[None] * 4, 0.125]


def test_threads_that_share_an_emulator_take_turns(entry: cache.Entry) -> None:
    alone = []
    for seed in range(THREADS):
        arguments = decode_arguments(seed)
        Emulator().load(entry)(*arguments)
        alone.append(arguments)

    emulator = Emulator()
    function = emulator.load(entry)

    def calls(seed: int) -> list[Any]:
        other = emulator.load(entry)
        for which in (function, other, function):
            arguments = decode_arguments(seed)
            which(*arguments)
        return arguments

    for expected, got in zip(alone, at_once(calls), strict=True):
        assert torch.equal(expected[3], got[3])
        assert torch.equal(expected[4], got[4])
    report = emulator.report
    assert len(report.launches) == 3 * THREADS
    assert {launch.instructions for launch in report.launches} == {
        report.instructions // (3 * THREADS)
    }


def test_a_call_within_a_call_is_refused(entry: cache.Entry) -> None:
    def progress(_: int, __: int) -> None:
        function(*decode_arguments(0))

    emulator = Emulator(progress=progress)
    function = emulator.load(entry)
    with pytest.raises(RuntimeError, match="within another one"):
        function(*decode_arguments(0))
    emulator._progress = None
    function(*decode_arguments(0))  # the emulator is none the worse


FORK = """
import os, sys, threading, time
import torch
from cute_attn.emulator import Emulator, build
from pathlib import Path

build.directory = Path(sys.argv[1])
from tests.emulator.test_threads import decode_arguments

entry, ready, forked = sys.argv[2], threading.Event(), threading.Event()

def progress(done, total):  # the fork happens in the middle of this thread's launch
    ready.set()
    forked.wait(60)

emulator = Emulator(progress=progress)
function = emulator.load(entry)
expected, got = decode_arguments(1), decode_arguments(1)
Emulator().load(entry)(*expected)
thread = threading.Thread(target=lambda: function(*decode_arguments(0)))
thread.start()
assert ready.wait(60)
child = os.fork()
if child == 0:
    forked.set()
    function(*got)
    emulator.load(entry)(*decode_arguments(2))
    equal = torch.equal(expected[3], got[3]) and torch.equal(expected[4], got[4])
    del function, emulator  # and the machine that was running goes without harm
    sys.exit(0 if equal else 3)
forked.set()
thread.join()
function(*got)
assert torch.equal(expected[4], got[4])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_during_a_launch_can_launch(entry: cache.Entry) -> None:
    assert build.directory is not None
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(build.directory), str(entry.directory)],
        cwd=Path(__file__).parents[2],
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
