"""FlashAttention-4's forward for head_dim 256 beside ours, in the emulator, on the same inputs.

    python -m tests.ops.test_attention_beside_peer

prints the table of docs/log/hd256_forward.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import cute_attn
from cute_attn.bench.peers import Captured, Request, capture_all
from cute_attn.bench.peers.flash_attention_4 import forward
from cute_attn.emulator import Emulator

from ..emulator import peer_results
from ..emulator.peer_captures import QUICK_REQUESTS, capture

ARCH = "sm_100a"
DIRECTORY = Path(__file__).parents[2] / "build" / "peers" / ARCH


def case(**options: Any) -> Request:
    return forward(arch=ARCH, head_dim=256, **{"heads": 1, "seqlen_q": 300} | options)


CASES = {
    "causal, 200 x 333": case(causal=True, seqlen_q=200, seqlen_k=333),
    "dense": case(heads=2, seqlen_q=256, seqlen_k=512),
    "float16": case(dtype="float16", seqlen_k=400),
    "4 heads to 2, causal": case(heads=4, qhead_per_kvhead=2, causal=True, seqlen_q=130),
    "packed 100, 60, 1 x 130, 60, 77, causal": case(
        heads=2, causal=True, seqlens_q=(100, 60, 1), seqlens_k=(130, 60, 77)
    ),
    "window (64, 0)": case(window=(64, 0)),
    "softcap 10, causal": case(softcap=10.0, causal=True),
    "sink, causal": case(learnable_sink=True, causal=True, heads=2),
}


class Errors(NamedTuple):
    """Relative, in the Frobenius norm, against float64."""

    ours: float
    theirs: float
    plain: float


def errors(captured: Captured) -> dict[str, Errors]:
    """The errors of out and lse; both kernels run with all checks on, and neither may give an
    error."""
    given = peer_results.inputs(captured)
    memory = captured.materialise(given)
    emulator = Emulator()
    for call in captured.calls:
        image = call.function.object_file.read_bytes()
        emulator.load_object(image, call.function.ptx)(*memory.arguments(call))
    theirs = peer_results.results(captured, memory.tensors)
    with cute_attn.emulated(ARCH, Emulator()):
        out, lse = ours(dict(captured.request.options), memory.tensors)
    expected = peer_results.expected(captured, given)
    return {
        name: Errors(
            *(peer_results.error(x, expected[name].exact) for x in (mine, theirs[name])),
            peer_results.error(expected[name].plain, expected[name].exact),
        )
        for name, mine in (("out", out), ("lse", lse))
    }


def ours(
    options: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "learnable_sink")
    call: dict[str, Any] = {name: tensors[name] for name in names if name in tensors}
    call |= {
        "causal": options["causal"],
        "window_size": options["window"],
        "softcap": options["softcap"] or 0.0,
        "return_lse": True,
    }
    if options["seqlens_q"] is None:
        return cute_attn.flash_attn_func(**call)
    return cute_attn.flash_attn_varlen_func(**call, max_seqlen_q=max(options["seqlens_q"]))


@pytest.mark.slow  # FlashAttention-4's kernel alone compiles for 25 seconds
@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_errors_are_of_the_same_size(request_: Request) -> None:
    """By the rule for the error of a kernel, which both keep."""
    out = errors(capture(request_, QUICK_REQUESTS))["out"]
    assert out.ours <= 2 * out.plain
    assert out.theirs <= 2 * out.plain


def main() -> None:
    capture_all(DIRECTORY, CASES.values())
    print("| case | o, ours | o, FlashAttention-4 | o, plain | lse, ours | lse, FlashAttention-4 |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, request in CASES.items():
        found = errors(request.capture(DIRECTORY))
        numbers = *found["out"], *found["lse"][:2]
        print(f"| {name} | {' | '.join(f'{number:.2e}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
