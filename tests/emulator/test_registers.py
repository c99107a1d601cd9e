"""Registers of warps: their number at launch, and whether ptxas keeps setmaxnreg."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from cutlass import cute

from cute_attn.cache.cubin import kernel_uses
from cute_attn.emulator import Emulator, Finding
from cute_attn.emulator.cubin import RegisterUse, cubins, register_uses
from cute_attn.emulator.runner import run_ptx
from cute_attn.machine_code.disassembly import disassemble, find_nvdisasm

ARCHS = ("sm_90a", "sm_100a")


class Trade:
    """The first warpgroup grows by the registers that the others release."""

    def __init__(self, threads: int, grow: int, shrink: int, blocks_per_sm: int) -> None:
        self.threads, self.blocks_per_sm = threads, blocks_per_sm
        self.grow, self.shrink = grow, shrink

    @cute.jit
    def __call__(self, out: cute.Tensor):
        self.kernel(out).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=self.blocks_per_sm
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        if thread < 128:
            cute.arch.setmaxregister_increase(self.grow)
            out[thread] = thread
        else:
            cute.arch.setmaxregister_decrease(self.shrink)
            out[thread] = thread + 1


@functools.cache
def compiled(arch: str, threads: int, grow: int, shrink: int, blocks_per_sm: int = 1) -> Any:
    kernel = Trade(threads, grow, shrink, blocks_per_sm)
    out = cute.runtime.make_fake_compact_tensor(cute.Int32, (threads,))
    options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx"
    return cute.compile(kernel, out, options=options)


def findings(function: Any, threads: int) -> list[Finding]:
    """Of a run, whose result has to be right."""
    emulator = Emulator()
    out = torch.full((threads,), -1, dtype=torch.int32)
    emulator.load(function)(out)
    thread = torch.arange(threads)
    assert torch.equal(out.long(), thread + (thread >= 128))
    return emulator.report.findings


# 352 threads are 11 warps, of which a quarter of the SM holds three: 65536 / 4 / 96 is 168 by
# eights, while 65536 / 352 would be 184.
@pytest.mark.parametrize("arch", ARCHS)
def test_registers_are_those_of_the_machine_code(arch: str) -> None:
    assert findings(compiled(arch, 352, 168, 24), 352) == []
    assert findings(compiled(arch, 352, 240, 56), 352) == []


@pytest.mark.parametrize("arch", ARCHS)
def test_setmaxnreg_that_the_assembler_leaves_out_has_no_effect(arch: str) -> None:
    # Without it warps keep what they have: far too little to grow to this if it did count.
    found = findings(compiled(arch, 1024, 256, 64, 0), 1024)
    assert {finding.check for finding in found} == {"registers"}
    assert {finding.severity for finding in found} == {"note"}
    assert all("left it out" in finding.message for finding in found)
    assert len(found) == 2


def object_file(function: Any, directory: Path) -> bytes:
    path = directory / "function.o"
    function.export_to_c(str(path), function_name="k")
    return path.read_bytes()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("blocks_per_sm", "kept"), [(1, True), (0, False)])
def test_what_machine_code_says(arch: str, blocks_per_sm: int, kept: bool, tmp_path: Path) -> None:
    image = object_file(compiled(arch, 352, 168, 24, blocks_per_sm), tmp_path)
    (code,) = cubins(image)
    (use,) = kernel_uses(code, ptxas_log="", host_code="")
    assert register_uses(image) == {use.name: RegisterUse(use.registers, kept)}
    assert use.registers == 168 or not kept
    assert ("USETMAXREG" in disassemble(code, find_nvdisasm())) == kept


def test_without_machine_code_nothing_is_known() -> None:
    assert register_uses(b"") == {}
    assert register_uses(b"\x7fELF" + b"?" * 100) == {}
    elf = bytearray(b" \x7fELF\x02\x01\x01" + bytes(200))
    elf[19] = 190
    assert register_uses(bytes(elf)) == {}  # no more than a header


PTX = """.version 8.8
.target {arch}
.address_size 64
.visible .entry k(.param .u64 out) .reqntid {threads} .minnctapersm 1
{{
    .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [out];
    setp.lt.u32 %p1, %r1, 128;
    @%p1 bra GROW;
    {shrink}
    bra OUT;
GROW:
    setmaxnreg.inc.sync.aligned.u32 {grow};
OUT:
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r1;
    ret;
}}
"""

# Registers at launch as ptxas 13.0 chose them for sm_90a and sm_100a, by threads and the largest
# increase. The last column is the most that the first warpgroup can grow to.
LAUNCHES = [
    (128, 256, 255),
    (192, 256, 255),
    (256, 256, 255),
    (256, 216, 216),
    (256, 232, 232),
    (320, 240, 168),
    (352, 208, 168),
    (352, 168, 168),
    (384, 240, 168),
    (384, 160, 160),
    (416, 152, 128),
    (480, 136, 128),
    (512, 144, 128),
    (640, 112, 96),
]


def text(arch: str, threads: int, grow: int, shrink: int | None) -> str:
    less = f"setmaxnreg.dec.sync.aligned.u32 {shrink};" if shrink else ""
    return PTX.format(arch=arch, threads=threads, grow=grow, shrink=less)


@pytest.mark.parametrize(("threads", "grow", "launched"), LAUNCHES)
def test_the_estimate_for_ptx_alone(threads: int, grow: int, launched: int) -> None:
    """A warp may shrink to its own number of registers but not above: that reveals the number."""
    held = (launched + 7) // 8 * 8

    def run(shrink: int | None) -> list[str]:
        out = torch.zeros(threads, dtype=torch.int32)
        done = run_ptx(text("sm_90a", threads, grow, shrink), block=threads, args=[out])
        return [finding.check for finding in done.errors]

    if threads > 128:
        if held < 256:
            assert "registers" in run(held + 8)
        assert "registers" not in run(held)
    assert run(24) == []  # enough for the increase in all of these


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("threads", "grow", "launched"), LAUNCHES)
def test_the_table_above_is_what_ptxas_does(
    arch: str, threads: int, grow: int, launched: int, tmp_path: Path
) -> None:
    source, output = tmp_path / "k.ptx", tmp_path / "k.cubin"
    source.write_text(text(arch, threads, grow, 24))
    subprocess.run(["ptxas", "-arch", arch, str(source), "-o", str(output)], check=True)
    # In an object file it stands behind other bytes.
    assert register_uses(b"object" + output.read_bytes()) == {"k": RegisterUse(launched, True)}
