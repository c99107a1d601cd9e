"""Sharding rules of softmax attention, for tensors that `torch.distributed.tensor` distributes.

After one call of `register`, the functions take DTensors that are sharded by sequences or by heads:

    from cute_attn.integrations.torch_dtensor import register

    register()
    o, _ = cute_attn.flash_attn_func(q, k, v)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops import register_operators
from ..ops.operator import NAMESPACE

__all__ = ["register"]

_Sharding = tuple[list[Any], list[Any]]  # the placements of results and of arguments

_ROWS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
_STATISTICS = ("lse", "dlse")
_RESULTS = {
    "flash_attn": ("o", "lse"),
    "flash_attn_backward": ("dq", "dk", "dv", "dsink"),
}


def register() -> None:
    """Make the sharding of `cute_attn.flash_attn_func` and `cute_attn.flash_attn_varlen_func` known
    to `torch.distributed.tensor`, forward and backward.

    q, k and v may be sharded by heads, if the number of devices divides the heads of k. They may be
    sharded by sequences, if the sequences are not packed. A mesh of two dimensions may shard by
    heads and sequences. Then nothing is communicated but the sum of the sink's gradient, and o has
    the placement of q. Other placements are redistributed first. All tensors of a call have to be
    DTensors: `learnable_sink` and lengths too. `out` has no rule.

    `register` calls `torch.distributed.tensor.experimental.register_sharding`, which PyTorch may
    change.
    """
    from torch.distributed.tensor.experimental import register_sharding

    register_operators()
    for name, results in _RESULTS.items():
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        register_sharding(operator)(_rule(operator, results))


def _rule(operator: Any, results: tuple[str, ...]) -> Callable[..., list[_Sharding]]:
    names = [argument.name for argument in operator._schema.arguments]

    def shardings(*args: Any, **kwargs: Any) -> list[_Sharding]:
        """The ways to shard over one dimension of the mesh. Tensors are given as their specs."""
        given = dict(zip(names, args, strict=False)) | kwargs
        q, k = given["q"], given["k"]
        packed = len(q.shape) == 3
        ways: list[Callable[[str], Any]] = [_replicated]
        if k.shape[-2] % k.mesh.size() == 0:
            ways.append(_packed_heads if packed else _heads)
        if not packed and len(k.shape) == 4 and given.get("page_table") is None:
            ways.append(_sequences)
        tensors = {name for name, x in given.items() if hasattr(x, "placements")}
        return [
            (
                [way(name) for name in results],
                [way(name) if name in tensors else None for name in given],
            )
            for way in ways
        ]

    return shardings


def _replicated(name: str) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _heads(name: str, packed: bool = False) -> Any:
    from torch.distributed.tensor import Shard

    if name in ("learnable_sink", "dsink"):
        return Shard(0)
    if name in _STATISTICS:
        return Shard(0 if packed else 1)
    return Shard(1 if packed else 2) if name in _ROWS else _replicated(name)


def _packed_heads(name: str) -> Any:
    return _heads(name, packed=True)


def _sequences(name: str) -> Any:
    from torch.distributed.tensor import Partial, Shard

    if name == "dsink":  # of all sequences
        return Partial()
    if name in (*_ROWS, *_STATISTICS, "seqused_q", "seqused_k"):
        return Shard(0)
    return _replicated(name)
