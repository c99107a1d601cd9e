"""Delta rules over two GPUs, with NCCL, beside one GPU."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cute_attn
from cute_attn.distributed import context_parallel

from .processes import on_ranks

TOKENS = ("q", "k", "v", "g", "beta")
LENGTHS = (5000, 3, 0, 9345, 700)
MOST = 1.2e-2  # relative difference: two roundings to bfloat16 of one result


def arguments(function: str, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    total, heads, group = sum(LENGTHS), 4, 2
    gates = (heads * group, 128) if function == "chunk_kda" else (heads * group,)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, total, *shape, device=device, dtype=torch.bfloat16)

    return {
        "q": normal(heads, 128),
        "k": normal(heads, 128),
        "v": normal(heads * group, 128),
        "g": normal(*gates),
        "beta": normal(heads * group) - 4.0,
        "A_log": torch.zeros(heads * group, device=device),
        "dt_bias": torch.randn(*gates, device=device) - 8.0,  # weak gates: states last
        "initial_state": torch.randn(len(LENGTHS), heads * group, 128, 128, device=device),
    }


def call(function: str, args: dict[str, Tensor], do: Tensor, dfinal: Tensor, **more: Any) -> Any:
    """(o, final states, gradients by name)"""
    leaves = {name: x.clone().requires_grad_() for name, x in args.items()}
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    options: dict[str, Any] = dict.fromkeys((*flags, "output_final_state"), True)
    o, final = getattr(cute_attn, function)(**leaves, **options, **more)
    torch.autograd.backward([o, final], [do, dfinal])
    return o.detach(), final.detach(), {name: x.grad for name, x in leaves.items()}


def agrees_with_one(function: str, layout: str) -> None:
    """o, final states and gradients of two GPUs are one GPU's, and repeat bit by bit."""
    args = arguments(function, "cuda")
    do, dfinal = torch.randn_like(args["v"]), torch.randn_like(args["initial_state"])
    bounds = [0, *accumulate(LENGTHS)]
    offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    o, final, gradients = call(function, args, do, dfinal, cu_seqlens=offsets)
    plan = context_parallel(cu_seqlens=bounds, layout=layout)
    own = {name: plan.shard(x, 1) if name in TOKENS else x for name, x in args.items()}
    share = dfinal if plan.rank == 0 else torch.zeros_like(dfinal)
    runs = [call(function, own, plan.shard(do, 1), share, cp=plan) for _ in range(2)]
    found: dict[str, Tensor] = {"o": plan.unshard(runs[0][0], 1), "final_state": runs[0][1]}
    for name, x in runs[0][2].items():
        assert torch.equal(x, runs[1][2][name]), f"{name} differs between runs"
        if name in TOKENS:
            found[name] = plan.unshard(x, 1)
        else:
            found[name] = x.clone()
            dist.all_reduce(found[name])
    for name, expected in {"o": o, "final_state": final, **gradients}.items():
        error = (found[name].double() - expected.double()).norm() / expected.double().norm()
        assert error <= MOST, f"{name}: {error:.1e}"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("function", ["chunk_kda", "chunk_gated_delta_rule"])
def test_two_gpus_agree_with_one(function: str, layout: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_ranks(2, agrees_with_one, function, layout)
