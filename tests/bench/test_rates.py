"""The micro-benchmarks run, and the assembler keeps what they measure."""

from __future__ import annotations

from collections import Counter

import pytest

from cute_attn.bench.rates import study
from cute_attn.bench.rates.beside import NOTHING, ROUNDS
from cute_attn.bench.rates.loops import LOOPS
from cute_attn.bench.rates.machine import spec_of
from cute_attn.bench.rates.spec import KERNEL
from cute_attn.emulator import Emulator

CASES = {
    "arithmetic": (1, 1, {}),
    "code": (1, 1, {}),
    "code with jumps": (1, 1, {}),
    "mma.sync": (4, 4, {}),
    "shared memory": (0, 4, {}),
    "shared memory latency": (0, 1, {}),
    "wgmma": (64, 4, {}),
    **{f"wgmma beside {kind}": (64, 12, {}) for kind in (NOTHING, *ROUNDS)},
    "chains": (0, 4, {}),
    "cluster barrier": (0, 4, {}),
    **dict.fromkeys(("load", "store", "load and store"), (0, 8, {})),
    "mma.sync beside square": (0, 8, {}),
    "mma.sync beside logic": (0, 8, {}),
    "wgmma, A in registers": (64, 4, {}),
    "barriers": (0, 4, {}),
    "bulk loads": (0, 1, {"size": 1024, "depth": 4, "step": 2048, "mask": 2**20 - 1}),
    "bulk stores": (0, 1, {"size": 1024, "step": 2048, "mask": 2**20 - 1}),
    "global memory": (16, 8, {"size": 16, "step": 8192, "mask": 2**20 - 1}),
    "global latency": (0, 1, {}),
    "nothing": (0, 2, {}),
}
QUICK = ("barriers", "bulk loads")


def test_every_loop_has_a_case() -> None:
    assert sorted(CASES) == sorted(LOOPS)


@pytest.mark.parametrize(
    "what",
    [what if what in QUICK else pytest.param(what, marks=pytest.mark.slow) for what in CASES],
)
def test_every_loop_runs_in_the_emulator(what: str) -> None:
    """The emulator finds no race, no missing wait and no wrong address."""
    from cute_attn.bench.rates.machine import Machine
    from cute_attn.emulation import emulated

    width, warps, parameters = CASES[what]
    shared = 64 if what.startswith(("wgmma", "chains")) else 36
    with emulated("sm_90a", Emulator(num_sms=2)):
        machine = Machine(memory_bytes=2**21)
        times = machine.run(spec_of(what, width, warps, shared), 6, ctas=2, **parameters)
    if LOOPS[what](width):
        assert bool((times[..., 1] > times[..., 0]).all())


# The machine instruction of each loop that is worth a check, and its number in an iteration.
KEPT = {
    "arithmetic": {"ex2": "MUFU.EX2", "fma": "FFMA", "max": "FMNMX", "logic": "LOP3.LUT"},
    "shared memory": {"load 16 B": "LDS.128", "stmatrix x4": "STSM.16.M88.4"},
    "wgmma": {"group of 9": "HGMMA.64x64x16.F32.BF16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", KEPT)
def test_the_assembler_keeps_the_operations(what: str) -> None:
    from cute_attn import cache
    from cute_attn.emulator.cubin import cubins
    from cute_attn.machine_code.disassembly import disassemble, find_nvdisasm
    from cute_attn.machine_code.listing import functions

    width, warps, _ = CASES[what]
    shared = 64 if what.startswith("wgmma") else 36
    entry = cache.compile(KERNEL, spec_of(what, width, warps, shared), arch="sm_90a")
    (cubin,) = cubins(entry.read("kernel.o"))
    (function,) = functions(disassemble(cubin, find_nvdisasm()))
    bodies = [Counter(i.opcode for i in function.within(loop)) for loop in function.loops()]
    for name, opcode in KEPT[what].items():
        (loop,) = (loop for loop in LOOPS[what](width) if loop.name == name)
        wanted = 9 if name == "group of 9" else loop.operations
        assert any(body[opcode] == wanted for body in bodies), name


def test_the_parts_name_their_kernels() -> None:
    """All kernels can be compiled before the first is timed."""
    for part in study.PARTS:
        assert study.requests(False, [part])
