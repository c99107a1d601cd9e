"""Small calls of the softmax attention operators, for `tests.gpu.small_calls`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import cute_attn
from cute_attn import launch
from cute_attn.kernels.attention import table
from cute_attn.kernels.attention.ds_tiles import CLUSTER_KEYS, nbytes
from cute_attn.kernels.attention.statistics import STATS_ROWS
from cute_attn.ops.attention import forward
from cute_attn.ops.attention.forward import empty_o
from tests.gpu.named_calls import LENGTHS, Group, Named, differentiate, on_device
from tests.ops import attention_cases
from tests.ops.attention_gradient_cases import fused_where_possible, workspace
from tests.ops.test_attention_pages import in_pages

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


def zero_o(q: Tensor, columns: int) -> Tensor:
    return empty_o(q, columns).zero_()


@contextmanager
def outputs_start_as_zeros() -> Iterator[None]:
    """initcheck does not see what TMA stores, as o, dq, dk and dv, and would take reads of it for
    reads of nothing. Workspaces are left as they are."""
    with (
        mock.patch.object(forward, "empty_o", zero_o),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
    ):
        yield


@contextmanager
def sums_of_dq_start_as_zeros() -> Iterator[None]:
    """In a fixed order the first tile of keys stores its part of dQ by a bulk copy, which initcheck
    does not see either. The emulator sees bulk copies."""
    new_empty = Tensor.new_empty

    def empty(x: Tensor, *size: Any, **more: Any) -> Tensor:
        found = new_empty(x, *size, **more)
        is_sums = found.dtype == torch.float32 and found.shape[-1] == x.shape[-1]
        return found.zero_() if is_sums else found

    with mock.patch.object(Tensor, "new_empty", empty):
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
        yield title, fused_where_possible()(outputs_start_as_zeros()(call))
        if name != DETERMINISTIC:
            continue
        call = differentiate(function, given | {"deterministic": True}, ATTENTION_INPUTS)
        always = sums_of_dq_start_as_zeros()(outputs_start_as_zeros()(call))
        yield f"{title}, deterministic", always
        if table.has("backward_ds_dq", target.arch, target.head_dim, target.head_dim_v):
            with workspace(0):
                yield f"{title}, without a workspace for dS", always
            long = on_device(LONG_KEYS.arguments(), device)
            call = outputs_start_as_zeros()(differentiate(function, long, ATTENTION_INPUTS))
            with workspace(PART_OF_KEYS), mock.patch.object(launch, "num_sms", return_value=4):
                yield f"{title}, dS of a part of the keys", call


def attention_at(head_dim: int) -> Group:
    """The attention calls at a head_dim: those that the architecture has kernels for."""

    def calls(device: str) -> Iterator[Named]:
        arch = launch.arch_for(torch.device(device, 0 if device == "cuda" else None))
        with attention_cases.on_target(attention_cases.Target(arch, head_dim)):
            if table.has("forward", arch, head_dim, attention_cases.head_dim_v_of(head_dim)):
                yield from attention(device)
            if table.has("backward_dq", arch, head_dim, attention_cases.head_dim_v_of(head_dim)):
                yield from attention_gradients(device)

    return calls


CALLS: dict[str, Group] = {f"attention_{d}": attention_at(d) for d in table.head_dims("forward")}
