"""One of the processes of `test_torch_dtensor`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.integrations.torch_dtensor import register
from tests.ops.attention_cases import assert_agrees, is_known
from tests.ops.attention_gradient_cases import assert_gradients_agree

NAMES = ("q", "k", "v", "learnable_sink")


def work(rank: int, processes: int, rendezvous: str, case: str) -> None:
    """Run a case on DTensors, and compare the whole results with the reference."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=processes
    )
    emulator = Emulator(num_sms=2)
    with cute_attn.emulated("sm_90a", emulator):
        CASES[case]()
    assert all(map(is_known, emulator.report.findings)), emulator.report
    dist.destroy_process_group()


def arguments(*, packed: bool = False, heads_k: int = 2) -> dict[str, Any]:
    """Of the reference, and of the operator."""
    generator = torch.Generator().manual_seed(0)
    rows = (24,) if packed else (2, 24)
    args: dict[str, Any] = {
        name: torch.randn(*rows, heads, 64, generator=generator).bfloat16()
        for name, heads in (("q", 2 * heads_k), ("k", heads_k), ("v", heads_k))
    }
    args["learnable_sink"] = torch.randn(2 * heads_k, generator=generator)
    if packed:
        bounds = torch.tensor([0, 7, 24], dtype=torch.int32)
        args |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    return args | {"causal": True}


def check(args: dict[str, Any], placements: dict[str, Any], o_placement: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = {
        name: distribute_tensor(x, mesh, [placements.get(name, Replicate())])
        for name, x in args.items()
        if isinstance(x, torch.Tensor)
    }
    leaves = [given[name].requires_grad_() for name in NAMES]
    function = (
        cute_attn.flash_attn_varlen_func if "cu_seqlens_q" in args else cute_attn.flash_attn_func
    )
    with torch.no_grad():
        alone, none = function(**given, causal=True)
    assert none is None and alone.placements == (o_placement,)
    o, lse = function(**given, causal=True, return_lse=True)
    assert isinstance(o, DTensor) and isinstance(lse, DTensor)
    assert o.placements == (o_placement,)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = torch.autograd.grad(o, leaves, distribute_tensor(do, mesh, [o_placement]))
    assert_agrees(args, o.detach().full_tensor(), lse.detach().full_tensor())
    found = {name: x.full_tensor() for name, x in zip(NAMES, gradients, strict=True)}
    assert_gradients_agree(args, found, do)


def by_heads() -> None:
    from torch.distributed.tensor import Shard

    places = dict.fromkeys(NAMES[:3], Shard(2)) | {"learnable_sink": Shard(0)}
    check(arguments(), places, Shard(2))


def by_packed_heads() -> None:
    from torch.distributed.tensor import Shard

    places = dict.fromkeys(NAMES[:3], Shard(1)) | {"learnable_sink": Shard(0)}
    check(arguments(packed=True), places, Shard(1))


def by_sequences() -> None:
    """The sink's gradient is a sum over the processes."""
    from torch.distributed.tensor import Shard

    check(arguments(), dict.fromkeys(NAMES[:3], Shard(0)), Shard(0))


def by_rows() -> None:
    """No way for the kernels, and the devices do not divide the heads: what is sharded by rows of
    all sequences is gathered, or sharded by sequences."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    args = arguments(heads_k=3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v = (distribute_tensor(args[name], mesh, [Shard(1)]) for name in NAMES[:3])
    o, _ = cute_attn.flash_attn_func(q, k, v, causal=True)
    assert o.placements in ((Replicate(),), (Shard(0),))
    assert_agrees(
        {name: args[name] for name in NAMES[:3]} | {"causal": True}, o.full_tensor(), None
    )


CASES = {
    "heads": by_heads,
    "packed heads": by_packed_heads,
    "rows": by_rows,
    "sequences": by_sequences,
}
register()
