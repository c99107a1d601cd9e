"""FlashAttention-4's backward for head_dim 256 beside ours, in the emulator, on the same inputs.

    python -m tests.ops.test_attention_gradients_beside_peer

prints the table of docs/log/hd256_backward.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_attn
import cute_attn.ops.attention  # registers the operators
from cute_attn.bench.peers import Captured, Request, capture_all, missing
from cute_attn.bench.peers.flash_attention_4 import backward
from cute_attn.emulator import Emulator

from ..emulator import peer_results
from .test_attention_beside_peer import ARCH, DIRECTORY, Errors

GRADIENTS = ("dq", "dk", "dv")


def case(**options: Any) -> Request:
    return backward(arch=ARCH, head_dim=256, **{"heads": 1, "seqlen_q": 300} | options)


CASES = {
    "dense": case(heads=2, seqlen_q=256, seqlen_k=512),
    "causal": case(causal=True),
    "causal, 200 x 333": case(causal=True, seqlen_q=200, seqlen_k=333),
    "float16": case(dtype="float16", seqlen_k=400),
    "4 heads to 2, causal": case(heads=4, qhead_per_kvhead=2, causal=True, seqlen_q=130),
    "packed 100, 60, 1 x 130, 60, 77, causal": case(
        heads=2, causal=True, seqlens_q=(100, 60, 1), seqlens_k=(130, 60, 77)
    ),
}


def errors(captured: Captured) -> dict[str, Errors]:
    """Of dq, dk and dv; both run with all checks on, and neither may give an error."""
    given = peer_results.inputs(captured)
    memory = captured.materialise(given)
    emulator = Emulator()
    for call in captured.calls:
        image = call.function.object_file.read_bytes()
        emulator.load_object(image, call.function.ptx)(*memory.arguments(call))
    theirs = peer_results.results(captured, memory.tensors)
    with cute_attn.emulated(ARCH, Emulator()):
        mine = ours(dict(captured.request.options), memory.tensors)
    expected = peer_results.expected(captured, given)
    return {
        name: Errors(
            *(peer_results.error(x[name], expected[name].exact) for x in (mine, theirs)),
            peer_results.error(expected[name].plain, expected[name].exact),
        )
        for name in GRADIENTS
    }


def ours(options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From the same o and lse, which `flash_attn_func` would have kept."""
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "lse")
    call: dict[str, Any] = {name: tensors[name] for name in names if name in tensors}
    call |= {"o": tensors["out"], "do": tensors["dout"], "causal": options["causal"]}
    found = torch.ops.cute_attn.flash_attn_backward(**call)
    return dict(zip(GRADIENTS, found, strict=False))


@pytest.mark.slow  # it compiles FlashAttention-4's backward
@pytest.mark.parametrize("request_", [pytest.param(r, id=name) for name, r in CASES.items()])
def test_errors_are_of_the_same_size(request_: Request) -> None:
    """By the rule for the error of a kernel, which both keep."""
    if reason := missing(request_.peer):
        pytest.skip(reason)
    for name, found in errors(request_.capture(DIRECTORY)).items():
        assert found.ours <= 2 * found.plain, name
        assert found.theirs <= 2 * found.plain, name


def main() -> None:
    capture_all(DIRECTORY, CASES.values())
    who = ("ours", "FlashAttention-4", "plain")
    columns = [f"{name}, {whose}" for name in GRADIENTS for whose in who]
    print(f"| case | {' | '.join(columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    for name, request in CASES.items():
        found = errors(request.capture(DIRECTORY))
        numbers = [number for gradient in GRADIENTS for number in found[gradient]]
        print(f"| {name} | {' | '.join(f'{number:.2e}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
