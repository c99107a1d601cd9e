"""Small calls of multi-head latent attention, for `tests.gpu.small_calls`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import cute_attn
from cute_attn import launch
from cute_attn.kernels.mla.spec import ARCHS
from tests.gpu.named_calls import Group, Named
from tests.ops import mla_cases

CASES = {
    "ragged": (mla_cases.Case((130, 0, 5)), 0),
    "queries, pages of 16": (mla_cases.Case((150, 70), queries=3, heads=40, page_size=16), 1),
    "splits": (mla_cases.Case((900, 100), heads=12), 14),
    "320 columns": (mla_cases.Case((200,), head_dim=320, head_dim_v=256), 2),
    "512 columns, no mask": (
        mla_cases.Case(
            (200,),
            queries=2,
            heads=5,
            head_dim=512,
            head_dim_v=512,
            dtype=torch.float16,
            causal=False,
        ),
        0,
    ),
}


def decode(device: str) -> Iterator[Named]:
    if launch.arch_for(torch.device(device, 0 if device == "cuda" else None)) not in ARCHS:
        return
    for name, (case, splits) in CASES.items():
        given = case.arguments(device) | {"num_splits": splits, "return_lse": True}
        yield f"latent decode, {name}", lambda given=given: cute_attn.mla_decode(**given)


CALLS: dict[str, Group] = {"mla": decode}
