"""Softmax attention: the operator of the backward, which computes the gradients of a forward.

Up to six kernels:

    preprocess    stats: lse and delta of the query rows; parts of dsink; a copy of do
    dq            dq
    dkdv          dk and dv, or with splits float32 parts of them
    sum_partials  dk and dv from the splits' parts; dsink from the tiles' parts. With
                  `float32_dkdv`, dk and dv are float32; a single split needs no sum
    zero_unused   rows of no sequence, which the others do not write

None of these kernels adds in an order that depends on timing, so every run gives the same bits. A
call that needs all of dq, dk and dv may get two other kernels (`heuristics.has_fused_dq`) in place
of dq and dkdv:

    dkdv          dk and dv, as above; and float32 sums of dq, in any order, or if the call is
                  `deterministic` in a fixed order
    postprocess   dq from its sums

On Hopper, at head_dim 192 and 256, if dS fits (`heuristics.parts_with_ds`), two kernels run for
one part of the heads after the other. If dS of one query head does not fit, these kernels run for
one part of the keys after the other:

    dkdv          dk and dv, as above; and dS
    ds_dq         dq from dS

Workspaces, allocated through torch, in bytes, with R the padded rows (`statistics.padded_rows`: at
most seqlen_q + 127 for each sequence, or total_q + 128 batch + 127), S the number of splits
(`heuristics.num_splits`, or more for ds_dq by `heuristics.parts_with_ds`) and T <= R / 128:

    stats            8 heads R
    copy of do       2 (elements of q)       only with `may_have_rows_without_keys`
    parts of dk, dv  8 S (elements of k)     only with S > 1
    parts of dsink   4 heads T               only with a sink that requires a gradient
    sums of dq       4 heads R head_dim      only with postprocess
    numbers of zeros 4 + 4 heads R / 128     only with postprocess; if `deterministic`, numbers of
                                             additions: 16 heads R / 128
    dS               2 R (keys + 127) for each query head of a part; only with ds_dq
    sums of dq       4 R head_dim            only with ds_dq and parts of the keys
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import launch
from ...kernels.attention import configs, ds_tiles, table
from ...kernels.attention.heuristics import (
    Parts,
    fixed_order,
    has_fused_dq,
    num_splits,
    parts_with_ds,
)
from ...kernels.attention.statistics import (
    STATS_ROWS,
    num_query_zeros,
    num_tiles,
    padded_rows,
)
from ...settings import settings
from ..checks import DTYPE_NAMES, check_dtypes_are, check_flags, check_shapes
from ..counters import counter_for
from ..operator import Operator
from .arguments import (
    MAX_SEQLEN,
    Arguments,
    bounds,
    check,
    check_alignment,
    check_tiles,
    dims_of,
    no_sequences,
    readable_or_copied,
    with_strides_for_tma,
)
from .plan import backward_requests

_contiguous = torch.contiguous_format
_Function = Callable[..., None]
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class BackwardArguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor
    dlse: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    learnable_sink: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    scheduler: str | None = None
    need_dq: bool = True
    need_dkdv: bool = True
    need_dsink: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    float32_dkdv: bool = False
    float32_dq: bool = False

    @property
    def forward(self) -> Arguments:
        """The arguments of the forward."""
        shared = {name: getattr(self, name) for name in Arguments._fields if hasattr(self, name)}
        return Arguments(**shared)

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def parts(self) -> Parts:
        """How the query heads of each K/V head are split among clusters, and how many parts' dS is
        kept at once."""
        if self.batch_invariant:  # splits round otherwise, and so does a kept dS
            return Parts(1)
        varlen_q, varlen_k = self.cu_seqlens_q is not None, self.cu_seqlens_k is not None
        arch, fused = launch.arch_for(self.q.device), self.is_fused
        row = configs.backward("backward_fused" if fused else "backward_dkdv", arch, *dims_of(self))
        assert row.costs is not None
        batch, (left, right) = self.batch, bounds(self)
        partial_bytes = 4 * (self.k.numel() + self.v.numel())  # per split of dk and dv
        splits = num_splits(
            seqlen_q=-(-self.q.shape[-3] // max(batch, 1)) if varlen_q else self.q.shape[-3],
            seqlen_k=-(-self.k.shape[-3] // max(batch, 1)) if varlen_k else self.k.shape[-3],
            batch=batch,
            heads=self.q.shape[-2],
            heads_k=self.k.shape[-2],
            window_left=left,
            window_right=right,
            clusters=launch.num_sms(self.q.device) // row.cluster,
            tile=row.tile[:2],
            costs=row.costs,
            most_splits=settings().workspace_bytes // max(partial_bytes, 1) if fused else None,
            order=order_of_additions(self),
        )
        return self.parts_with_ds(splits)

    @property
    def may_have_rows_without_keys(self) -> bool:
        """Whether, as far as the host knows, queries may see no key and share a tile with queries
        that see keys. A causal sequence of more queries than keys begins with such queries. With a
        negative bound every sequence begins or ends with such queries."""
        _, right = bounds(self)
        if not self.need_dkdv or (right is None and not self.has_negative_left):
            return False
        if self.has_negative_left or (right is not None and right < 0):
            return True
        assert right is not None
        packed = self.cu_seqlens_q is not None or self.cu_seqlens_k is not None
        if not packed and self.seqused_k is None:
            return self.q.shape[1] > self.k.shape[1] + right
        fits = packed or self.q.shape[1] <= self.k.shape[1]
        return not (
            fits
            and _same_memory(self.cu_seqlens_q, self.cu_seqlens_k)
            and _same_memory(self.seqused_q, self.seqused_k)
        )

    @property
    def has_negative_left(self) -> bool:
        """Whether queries see only keys to the right of their position."""
        left, _ = bounds(self)
        return left is not None and left < 0

    @property
    def is_fused(self) -> bool:
        """Whether one kernel computes dK, dV and sums of dQ."""
        return has_fused_dq(
            launch.arch_for(self.q.device),
            *dims_of(self),
            softcap=bool(self.softcap),
            dq=self.need_dq,
            dkdv=self.need_dkdv,
        )

    @property
    def has_short_sequences(self) -> bool:
        """Whether one kernel computes all gradients, and sequences have so few queries on average
        that a fixed order of additions is faster."""
        if not self.is_fused:
            return False
        arch = launch.arch_for(self.q.device)
        most = configs.backward("backward_fused", arch, *dims_of(self)).ordered_queries
        rows = self.q.shape[-3] * (self.batch if self.cu_seqlens_q is None else 1)
        return rows <= most * self.batch

    def parts_with_ds(self, splits: int) -> Parts:
        """How the dK/dV kernel keeps dS, with at least `splits` parts of each group of heads."""
        arch, dims = launch.arch_for(self.q.device), dims_of(self)
        if not (self.need_dq and self.need_dkdv):
            return Parts(splits)
        cluster = table.find("backward_dkdv", arch, *dims).cluster
        return parts_with_ds(
            arch,
            *dims,
            rows=padded_rows(self.q.shape[-3], self.batch, self.cu_seqlens_q is not None),
            keys=self.k.shape[-3],
            heads=self.q.shape[-2],
            heads_k=self.k.shape[-2],
            splits=splits,
            limit=settings().workspace_bytes,
            packed=self.cu_seqlens_k is not None,
            batch=self.batch,
            clusters=launch.num_sms(self.q.device) // cluster,
        )


class _Ready(NamedTuple):
    """Loaded kernels (None for kernels that are not needed), and values that all calls with one key
    share."""

    preprocess: _Function
    dq: _Function | None
    dkdv: _Function | None
    sum_dkdv: _Function | None
    sum_dsink: _Function | None
    zero_dq: _Function | None
    zero_dkdv: _Function | None
    default_scale: float
    softcap: float
    left: int
    right: int
    splits: int
    dq_clusters: int
    dkdv_clusters: int
    dq_counts: bool  # the kernel takes a counter
    dkdv_counts: bool
    ds_dq_counts: bool
    postprocess: _Function | None  # if dkdv adds up dq too
    ds_dq: _Function | None  # if dkdv keeps dS
    dkdv_of_heads: bool  # the kernel takes a part of the K/V heads
    rows_without_keys: bool  # preprocess copies do


class Backward(Operator[BackwardArguments]):
    name = "flash_attn_backward"
    arguments = BackwardArguments
    results = (
        ("dq", "need_dq"),
        ("dk", "need_dkdv"),
        ("dv", "need_dkdv"),
        ("dsink", "need_dsink"),
    )

    def check(self, a: BackwardArguments, given: dict[str, Tensor]) -> None:
        check(a.forward, given)
        check_tiles(a.forward, STATS_ROWS)
        check_flags(need_dq=a.need_dq, need_dkdv=a.need_dkdv, need_dsink=a.need_dsink)
        check_flags(float32_dkdv=a.float32_dkdv, float32_dq=a.float32_dq)
        if a.float32_dq and not a.is_fused:
            raise NotImplementedError(
                "float32_dq is True, it needs a kernel that computes dq, dk and dv: head_dim 64 or "
                "128 on Hopper, without softcap"
            )
        if not (a.need_dq or a.need_dkdv or a.need_dsink):
            raise ValueError("need_dq, need_dkdv and need_dsink are False, one must be True")
        if a.need_dsink and a.learnable_sink is None:
            raise ValueError("need_dsink is True, it needs learnable_sink")
        check_dtypes_are(given, ("o", "do"), a.q.dtype)
        check_dtypes_are(given, ("lse", "dlse"), torch.float32)
        *batch, seqlen_q, heads, _ = a.q.shape
        of_rows = (*batch, heads, seqlen_q)
        of_o = (*a.q.shape[:-1], a.v.shape[-1])
        check_shapes(given, {"o": of_o, "do": of_o, "lse": of_rows, "dlse": of_rows})

    def check_memory(self, a: BackwardArguments) -> None:
        for direction in ("backward_preprocess", "backward_dq", "backward_dkdv"):
            table.find(direction, launch.arch_for(a.q.device), *dims_of(a))
        check_alignment(q=a.q, k=a.k, v=a.v)

    def prepare(self, a: BackwardArguments) -> _Ready:
        left, right = bounds(a)
        arch, device = launch.arch_for(a.q.device), a.q.device
        head_dim, head_dim_v = dims_of(a)
        parts = a.parts
        requests = backward_requests(
            arch,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=DTYPE_NAMES[a.q.dtype],
            window_left=left is not None,
            window_right=right is not None,
            sink=DTYPE_NAMES[a.learnable_sink.dtype] if a.need_dsink else None,  # type: ignore[union-attr]
            softcap=bool(a.softcap),
            varlen_q=a.cu_seqlens_q is not None,
            varlen_k=a.cu_seqlens_k is not None,
            seqused_q=a.seqused_q is not None,
            seqused_k=a.seqused_k is not None,
            scheduler=a.scheduler,
            dlse=a.dlse is not None,
            dq=bool(a.need_dq),
            dkdv=bool(a.need_dkdv),
            split=parts.splits > 1,
            ds=parts.heads > 0,
            ds_of_keys=parts.key_blocks > 0,
            rows_without_keys=a.may_have_rows_without_keys,
            negative_left=a.has_negative_left,
            order=order_of_additions(a),
            float32_dkdv=bool(a.float32_dkdv),
            float32_dq=bool(a.float32_dq),
        )

        def load(request: launch.Request | None) -> _Function | None:
            return None if request is None else launch.get_for(device, *request)

        def counts(request: launch.Request | None) -> bool:
            return getattr(request and request[1], "scheduler", None) == "counter"

        def clusters(direction: str) -> int:
            return launch.num_clusters(
                device, table.find(direction, arch, head_dim, head_dim_v).cluster
            )

        return _Ready(
            preprocess=launch.get_for(device, *requests.preprocess),
            dq=load(requests.dq),
            dkdv=load(requests.dkdv),
            sum_dkdv=load(requests.sum_dkdv),
            sum_dsink=load(requests.sum_dsink),
            zero_dq=load(requests.zero_dq),
            zero_dkdv=load(requests.zero_dkdv),
            default_scale=head_dim**-0.5,
            softcap=float(a.softcap or 1.0),
            left=left or 0,
            right=right or 0,
            splits=parts.splits,
            dq_clusters=clusters("backward_dq"),
            dkdv_clusters=clusters("backward_dkdv"),
            dq_counts=counts(requests.dq),
            dkdv_counts=counts(requests.dkdv),
            ds_dq_counts=counts(requests.ds_dq),
            postprocess=load(requests.postprocess),
            ds_dq=load(requests.ds_dq),
            dkdv_of_heads=table.has("backward_ds_dq", arch, head_dim, head_dim_v),
            rows_without_keys=requests.preprocess[1].rows_without_keys,
        )

    def key(self, a: BackwardArguments) -> tuple[Any, ...]:
        lengths = (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k)
        parts = a.parts
        return (
            len(a.q.shape),
            (*a.q.shape[-2:], a.v.shape[-1]),
            a.k.shape[-2],
            a.q.shape[0] if a.cu_seqlens_q is None else None,
            a.k.shape[0] if a.cu_seqlens_k is None else None,
            *(None if x is None else x.shape for x in lengths),
            a.q.dtype,
            a.q.get_device(),
            None if a.learnable_sink is None else a.learnable_sink.dtype,
            a.dlse is None,
            a.softmax_scale,
            a.causal,
            a.window_left,
            a.window_right,
            a.softcap,
            a.scheduler,
            a.need_dq,
            a.need_dkdv,
            a.need_dsink,
            order_of_additions(a),
            bool(a.batch_invariant),
            a.float32_dkdv,
            a.float32_dq,
            parts.splits,
            parts.heads > 0,
            parts.key_blocks > 0,
            a.may_have_rows_without_keys,
            # Keys of empty tensors are never in the table.
            not (a.q.numel() and a.k.numel()),
        )

    def into(self, a: BackwardArguments, dq: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(dk, dv, dsink) of a call that needs all gradients; dq is written to the given memory, of
        q's shape."""
        key = self.key(a)
        ready = self.ready.get(key)
        if ready is None or not dq.is_contiguous():
            found, dk, dv, dsink = self.forward(*a)
        else:
            try:
                _, dk, dv, dsink = self.launch(ready, a, dq)
                found = None
            except Exception as error:  # a tensor that the kernels refuse is copied
                found, dk, dv, dsink = self.failed(error, key, ready, *a)
        if found is not None:
            dq.copy_(found)
        assert dk is not None and dv is not None
        return dk, dv, dsink

    def launch(self, ready: _Ready, a: BackwardArguments, dq: Tensor | None = None) -> _Gradients:
        q, k, v = a.q, a.k, a.v
        heads, varlen_q = q.shape[-2], a.cu_seqlens_q is not None
        sizes = q.shape[-3], a.batch, varlen_q
        stats = q.new_empty((2, heads, padded_rows(*sizes)), dtype=torch.float32)
        sink = parts = dsink = None
        if ready.sum_dsink is not None:
            sink = a.learnable_sink
            parts = q.new_empty((num_tiles(*sizes), heads), dtype=torch.float32)
        dq_sums = zeroed = None
        if ready.postprocess is not None:
            dq_sums = q.new_empty((*stats.shape[1:], q.shape[-1]), dtype=torch.float32)
            count = num_query_zeros(heads, stats.shape[-1], ordered=adds_in_order(a))
            zeroed = q.new_empty(count, dtype=torch.int32)
        seen_do = None
        keys: tuple[Tensor | None, Tensor | None] = (None, None)
        window_left, window_right = None, ready.right
        if ready.rows_without_keys:
            seen_do = torch.empty_like(a.o, memory_format=_contiguous)
            keys = a.cu_seqlens_k, a.seqused_k
            if a.has_negative_left:
                window_left = ready.left
                if bounds(a)[1] is None:
                    window_right = MAX_SEQLEN
        ready.preprocess(
            a.o, a.do, a.lse, a.dlse, sink, a.cu_seqlens_q, a.seqused_q, stats, zeroed, parts,
            seen_do, *keys, k.shape[-3], window_right, window_left,
        )  # fmt: skip
        do = a.do if seen_do is None else seen_do
        if sink is not None and parts is not None and ready.sum_dsink is not None:
            dsink = torch.empty_like(sink)
            ready.sum_dsink(parts[:, None], dsink[None])

        scalars = (
            ready.default_scale if a.softmax_scale is None else a.softmax_scale,
            ready.softcap,
            ready.left,
            ready.right,
        )
        lengths = (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k)
        counts = ready.dq_counts or ready.dkdv_counts or ready.ds_dq_counts
        counter = (counter_for(q),) if counts else ()
        dk = dv = None
        if a.need_dq:
            if dq is None:
                dq = empty_dq(a)
            if ready.zero_dq is not None:
                ready.zero_dq(_words(dq), a.cu_seqlens_q, a.seqused_q)
        if ready.dq is not None:
            ready.dq(
                q, k, v, do, stats, dq, *lengths, *scalars, ready.dq_clusters,
                *(counter if ready.dq_counts else ()),
            )  # fmt: skip
        if ready.dkdv is not None:
            written: tuple[Tensor, ...]
            if a.float32_dkdv or ready.sum_dkdv is not None:
                written = tuple(
                    x.new_empty((ready.splits, *x.shape), dtype=torch.float32) for x in (k, v)
                )
            if ready.sum_dkdv is None and a.float32_dkdv:
                dk, dv = (x[0] for x in written)
            else:
                dk, dv = self.outputs_of_keys(a)
                if ready.sum_dkdv is None:
                    written = dk, dv
            if ready.zero_dkdv is not None:
                for x in written:
                    ready.zero_dkdv(_words(x), a.cu_seqlens_k, a.seqused_k)
            if ready.dkdv_of_heads:
                self.launch_by_heads(ready, a._replace(do=do), stats, scalars, written, dq, counter)
            else:
                ready.dkdv(
                    q, k, v, do, stats, *written, *lengths, *scalars, ready.splits,
                    ready.dkdv_clusters,
                    *(counter if ready.dkdv_counts else ()),
                    *(() if ready.postprocess is None else (dq_sums, zeroed)),
                )  # fmt: skip
            if ready.postprocess is not None:
                ready.postprocess(
                    dq_sums, stats, dq, a.cu_seqlens_q, a.seqused_q, scalars[0],
                    zeroed if adds_in_order(a) else None,
                )  # fmt: skip
            if ready.sum_dkdv is not None:
                for x, out in zip(written, (dk, dv), strict=True):
                    ready.sum_dkdv(x.flatten(1, -2), out.flatten(0, -2))
        return dq, dk, dv, dsink

    def launch_by_heads(
        self,
        ready: _Ready,
        a: BackwardArguments,
        stats: Tensor,
        scalars: tuple[float, float, int, int],
        written: tuple[Tensor, ...],
        dq: Tensor | None,
        counter: tuple[Tensor, ...],
    ) -> None:
        """Launch dkdv, and with dS also ds_dq, for one part of the heads and keys after the
        other."""
        lengths = (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k)
        split_heads, rows = a.k.shape[-2] * ready.splits, stats.shape[-1]
        blocks = -(-a.k.shape[-3] // ds_tiles.CLUSTER_KEYS)
        group = a.q.shape[-2] // split_heads
        step, step_blocks, ds, sums = split_heads, blocks, None, None
        if ready.ds_dq is not None:
            _, step, of_keys = a.parts_with_ds(ready.splits)
            step_blocks = of_keys or blocks
            keys = step_blocks * ds_tiles.CLUSTER_KEYS
            ds = a.q.new_empty(ds_tiles.shape(step * group, rows, keys))
            if of_keys:
                sums = a.q.new_empty((step * group, rows, a.q.shape[-1]), dtype=torch.float32)
        scale, _, left, right = scalars
        for first, block in itertools.product(
            range(0, split_heads, step), range(0, blocks, step_blocks)
        ):
            count = min(step, split_heads - first)
            assert ready.dkdv is not None
            ready.dkdv(
                a.q, a.k, a.v, a.do, stats, ds, *written, *lengths, *scalars, ready.splits, first,
                count, block, step_blocks, ready.dkdv_clusters,
                *(counter if ready.dkdv_counts else (None,)),
            )  # fmt: skip
            if ready.ds_dq is not None:
                first_tile = block * (ds_tiles.CLUSTER_KEYS // ds_tiles.TILE)
                ready.ds_dq(
                    a.k, ds, stats, sums, dq, *lengths, scale, left, right, first * group,
                    count * group, first_tile, ready.dkdv_clusters,
                    *(counter if ready.ds_dq_counts else (None,)),
                )  # fmt: skip

    def outputs(self, a: BackwardArguments) -> _Gradients:
        dq = empty_dq(a) if a.need_dq else None
        dk, dv = self.outputs_of_keys(a) if a.need_dkdv else (None, None)
        dsink = None
        if a.need_dsink and a.learnable_sink is not None:
            dsink = torch.empty_like(a.learnable_sink)
        return dq, dk, dv, dsink

    def outputs_of_keys(self, a: BackwardArguments) -> tuple[Tensor, Tensor]:
        """Memory for dk and dv."""
        dtype = torch.float32 if a.float32_dkdv else None
        dk, dv = (torch.empty_like(x, dtype=dtype, memory_format=_contiguous) for x in (a.k, a.v))
        return dk, dv

    def readable(self, a: BackwardArguments) -> BackwardArguments:
        q, k, v = map(with_strides_for_tma, (a.q, a.k, a.v))
        o, do = map(readable_or_copied, (a.o, a.do))
        return a._replace(q=q, k=k, v=v, o=o, do=do)

    def nothing(self, a: BackwardArguments) -> _Gradients | None:
        """The gradients if there are no queries, no keys or no sequences."""
        unused = no_sequences(a.cu_seqlens_q)
        if a.q.numel() and a.k.numel() and not unused:
            return None
        results = self.outputs(a)
        for x in results:
            if x is not None:
                x.zero_()
        dsink = results[-1]
        if dsink is not None and a.dlse is not None and not unused:
            # Without a key, the log-sum-exp of a row is the sink.
            dlse = a.dlse
            if a.cu_seqlens_q is None and a.seqused_q is not None:
                used = a.seqused_q.view(torch.int32)[:, None, None]
                rows = torch.arange(dlse.shape[-1], dtype=torch.int32, device=dlse.device)
                dlse = dlse.masked_fill(rows >= used, 0.0)
            if a.cu_seqlens_q is not None:
                of_sequences = _rows_of_sequences(dlse.shape[-1], a.cu_seqlens_q, a.seqused_q)
                dlse = dlse.masked_fill(~of_sequences, 0.0)
            dsink.copy_(dlse.sum(dim=(0, -1) if dlse.dim() == 3 else (-1,)))
        return results

    def backward(
        self,
        saved: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        needed: frozenset[str],
    ) -> Mapping[str, Tensor]:
        raise NotImplementedError(
            "flash_attn_func, as flash_attn_varlen_func, has no second derivative: take the first "
            "one without create_graph=True, or use another implementation"
        )


def empty_dq(a: BackwardArguments) -> Tensor:
    """Memory for dq."""
    dtype = torch.float32 if a.float32_dq else None
    return torch.empty_like(a.q, dtype=dtype, memory_format=_contiguous)


def is_deterministic(a: BackwardArguments) -> bool:
    """Whether the call or torch asks for the same bits in every run."""
    asked = bool(a.deterministic or a.batch_invariant)
    return asked or torch.are_deterministic_algorithms_enabled()


def adds_in_order(a: BackwardArguments) -> bool:
    """Whether the sums of dq are added up in a fixed order: in deterministic calls, and in calls of
    short sequences, which are faster so."""
    return is_deterministic(a) or a.has_short_sequences


def order_of_additions(a: BackwardArguments) -> str:
    """The order in which one kernel of all gradients adds to the sums of dq: "any", or a fixed
    order. "any" where there is no such kernel."""
    if not (a.is_fused and adds_in_order(a)):
        return "any"
    left, right = bounds(a)
    return fixed_order(
        dims_of(a)[0],
        window_left=left is not None,
        window_right=right is not None,
        batch_invariant=bool(a.batch_invariant),
        packed=a.cu_seqlens_q is not None or a.cu_seqlens_k is not None,
        seqlen_q=a.q.shape[-3],
        group=a.q.shape[-2] // a.k.shape[-2],
    )


def _same_memory(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether x and y hold equal lengths because they share memory, or because both are None."""
    if x is None or y is None:
        return x is y
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape)


def _words(x: Tensor) -> Tensor:
    """x, `[..., tokens, heads, head_dim]`, as 32-bit words, `[n, tokens, words]`."""
    return x[None].view(torch.int32).flatten(-2).flatten(0, -3)


def _rows_of_sequences(rows: int, offsets: Tensor, used: Tensor | None) -> Tensor:
    """Which packed rows belong to a sequence and are used: booleans `[rows]`."""
    offsets = offsets.view(torch.int32)
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:], row, right=True)
    inside = (row >= offsets[0]) & (sequence < len(offsets) - 1)
    if used is not None:
        sequence = sequence.clamp(max=len(used) - 1)
        inside &= row - offsets[sequence] < used.view(torch.int32)[sequence]
    return inside


BACKWARD = Backward()
