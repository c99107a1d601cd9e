"""Run CUTLASS's CuTe DSL examples, unmodified, in the emulator; write docs/emulator_examples.md.

    python -m tests.emulator.cutlass_examples CHECKOUT [--only TEXT] [--jobs N]
    python -m tests.emulator.cutlass_examples --page

The checkout is read, never written: examples run in a scratch directory. Outcomes are kept in
cutlass_examples.json, so that a run of some examples replaces only their rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "emulator_examples.md"
EXAMPLES = "examples/python/CuTeDSL"
FOUND = 3  # the emulator's exit status if a kernel has errors

AMPERE, HOPPER, BLACKWELL, GEFORCE = "sm_80", "sm_90a", "sm_100a", "sm_120a"

CASES = f"""
{AMPERE} cute/ampere/kernel/attention/flash_attention_v2.py --batch_size 1 --seqlen_q 256 --seqlen_k 256 --num_head 2 --iterations 1 --warmup_iterations 0
{AMPERE} cute/ampere/kernel/attention/hstu_attention.py --batch_size 1 --seqlen_q 256 --seqlen_kv 256 --num_head 2
{AMPERE} cute/ampere/kernel/dense_gemm/sgemm.py --mnk 128,128,64
{AMPERE} cute/ampere/kernel/dense_gemm/tensorop_gemm.py --mnkl 256,128,64,1
{AMPERE} cute/ampere/kernel/elementwise/elementwise_add.py --M 64 --N 256
{AMPERE} cute/ampere/kernel/elementwise/elementwise_apply.py --M 64 --N 256
{AMPERE} cute/ampere/tutorial/elementwise_add_autotune.py --M 128 --N 128 --iterations 1 --warmup_iterations 1
{BLACKWELL} cute/blackwell/efc/activation_custom_epilogue_dense_gemm.py
{BLACKWELL} cute/blackwell/efc/custom_epilogue_dense_gemm.py
{BLACKWELL} cute/blackwell/efc/synthetic_custom_epilogue_dense_gemm.py
{BLACKWELL} cute/blackwell/kernel/attention/fmha/fmha.py --q_shape 1,256,2,128 --k_shape 1,256,2,128
{BLACKWELL} cute/blackwell/kernel/attention/fmha/fmha_bwd.py --s_q 256 --s_k 256 --h_q 1 --h_k 1
{BLACKWELL} cute/blackwell/kernel/attention/mamba2_ssd/mamba2_ssd.py --gbehcdln 2,2,2,2,2,64,128,128
{BLACKWELL} cute/blackwell/kernel/attention/mixed_input_fmha/mixed_input_fmha_decode.py --b 1 --seqlen_k 256 --h_q 8 --h_k 1
{BLACKWELL} cute/blackwell/kernel/attention/mixed_input_fmha/mixed_input_fmha_prefill_d256.py --q_shape 1,1,256,256 --k_shape 1,1,256,256
{BLACKWELL} cute/blackwell/kernel/attention/mixed_input_fmha/mixed_input_fmha_prefill_d512.py --q_shape 1,1,256,512 --k_shape 1,1,256,512
{BLACKWELL} cute/blackwell/kernel/attention/mla/mla_decode_fp16.py
{BLACKWELL} cute/blackwell/kernel/attention/mla/mla_decode_fp8.py
{BLACKWELL} cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py --mnkl 256,256,256,1
{BLACKWELL} cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_amax.py --mnkl 256,256,256,1
{BLACKWELL} cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_prefetch.py --mnkl 256,256,256,1
sm_103a cute/blackwell/kernel/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py --mnkl 256,256,768,1
{BLACKWELL} cute/blackwell/kernel/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py
sm_103a cute/blackwell/kernel/blockscaled_grouped_gemm/sm103_grouped_blockscaled_gemm.py
{BLACKWELL} cute/blackwell/kernel/blockwise_gemm/blockwise_gemm.py
{BLACKWELL} cute/blackwell/kernel/blockwise_gemm/contiguous_grouped_gemm.py
{BLACKWELL} cute/blackwell/kernel/blockwise_gemm/masked_grouped_gemm.py
{BLACKWELL} cute/blackwell/kernel/dense_gemm/dense_gemm.py
{BLACKWELL} cute/blackwell/kernel/dense_gemm/dense_gemm_alpha_beta_persistent.py
{BLACKWELL} cute/blackwell/kernel/dense_gemm/dense_gemm_persistent.py
{BLACKWELL} cute/blackwell/kernel/dense_gemm/dense_gemm_persistent_dynamic.py
{BLACKWELL} cute/blackwell/kernel/dense_gemm/dense_gemm_persistent_prefetch.py
{BLACKWELL} cute/blackwell/kernel/dense_gemm/dense_gemm_software_pipeline.py
{BLACKWELL} cute/blackwell/kernel/grouped_gemm/grouped_gemm.py
{BLACKWELL} cute/blackwell/kernel/mixed_input_gemm/grouped_mixed_input_gemm.py
{BLACKWELL} cute/blackwell/kernel/mixed_input_gemm/grouped_mixed_input_gemm_acc_scale.py
{BLACKWELL} cute/blackwell/kernel/mixed_input_gemm/mixed_input_gemm.py
{BLACKWELL} cute/blackwell/kernel/moe/torch_grouped_mm.py --tokens 64 --experts 4 --top_k_select 2 --hidden 256 --intermediate 256
{BLACKWELL} cute/blackwell/kernel/moe/torch_scaled_grouped_mm.py --tokens 64 --experts 4 --top_k_select 2 --hidden 256 --intermediate 256
{BLACKWELL} cute/blackwell/kernel/rmsnorm/rmsnorm.py --M 16 --N 1024
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_0.py --mnk 256,256,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_1.py --mnk 512,512,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_2.py --mnk 512,512,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_3.py --mnk 512,512,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_3_1.py --mnk 512,512,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_4.py --mnk 512,512,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_5.py --mnk 512,512,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_6.py --mnk 512,512,128
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/nvfp4_gemm_0.py --mnkl 256,256,256,1
{BLACKWELL} cute/blackwell/tutorial/tutorial_gemm/nvfp4_gemm_1.py --mnkl 512,256,256,1
{BLACKWELL} cute/blackwell/tutorial/tutorial_tma/tma_v0.py --M 128 --N 128
{BLACKWELL} cute/blackwell/tutorial/tutorial_tma/tma_v1.py
{BLACKWELL} cute/blackwell/tutorial/tutorial_tma/tma_v2.py
{GEFORCE} cute/blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_cooperative.py --mnkl 256,128,256,1
{GEFORCE} cute/blackwell_geforce/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent_pingpong.py --mnkl 256,128,256,1
{GEFORCE} cute/blackwell_geforce/kernel/dense_gemm/dense_gemm.py --mnkl 256,256,128,1
{HOPPER} cute/hopper/kernel/attention/fmha.py --q_shape 1,256,2,128 --k_shape 1,256,2,128
{HOPPER} cute/hopper/kernel/cta_norm/cta_norm.py --M 16 --N 1024
{HOPPER} cute/hopper/kernel/dense_gemm/dense_gemm.py --mnkl 256,256,128,1
{HOPPER} cute/hopper/kernel/dense_gemm/dense_gemm_fp8_2xacc.py --mnkl 256,256,256,1
{HOPPER} cute/hopper/kernel/dense_gemm/dense_gemm_fp8_gelu_persistent.py --mnkl 256,256,256,1
{HOPPER} cute/hopper/kernel/dense_gemm/dense_gemm_persistent.py --mnkl 256,256,128,1
{HOPPER} cute/hopper/kernel/grouped_gemm/grouped_gemm.py --num_groups 2 --problem_sizes_mnkl "(128,128,128,1),(256,128,64,1)"
{BLACKWELL} cute/tvm_ffi/fp4_x2_tensor.py
{AMPERE} cute_ext/ampere/memcpy_simt_universal_copy.py
{BLACKWELL} cute_ext/blackwell/dense_block_scaled_gemm.py
{BLACKWELL} cute_ext/blackwell/dense_gemm.py
{BLACKWELL} cute_ext/blackwell/dense_gemm_2sm.py
{BLACKWELL} cute_ext/blackwell/dense_gemm_cute_pipeline.py
{BLACKWELL} cute_ext/blackwell/dense_gemm_ptr_array.py
{AMPERE} dsl_tutorials/call_bypass_dlpack.py
{AMPERE} dsl_tutorials/call_from_jit.py
{HOPPER} dsl_tutorials/cooperative_launch.py
{HOPPER} dsl_tutorials/dataclass_immutable.py
{HOPPER} dsl_tutorials/dynamic_smem_size.py
{HOPPER} dsl_tutorials/export/export_to_c.py
{HOPPER} dsl_tutorials/export/load_in_python.py
{HOPPER} dsl_tutorials/ffi/jit_argument.py
{BLACKWELL} dsl_tutorials/fp16_gemm_4_iket.py --mnk 512,512,128
{HOPPER} dsl_tutorials/inline_ptx.py
{HOPPER} dsl_tutorials/launch_completion_and_programmatic_events.py --n-blocks 4
{HOPPER} dsl_tutorials/print_latex.py
{HOPPER} dsl_tutorials/programmatic_dependent_launch.py --M 64 --N 64
{HOPPER} dsl_tutorials/smem_allocator.py
{HOPPER} dsl_tutorials/torch_fake_tensor.py
{AMPERE} dsl_tutorials/tvm_ffi/ampere_gemm_with_fake_tensor.py
{HOPPER} dsl_tutorials/tvm_ffi/aot_export.py
{HOPPER} dsl_tutorials/tvm_ffi/aot_use_in_torch.py
{HOPPER} dsl_tutorials/tvm_ffi/compile_with_fake_tensor.py
{HOPPER} dsl_tutorials/tvm_ffi/error_reporting.py
{HOPPER} dsl_tutorials/tvm_ffi/jit_and_use_in_torch.py
"""  # noqa: E501 - commands are as long as they are

# What a script says at its end that shows an error on purpose.
INTENDED = {
    "dsl_tutorials/tvm_ffi/error_reporting.py": "ValueError: Mismatched a.shape[0]",
}

# Why a script fails, or what its findings mean, where this was looked into.
REASONS = {
    "cute/blackwell/kernel/blockscaled_gemm/sm103_dense_blockscaled_gemm_persistent.py": (
        "products with K = 96 are not emulated"
    ),
    "cute/blackwell/kernel/blockscaled_grouped_gemm/sm103_grouped_blockscaled_gemm.py": (
        "products with K = 96 are not emulated"
    ),
    "cute/blackwell/kernel/moe/torch_scaled_grouped_mm.py": (
        "torch has no `scaled_grouped_mm` for the CPU, with which the script compares"
    ),
    "cute/hopper/kernel/grouped_gemm/grouped_gemm.py": (
        "the timed call has addresses of tensors that the script has freed"
    ),
}


@dataclass(frozen=True)
class Case:
    """An example with its arguments."""

    arch: str
    script: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of an example."""

    arch: str
    script: str
    arguments: tuple[str, ...]
    status: int | None  # None: it ran out of time
    seconds: float  # of the processor
    launches: int
    errors: dict[str, int]  # findings by check
    notes: int
    last: str  # line of output

    @property
    def ran(self) -> bool:
        """Whether the script came to its intended end."""
        intended = INTENDED.get(self.script)
        if intended is not None:
            return self.status == 1 and intended in self.last
        return self.status in (0, FOUND)

    @property
    def result(self) -> str:
        """The outcome in words."""
        reason = REASONS.get(self.script)
        if self.status is None:
            return f"not finished after {self.seconds:.0f} s"
        if not self.ran:
            return f"fails: {reason}" if reason else f"fails: `{self.last}`"
        if self.script in INTENDED:
            return "raises its error, as intended"
        if self.errors:
            counts = ", ".join(f"{n} {check}" for check, n in sorted(self.errors.items()))
            return f"runs; {counts}" + (f": {reason}" if reason else "")
        return "runs"


