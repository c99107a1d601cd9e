"""The stages of the backward as public functions, ours and the peer's, for `kda-backward --stage`.

Imports torch, so the benchmarks' modules import this module only when a benchmark runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from cute_attn.reference.kda import CHUNK

from ..harness.agreement import Disagreement, relative_error
from . import problem, training
from .cases import LOWER_BOUND
from .problem import Arguments, Call


class Stage(NamedTuple):
    """The results of a stage, by name, and its calls."""

    results: tuple[str, ...]
    calls: dict[str, Call]


def stages(given: Arguments, *, with_peer: bool) -> dict[str, Stage]:
    """The stages in the order of the backward. The stages' inputs are results of our forward stages
    and of earlier stages.

    Args:
        given: `training.arguments` of a dense case.
    """
    from cute_attn.ops import kda

    with torch.no_grad():
        q, k = (
            torch.nn.functional.normalize(given[name].float(), dim=-1).to(problem.DTYPE)
            for name in "qk"
        )
        v, beta = given["v"], torch.sigmoid(given["beta"].float())
        do, scale = training.slope(given), q.shape[-1] ** -0.5
        gate = {name: given[name] for name in ("A_log", "dt_bias")} | {"lower_bound": LOWER_BOUND}
        G = kda.kda_gate_cumsum(given["g"], **gate, use_gate_in_kernel=True)
        x = kda.kda_chunk_intra(q, k, v, G, beta, scale, output_qg=True)
        qg = x.qg
        assert qg is not None
        states = kda.kda_chunk_delta_h(x.kg, x.w, x.u, G)
        h, v_new = states.h, states.v_new
        assert v_new is not None
        of_output = kda.kda_chunk_output_backward(v_new, x.Aqk, do, scale)
        of_state = kda.kda_chunk_delta_h_backward(qg, x.kg, x.w, G, do, of_output.dv, scale=scale)
        tiles = q, k, v, v_new, G, beta, x.Akk, h, do, of_state.dh, of_state.dv, scale
        recomputed = kda.kda_recompute_w_u_backward(*tiles)
        within = (
            q, k, G, beta, of_output.dAqk, recomputed.dAkk, recomputed.dq, recomputed.dk,
            recomputed.dbeta, recomputed.dg,
        )  # fmt: skip
        dg = kda.kda_chunk_intra_backward(*within).dg

    found = {
        "output": Stage(
            ("dAqk", "dv"),
            {"ours": lambda: kda.kda_chunk_output_backward(v_new, x.Aqk, do, scale)},
        ),
        "delta_h": Stage(
            ("dh", "dinitial_state", "dv"),
            {
                "ours": lambda: kda.kda_chunk_delta_h_backward(
                    qg, x.kg, x.w, G, do, of_output.dv, scale=scale
                )
            },
        ),
        "recompute_w_u": Stage(
            ("dq", "dk", "dv", "dbeta", "dg", "dAkk"),
            {"ours": lambda: kda.kda_recompute_w_u_backward(*tiles)},
        ),
        "intra": Stage(
            ("dq", "dk", "dbeta", "dg"), {"ours": lambda: kda.kda_chunk_intra_backward(*within)}
        ),
        "gate_cumsum": Stage(
            ("dg", "dA_log", "ddt_bias"),
            {
                "ours": lambda: kda.kda_gate_cumsum_backward(
                    dg, given["g"], **gate, use_gate_in_kernel=True
                )
            },
        ),
    }
    if not with_peer:
        return found
    peer = {name: problem.peer(f"fla.ops.{path}") for name, path in _PEERS.items()}
    if None in peer.values():
        return found
    theirs: dict[str, Any] = peer
    group = v.shape[2] // q.shape[2]

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, group)).sum(3) if group > 1 else x

    def intra() -> tuple[torch.Tensor, ...]:
        dq, dk, *rest = theirs["intra"](*within, safe_gate=True)
        return of_heads(dq), of_heads(dk), *rest

    def gate_cumsum() -> tuple[torch.Tensor, ...]:
        summed = theirs["cumsum"](dg, chunk_size=CHUNK, reverse=True)
        found: tuple[torch.Tensor, ...] = theirs["gate"](given["g"], dyg=summed, **gate)
        return found

    calls: dict[str, Call] = {
        "output": lambda: theirs["output"](q, k, v_new, do, A=x.Aqk, scale=scale),
        "delta_h": lambda: theirs["delta_h"](
            q=qg, k=x.kg, w=x.w, gk=G, do=do, dv=of_output.dv, scale=scale
        ),
        "recompute_w_u": lambda: theirs["recompute_w_u"](*tiles),
        "intra": intra,
        "gate_cumsum": gate_cumsum,
    }
    for name, call in calls.items():
        found[name].calls["fla"] = call
    return found


_PEERS = {
    "output": "kda.chunk_bwd:chunk_kda_bwd_dAv",
    "delta_h": "common.chunk_delta_h:chunk_gated_delta_rule_bwd_dhu",
    "recompute_w_u": "kda.chunk_bwd:chunk_kda_bwd_wy_dqkg_fused",
    "intra": "kda.chunk_intra:chunk_kda_bwd_intra",
    "cumsum": "utils.cumsum:chunk_local_cumsum",
    "gate": "kda.gate:kda_gate_bwd",
}


def check(name: str, stage: Stage, calls: Mapping[str, Call]) -> dict[str, float]:
    """Relative differences of the peers' results from ours.

    Raises:
        Disagreement: a peer fails or computes something else.
    """
    ours = dict(zip(stage.results, stage.calls["ours"](), strict=True))
    errors: dict[str, float] = {}
    for who, call in calls.items():
        found = dict(zip(stage.results, problem.outcome(who, call), strict=True))
        for result, expected in ours.items():
            if expected is None:
                continue
            error = relative_error(found[result].view(expected.shape), expected.double())
            limit = training.FEW_NUMBERS_LIMIT if result == "dA_log" else problem.PEER_MAX_ERROR
            if not error <= limit:
                raise Disagreement(
                    who, f"{who}, {name} backward: {result} differs by {error:.2e} from ours"
                )
            errors[f"{who} {result}"] = error
    return errors
