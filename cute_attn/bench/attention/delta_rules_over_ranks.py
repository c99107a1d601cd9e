"""Delta rules over GPUs: the part of `context-parallel` for `chunk_kda` and
`chunk_gated_delta_rule`.

The base is one GPU's time for 1 / W of the tokens and all heads. With 1 / W of the heads, one GPU
would take longer, because the pass of the state has few CTAs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..harness.report import Row
from .clock_of_ranks import Clock

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


class DeltaCase(NamedTuple):
    """A row of the table; goals are shares of W times one GPU's rate, 0 for no goal.

    Attributes:
        function: the public function.
        gates: "usual": channels that forget within a token up to within hundreds of tokens. "weak":
            decays near 1, so that ranks need the exact transitions of their whole spans.
    """

    name: str
    function: str
    tokens: int
    heads: int = 32
    heads_v: int = 32
    gates: str = "usual"
    layout: str = "contiguous"
    forward: float = 0.85
    both: float = 0.88


TOKENS_OF_RANK = 2**15


def cases(world: int) -> tuple[DeltaCase, ...]:
    """The table for W ranks; the number of tokens grows with W."""
    tokens = TOKENS_OF_RANK * world

    def case(function: str, heads: int) -> DeltaCase:
        return DeltaCase(f"{function} {heads}/32, {tokens // 1024}k", function, tokens, heads)

    def weak(usual: DeltaCase) -> DeltaCase:
        name = f"{usual.name}, weak gates"
        return usual._replace(name=name, gates="weak", forward=0, both=0)

    kda, gdn = case("chunk_kda", 32), case("chunk_gated_delta_rule", 16)
    return kda, weak(kda), gdn, weak(gdn)


def arguments(case: DeltaCase, tokens: int) -> dict[str, Any]:
    """Arguments of the function. The kernels apply gate, norms and sigmoid."""
    import torch

    per_channel = case.function == "chunk_kda"
    gates = (case.heads_v, 128) if per_channel else (case.heads_v,)
    weak = case.gates == "weak"

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device="cuda", dtype=torch.bfloat16)

    def uniform(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, device="cuda")

    return {
        "q": normal(case.heads, 128),
        "k": normal(case.heads, 128),
        "v": normal(case.heads_v, 128),
        "g": normal(*gates),
        # With weak gates, corrections are small too: they also let a state fade.
        "beta": normal(case.heads_v) - (8.0 if weak else 0.0),
        "A_log": uniform((case.heads_v,), 0.5, 2.0).log(),
        "dt_bias": uniform(gates, -12.0, -9.0) if weak else uniform(gates, -6.0, 0.0),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }


def calls_of(case: DeltaCase, tokens: int, **more: Any) -> dict[str, Callable[[], Any]]:
    """The call without gradients, "forward", and with gradients of all inputs, "both"."""
    import torch

    from ... import chunk_gated_delta_rule, chunk_kda

    functions: dict[str, Any] = {
        "chunk_kda": chunk_kda,
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
    }
    function = functions[case.function]
    args = arguments(case, tokens)
    of_leaves = {name: args[name].detach().requires_grad_() for name in INPUTS}
    do = torch.randn_like(args["v"])

    def forward() -> None:
        with torch.no_grad():
            function(**args, **more)

    def both() -> None:
        o, _ = function(**args | of_leaves, **more)
        torch.autograd.grad(o, list(of_leaves.values()), do)

    return {"forward": forward, "both": both}


def measured(case: DeltaCase, clock: Clock) -> Iterator[Row]:
    """The row of a case; every rank calls this."""
    import torch

    from ...distributed import context_parallel

    torch.manual_seed(torch.distributed.get_rank())
    world = torch.distributed.get_world_size()
    plan = context_parallel(seqlen=case.tokens, layout=case.layout)
    over = calls_of(case, plan.tokens, cp=plan)
    peaks = {name: clock.peak_mib(call) for name, call in over.items()}
    base = calls_of(case, case.tokens // world)
    times = clock.times(over | {f"base_{name}": call for name, call in base.items()})
    row: Row = {
        "case": case.name,
        "mode": "states",
        "gpus": world,
        "base_ms": times["base_forward"],
        "forward_ms": times["forward"],
        "share_of_ideal_forward": times["base_forward"] / times["forward"],
        "base_both_ms": times["base_both"],
        "both_ms": times["both"],
        "share_of_ideal_both": times["base_both"] / times["both"],
        "forward_peak_mib": peaks["forward"],
        "both_peak_mib": peaks["both"],
    }
    torch.cuda.empty_cache()
    yield row
