"""Bugs in programs of other packages: docs/bugs_found.md tells of them.

    python -m tests.emulator.bugs_in_scripts [--cutlass CHECKOUT] [--flashinfer WHEEL]
        [--vllm WHEEL] [NAME ...]

runs each program in the emulator, unmodified, and prints its errors; then the same for a copy of
the sources with a small change. CHECKOUT is a checkout of NVIDIA/cutlass, WHEEL an unpacked wheel.
All are read, never written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cutlass_examples import BLACKWELL, EXAMPLES

KERNELS = "cute/blackwell/kernel"
MIXED = f"{KERNELS}/attention/mixed_input_fmha"
MQA = "attn_scores/kernels/fp8_paged_mqa_logits.py"
GDN = "model_executor/layers/mamba/ops/gdn_chunk_cutedsl"
FLASHINFER_GDN = "gdn_kernels/blackwell"
# Of each package: the folder in what is given, and the parts of the folder that a copy needs.
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "cutlass": (EXAMPLES, (".",)),
    "flashinfer": ("flashinfer", ("attn_scores", FLASHINFER_GDN)),
    "vllm": ("vllm", ("cute_utils", GDN)),
}
Edit = tuple[str, str]


@dataclass(frozen=True)
class Program:
    """A program with a bug.

    Attributes:
        package: a key of PACKAGES.
        file: the file with the bug, in the package's folder.
        arguments: of the script.
        checks: those that find the bug.
        edits: what mends it: texts that occur once, and what takes their places.
        schedules: the number of the emulator's schedules.
        caller: the program that calls the kernel, where the file is no program itself.
    """

    package: str
    file: str
    arguments: str
    checks: frozenset[str]
    edits: tuple[Edit, ...]
    schedules: int = 5
    caller: str | None = None

    def folder(self, given: Path) -> Path:
        """The package's folder in a checkout, or in an unpacked wheel."""
        return given / PACKAGES[self.package][0]

    def errors(self, folder: Path, scratch: Path) -> list[str]:
        """The errors of a run, in words."""
        if self.caller is None:
            command = [str(folder / self.file), *self.arguments.split()]
        else:
            command = [str(Path(__file__).with_name(self.caller)), str(folder)]
        report = scratch / "report.json"
        report.unlink(missing_ok=True)
        options = "--arch", BLACKWELL, "--schedules", str(self.schedules), "--report", str(report)
        done = subprocess.run(
            [sys.executable, "-m", "cute_attn.emulator", *options, *command],
            cwd=scratch, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(done.stdout + done.stderr)
        found = json.loads(report.read_text())["findings"]
        return [f"{f['check']}: {f['message']}" for f in found if f["severity"] == "error"]

    def mended(self, folder: Path, scratch: Path) -> Path:
        """A copy of the folder's parts with the edits."""
        copy = scratch / "mended"
        shutil.rmtree(copy, ignore_errors=True)
        for part in PACKAGES[self.package][1]:
            shutil.copytree(folder / part, copy / part)
        text = (copy / self.file).read_text()
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.file} has this text {text.count(old)} times: {old!r}")
            text = text.replace(old, new)
        (copy / self.file).write_text(text)
        return copy


def _meets(indent: str, threads: int) -> str:
    return f"{indent}cute.arch.barrier(barrier_id=15, number_of_threads={threads})\n"


