"""Cases, inputs and contenders of the benchmarks of `chunk_gated_delta_rule`: KDA's, with one decay
a head.

Imports torch, so a benchmark's module imports this module only when the benchmark runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import normalize, softplus

from cute_attn.reference import gated_delta_rule as reference

from ..kda import problem, training
from ..kda.cases import Case
from ..kda.problem import Arguments, Call, Results

PEER = "fla.ops.gated_delta_rule:chunk_gated_delta_rule"
FLASHINFER = "flashinfer.gdn_prefill:chunk_gated_delta_rule"
OPTIONS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


def arguments(case: Case) -> Arguments:
    """Arguments of our and the peer's function: KDA's, with the gate of one channel for a head."""
    given = problem.chunk_arguments(case)
    given["g"] = given["g"][..., 0].contiguous()
    given["dt_bias"] = given["dt_bias"].view(case.heads_v, -1)[:, 0].contiguous()
    return given


def training_arguments(case: Case) -> Arguments:
    """Arguments of a training step, without states."""
    given = arguments(case)
    del given["initial_state"]
    return given | {"output_final_state": False}


def functions(*, with_peer: bool) -> dict[str, Callable[..., Any]]:
    """`chunk_gated_delta_rule` of each contender."""
    from cute_attn import chunk_gated_delta_rule

    found: dict[str, Callable[..., Any]] = {"ours": chunk_gated_delta_rule}
    theirs = problem.peer(PEER) if with_peer else None
    if theirs is not None:
        found["fla"] = theirs
    return found


def forward_calls(given: Arguments, *, with_peer: bool) -> dict[str, Call]:
    return {who: partial(f, **given) for who, f in functions(with_peer=with_peer).items()}


def flashinfer_call(given: Arguments) -> dict[str, Call]:
    """The call of FlashInfer's function, if FlashInfer is installed. The function takes packed
    tokens, normalised rows of q and k, decays and beta in float32, and states with V first. These
    are made here, so FlashInfer's call has less to do than the other calls."""
    theirs = problem.peer(FLASHINFER)
    if theirs is None:
        return {}
    v, state = given["v"], given["initial_state"].transpose(-1, -2).contiguous()
    batch, tokens = v.shape[:2]
    gate = -given["A_log"].exp() * softplus(given["g"].float() + given["dt_bias"])
    packed = {name: normalize(given[name].float(), dim=-1).to(v.dtype) for name in ("q", "k")}
    packed |= {"v": v, "g": gate.exp(), "beta": given["beta"].float().sigmoid()}
    packed = {name: x.flatten(0, 1).contiguous() for name, x in packed.items()}
    options = {
        "cu_seqlens": torch.arange(batch + 1, device=v.device) * tokens,
        "max_seqlen": tokens,
        "initial_state": state,
        "output_final_state": True,
    }

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        o, final_state = theirs(**packed, **options, output_state=torch.empty_like(state))
        return o.view(v.shape), final_state.transpose(-1, -2)

    return {"flashinfer": call}


def steps(given: Arguments, *, with_peer: bool) -> dict[str, training.Step]:
    do = training.slope(given)
    found = functions(with_peer=with_peer)
    return {who: training.Step(f, given, do) for who, f in found.items()}


def compile_ours(cases: Sequence[Case], *, backward: bool) -> None:
    """Compile the kernels of the cases on all cores, instead of one by one when called."""
    from cute_attn import cache, warmup
    from cute_attn.ops.gated_delta_rule import (
        plan_chunk_gated_delta_rule,
        plan_chunk_gated_delta_rule_backward,
    )

    arch = cache.current_arch()
    requests = plan_chunk_gated_delta_rule(
        arch, initial_state=True, output_final_state=True, **OPTIONS
    )
    if backward:
        requests += plan_chunk_gated_delta_rule(arch, gradient=True, **OPTIONS)
        for grouped in {case.heads != case.heads_v for case in cases}:
            requests += plan_chunk_gated_delta_rule_backward(arch, grouped=grouped, **OPTIONS)
    warmup(dict.fromkeys(requests))


def check_forward(case: Case, given: Arguments, calls: Mapping[str, Call]) -> dict[str, float]:
    """Compare each contender with the float64 reference, on all tokens of a few heads."""
    run = reference.gated_delta_rule_chunk_reference
    return problem.check_chunk(case, given, calls, name="chunk_gated_delta_rule", run=run)


def check_gradients(
    case: Case, given: Arguments, calls: Mapping[str, Callable[[], Results]]
) -> dict[str, float]:
    """Compare the gradients of each contender with the float64 reference, on a few heads."""
    references = (
        reference.gated_delta_rule_gradients,
        reference.gated_delta_rule_chunk_gradients,
    )
    return training.check_gradients(case, given, calls, references)
