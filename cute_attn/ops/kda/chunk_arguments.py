"""The arguments of `chunk_kda`, and their checks."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.delta.chunk.spec import CHUNK
from ..checks import check_flags, check_number
from .arguments import (
    Sizes,
    check_beta_options,
    check_dtypes,
    check_gate,
    check_gate_and_beta_dtypes,
    check_state,
)

# Exponents of the smallest and the largest size of a scale. In bfloat16 chunks hold products times
# 2**-60. In float16, with a scale past the second pair, an element of scale * q is subnormal or
# infinite.
SCALES = (-60, 60)
SCALES_OF_NORMALISED_FLOAT16 = (-10, 15)


class ChunkArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    num_chunks: int | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    keep_states: bool = False  # set where a gradient is needed


def check(a: ChunkArguments, given: dict[str, Tensor]) -> Sizes:
    """Raise the documented exception if no kernel can take these arguments; return their sizes.

    Args:
        given: the arguments that are tensors, by name.
    """
    check_number("lower_bound", a.lower_bound)
    check_flags(safe_gate=a.safe_gate, return_intermediate_states=a.return_intermediate_states)
    check_disable_recompute(a.disable_recompute, a.return_intermediate_states)
    if a.keep_states and a.return_intermediate_states:
        raise ValueError("keep_states is True, must be False with return_intermediate_states")
    sizes = check_sequences(a, given, gate="B T HV K")
    check_gate(given, sizes, a.use_gate_in_kernel, a.safe_gate, a.lower_bound)
    return sizes


def check_sequences(a: Any, given: dict[str, Tensor], *, gate: str) -> Sizes:
    """`check` without the parameters of the gate, whose shape is `gate`, and without arguments that
    only `chunk_kda` has."""
    check_number("scale", a.scale)
    check_flags(
        output_final_state=a.output_final_state,
        use_qk_l2norm_in_kernel=a.use_qk_l2norm_in_kernel,
        use_gate_in_kernel=a.use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=a.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=a.allow_neg_eigval,
        state_v_first=a.state_v_first,
        keep_states=a.keep_states,
    )
    check_beta_options(a.use_beta_sigmoid_in_kernel, a.allow_neg_eigval)
    check_dtypes(given, ("q", "k", "v"))
    check_scale(a)
    check_gate_and_beta_dtypes(given)
    sizes = Sizes()
    sizes.take_queries(a.q, a.k, a.v, a.g, "B T HQK K")
    sizes.take("v", a.v, "B T HV V")
    sizes.check_heads()
    sizes.check_dims()
    sizes.take("g", a.g, gate)
    sizes.take("beta", a.beta, "B T HV")
    sizes.check_sequences(a.cu_seqlens)
    check_state(sizes, a.initial_state, a.state_v_first)
    return sizes


def check_scale(a: Any) -> None:
    """Raise ValueError for a scale that takes intermediate results out of range."""
    if a.scale is None or a.scale == 0:
        return
    low, high = SCALES
    of = ""
    if a.use_qk_l2norm_in_kernel and a.q.dtype == torch.float16:
        low, high = SCALES_OF_NORMALISED_FLOAT16
        of = " with use_qk_l2norm_in_kernel and float16 q"
    if not 2.0**low <= abs(a.scale) <= 2.0**high:
        raise ValueError(
            f"scale is {a.scale}, must be 0, or from 2**{low} to 2**{high} in size{of}"
        )


def check_disable_recompute(disable_recompute: Any, return_intermediate_states: Any) -> None:
    check_flags(disable_recompute=disable_recompute)
    if disable_recompute and return_intermediate_states:
        raise ValueError(
            "disable_recompute is True, must be False with return_intermediate_states: one is "
            "for training, the other for inference"
        )


def over_ranks(
    cp: Any, module: str, rule: str, tensors: tuple[Any, ...], initial_state: Any,
    options: dict[str, Any], unsupported: dict[str, Any],
) -> Any:  # fmt: skip
    """Run a call that has cp; the plan runs the call.

    Args:
        module, rule: the module in `ops`, and its object with the operator's kernels.
        tensors: q, k, v, g, beta, A_log and dt_bias.
    """
    if not hasattr(cp, "chunk_delta_rule"):
        raise TypeError(
            f"cp is {type(cp).__name__}, must be a plan of cute_attn.distributed.context_parallel"
        )
    return cp.chunk_delta_rule(
        getattr(import_module(f"..{module}", __package__), rule),
        dict(zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias"), tensors, strict=True)),
        initial_state,
        options,
        unsupported,
    )


def check_chunks_and_contexts(
    chunk_size: Any, cp_context: Any, sizes: tuple[int, ...], *, returns_chunks: Any = False
) -> None:
    """Raise the documented exception for a chunk_size or a cp_context that no call takes.

    Args:
        sizes: what flash-linear-attention takes as chunk_size.
        returns_chunks: whether a result has a state for each chunk.
    """
    if not isinstance(chunk_size, int) or chunk_size not in sizes:
        raise ValueError(f"chunk_size is {chunk_size!r}, must be one of {sizes}")
    if returns_chunks and chunk_size != CHUNK:
        raise NotImplementedError(
            f"chunk_size is {chunk_size}, must be {CHUNK} with return_intermediate_states: there "
            f"is a state for each {CHUNK} tokens"
        )
    if cp_context is not None:
        raise NotImplementedError(
            "cp_context is given, must be None: for context parallelism give a plan of "
            "cute_attn.distributed.context_parallel as cp"
        )
