"""Plans of context parallelism, as users make them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .attention import attend
from .choose import MODES
from .delta import chunk_delta_rule
from .layout import LAYOUTS, Layout, Range
from .plan import Plan, compare

# A graph break: torch.compile cannot trace messages. The wrapper costs time in each call.
attend_in_graph = torch.compiler.disable(attend)

LayoutOf = str | Sequence[Sequence[Range]]


class ContextParallel(Plan):
    """Which tokens of all sequences each rank of a group holds; `context_parallel` makes it.

    `Plan` describes the attributes.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Attention over ranks. The public functions call this method if they get `cp`.

        Args:
            q: this rank's queries, as for `flash_attn_func` or `flash_attn_varlen_func`.
            k: this rank's keys, as for the same function.
            v: this rank's values, as for the same function.
            options: the arguments of `attention.attend`.

        Returns:
            The pair (o, lse) of this rank's queries.
        """
        run = attend_in_graph if torch.compiler.is_dynamo_compiling() else attend
        return run(self, q, k, v, **options)

    # A graph break: torch.compile cannot trace messages.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def chunk_delta_rule(self, *arguments: Any) -> Any:
        """A delta rule over ranks. `chunk_kda` and `chunk_gated_delta_rule` call this method if
        they get `cp`. `delta.chunk_delta_rule` describes the arguments and the results."""
        return chunk_delta_rule(self, *arguments)


def context_parallel(
    group: Any = None,
    *,
    seqlen: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    layout: LayoutOf = "zigzag",
    mode: str | None = None,
) -> ContextParallel:
    """Make a plan of context parallelism: which tokens each rank holds, for given lengths.

    Every rank of the group calls this with the same arguments. `flash_attn_func`,
    `flash_attn_varlen_func`, `chunk_kda` and `chunk_gated_delta_rule` take the plan as `cp`.

    Args:
        group: a process group of torch.distributed, or a DeviceMesh; None is the default group. In
            a mesh with two dimensions, the first dimension splits tokens. Ranks of the second
            dimension exchange tokens for heads.
        seqlen: the length of every sequence of `[batch, seqlen, ...]` tensors.
        cu_seqlens: for packed sequences, the first token of each sequence, then the number of all
            tokens. Either cu_seqlens or seqlen is given. A tensor on a GPU is copied to the host
            once.
        layout: "contiguous": each rank holds one span of all tokens. "zigzag": each sequence is cut
            into 2 * world chunks, and rank r holds the chunks r and 2 * world - 1 - r, which
            balances causal attention. "documents": most sequences are whole on a rank, and all
            ranks have equal numbers of tokens. Or for each rank a list of ranges `(start, end)` of
            tokens.
        mode: how ranks exchange data. "gather": each rank receives the keys that its queries see.
            "ring": keys pass around all ranks, and each rank combines its results. "heads": each
            rank gets all tokens of some heads. None: each call's shapes choose the mode. In mode
            "ring", a call with a window gathers keys, and so does a backward without a kernel that
            computes dq, dk and dv at once.

    Returns:
        The plan.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value, or differs between ranks (the message names the
            rank), or torch.distributed has no process group.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode is {mode!r}, must be one of {MODES} or None")
    by_tokens, by_heads, all_ranks = _groups_of(group)
    lengths, packed = _lengths(seqlen, cu_seqlens)
    if not isinstance(layout, str):
        layout = _ranges(layout)
    said = {"layout": layout, "mode": mode, "lengths": lengths, "packed": packed}
    compare(all_ranks, said, "plans with")
    if mode == "heads" and by_heads is not None:
        raise ValueError("mode is 'heads' with a mesh, whose second dimension exchanges heads")
    rows = Layout.of(layout, lengths, dist.get_world_size(by_tokens))
    return ContextParallel(by_tokens, by_heads, all_ranks, rows, packed=packed, mode=mode)


def _groups_of(group: Any) -> tuple[Any, Any, Any]:
    """The group that splits tokens, the group that exchanges heads or None, and the group of all
    ranks of the plan."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no process group: call init_process_group first")
    if group is None:
        return dist.group.WORLD, None, dist.group.WORLD
    if not hasattr(group, "mesh_dim_names"):
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is {type(group).__name__}, must be a ProcessGroup, a DeviceMesh or None"
            )
        return group, None, group
    if group.ndim == 1:
        return group.get_group(), None, group.get_group()
    if group.ndim != 2:
        raise ValueError(f"group is a mesh of {group.ndim} dimensions, must have 1 or 2")
    if group.mesh.numel() == dist.get_world_size():
        all_ranks = dist.group.WORLD
    else:
        all_ranks = group._flatten().get_group()
    return group.get_group(0), group.get_group(1), all_ranks


def _lengths(
    seqlen: int | None, cu_seqlens: Sequence[int] | Tensor | None
) -> tuple[tuple[int, ...], bool]:
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueError("seqlen and cu_seqlens are both given or both None, give one of them")
    if seqlen is not None:
        if isinstance(seqlen, bool) or not isinstance(seqlen, int):
            raise TypeError(f"seqlen must be an int, got {type(seqlen).__name__}")
        if seqlen < 0:
            raise ValueError(f"seqlen is {seqlen}, must be at least 0")
        return (seqlen,), False
    given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    try:
        bounds = list(map(index, given))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"cu_seqlens is {given!r}, must hold ints in one dimension") from None
    lengths = tuple(b - a for a, b in pairwise(bounds))
    if not bounds or bounds[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens is {bounds}, must begin with 0 and not decrease")
    return lengths, True


def _ranges(layout: Any) -> tuple[tuple[Range, ...], ...]:
    """Each rank's ranges, as tuples of ints."""
    try:
        return tuple(tuple((index(a), index(b)) for a, b in ranges) for ranges in layout)
    except (TypeError, ValueError):
        raise TypeError(
            f"layout is {layout!r}, must be one of {LAYOUTS}, or for each rank a list of pairs "
            "(start, end) of ints"
        ) from None
