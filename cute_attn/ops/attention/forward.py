"""Softmax attention: the forward operator, and its gradient.

A warm call looks up the loaded kernel, allocates the output and calls the kernel. The look-up's key
holds everything that the choice of a kernel depends on, and every tensor's batch size. The compiled
host code checks the rest before it launches: lengths, strides, alignment, other tensors' dtypes
and devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ... import launch
from ...kernels.attention import configs, table
from ...kernels.attention.configs import PART_COLUMNS
from ...kernels.attention.heuristics import (
    FEW_ROWS,
    LONG_SEQLEN_Q,
    MOST_PIECE_ROWS,
    PIECE_ROWS,
    SHORT_SEQLEN_Q,
    has_few_rows,
    invariant_splits,
    num_splits_of_forward,
)
from ...kernels.attention.spec import LARGEST_SCALE, SHARING_CTAS
from ...settings import on_reload
from ..checks import DTYPE_NAMES
from ..counters import counter_for
from ..operator import MOST_READY, Operator, may_remember
from .arguments import (
    MAX_SPLITS,
    SMALLEST_SCALE,
    Arguments,
    bounds,
    check,
    check_alignment,
    check_fp8,
    check_tree_arch,
    descales_of,
    dims_of,
    has_tree_lengths,
    is_fp8,
    no_sequences,
    with_strides_for_tma,
)
from .backward import BACKWARD, BackwardArguments
from .plan import plan_attention

_empty_like = torch.empty_like
_empty_strided = torch.empty_strided  # torch's fastest allocating function
_contiguous = torch.contiguous_format
_NUMBERS = (float, int)

# (function, default softmax_scale, softcap, left and right window, clusters that fit the GPU,
# whether the function takes a counter, the kernel that combines splits, head_dim_v or 0 for
# head_dim, the layout of the pieces' results or None)
_Ready = tuple[
    Callable[..., None], float, float, int, int, int, bool, Callable[..., None] | None, int,
    "PartsLayout | None",
]  # fmt: skip


# Plan of a call (see `call`) -> the entry of `ready`, with the call's scale, and the layouts of the
# splits' results.
PLANS: dict[tuple[Any, ...], tuple[Any, ...]] = {}
on_reload(PLANS.clear)

_Called = TypeVar("_Called", bound=tuple[Any, ...])


class Attention(Operator[_Called]):
    """Shared code of two operators: the operator that allocates o, and the operator that writes to
    a given `out`."""

    def routed(self, *arguments: Any) -> Any:
        # A jagged tensor has a `__torch_function__`, which runs before all checks.
        _refuse_nested(self.arguments(*arguments))
        return super().routed(*arguments)

    def _check(self, a: Any) -> None:
        _refuse_nested(a)
        super()._check(a)

    def check_memory(self, a: Any) -> None:
        arch = launch.arch_for(a.q.device)
        table.find("forward", arch, *dims_of(a))
        if is_fp8(a.k):
            check_fp8(arch, *dims_of(a), DTYPE_NAMES[a.k.dtype])
        if a.tree_mask is not None:
            check_tree_arch(arch)
        check_alignment(q=a.q, k=a.k, v=a.v)

    def prepare(self, a: Any) -> _Ready:
        left, right = bounds(a)
        head_dim, head_dim_v = dims_of(a)
        ((kernel, spec), *combine), cluster, clusters = requests_of(
            a,
            num_splits=0 if takes_pieces(a) else splits_of(a),
            pieces=True,
            batch_invariant=bool(a.batch_invariant),
        )
        return (
            launch.get_for(a.q.device, kernel, spec),
            head_dim**-0.5,
            float(a.softcap or 1.0),
            left or 0,
            right or 0,
            clusters,
            spec.scheduler in ("counter", "pieces"),
            launch.get_for(a.q.device, *combine[0]) if combine else None,
            0 if head_dim_v == head_dim else head_dim_v,
            PartsLayout.of(clusters, cluster, spec.tile_m, head_dim_v)
            if spec.scheduler == "pieces"
            else None,
        )

    def key(self, a: Any) -> tuple[Any, ...]:
        q_shape, k_shape = a.q.shape, a.k.shape
        return (
            len(q_shape),
            q_shape[-1],
            a.v.shape[-1],
            q_shape[-2],
            k_shape[-2],
            q_shape[0] if a.cu_seqlens_q is None else None,
            k_shape[0] if a.cu_seqlens_k is None and a.page_table is None else None,
            None if a.page_table is None else (k_shape[1], a.page_table.shape),
            None if a.cu_seqlens_q is None else a.cu_seqlens_q.shape,
            None if a.cu_seqlens_k is None else a.cu_seqlens_k.shape,
            None if a.seqused_q is None else a.seqused_q.shape,
            None if a.seqused_k is None else a.seqused_k.shape,
            is_short(q_shape, a.cu_seqlens_q, a.max_seqlen_q),
            is_long(q_shape, a.cu_seqlens_q),
            is_few(q_shape, k_shape, a.cu_seqlens_q, a.max_seqlen_q),
            a.q.dtype,
            a.k.dtype,
            None if a.k_descale is None else a.k_descale.dim(),
            None if a.v_descale is None else a.v_descale.dim(),
            None if a.tree_mask is None else (a.tree_mask.shape == q_shape[:-2]),
            a.tree_mask is None or has_tree_lengths(a),
            a.q.get_device(),
            None if a.learnable_sink is None else a.learnable_sink.dtype,
            a.causal,
            a.window_left,
            a.window_right,
            a.softcap,
            a.scheduler,
            "pieces" if takes_pieces(a) else splits_of(a) > 1,
            a.num_splits == 0,
            a.batch_invariant,
            a.return_lse,
            # Keys of empty tensors, or of invalid numbers, are never in the table.
            0 in q_shape or 0 in k_shape,
            a.softmax_scale is None
            or (
                isinstance(a.softmax_scale, _NUMBERS)
                and SMALLEST_SCALE <= a.softmax_scale <= LARGEST_SCALE
                and a.softmax_scale is not True
            ),
            0 <= a.num_splits <= (1 if a.batch_invariant else MAX_SPLITS),
            a.batch_invariant
            and a.num_splits == 0
            and a.cu_seqlens_q is not None
            and a.max_seqlen_q is None,
            a.max_seqlen_q is None or a.max_seqlen_q >= 0,
            a.max_seqlen_k is None or a.max_seqlen_k >= 0,
        )

    def launch(self, ready: _Ready, a: Any) -> tuple[Tensor, Tensor | None]:
        function, default_scale, cap, left, right, clusters, counts, combine, _, shared = ready
        o, lse = self.results_of(a)
        scale = default_scale if a.softmax_scale is None else a.softmax_scale
        counter: tuple[Any, ...] = ()
        if counts:
            descales = descales_of(a.k_descale, a.v_descale, batch_of(a), a.k.shape[-2])
            counter = (*shared_memory(a.q, None, shared), *descales, a.tree_mask)
        lengths = (a.cu_seqlens_q, a.cu_seqlens_k, a.seqused_q, a.seqused_k, a.page_table)
        scalars = (scale, cap, left, right, clusters, *counter)
        if combine is None:
            function(a.q, a.k, a.v, o, lse, a.learnable_sink, *lengths, *scalars)
        else:
            # The sink counts once, in the combination.
            parts = Splits.allocate(a.q, split_layouts(o.shape, splits_of(a)))
            function(a.q, a.k, a.v, parts.o, parts.lse.mT, None, *lengths, *scalars)
            parts.combine(combine, o, lse, a.learnable_sink)
        return o, lse

    def remember(self, plan: tuple[Any, ...], a: Any) -> None:
        """Store the data that warm calls with this plan need, if the kernels of `a` are loaded."""
        ready = self.ready.get(self.key(a)) if may_remember(a.q) else None
        if ready is None:
            return
        if len(PLANS) >= MOST_READY:
            PLANS.clear()
        function, default_scale, *rest = ready
        scale = default_scale if a.softmax_scale is None else a.softmax_scale
        layouts = None
        if not takes_pieces(a) and (splits := splits_of(a)) > 1:
            layouts = split_layouts((*a.q.shape[:-1], a.v.shape[-1]), splits)
        PLANS[plan] = function, scale, *rest, layouts

    def readable(self, a: Any) -> Any:
        q, k, v = map(with_strides_for_tma, a[:3])
        return a._replace(q=q, k=k, v=v)

    def results_of(self, a: Any) -> tuple[Tensor, Tensor | None]:
        """o and lse, given or new."""
        raise NotImplementedError

    def nothing(self, a: Any) -> Any:
        """The results if there are no queries, no keys or no sequences."""
        pages = a.page_table is None or a.page_table.numel()
        if a.q.numel() and a.k.numel() and pages and not no_sequences(a.cu_seqlens_q):
            return None
        o, lse = self.results_of(a)
        if lse is not None:
            lse.fill_(-math.inf)
            if a.learnable_sink is not None:
                lse.copy_(a.learnable_sink[:, None])
        return o.zero_(), lse


def _refuse_nested(a: Any) -> None:
    for name in ("q", "k", "v", "out"):
        x = getattr(a, name, None)
        if isinstance(x, Tensor) and x.is_nested:
            raise TypeError(
                f"{name} is nested, must be one strided tensor: give flash_attn_varlen_func the "
                "tokens of all sequences, [total, heads, head_dim], and cu_seqlens_q and "
                "cu_seqlens_k (x.values() and x.offsets().int() of a jagged x)"
            )


class Forward(Attention[Arguments]):
    name = "flash_attn"
    public_name = "flash_attn_func, as flash_attn_varlen_func,"
    arguments = Arguments
    results = (("o", ""), ("lse", "return_lse"))
    saved = (
        "q", "k", "v", "o", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
        "learnable_sink", "softmax_scale", "causal", "window_left", "window_right", "softcap",
        "scheduler", "deterministic", "batch_invariant",
    )  # fmt: skip
    kept: ClassVar[Mapping[str, Any]] = {"return_lse": True}

    def check(self, a: Arguments, given: dict[str, Tensor]) -> None:
        check(a, given)

    def recorded(self, *arguments: Any) -> Any:
        """Refuses, before the forward, a call whose backward has no kernel."""
        q = arguments[0]
        # The forward refuses any other q.
        if isinstance(q, Tensor) and not q.is_nested and q.dim():
            launch.check_device("q", q.device)
            arch, v = launch.arch_for(q.device), arguments[2]
            if isinstance(v, Tensor) and not v.is_nested and v.dim():
                dims = q.shape[-1], v.shape[-1]
                if table.has("forward", arch, *dims):
                    table.find("backward_dq", arch, *dims)
        return super().recorded(*arguments)

    def check_gradient(self, a: Arguments) -> None:
        if a.k_descale is not None or a.v_descale is not None or is_fp8(a.k):
            raise NotImplementedError(
                "k and v of fp8 have no backward: call under torch.no_grad() or "
                "torch.inference_mode(), or detach"
            )
        if a.tree_mask is not None:
            raise NotImplementedError(
                "tree_mask has no backward: call under torch.no_grad() or torch.inference_mode(), "
                "or detach"
            )
        if a.page_table is not None:
            raise NotImplementedError("page_table has no backward: k and v are not in one piece")

    def outputs(self, a: Arguments) -> tuple[Tensor, Tensor | None]:
        head_dim, head_dim_v = dims_of(a)
        o = empty_o(a.q, 0 if head_dim_v == head_dim else head_dim_v)
        return o, empty_lse(a.q) if a.return_lse else None

    def results_of(self, a: Arguments) -> tuple[Tensor, Tensor | None]:
        return self.outputs(a)

    def backward(
        self,
        saved: Mapping[str, Any],
        gradients: Mapping[str, Tensor | None],
        needed: frozenset[str],
    ) -> Mapping[str, Tensor]:
        do = gradients["o"]
        if do is None:  # only the log-sum-exp has a gradient
            do = torch.zeros_like(saved["o"])
        call = BackwardArguments(
            **saved,
            do=do,
            dlse=gradients["lse"],
            need_dq="q" in needed,
            need_dkdv=not needed.isdisjoint(("k", "v")),
            need_dsink="learnable_sink" in needed,
        )
        dq, dk, dv, dsink = BACKWARD.routed(*call)
        found = {"q": dq, "k": dk, "v": dv, "learnable_sink": dsink}
        return {name: found[name] for name in needed}


_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
_Layouts = tuple[_Layout, _Layout]


class PartsLayout(NamedTuple):
    """The memory that CTAs of a launch with pieces share.

    Attributes:
        counters: the number of counters.
        layout: the contiguous layout of the pieces' results: rows of o and the log-sum-exp.
    """

    counters: int
    layout: _Layout

    @classmethod
    def of(cls, clusters: int, ctas: int, tile_m: int, head_dim_v: int) -> PartsLayout:
        """The memory for `clusters` clusters of `ctas` CTAs. Each CTA counts its own arrivals."""
        pieces = 2 * clusters
        layout = _contiguous_layout((pieces, tile_m, head_dim_v + PART_COLUMNS))
        return cls(2 + ctas * pieces, layout)


def _contiguous_layout(shape: tuple[int, ...]) -> _Layout:
    return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def shared_memory(
    q: Tensor, device: int | None, shared: PartsLayout | None
) -> tuple[Tensor, Tensor | None]:
    """The counters through which the CTAs of a launch share out or combine work, and memory for the
    results of pieces."""
    if shared is None:
        return counter_for(q, device), None
    counters, layout = shared
    parts = _empty_strided(*layout, dtype=torch.float32, device=q.device)
    return counter_for(q, device, counters), parts


@functools.lru_cache(maxsize=4096)
def split_layouts(o_shape: tuple[int, ...], splits: int) -> _Layouts:
    """The contiguous layouts of `Splits`."""
    return _contiguous_layout((splits, *o_shape)), _contiguous_layout((splits, *o_shape[:-1]))


class Splits(NamedTuple):
    """The splits' results: o `[splits, (batch,) seqlen, heads, head_dim_v]`, and lse `[splits,
    (batch,) seqlen, heads]`."""

    o: Tensor
    lse: Tensor

    @classmethod
    def allocate(cls, q: Tensor, layouts: _Layouts) -> Splits:
        """Memory on q's device, with the layouts of `split_layouts` for o."""
        o, lse = layouts
        return cls(
            _empty_strided(*o, dtype=torch.float32, device=q.device),
            _empty_strided(*lse, dtype=torch.float32, device=q.device),
        )

    def combine(
        self, kernel: Callable[..., None], o: Tensor, lse: Tensor | None, sink: Tensor | None
    ) -> None:
        """Combine the splits into o and lse of the call."""
        if lse is not None:
            lse = lse.mT
        if o.dim() == 4:
            kernel(self.o, self.lse, o, lse, sink)
        else:
            kernel(
                self.o[:, None],
                self.lse[:, None],
                o[None],
                None if lse is None else lse[None],
                sink,
            )


def requests_of(
    a: Any, *, num_splits: int, pieces: bool, batch_invariant: bool
) -> tuple[list[launch.Request], int, int]:
    """Return the kernels of a call, the CTAs of a cluster of the forward, and how many clusters run
    at once. The other parameters are as for `plan_attention`."""
    arch, (head_dim, head_dim_v) = launch.arch_for(a.q.device), dims_of(a)
    left, right = bounds(a)
    requests = plan_attention(
        arch,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=DTYPE_NAMES[a.q.dtype],
        heads=a.q.shape[-2],
        heads_k=a.k.shape[-2],
        window_left=left is not None,
        window_right=right is not None,
        sink=None if a.learnable_sink is None else DTYPE_NAMES[a.learnable_sink.dtype],
        softcap=bool(a.softcap),
        varlen_q=a.cu_seqlens_q is not None,
        varlen_k=a.cu_seqlens_k is not None,
        seqused_q=a.seqused_q is not None,
        seqused_k=a.seqused_k is not None,
        page_size=None if a.page_table is None else a.k.shape[1],
        scheduler=a.scheduler,
        num_splits=num_splits,
        pieces=pieces,
        return_lse=bool(a.return_lse),
        short=is_short(a.q.shape, a.cu_seqlens_q, a.max_seqlen_q),
        long=is_long(a.q.shape, a.cu_seqlens_q),
        few=is_few(a.q.shape, a.k.shape, a.cu_seqlens_q, a.max_seqlen_q),
        kv_dtype=DTYPE_NAMES[a.k.dtype],
        k_descale=a.k_descale is not None,
        v_descale=a.v_descale is not None,
        batch_invariant=batch_invariant,
        tree_mask=a.tree_mask is not None,
    )
    cluster = table.find("forward", arch, head_dim, head_dim_v).cluster
    if getattr(requests[0][1], "shared_keys", False):
        cluster = SHARING_CTAS
    return requests, cluster, launch.num_clusters(a.q.device, cluster)


def batch_of(a: Any) -> int:
    """The number of sequences of a call."""
    batch: int = a.q.shape[0] if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0] - 1
    return batch


def takes_pieces(a: Any) -> bool:
    """Whether a call with num_splits of 0 cuts the keys of long sequences into pieces.

    Other calls may cut keys into splits, and so does a single sequence. With more than PIECE_ROWS
    query rows of a K/V head, a tile of pieces does not hold all rows. Such calls take pieces only
    if the usual tile does not hold the rows either, and sequences are short.
    """
    of_call = a.q.shape, a.k.shape, a.cu_seqlens_q, a.max_seqlen_q
    if (
        a.num_splits
        or a.batch_invariant
        or batch_of(a) < 2
        or not is_few(*of_call, MOST_PIECE_ROWS)
    ):
        return False
    on = _on_gpu if a.q.device.type == "cuda" else _on_device
    tile_m = on(a.q.device, a.q.shape[-1], a.v.shape[-1])[2]
    if not tile_m or is_few(*of_call, PIECE_ROWS):
        return tile_m > 0
    return not is_few(*of_call, tile_m) and is_short(a.q.shape, a.cu_seqlens_q, a.max_seqlen_q)


def splits_of(a: Any) -> int:
    """num_splits of a call's arguments; for 0, the number that the shapes suggest."""
    if a.num_splits:
        return int(a.num_splits)
    q_shape, k_shape = a.q.shape, a.k.shape
    rows, heads, head_dim = q_shape[-3:]
    head_dim_v, device = a.v.shape[-1], a.q.device
    on = _on_gpu if device.type == "cuda" else _on_device
    arch, clusters, _ = on(device, head_dim, head_dim_v)
    seqlen_k = k_shape[-3]
    if a.page_table is not None:
        seqlen_k *= a.page_table.shape[1]
    if a.max_seqlen_k is not None:
        seqlen_k = min(seqlen_k, a.max_seqlen_k)
    if a.batch_invariant:
        return invariant_splits(
            seqlen_k=seqlen_k,
            window_left=bounds(a)[0],
            few=is_few(q_shape, k_shape, a.cu_seqlens_q, a.max_seqlen_q),
            sink=a.learnable_sink is not None,
            most=MAX_SPLITS,
        )
    if a.window_left is not None and a.window_left >= 0:
        most_queries = rows if a.max_seqlen_q is None else a.max_seqlen_q
        seqlen_k = min(seqlen_k, a.window_left + 1 + most_queries)
    batch = batch_of(a)
    return num_splits_of_forward(
        arch,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        rows=rows * batch if a.cu_seqlens_q is None else rows,
        batch=batch,
        heads=heads,
        heads_k=k_shape[-2],
        short=is_short(q_shape, a.cu_seqlens_q, a.max_seqlen_q),
        few=is_few(q_shape, k_shape, a.cu_seqlens_q, a.max_seqlen_q),
        seqlen_k=seqlen_k,
        clusters=clusters,
        fp8=is_fp8(a.k),
    )


def _on_device(device: torch.device, head_dim: int, head_dim_v: int) -> tuple[str, int, int]:
    """(the architecture, how many clusters of its forward run at once, tile_m). tile_m is the rows
    of the tile for any number of rows; 0 if the forward has no pieces."""
    arch = launch.arch_for(device)
    row = configs.forward(arch, head_dim, head_dim_v)
    return arch, launch.num_clusters(device, row.cluster), row.tile.m if row.pieces else 0


_on_gpu = functools.cache(_on_device)


def empty_o(q: Tensor, columns: int) -> Tensor:
    """The output of a call, without values; `columns` is head_dim_v, or 0 for q's head_dim."""
    if columns:
        return q.new_empty((*q.shape[:-1], columns))
    return _empty_like(q, memory_format=_contiguous)


def empty_lse(q: Tensor) -> Tensor:
    """The log-sum-exp of a call, without values."""
    *batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((*batch, heads, seqlen_q), dtype=torch.float32)


def is_short(q_shape: Sequence[int], cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> bool:
    """Whether sequences, as far as the host knows, are so short that heads should share tiles."""
    if cu_seqlens_q is None:
        return q_shape[1] <= SHORT_SEQLEN_Q
    if max_seqlen_q is not None:
        return max_seqlen_q <= SHORT_SEQLEN_Q
    return q_shape[0] <= SHORT_SEQLEN_Q * (cu_seqlens_q.shape[0] - 1)


def is_long(q_shape: Sequence[int], cu_seqlens_q: Tensor | None) -> bool:
    """Whether sequences that are not packed are long enough for CTAs to share K and V."""
    return cu_seqlens_q is None and q_shape[1] >= LONG_SEQLEN_Q


def is_few(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    few_rows: int = FEW_ROWS,
) -> bool:
    """Whether a K/V head has at most `few_rows` rows in each sequence, as far as the host knows."""
    if cu_seqlens_q is None:
        most = q_shape[1]
    elif max_seqlen_q is not None:
        most = max_seqlen_q
    else:
        most = q_shape[0]
    # The cheap test first: each call comes here.
    return most <= few_rows and has_few_rows(
        heads=q_shape[-2], heads_k=k_shape[-2], most_queries=most, few_rows=few_rows
    )


FORWARD = Forward()