FREES = "            tmem.relinquish_alloc_permit()\n            tmem.free(tmem_ptr)\n"
RACES = frozenset({"race", "tmem", "uninitialised"})
PROGRAMS = {
    "masked-grouped-gemm": Program(
        "cutlass",
        f"{KERNELS}/blockwise_gemm/masked_grouped_gemm.py",
        "",
        frozenset({"out-of-bounds"}),
        (
            (
                "                    cur_boundary = gidx_mapping[cur_tile_coord[2]]\n"
                "                    is_valid_m = cur_m < cur_boundary\n\n"
                "                cur_tile_coord = work_tile.tile_idx\n",
                "                    if work_tile.is_valid_tile:\n"
                "                        cur_boundary = gidx_mapping[cur_tile_coord[2]]\n"
                "                    is_valid_m = cur_m < cur_boundary\n\n"
                "                cur_tile_coord = work_tile.tile_idx\n",
            ),
        ),
        schedules=1,
    ),
    "mixed-input-prefill-d256": Program(
        "cutlass",
        f"{MIXED}/mixed_input_fmha_prefill_d256.py",
        "--q_shape 1,1,256,256 --k_shape 1,1,256,256",
        RACES,
        ((FREES, _meets(" " * 12, 128) + FREES),),
    ),
    "mixed-input-decode": Program(
        "cutlass",
        f"{MIXED}/mixed_input_fmha_decode.py",
        "--b 1 --seqlen_k 256 --h_q 8 --h_k 1",
        RACES,
        (
            (
                "            cute.copy(thr_store_o, tSrO, tStO)\n\n            # Initialize colsum",
                "            cute.copy(thr_store_o, tSrO, tStO)\n"
                "            cute.arch.fence_view_async_tmem_store()\n\n"
                "            # Initialize colsum",
            ),
        ),
        schedules=2,
    ),
    "fmha-backward": Program(
        "cutlass",
        f"{KERNELS}/attention/fmha/fmha_bwd.py",
        "--s_q 256 --s_k 256 --h_q 1 --h_k 1",
        RACES,
        (
            (
                "                self.epilogue_sync_barrier.arrive_and_wait()\n\n"
                "                if warp_idx % self.num_compute_warps == 0:\n",
                "                self.epilogue_sync_barrier.arrive_and_wait()\n"
                + _meets(" " * 16, 384)
                + "                if warp_idx % self.num_compute_warps == 0:\n",
            ),
            (
                "                    (mma_reduce_dQ_pipeline, reduce_tma_store_pipeline),\n"
                "                )\n\n            else:\n",
                "                    (mma_reduce_dQ_pipeline, reduce_tma_store_pipeline),\n"
                "                )\n"
                + _meets(" " * 16, 384).replace("barrier(", "barrier_arrive(")
                + "            else:\n",
            ),
        ),
        schedules=1,
    ),
    "paged-mqa-logits": Program(
        "flashinfer",
        MQA,
        "",
        RACES,
        (
            (
                "            # TMEM dealloc: math warps are allocator + last consumer\n",
                _meets(" " * 12, 256),
            ),
        ),
        caller="flashinfer_mqa.py",
    ),
    "delta-rule-chunks": Program(
        "flashinfer",
        f"{FLASHINFER_GDN}/gated_delta_net_chunked.py",
        "",
        RACES,
        (
            (
                "            tmem.relinquish_alloc_permit()\n            tmem.free(tmem_ptr)\n\n"
                "            o_store_producer.tail()\n",
                _meets(" " * 12, 128)
                + "            tmem.relinquish_alloc_permit()\n"
                + "            tmem.free(tmem_ptr)\n\n"
                + "            o_store_producer.tail()\n",
            ),
        ),
        schedules=3,
        caller="flashinfer_gdn.py",
    ),
    "grouped-mm-tail": Program(
        "cutlass",
        f"{KERNELS}/moe/torch_grouped_mm.py",
        "--tokens 64 --experts 4 --top_k_select 2 --hidden 256 --intermediate 256",
        frozenset({"barrier"}),
        (
            (
                "            sched_pipeline.producer_commit(sched_producer_state)\n\n"
                "            sched_pipeline.producer_tail(sched_producer_state)\n",
                "            sched_pipeline.producer_commit(sched_producer_state)\n"
                "            sched_producer_state.advance()\n"
                "            sched_pipeline.producer_acquire(sched_producer_state)\n",
            ),
        ),
        schedules=3,
    ),
    "delta-rule-state": Program(
        "vllm",
        f"{GDN}/kernel_h.py",
        "",
        frozenset({"proxy-fence"}),
        (
            (
                "            if warp_id_ == 0:\n                ht_dst =",
                "            fence_before_tma_store()\n"
                "            if warp_id_ == 0:\n                ht_dst =",
            ),
        ),
        schedules=1,
        caller="vllm_gdn.py",
    ),
    "delta-rule-inverse": Program(
        "vllm",
        f"{GDN}/kernel_kkt_inv_uw.py",
        "",
        RACES,
        (
            (
                "            cute.arch.mbarrier_wait(epi_mbar + stage_id, parity ^ 1)\n"
                "            _tcgen05.dealloc()\n",
                "            last_id = (stage_id + num_stages - 1) % num_stages\n"
                "            if stage_id == 0:\n"
                "                parity ^= 1\n"
                "            cute.arch.mbarrier_wait(epi_mbar + last_id, parity)\n"
                + _meets(" " * 12, 160)
                + "            _tcgen05.dealloc()\n",
            ),
            (
                '"32x32b", BT // 2, zeros_)\n',
                '"32x32b", BT // 2, zeros_)\n            _tcgen05.wait_st()\n'
                + _meets(" " * 12, 160).replace("barrier(", "barrier_arrive("),
            ),
        ),
        schedules=3,
        caller="vllm_gdn.py",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cutlass", type=Path, help="a checkout of NVIDIA/cutlass")
    parser.add_argument("--flashinfer", type=Path, help="an unpacked wheel of FlashInfer")
    parser.add_argument("--vllm", type=Path, help="an unpacked wheel of vLLM")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    given = parser.parse_args(arguments)
    for name in given.names or PROGRAMS:
        if name not in PROGRAMS:
            parser.error(f"{name} is none of {', '.join(PROGRAMS)}")
        program = PROGRAMS[name]
        package = vars(given)[program.package]
        if package is None:
            print(f"{name}: needs --{program.package}")
            continue
        with tempfile.TemporaryDirectory() as directory:
            scratch, folder = Path(directory), program.folder(package.resolve())
            show(f"{name}, as released", program, program.errors(folder, scratch))
            mended = program.mended(folder, scratch)
            show(f"{name}, mended", program, program.errors(mended, scratch))


def show(title: str, program: Program, errors: list[str]) -> None:
    """Print the numbers of errors, and the first few."""
    ours = sum(x.split(":")[0] in program.checks for x in errors)
    print(f"{title}: {ours} errors of {sorted(program.checks)}, {len(errors) - ours} others")
    for line in errors[:4]:
        print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
