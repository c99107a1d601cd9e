"""A few small calls of every operator that runs on this GPU, for `test_sanitizers`.

`python -m tests.gpu.small_calls` makes them; with `compile` it only fills the kernel cache, with
all cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import cute_attn
from cute_attn.kernels.attention import table
from cute_attn.kernels.kda.chunk.spec import CHUNK
from tests.ops import attention_cases, kda_cases, kda_decode_cases, lightning_cases

LENGTHS = (70, 0, 63)  # of sequences that are packed: two chunks, none, and one that is not whole
CHUNK_KDA = {
    "dense": (kda_cases.PLAIN, (sum(LENGTHS),)),
    "packed": (kda_cases.PACKED, LENGTHS),
    "float16, K = V = 64": (kda_cases.SMALL, (sum(LENGTHS),)),
}
DECODE = {
    "slots": kda_decode_cases.Kernel(),
    "several tokens, positions": kda_decode_cases.Kernel(multi_token=True, slots="positions"),
    "several tokens, records": kda_decode_cases.Kernel(multi_token=True, slots="records"),
}
LIGHTNING = {
    "slots": lightning_cases.Case(slots=5, padded=1),
    "several tokens": lightning_cases.Case(tokens=3),
    "drafts": lightning_cases.Case(tokens=3, slots=5, records=4),
}

ATTENTION = {
    "causal": attention_cases.Case(attention_cases.CAUSAL, (130,), (200,), heads_k=2),
    "cache": attention_cases.Case(
        attention_cases.CACHE, (1, 0, 3), (150,) * 3, unused_k=(0, 9, 149), group=2
    ),
}

SPLITS = 2

Call = tuple[Callable[..., Any], dict[str, Any]]


def attention_targets() -> list[attention_cases.Target]:
    """The attention kernels of this GPU."""
    current = cute_attn.cache.current_arch()
    dims = [d for way, arch, d in table.KERNELS if (way, arch) == ("forward", current)]
    return [attention_cases.Target(current, head_dim) for head_dim in dims]


def calls() -> Iterator[tuple[str, Call]]:
    for name, (kind, lengths) in CHUNK_KDA.items():
        case = kda_cases.Case(kind=kind, lengths=lengths, heads=2)
        for modular in (False, True):
            arguments = case.arguments("cuda") | {"return_intermediate_states": modular}
            path = "modular" if modular else "fused"
            yield f"chunk_kda, {name}, {path}", (cute_attn.chunk_kda, arguments)
    long = kda_cases.Case(lengths=(33 * CHUNK,), heads=1, group=1)
    yield "chunk_kda, split", (cute_attn.chunk_kda, long.arguments("cuda"))
    for name, kernel in DECODE.items():
        decode = kda_decode_cases.Case(kernel, tokens=3 if kernel.multi_token else 1)
        yield f"kda_decode, {name}", (cute_attn.kda_decode, decode.inputs())
    for name, lightning in LIGHTNING.items():
        yield f"Lightning decode, {name}", (cute_attn.lightning_attn_decode, lightning.inputs())

    for target in attention_targets():
        with attention_cases.on_target(target):
            for name, attention in ATTENTION.items():
                given = {
                    key: x.cuda() if isinstance(x, torch.Tensor) else x
                    for key, x in attention.arguments().items()
                }
                packed = "cu_seqlens_q" in given
                function = cute_attn.flash_attn_varlen_func if packed else cute_attn.flash_attn_func
                title = f"attention, {name}, head_dim {target.head_dim}"
                yield title, (function, given)
                if name == "cache":
                    parts = {"num_splits": SPLITS, "out": torch.empty_like(given["q"])}
                    yield f"{title}, in splits to a given tensor", (function, given | parts)


def requests() -> list[Any]:
    arch = cute_attn.cache.current_arch()
    wanted = [request for kernel in DECODE.values() for request in kernel.plan(arch)]
    for kind, _ in CHUNK_KDA.values():
        for modular in (False, True):
            wanted += kind.requests(arch, return_intermediate_states=modular)
    for target in attention_targets():
        with attention_cases.on_target(target):
            wanted += [case.kind.request("static") for case in ATTENTION.values()]
            wanted += ATTENTION["cache"].kind.requests("static", num_splits=SPLITS)
    return wanted


def main() -> None:
    if sys.argv[1:] == ["compile"]:
        cute_attn.warmup(requests())
    with torch.inference_mode():
        for name, (operator, arguments) in calls():
            operator(**arguments)
            torch.cuda.synchronize()
            print(name, flush=True)


if __name__ == "__main__":
    main()