def cases() -> Iterator[Case]:
    """All examples for one GPU, without JAX."""
    for line in CASES.strip().splitlines():
        arch, script, *arguments = shlex.split(line)
        yield Case(arch, script, tuple(arguments))


def of_this_environment(case: Case) -> list[str]:
    """Arguments that say where the extension that an example builds finds nanobind."""
    spec = importlib.util.find_spec("nanobind") if "jit_argument" in case.script else None
    if spec is None or spec.origin is None:
        return []
    return [f"--cmake-args=-Dnanobind_DIR={Path(spec.origin).parent / 'cmake'}"]


def run(case: Case, checkout: Path, logs: Path, timeout: float) -> Outcome:
    """Run one example in a directory that it shares with the examples of its folder."""
    name = case.script.replace("/", ".").removesuffix(".py")
    directory = logs / os.path.dirname(case.script).replace("/", ".")  # noqa: PTH120
    directory.mkdir(exist_ok=True)
    report, log = logs / f"{name}.json", logs / f"{name}.log"
    report.unlink(missing_ok=True)
    script = checkout / EXAMPLES / case.script
    options = ["--arch", case.arch, "--report", str(report)]
    arguments = [*case.arguments, *of_this_environment(case)]
    command = [sys.executable, "-m", "cute_attn.emulator", *options, str(script), *arguments]
    started = time.monotonic()
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    status: int | None
    with log.open("w") as output:
        try:
            status = subprocess.run(
                command, cwd=directory, env=environment, timeout=timeout, check=False,
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = None
    seconds = time.monotonic() - started
    lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
    said = [x for x in lines if not x.startswith("emulator:")]
    last = re.sub(r"\S*/(?=\S)", "", said[-1])[:120] if said else ""
    launches, errors, notes = 0, dict[str, int](), 0
    if report.exists():
        content = json.loads(report.read_text())
        seconds = content["cpu_seconds"]
        launches = len(content["schedules"][-1]["launches"])
        for found in content["findings"]:
            if found["severity"] == "error":
                errors[found["check"]] = errors.get(found["check"], 0) + 1
            else:
                notes += 1
    return Outcome(
        case.arch, case.script, case.arguments, status, round(seconds, 1), launches, errors, notes,
        last,
    )  # fmt: skip


def chains(chosen: list[Case]) -> list[list[Case]]:
    """Lists of examples that follow each other: an export, and the use of what it wrote."""
    together: dict[str, list[Case]] = {}
    for case in chosen:
        folder, name = os.path.split(case.script)
        written = folder.endswith("/export") or name.startswith("aot_")
        together.setdefault(folder if written else case.script, []).append(case)
    return list(together.values())


def kept() -> tuple[dict[str, str], dict[str, Outcome]]:
    """The versions and the outcomes of earlier runs; outcomes by script."""
    if not RESULTS.exists():
        return {}, {}
    record = json.loads(RESULTS.read_text())
    rows = (Outcome(**row | {"arguments": tuple(row["arguments"])}) for row in record["outcomes"])
    return record["versions"], {row.script: row for row in rows}


def keep(versions: dict[str, str], outcomes: dict[str, Outcome]) -> None:
    """Write versions and outcomes for later runs."""
    rows = [asdict(outcomes[c.script]) for c in cases() if c.script in outcomes]
    RESULTS.write_text(json.dumps({"versions": versions, "outcomes": rows}, indent=1) + "\n")


def commit_of(checkout: Path) -> str:
    """The checkout's commit, or "unknown" for a copy without its repository."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def dsl_version() -> str:
    """The compiler's version, and the CUDA version of its libraries, which decides about PTX."""
    installed = {x.name for x in metadata.distributions()}
    libraries = [x for x in ("cu12", "cu13") if f"nvidia-cutlass-dsl-libs-{x}" in installed]
    return f"{metadata.version('nvidia-cutlass-dsl')} ({', '.join(libraries)})"


def page(versions: dict[str, str], outcomes: list[Outcome]) -> str:
    """The page of documentation."""
    finished = [x for x in outcomes if x.ran]
    clean = [x for x in finished if not x.errors]
    lines = [
        "# CUTLASS's examples in the emulator",
        "",
        "<!-- written by python -m tests.emulator.cutlass_examples -->",
        "",
        "These are all CuTe DSL examples of CUTLASS in `cute/`, `cute_ext/` and `dsl_tutorials/` "
        "that need one GPU and no JAX. [The emulator](emulator.md) runs each script unmodified, at "
        "a small size. Each script checks its own results where the script has a reference. "
        f"CUTLASS is at commit {versions['cutlass'][:9]}, the DSL's version is {versions['dsl']}.",
        "",
        f"{len(finished)} of {len(outcomes)} scripts run to their end. {len(clean)} of these have "
        "no finding of severity error. A number before a check's name counts such findings.",
        "",
        "<!-- not run: needs a checkout of CUTLASS -->",
        "```bash",
        "python -m tests.emulator.cutlass_examples /path/to/cutlass",
        "```",
        "",
        "| script and arguments | architecture | launches | result |",
        "| --- | --- | ---: | --- |",
    ]
    for x in outcomes:
        command = shlex.join([x.script, *x.arguments])
        lines.append(f"| `{command}` | {x.arch} | {x.launches} | {x.result} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="a checkout of NVIDIA/cutlass")
    parser.add_argument("--only", default="", help="examples whose path has this text")
    parser.add_argument("--again", action="store_true", help="only examples that did not run")
    parser.add_argument("--jobs", type=int, default=1, help="examples to run at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for an example")
    parser.add_argument("--logs", type=Path, help="directory for the examples' output")
    parser.add_argument("--commit", help="the checkout's commit, if it is a copy")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    versions, outcomes = kept()
    if not given.page:
        if given.checkout is None or not (given.checkout / EXAMPLES).is_dir():
            parser.error(f"{given.checkout} has no {EXAMPLES}")
        versions["cutlass"] = given.commit or commit_of(given.checkout)
        versions["dsl"] = dsl_version()
        ran = {name for name, x in outcomes.items() if x.ran}
        chosen = [
            case
            for case in cases()
            if given.only in case.script and not (given.again and case.script in ran)
        ]
        with tempfile.TemporaryDirectory() as scratch:
            logs = (given.logs or Path(scratch)).resolve()
            logs.mkdir(parents=True, exist_ok=True)

            def follow(chain: list[Case]) -> None:
                for case in chain:
                    outcome = run(case, given.checkout.resolve(), logs, given.timeout)
                    outcomes[case.script] = outcome
                    print(f"{outcome.seconds:6.1f} s {case.script}: {outcome.result}", flush=True)
                    keep(versions, outcomes)

            with ThreadPoolExecutor(given.jobs) as pool:
                list(pool.map(follow, chains(chosen)))
    PAGE.write_text(page(versions, [outcomes[c.script] for c in cases() if c.script in outcomes]))


if __name__ == "__main__":
    main()
