"""A few small calls of every operator that runs on this GPU, for `test_sanitizers`.

`python -m tests.gpu.small_calls FAMILY` makes those of a family. With `compile` in place of it,
kernels do nothing, and those that all calls ask for are compiled by all cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import cute_attn
from cute_attn import launch
from cute_attn.kernels.attention import table
from cute_attn.kernels.attention.ds_tiles import CLUSTER_KEYS, nbytes
from cute_attn.kernels.attention.statistics import STATS_ROWS
from cute_attn.kernels.kda.chunk.spec import CHUNK
from cute_attn.launch import Request
from cute_attn.ops import kda
from cute_attn.ops.attention import forward
from tests.ops import (
    attention_cases,
    kda_cases,
    kda_decode_cases,
    lightning_cases,
    test_kda_stages_backward,
)
from tests.ops.attention_gradient_cases import workspace
from tests.ops.operators import OPERATORS
from tests.ops.test_attention_pages import in_pages
from tests.ops.test_kda_gradients import INPUTS as KDA_INPUTS
from tests.ops.test_kda_gradients import weights
from tests.ops.test_kda_pool import SERVER, pool_call

LENGTHS = (70, 0, 63)  # of sequences that are packed: two chunks, none, and one that is not whole
CHUNK_KDA = {
    "dense": (kda_cases.PLAIN, (sum(LENGTHS),)),
    "packed": (kda_cases.PACKED, LENGTHS),
    "float16, K = V = 64": (kda_cases.SMALL, (sum(LENGTHS),)),
}
LONG = 33 * CHUNK  # so long a sequence is split, with one head
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
PAGED = ("cache", (16, 64))  # the call, and the sizes of its pages
SPLITS = 2
PACKED = attention_cases.Kind(
    window_left=True,
    window_right=True,
    varlen_q=True,
    varlen_k=True,
    seqused_k=True,
    sink=torch.float32,
)
CAPPED = attention_cases.Kind(dtype=torch.float16, softcap=True)
GRADIENTS = {  # splits of a group are parts of a sum
    "causal": attention_cases.Case(attention_cases.CAUSAL, (130,), (200,), heads_k=2),
    "packed, splits": attention_cases.Case(
        PACKED, LENGTHS, (90, 30, 140), unused_k=(5, 0, 9), group=8, left=60, right=20, tail=3
    ),
    "softcap": attention_cases.Case(CAPPED, (140,), (130,), heads_k=2, softcap=5.0),
}
LONG_KEYS = attention_cases.Case(attention_cases.CAUSAL, (64,), (7 * CLUSTER_KEYS,))
PART_OF_KEYS = nbytes(1, STATS_ROWS, 2 * CLUSTER_KEYS) + 4 * STATS_ROWS * 256  # for 4 SMs
DETERMINISTIC = "causal"  # also as deterministic calls, which may get other kernels
ATTENTION_INPUTS = ("q", "k", "v", "learnable_sink")

Named = tuple[str, Callable[[], Any]]  # a call and what it is called


def on_device(given: dict[str, Any], device: str) -> dict[str, Any]:
    return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in given.items()}


def differentiate(
    function: Callable[..., Any], given: dict[str, Any], of: tuple[str, ...]
) -> Callable[[], None]:
    """A call and its backward, for random gradients of what it returns."""

    def call() -> None:
        leaves = {name: given[name].detach().requires_grad_() for name in of if name in given}
        returned = function(**given | leaves)
        results = [x for x in returned if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(results, [torch.randn_like(x) for x in results])

    return call


# -- families: their calls, on a device


def by_tokens(device: str) -> Iterator[Named]:
    for name, kernel in DECODE.items():
        decode = kda_decode_cases.Case(kernel, tokens=3 if kernel.multi_token else 1)
        given = decode.inputs(device)
        yield f"kda_decode, {name}", lambda given=given: cute_attn.kda_decode(**given)
    recurrent = on_device(OPERATORS["fused_recurrent_kda"].arguments(), device)
    yield "fused_recurrent_kda", lambda: cute_attn.fused_recurrent_kda(**recurrent)
    for name, lightning in LIGHTNING.items():
        given = lightning.inputs(device)
        call = cute_attn.lightning_attn_decode
        yield f"Lightning decode, {name}", lambda given=given, call=call: call(**given)


def chunk_kda(device: str) -> Iterator[Named]:
    for name, (kind, lengths) in CHUNK_KDA.items():
        case = kda_cases.Case(kind=kind, lengths=lengths, heads=2)
        for modular in (False, True):
            given = case.arguments(device) | {"return_intermediate_states": modular}
            path = "modular" if modular else "fused"
            yield (
                f"chunk_kda, {name}, {path}",
                torch.inference_mode()(lambda given=given: cute_attn.chunk_kda(**given)),
            )
    long = kda_cases.Case(lengths=(LONG,), heads=1, group=1).arguments(device)
    yield "chunk_kda, split", torch.inference_mode()(lambda: cute_attn.chunk_kda(**long))
    pool = pool_call(kda_cases.Case(SERVER, LENGTHS, heads=2).arguments(device)).given
    yield "chunk_kda, pool", torch.inference_mode()(lambda: cute_attn.chunk_kda(**pool))


def kda_gradients(device: str) -> Iterator[Named]:
    recompute = on_device(OPERATORS["kda_recompute_w_u"].arguments(), device)
    yield "kda_recompute_w_u", lambda: kda.kda_recompute_w_u(**recompute)
    for name, (kind, lengths) in CHUNK_KDA.items():
        given = kda_cases.Case(kind=kind, lengths=lengths, heads=2).arguments(device)
        title = f"gradients of chunk_kda, {name}"
        yield title, differentiate(cute_attn.chunk_kda, given, KDA_INPUTS)
    long = kda_cases.Case(lengths=(LONG,), heads=1, group=1).arguments(device)
    title = "gradients of chunk_kda, split"
    yield title, differentiate(cute_attn.chunk_kda, long, KDA_INPUTS)

    stages = test_kda_stages_backward
    given = kda_cases.Case(stages.FEW, (sum(LENGTHS),), heads=2).arguments(device)

    def modular() -> None:
        with mock.patch.object(stages, "poisoned_outputs", nullcontext):
            stages.put_together(given, weights(given))

    yield "gradients of chunk_kda, modular", modular


def attention(device: str) -> Iterator[Named]:
    head_dim, head_dim_v = attention_cases.target().head_dim, attention_cases.target().head_dim_v
    cases = {name: on_device(case.arguments(), device) for name, case in ATTENTION.items()}
    paged, sizes = PAGED
    for size in sizes:
        case = ATTENTION[paged]
        pages = in_pages(case.arguments(), size, seed=0)
        cases[f"{paged}, pages of {size}"] = on_device(pages, device)
    for name, given in cases.items():
        function = cute_attn.flash_attn_func
        if "seqused_k" in given:
            function = cute_attn.flash_attn_varlen_func
        title = f"attention, {name}, head_dim {head_dim}"
        call = torch.inference_mode()(lambda f=function, given=given: f(**given))
        yield title, call
        if name == paged:
            of_out = given["q"].new_empty((*given["q"].shape[:-1], head_dim_v))
            with_parts = given | {"num_splits": SPLITS, "out": of_out}
            call = torch.inference_mode()(lambda f=function, given=with_parts: f(**given))
            yield f"{title}, in splits to a given tensor", call
    parts = (
        torch.randn(3, 2, 5, 4, head_dim_v, device=device),
        torch.randn(3, 2, 5, 4, device=device),
    )
    title = f"flash_attn_combine, head_dim {head_dim}"
    yield title, lambda: cute_attn.flash_attn_combine(*parts, out_dtype=torch.bfloat16)


@contextmanager
def outputs_start_as_zeros() -> Iterator[None]:
    """initcheck does not see what TMA stores, as o, dq, dk and dv, and would take reads of it for
    reads of nothing. Workspaces are left as they are."""
    with (
        mock.patch.object(forward, "_empty_like", torch.zeros_like),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
    ):
        yield


def attention_gradients(device: str) -> Iterator[Named]:
    target = attention_cases.target()
    for name, case in GRADIENTS.items():
        given = on_device(case.arguments(), device)
        function = cute_attn.flash_attn_func
        if case.kind.varlen_q:
            function = cute_attn.flash_attn_varlen_func
        title = f"gradients of attention, {name}, head_dim {target.head_dim}"
        call = differentiate(function, given, ATTENTION_INPUTS)
        yield title, outputs_start_as_zeros()(call)
        if name != DETERMINISTIC:
            continue
        call = differentiate(function, given | {"deterministic": True}, ATTENTION_INPUTS)
        always = outputs_start_as_zeros()(call)
        yield f"{title}, deterministic", always
        if table.has("backward_ds_dq", target.arch, target.head_dim):
            with workspace(0):
                yield f"{title}, without a workspace for dS", always
            long = on_device(LONG_KEYS.arguments(), device)
            call = outputs_start_as_zeros()(differentiate(function, long, ATTENTION_INPUTS))
            with workspace(PART_OF_KEYS), mock.patch.object(launch, "num_sms", return_value=4):
                yield f"{title}, dS of a part of the keys", call


def attention_at(head_dim: int) -> Callable[[str], Iterator[Named]]:
    """The attention calls at a head_dim: those that the architecture has kernels for."""

    def calls(device: str) -> Iterator[Named]:
        arch = launch.arch_for(torch.device(device, 0 if device == "cuda" else None))
        with attention_cases.on_target(attention_cases.Target(arch, head_dim)):
            if table.has("forward", arch, head_dim, attention_cases.head_dim_v_of(head_dim)):
                yield from attention(device)
            if table.has("backward_dq", arch, head_dim, attention_cases.head_dim_v_of(head_dim)):
                yield from attention_gradients(device)

    return calls


FAMILIES: dict[str, Callable[[str], Iterator[Named]]] = {
    "by_tokens": by_tokens,
    "chunk_kda": chunk_kda,
    "kda_gradients": kda_gradients,
    **{f"attention_{d}": attention_at(d) for d in table.head_dims("forward")},
}


@contextmanager
def idle_kernels() -> Iterator[list[Request]]:
    """Within it kernels do nothing; the list gets those that were asked for."""
    wanted: dict[Request, None] = {}
    found: list[Request] = []

    def get_for(_: torch.device, *request: Any) -> Callable[..., None]:
        wanted[request] = None  # type: ignore[index]
        return lambda *_: None

    with mock.patch.object(launch, "get_for", get_for):
        yield found
    found += wanted


def make_calls(family: str, device: str) -> None:
    for title, call in FAMILIES[family](device):
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        print(title, flush=True)
    print(f"done: {family}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    (family,) = sys.argv[1:]
    if family != "compile":
        make_calls(family, "cuda")
        return
    with idle_kernels() as wanted:
        for each in FAMILIES:
            make_calls(each, "cuda")
    cute_attn.warmup(wanted)


if __name__ == "__main__":
    main()
