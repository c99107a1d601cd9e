"""Delta rules over GPUs: the part of `context-parallel` for `chunk_kda` and
`chunk_gated_delta_rule`.

The base is one GPU's time for 1 / W of the tokens and all heads. With 1 / W of the heads, one GPU
would take longer, because the pass of the state has few CTAs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..harness.report import Row


class DeltaCase(NamedTuple):
    """A row of the table; goals are shares of W times one GPU's rate, 0 for no goal.

    Attributes:
        function: the public function.
        gates: "usual": channels that forget within a token up to within hundreds of tokens. "weak":
            decays near 1, so that ranks need the exact transitions of their whole spans.
    """

    name: str
    function: str
    tokens: int = 2**16
    heads: int = 32
    heads_v: int = 32
    gates: str = "usual"
    layout: str = "contiguous"
    forward: float = 0.85
    both: float = 0.88


CASES = (
    DeltaCase("chunk_kda 32/32, 64k", "chunk_kda"),
    DeltaCase("chunk_kda 32/32, 64k, weak gates", "chunk_kda", gates="weak", forward=0, both=0),
    DeltaCase("chunk_gated_delta_rule 16/32, 64k", "chunk_gated_delta_rule", heads=16),
)


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


def measured(
    case: DeltaCase, lockstep: Callable[..., float], *, forward_only: bool = False
) -> list[Row]:
    """The row of a case; every rank calls this. `lockstep` times a call that all ranks make."""
    import torch

    from ... import chunk_gated_delta_rule, chunk_kda
    from ...distributed import context_parallel

    functions: dict[str, Any] = {
        "chunk_kda": chunk_kda,
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
    }
    function = functions[case.function]
    inputs = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")

    def times(tokens: int, **more: Any) -> tuple[float, float]:
        args = arguments(case, tokens)
        with torch.no_grad():
            forward = lockstep(lambda: function(**args, **more))
        if forward_only:
            return forward, float("nan")
        leaves = [args[name].requires_grad_() for name in inputs]
        do = torch.randn_like(args["v"])

        def both() -> None:
            o, _ = function(**args, **more)
            torch.autograd.grad(o, leaves, do)

        return forward, lockstep(both)

    torch.manual_seed(torch.distributed.get_rank())
    world = torch.distributed.get_world_size()
    base, base_both = times(case.tokens // world)
    torch.cuda.empty_cache()
    plan = context_parallel(seqlen=case.tokens, layout=case.layout)
    torch.cuda.reset_peak_memory_stats()
    forward, both = times(plan.tokens, cp=plan)
    row: Row = {
        "case": case.name,
        "mode": "states",
        "base_ms": base,
        "forward_ms": forward,
        "share_of_ideal_forward": base / forward,
        "base_both_ms": base_both,
        "both_ms": both,
        "share_of_ideal_both": base_both / both,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
    }
    torch.cuda.empty_cache()
    return [row]
