"""Delta rules over two GPUs, with NCCL, beside one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cute_attn
from cute_attn.distributed import context_parallel

from . import processes
from .kernels_ahead import compiled
from .processes import on_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, only to find the kernels
FUNCTIONS = ("chunk_kda", "chunk_gated_delta_rule")
LAYOUTS = ("contiguous", "zigzag")
TOKENS = ("q", "k", "v", "g", "beta")
LENGTHS = (5000, 3, 0, 9345, 700)
MOST = 1.2e-2  # relative difference: two roundings to bfloat16 of one result


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """All kernels of this module's calls are compiled before the first test."""
    if torch.cuda.device_count() >= 2:
        compiled(every_call)
    yield
    processes.close()


def every_call() -> None:
    """Each kind of call that a test of this module makes."""
    for function in FUNCTIONS:
        x = Inputs(function)
        x.alone()
        for layout in LAYOUTS:
            x.over_ranks(layout)


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


class Inputs:
    """The arguments of a call, equal on all ranks, and the gradients of its results."""

    def __init__(self, function: str) -> None:
        self.function, self.args = function, arguments(function, DEVICE)
        self.do = torch.randn_like(self.args["v"])
        self.dfinal = torch.randn_like(self.args["initial_state"])
        self.bounds = [0, *accumulate(LENGTHS)]

    def alone(self) -> Any:
        offsets = torch.tensor(self.bounds, dtype=torch.int32, device=DEVICE)
        return call(self.function, self.args, self.do, self.dfinal, cu_seqlens=offsets)

    def over_ranks(self, layout: str) -> tuple[Any, Any]:
        """(plan, results)"""
        plan = context_parallel(cu_seqlens=self.bounds, layout=layout)
        own = {name: plan.shard(x, 1) if name in TOKENS else x for name, x in self.args.items()}
        share = self.dfinal if plan.rank == 0 else torch.zeros_like(self.dfinal)
        return plan, call(self.function, own, plan.shard(self.do, 1), share, cp=plan)


def agrees_with_one(function: str, layout: str) -> None:
    """o, final states and gradients of two GPUs are one GPU's, and repeat bit by bit."""
    inputs = Inputs(function)
    o, final, gradients = inputs.alone()
    (plan, first), (_, second) = (inputs.over_ranks(layout) for _ in range(2))
    found: dict[str, Tensor] = {"o": plan.unshard(first[0], 1), "final_state": first[1]}
    for name, x in first[2].items():
        assert torch.equal(x, second[2][name]), f"{name} differs between runs"
        if name in TOKENS:
            found[name] = plan.unshard(x, 1)
        else:
            found[name] = x.clone()
            dist.all_reduce(found[name])
    for name, expected in {"o": o, "final_state": final, **gradients}.items():
        error = (found[name].double() - expected.double()).norm() / expected.double().norm()
        assert error <= MOST, f"{name}: {error:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_gpus_agree_with_one(function: str, layout: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    on_ranks(2, agrees_with_one, function, layout)
