"""The Gated Delta Net in plain PyTorch: the reference for tests of the kernels.

For each token, where the state S of a value head is a K by V matrix (Gated Delta Networks, arXiv
2412.06464):

    S <- exp(g) S              decay, one rate for the head
    u  = beta (v - S^T k)      the correction: v minus S's prediction for k
    S <- S + k u^T
    o  = scale S^T q

This is Kimi Delta Attention with one decay for all channels of a head, so every function here calls
its counterpart in `kda` with g as `[B, T, HV, 1]`. Other shapes, and arguments, are the
counterpart's. Here g is `[B, T, HV]`, and dt_bias has HV numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from . import kda
from .kda import KdaDecodeResult, KdaGradients, KdaResult, KdaStages


def gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    **options: Any,
) -> KdaResult:
    """The reference for `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`.

    Args:
        g: `[B, T, HV]`: natural logarithms of the decay. With use_gate_in_kernel, g is the input of
            the gate -exp(A_log) softplus(g + dt_bias).
        options: the other arguments of `kda_reference`.
    """
    return kda.kda_reference(q, k, v, g.unsqueeze(-1), beta, scale, initial_state, **options)


def gated_delta_rule_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    **options: Any,
) -> KdaDecodeResult:
    """The reference for `gated_delta_rule_decode`: one or more tokens of every sequence.

    Args:
        g: `[B, T, HV]`, or `[B, HV]`.
        options: the other arguments of `kda_decode_reference`. In its records, g is
            `[slots, S, HV]`.
    """
    records = options.pop("records", None)
    if records is not None:
        options["records"] = records._replace(g=records.g.unsqueeze(-1))
    result = kda.kda_decode_reference(q, k, v, g.unsqueeze(-1), beta, state, **options)
    if result.records is not None:
        result = result._replace(records=result.records._replace(g=result.records.g.squeeze(-1)))
    return result


def gated_delta_rule_chunk_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    **options: Any,
) -> KdaStages:
    """`gated_delta_rule_reference` by chunks, with the results of every stage. In the result, the
    stages' g is `[B, T, HV, 1]`.

    Args:
        options: the other arguments of `kda_chunk_reference`. With `stage_dtype` this is plain code
            in 16 bits; tests compare the kernels' error with this code's error.
    """
    return kda.kda_chunk_reference(q, k, v, g.unsqueeze(-1), beta, scale, initial_state, **options)


def gated_delta_rule_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor | None = None,
    dfinal_state: torch.Tensor | None = None,
    **options: Any,
) -> KdaGradients:
    """The gradients of sum(o * do) + sum(final_state * dfinal_state) in float64, by autograd of
    `gated_delta_rule_reference`.

    Args:
        options: the other arguments of `kda_gradients`.
    """
    gradients = kda.kda_gradients(q, k, v, g.unsqueeze(-1), beta, do, dfinal_state, **options)
    return gradients._replace(dg=gradients.dg.squeeze(-1))


def gated_delta_rule_chunk_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor | None = None,
    dfinal_state: torch.Tensor | None = None,
    **options: Any,
) -> KdaGradients:
    """The gradients of `gated_delta_rule_reference` by chunks.

    Args:
        options: the other arguments of `kda_chunk_gradients`. With `stage_dtype` this is plain code
            in 16 bits; tests compare the kernels' error with this code's error.
    """
    gradients = kda.kda_chunk_gradients(q, k, v, g.unsqueeze(-1), beta, do, dfinal_state, **options)
    return gradients._replace(dg=gradients.dg.squeeze(-1))
