"""The families of operators: what each family has, and where. A new family is a record here.

This module gives the public names of `cute_attn`, the registered operators, the list of benchmarks,
the table in docs/support.md, and what tests ask of every family. The module is plain data:
everything is named by a string, as "module" or "module:name", and nothing else is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_HERE = __name__.rpartition(".")[0]  # differs if the package is loaded by another name

HEAD_DIM = {"head_dim": "head_dim"}
K_V = {"K": "head_dim_k", "V": "head_dim_v"}


class Support(NamedTuple):
    """A row of docs/support.md: public functions in one direction.

    Attributes:
        functions: the names of public functions.
        direction: "forward" or "backward".
        plan: the plan function, which knows the kernels that there are.
        sizes: a size that a reader knows, to its parameter of `plan`.
        dtype: the parameter of `plan` that is the dtype.
        unequal: whether the row leaves out equal sizes, which have another row.
        states: the dtypes of recurrent states, where the functions have states.
        measured: the architectures that a GPU has tested and timed; all other architectures are
            emulated.
        summary: the row of README's table that stands for this row, if any.
    """

    functions: tuple[str, ...]
    direction: str
    plan: str
    sizes: Mapping[str, str] = HEAD_DIM
    dtype: str = "dtype"
    unequal: bool = False
    states: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    summary: str = ""


class Family(NamedTuple):
    """A family of operators.

    Attributes:
        name: the name of the family's folder or module in `ops`.
        functions: the public functions, which `cute_attn` exports.
        operators: the module whose import defines the family's `torch.ops.cute_attn.*`.
        table: the module that names the family's kernels. All kernels of a table are called on
            every architecture, unless the table has a function `called(arch)`.
        reference: the modules that define the operators in plain PyTorch.
        support: the rows of docs/support.md.
        spec_files: the files of cute_attn/models that have plans of the family.
        pages: the pages in docs that document the public functions.
        benchmarks: name -> the module below `cute_attn.bench`, and a line of help.
        checks: a checkout's checks of every public function, for examples/quickstart.py.
        calls: the tests' good calls of every operator.
        small_calls: calls for compute-sanitizer that launch every kernel.
        other_gpus: the tests' calls on architectures that no other test covers.
        oldest: the tests that run with the oldest versions of all requirements.
    """

    name: str
    functions: tuple[str, ...]
    operators: str
    table: str
    reference: tuple[str, ...]
    support: tuple[Support, ...]
    spec_files: tuple[str, ...]
    pages: tuple[str, ...]
    benchmarks: Mapping[str, tuple[str, str]]
    checks: str
    calls: str
    small_calls: str
    other_gpus: str
    oldest: tuple[str, ...]


FAMILIES = (
    Family(
        name="attention",
        functions=(
            f"{_HERE}.ops.attention:flash_attn_combine",
            f"{_HERE}.ops.attention:flash_attn_func",
            f"{_HERE}.ops.attention:flash_attn_varlen_func",
        ),
        operators=f"{_HERE}.ops.attention",
        table=f"{_HERE}.kernels.attention.table",
        reference=(f"{_HERE}.reference.attention",),
        support=(
            *(
                Support(
                    functions=("flash_attn_func", "flash_attn_varlen_func"),
                    direction=direction,
                    plan=f"{_HERE}.ops.attention:{plan}",
                    measured=("sm_90a",),
                    summary=f"Softmax attention, {direction}",
                )
                for direction, plan in (
                    ("forward", "plan_attention"),
                    ("backward", "plan_attention_backward"),
                )
            ),
            *(
                Support(
                    functions=("flash_attn_func", "flash_attn_varlen_func"),
                    direction=direction,
                    plan=f"{_HERE}.ops.attention:{plan}",
                    sizes={"head_dim": "head_dim", "head_dim_v": "head_dim_v"},
                    unequal=True,
                    measured=("sm_90a",),
                    summary=f"Softmax attention with narrower v, {direction}",
                )
                for direction, plan in (
                    ("forward", "plan_attention"),
                    ("backward", "plan_attention_backward"),
                )
            ),
            Support(
                functions=("flash_attn_combine",),
                direction="forward",
                plan=f"{_HERE}.ops.attention:plan_attention_combine",
                dtype="out_dtype",
                measured=("sm_90a",),
            ),
        ),
        spec_files=("kimi_training.toml", "training.toml", "vllm.toml"),
        pages=("operators.md",),
        benchmarks={
            "attention": (
                "attention.operators",
                "attention forward, backward and decode against FlashAttention-4 and cuDNN",
            ),
            "context-parallel": (
                "attention.context_parallel",
                "attention over the machine's GPUs beside one GPU with a part of the work",
            ),
            "attention-exchange": (
                "attention.exchange",
                "st.async between CTAs, as the dK/dV kernel at head_dim 256 uses it",
            ),
            "attention-first-result": (
                "attention.first_result",
                "time to the first result of a process, ours and FlashAttention-4's, from cold and"
                " warm caches",
            ),
        },
        checks="checks.attention:CHECKS",
        calls="tests.ops.attention_calls:OPERATORS",
        small_calls="tests.gpu.attention_small_calls:CALLS",
        other_gpus="tests.ops.attention_other_gpus:CALLS",
        oldest=("tests/ops/test_attention_sm90_few.py", "tests/ops/test_attention_gradients.py"),
    ),
    Family(
        name="gated_delta_rule",
        functions=(
            f"{_HERE}.ops.gated_delta_rule:chunk_gated_delta_rule",
            f"{_HERE}.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",
            f"{_HERE}.ops.gated_delta_rule:gated_delta_rule_decode",
        ),
        operators=f"{_HERE}.ops.gated_delta_rule",
        table=f"{_HERE}.kernels.delta.table",
        reference=(f"{_HERE}.reference.gated_delta_rule", f"{_HERE}.reference.convolution"),
        support=(
            Support(
                functions=("chunk_gated_delta_rule",),
                direction="forward",
                plan=f"{_HERE}.ops.gated_delta_rule:plan_chunk_gated_delta_rule",
                sizes=K_V,
                states=("float32",),
                measured=("sm_90a",),
                summary="Gated Delta Net, prefill",
            ),
            Support(
                functions=("chunk_gated_delta_rule",),
                direction="backward",
                plan=f"{_HERE}.ops.gated_delta_rule:plan_chunk_gated_delta_rule_backward",
                sizes=K_V,
                measured=("sm_90a",),
                summary="Gated Delta Net, backward",
            ),
            Support(
                functions=("fused_recurrent_gated_delta_rule",),
                direction="forward",
                plan=f"{_HERE}.ops.gated_delta_rule:plan_fused_recurrent_gated_delta_rule",
                sizes=K_V,
                states=("float32",),
                summary="Gated Delta Net, recurrent",
            ),
            Support(
                functions=("gated_delta_rule_decode",),
                direction="forward",
                plan=f"{_HERE}.ops.gated_delta_rule:plan_gated_delta_rule_decode",
                sizes=K_V,
                states=("float32", "bfloat16"),
                measured=("sm_90a",),
                summary="Gated Delta Net, decode",
            ),
        ),
        spec_files=("qwen_training.toml", "serving.toml"),
        pages=("operators.md",),
        benchmarks={
            "gdn": (
                "gated_delta_rule.chunk",
                "chunk_gated_delta_rule, forward and backward, against FLA",
            ),
            "gdn-decode": (
                "gated_delta_rule.decode",
                "gated_delta_rule_decode, with the convolution, against FLA and the copy bandwidth",
            ),
        },
        checks="checks.gated_delta_rule:CHECKS",
        calls="tests.ops.gated_delta_rule_calls:OPERATORS",
        small_calls="tests.gpu.gated_delta_rule_small_calls:CALLS",
        other_gpus="tests.ops.gated_delta_rule_other_gpus:CALLS",
        oldest=("tests/ops/test_gated_delta_rule_decode.py",),
    ),
    Family(
        name="kda",
        functions=(
            f"{_HERE}.ops.kda:chunk_kda",
            f"{_HERE}.ops.kda:fused_recurrent_kda",
            f"{_HERE}.ops.kda:kda_decode",
        ),
        operators=f"{_HERE}.ops.kda",
        table=f"{_HERE}.kernels.delta.table",
        reference=(f"{_HERE}.reference.kda", f"{_HERE}.reference.convolution"),
        support=(
            Support(
                functions=("chunk_kda",),
                direction="forward",
                plan=f"{_HERE}.ops.kda:plan_chunk_kda",
                sizes=K_V,
                states=("float32",),
                measured=("sm_90a",),
                summary="KDA, prefill",
            ),
            Support(
                functions=("chunk_kda",),
                direction="backward",
                plan=f"{_HERE}.ops.kda:plan_chunk_kda_backward",
                sizes=K_V,
                measured=("sm_90a",),
                summary="KDA, backward",
            ),
            Support(
                functions=("fused_recurrent_kda",),
                direction="forward",
                plan=f"{_HERE}.ops.kda:plan_fused_recurrent_kda",
                sizes=K_V,
                states=("float32",),
                measured=("sm_90a",),
                summary="KDA, decode",
            ),
            Support(
                functions=("kda_decode",),
                direction="forward",
                plan=f"{_HERE}.ops.kda:plan_kda_decode",
                sizes=K_V,
                states=("float32", "bfloat16"),
                measured=("sm_90a",),
                summary="KDA, decode",
            ),
        ),
        spec_files=("kimi_training.toml", "serving.toml"),
        pages=("operators.md",),
        benchmarks={
            "kda-backward": (
                "kda.backward",
                "the gradient of chunk_kda: its kernels, memory and layers, against FLA",
            ),
            "kda-chunk": (
                "kda.chunk",
                "chunk_kda forward against FLA and the bytes that it must move",
            ),
            "kda-decode": ("kda.decode", "kda_decode against FLA and the copy bandwidth"),
            "kda-first-result": (
                "kda.first_result",
                "time to the first result of a process, ours and FLA's, from cold and warm caches",
            ),
            "kda-intra": (
                "kda.intra",
                "kda_chunk_intra against FLA and the bytes that it must move",
            ),
            "kda-recompute": (
                "kda.recompute",
                "kda_recompute_w_u against FLA and the bytes that it must move",
            ),
        },
        checks="checks.kda:CHECKS",
        calls="tests.ops.kda_calls:OPERATORS",
        small_calls="tests.gpu.kda_small_calls:CALLS",
        other_gpus="tests.ops.kda_other_gpus:CALLS",
        oldest=("tests/ops/test_kda_gradients.py",),
    ),
    Family(
        name="lightning",
        functions=(f"{_HERE}.ops.lightning:lightning_attn_decode",),
        operators=f"{_HERE}.ops.lightning",
        table=f"{_HERE}.kernels.lightning.table",
        reference=(f"{_HERE}.reference.lightning",),
        support=(
            Support(
                functions=("lightning_attn_decode",),
                direction="forward",
                plan=f"{_HERE}.ops.lightning:plan_decode",
                sizes=K_V,
                states=("float32", "bfloat16"),
                measured=("sm_90a",),
                summary="Lightning Attention, decode",
            ),
        ),
        spec_files=("serving.toml",),
        pages=("operators.md",),
        benchmarks={
            "lightning-decode": (
                "lightning.decode",
                "Lightning Attention decode against FLA and the copy bandwidth",
            ),
            "lightning-decode-ncu": (
                "lightning.decode_ncu",
                "DRAM throughput, occupancy, stalls and L2 hit rate of the decode kernel (ncu)",
            ),
        },
        checks="checks.lightning:CHECKS",
        calls="tests.ops.lightning_calls:OPERATORS",
        small_calls="tests.gpu.lightning_small_calls:CALLS",
        other_gpus="tests.ops.lightning_other_gpus:CALLS",
        oldest=("tests/ops/test_lightning_decode.py",),
    ),
    Family(
        name="mla",
        functions=(f"{_HERE}.ops.mla:mla_decode",),
        operators=f"{_HERE}.ops.mla",
        table=f"{_HERE}.kernels.mla.table",
        reference=(f"{_HERE}.reference.mla",),
        support=(
            Support(
                functions=("mla_decode",),
                direction="forward",
                plan=f"{_HERE}.ops.mla:plan_mla_decode",
                measured=("sm_90a",),
                summary="Multi-head latent attention, decode",
            ),
        ),
        spec_files=("serving.toml", "vllm.toml"),
        pages=("operators.md",),
        benchmarks={
            "mla": ("mla.decode", "mla_decode against the bytes that it must read"),
        },
        checks="checks.mla:CHECKS",
        calls="tests.ops.mla_calls:OPERATORS",
        small_calls="tests.gpu.mla_small_calls:CALLS",
        other_gpus="tests.ops.mla_other_gpus:CALLS",
        oldest=("tests/ops/test_mla_decode.py",),
    ),
)

FUNCTIONS = {
    name.partition(":")[2]: name.partition(":")[0]
    for family in FAMILIES
    for name in family.functions
}
"""A public function of a family -> the module that defines it."""

EXPORTS = {
    **FUNCTIONS,
    "chunk_gdn": f"{_HERE}.ops.gated_delta_rule",  # other names of functions
    "fused_recurrent_gdn": f"{_HERE}.ops.gated_delta_rule",
    "emulated": f"{_HERE}.emulation",
    "register_operators": f"{_HERE}.ops",
    "reload_settings": f"{_HERE}.settings",
    "warmup": f"{_HERE}.launch",
}
"""All public names of cute_attn but the version -> the module that defines each."""
