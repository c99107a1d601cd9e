"""Softmax attention: the arguments and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.attention import configs, table
from ...kernels.attention.spec import (
    DTYPES,
    FP8_DTYPES,
    LARGEST_SCALE,
    LARGEST_SOFTCAP,
    SINK_DTYPES,
)
from ..checks import (
    DTYPE_NAMES,
    check_contiguous,
    check_dtype,
    check_dtypes_are,
    check_flags,
    check_has_slots,
    check_int32,
    check_is_number,
    check_shapes,
    exceeds,
    is_int,
)

USER_SCHEDULERS = ("static", "clc")  # kernels also have "single"
SMALLEST_SCALE = 2.0**-126
MAX_SEQLEN = 2**30  # positions and their distances are int32 in a kernel

ALIGNMENT = 16  # bytes: TMA requires aligned addresses and strides
_MAX_TILES = 2**31
MAX_SPLITS = 256
MOST_TREE_QUERIES = 64  # bits of a tree_mask


def dims_of(a: Any) -> tuple[int, int]:
    """head_dim and head_dim_v of a call's arguments."""
    return a.q.shape[-1], a.v.shape[-1]


class Arguments(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    tree_mask: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    learnable_sink: Tensor | None = None
    softcap: float = 0.0
    scheduler: str | None = None
    num_splits: int = 1
    batch_invariant: bool = False
    return_lse: bool = False
    deterministic: bool = False


def check(a: Arguments, given: dict[str, Tensor]) -> None:
    check_values(a, given)
    check_strides(given, ("q", "k", "v"))
    check_contiguous(given, (*_LENGTHS, "learnable_sink", "tree_mask"))
    if a.tree_mask is not None:
        _check_tree(a, a.tree_mask)


def check_values(a: Arguments, given: dict[str, Tensor]) -> None:
    """The checks that do not concern strides or a tree_mask."""
    check_scalars(a)
    check_dtype("q", a.q, DTYPES)
    _check_key_dtypes(a, given)
    check_int32(given, _INTEGERS)
    sink = given.get("learnable_sink")
    if sink is not None and DTYPE_NAMES.get(sink.dtype) not in SINK_DTYPES:
        raise TypeError(f"learnable_sink has dtype {sink.dtype}, must be one of {SINK_DTYPES[1:]}")
    _check_shapes(a, {name: x for name, x in given.items() if name in _LENGTHS})


def _check_tree(a: Any, tree_mask: Tensor) -> None:
    if tree_mask.dtype != torch.int64:
        raise TypeError(f"tree_mask has dtype {tree_mask.dtype}, must be torch.int64")
    if tree_mask.shape != a.q.shape[:-2]:
        raise ValueError(
            f"tree_mask has shape {_shape(tree_mask)}, must be {_shape(a.q)[:-2]}, a number for "
            "each query"
        )
    if not a.causal:
        raise ValueError(f"tree_mask is given, and causal is {a.causal}, must be True")
    if not has_tree_lengths(a):
        name, most = most_queries(a)
        raise ValueError(
            f"tree_mask is given, and {name} is {most}, must be an int of at most "
            f"{MOST_TREE_QUERIES}: the mask has {MOST_TREE_QUERIES} bits for a query"
        )


def most_queries(a: Any) -> tuple[str, int | None]:
    """The name of the argument that gives the most queries of a sequence, and its value. The value
    is None if the host does not know it."""
    if a.cu_seqlens_q is None:
        return "seqlen_q", a.q.shape[1]
    return "max_seqlen_q", a.max_seqlen_q


def has_tree_lengths(a: Any) -> bool:
    """Whether the bits of a tree_mask suffice for the queries of a sequence."""
    _, most = most_queries(a)
    return most is not None and most <= MOST_TREE_QUERIES


def check_tree_arch(arch: str) -> None:
    """Raise NotImplementedError if no kernel on `arch` takes a tree_mask."""
    if arch not in configs.SM90:
        raise NotImplementedError(
            f"tree_mask is given, and {arch} has no kernel for it: there are kernels on "
            f"{', '.join(configs.SM90)}"
        )


def _check_key_dtypes(a: Any, given: dict[str, Tensor]) -> None:
    if not is_fp8(a.k):
        check_dtypes_are(given, ("k",), a.q.dtype)
        for name in _DESCALES:
            if name in given:
                raise ValueError(
                    f"{name} is given, and k has dtype {a.k.dtype}: only fp8 k and v have factors, "
                    f"{FP8_DTYPES}"
                )
    check_dtypes_are(given, ("v",), a.k.dtype)
    check_dtypes_are(given, _DESCALES, torch.float32)


def check_fp8(arch: str, head_dim: int, head_dim_v: int, dtype: str) -> None:
    """Raise NotImplementedError if no kernel on `arch` takes k and v of the fp8 `dtype`, and
    ValueError for a name of another dtype."""
    if dtype not in FP8_DTYPES:
        raise ValueError(f"dtype of k and v is {dtype!r}, must be q's or one of {FP8_DTYPES}")
    if not configs.has_fp8(arch, head_dim, head_dim_v):
        raise NotImplementedError(
            f"k and v have dtype {dtype}, and {arch} has no kernel for it at head_dim {head_dim} "
            f"and head_dim_v {head_dim_v}: there are kernels on {', '.join(configs.SM90)}"
        )


def is_fp8(x: Any) -> bool:
    """Whether k, v or a cache is fp8."""
    return getattr(x, "dtype", None) in _FP8


def descales_of(
    k_descale: Tensor | None, v_descale: Tensor | None, batch: int, heads_k: int
) -> tuple[Tensor | None, Tensor | None]:
    """The factors of k and v as the kernel reads them, `[batch, heads_k]`."""
    return (
        None if k_descale is None else k_descale.expand(batch, heads_k),
        None if v_descale is None else v_descale.expand(batch, heads_k),
    )


def check_strides(given: dict[str, Tensor], names: Sequence[str]) -> None:
    """Raise ValueError for a tensor with strides that TMA cannot take."""
    for name in names:
        if not has_readable_strides(given[name]):
            raise ValueError(
                f"{name} has strides {given[name].stride()}: TMA, which takes it in place, needs "
                "the last dimension contiguous and the others to step by multiples of "
                f"{_vector(given[name])} elements"
            )


def _vector(x: Tensor) -> int:
    """Elements of ALIGNMENT bytes."""
    return ALIGNMENT // x.element_size()


def has_readable_strides(x: Tensor) -> bool:
    """Whether TMA can read x, `[..., rows, heads, head_dim]`, in place."""
    # Sizes come last: a graph that is being traced may not know sizes.
    vector = _vector(x)
    return (
        x.stride(-1) == 1
        and all(
            stride % vector == 0 or size <= 1
            for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
    ) or not x.numel()


def with_strides_for_tma(x: Tensor) -> Tensor:
    """x, or a view of x. In the view, a dimension of size 1 has another stride if TMA refuses its
    stride."""
    vector = _vector(x)
    if all(stride % vector == 0 for stride in x.stride()[:-1]):
        return x
    strides = [
        stride if stride % vector == 0 else x.shape[-1]
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    return x.as_strided(x.shape, (*strides, 1))


def readable_or_copied(x: Tensor) -> Tensor:
    """x, or a view or copy of x that kernels can read in place."""
    if x.is_contiguous() and not (x.shape[-1] % _vector(x) or x.data_ptr() % ALIGNMENT):
        return x  # the usual case
    if not has_readable_strides(x):
        return x.contiguous()
    if x.data_ptr() % ALIGNMENT:
        return x.clone(memory_format=torch.contiguous_format)
    return with_strides_for_tma(x)


def check_alignment(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} starts at address {x.data_ptr():#x}: TMA, which takes it in place, "
                f"needs {ALIGNMENT}-byte alignment"
            )


def check_tiles(a: Arguments, tile_rows: int) -> None:
    """Raise ValueError if q has too many tiles of the given rows for a grid."""
    heads = a.q.shape[-2]
    if a.cu_seqlens_q is not None:  # an upper bound: the host knows no lengths
        batch = a.cu_seqlens_q.shape[0] - 1
        tiles = heads * (a.q.shape[0] // tile_rows + batch)
    else:
        batch = a.q.shape[0]
        tiles = heads * batch * -(-a.q.shape[1] // tile_rows)
    if exceeds(tiles, _MAX_TILES - 1):
        raise ValueError(
            f"q has {batch} sequences of {heads} heads, {tiles} tiles of {tile_rows} rows: fewer "
            f"than {_MAX_TILES} fit one call"
        )


def no_sequences(cu_seqlens_q: Tensor | None) -> bool:
    return cu_seqlens_q is not None and len(cu_seqlens_q) == 1


def check_length(name: str, value: Any) -> None:
    """Raise TypeError unless value is an int, and ValueError if it is negative."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} is {value}, must be at least 0")


def bounds(a: Any) -> tuple[int | None, int | None]:
    """The left and the right bound of the window of a call's arguments, None for a bound that masks
    nothing."""
    left, right = (
        None if bound is None or bound == -1 or bound >= MAX_SEQLEN else max(bound, 1 - MAX_SEQLEN)
        for bound in (a.window_left, a.window_right)
    )
    return left, 0 if a.causal else right


# The dimensions of tensors in messages; those of q, k and v depend on the call.
_DIMENSIONS = {
    "cu_seqlens_q": "batch + 1",
    "cu_seqlens_k": "batch + 1",
    "seqused_q": "batch",
    "seqused_k": "batch",
    "page_table": "batch, max_pages",
    "learnable_sink": "heads",
}
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_INTEGERS = (*_LENGTHS, "page_table")
_DESCALES = ("k_descale", "v_descale")
_FP8 = frozenset(dtype for dtype, name in DTYPE_NAMES.items() if name in FP8_DTYPES)


def check_scalars(a: Arguments) -> None:
    """Raise the documented exception for a number, a flag or a name that no kernel takes."""
    for name, value in (("softmax_scale", a.softmax_scale), ("softcap", a.softcap)):
        if value is not None:
            check_is_number(name, value)
    check_flags(causal=a.causal, batch_invariant=a.batch_invariant, return_lse=a.return_lse)
    if a.softmax_scale is not None and not SMALLEST_SCALE <= a.softmax_scale <= LARGEST_SCALE:
        raise ValueError(
            f"softmax_scale is {a.softmax_scale}, must be positive and finite in float32, also "
            f"times log2(e): from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}"
        )
    if a.softcap and not SMALLEST_SCALE <= a.softcap <= LARGEST_SOFTCAP:
        raise ValueError(
            f"softcap is {a.softcap}, must be positive, from {SMALLEST_SCALE:.3g} to "
            f"{LARGEST_SOFTCAP:.3g}, or 0 for none"
        )
    _check_window(a)
    if a.scheduler is not None and a.scheduler not in USER_SCHEDULERS:
        raise ValueError(f"scheduler is {a.scheduler!r}, must be one of {USER_SCHEDULERS} or None")
    for name, length in (("max_seqlen_q", a.max_seqlen_q), ("max_seqlen_k", a.max_seqlen_k)):
        if length is not None:
            check_length(name, length)
    check_length("num_splits", a.num_splits)
    if a.num_splits > MAX_SPLITS:
        raise ValueError(f"num_splits is {a.num_splits}, must be at most {MAX_SPLITS}")
    if a.batch_invariant:
        _check_invariant(a)


def _check_invariant(a: Arguments) -> None:
    if a.num_splits > 1:
        raise ValueError(
            f"num_splits is {a.num_splits} with batch_invariant, must be 1, or 0 for splits of a "
            "fixed number of keys"
        )
    if a.num_splits == 0 and a.cu_seqlens_q is not None and a.max_seqlen_q is None:
        raise ValueError(
            "max_seqlen_q is not given as an int, it must be with batch_invariant, num_splits of 0 "
            "and cu_seqlens_q: whether keys are split must not depend on the number of sequences"
        )


def _check_window(a: Arguments) -> None:
    for bound in (a.window_left, a.window_right):
        if bound is None:
            continue
        if not is_int(bound):
            raise TypeError(
                f"window_size holds a {type(bound).__name__}, must be ints, or None for no bound"
            )
    left, right = bounds(a)
    if left is not None and right is not None and left + right < 0:
        causal = " with causal, whose right number is 0" if a.causal else ""
        raise ValueError(
            f"window_size is {(a.window_left, a.window_right)}{causal}: no query sees a key; the "
            "sum must be at least 0, or a number None or -1 for no bound"
        )


def _check_shapes(a: Arguments, lengths: dict[str, Tensor]) -> None:
    q, k = a.q, a.k
    dimensions = dict(_DIMENSIONS)
    if a.page_table is not None and a.cu_seqlens_k is not None:
        raise ValueError("page_table is given with cu_seqlens_k, must be with seqused_k alone")
    if a.page_table is not None and a.seqused_k is None:
        raise ValueError("page_table is given, it needs seqused_k: the keys of each sequence")
    for name, x in (("q", q), ("k", k)):
        packed = f"cu_seqlens_{name}" in lengths
        heads_of = "heads" if name == "q" else "heads_k"
        rows = f"total_{name}" if packed else f"batch, seqlen_{name}"
        if name == "k" and a.page_table is not None:
            rows = "num_pages, page_size"
        dimensions[name] = f"{rows}, {heads_of}, head_dim"
        if x.dim() != (3 if packed else 4):
            given = "given" if packed else "not given"
            raise ValueError(
                f"{name} has shape {_shape(x)}, must be [{dimensions[name]}] where "
                f"cu_seqlens_{name} is {given}"
            )
        if exceeds(x.shape[-3], MAX_SEQLEN - 1):
            raise ValueError(f"{name} has {x.shape[-3]} rows, must be fewer than {MAX_SEQLEN}")
    if a.page_table is not None:
        _check_pages(a, a.page_table)
    head_dim = int(q.shape[-1])
    if head_dim not in table.head_dims("forward"):
        raise NotImplementedError(
            f"head_dim of q is {head_dim}, there are kernels for (of q, of v): "
            f"{table.shapes('forward')}"
        )
    _check_q_beside_k(a, lengths)
    if a.v.dim() and (head_dim, int(a.v.shape[-1])) not in table.shapes("forward"):
        raise NotImplementedError(
            f"head_dim of v is {a.v.shape[-1]} and of q {head_dim}, there are kernels for (of q, "
            f"of v): {table.shapes('forward')}"
        )
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in lengths and (lengths[name].dim() != 1 or lengths[name].shape[0] == 0):
            raise ValueError(f"{name} has shape {_shape(lengths[name])}, must be [batch + 1]")
    batch = lengths["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in lengths else q.shape[0]
    heads, heads_k = q.shape[-2], k.shape[-2]
    expected_k = (
        (k.shape[0], heads_k, head_dim)
        if "cu_seqlens_k" in lengths
        else (batch if a.page_table is None else k.shape[0], k.shape[1], heads_k, head_dim)
    )
    expected: dict[str, tuple[Any, ...]] = {
        "k": expected_k,
        "v": (*expected_k[:-1], *a.v.shape[-1:]),
    }
    tensors = {"k": k, "v": a.v} | lengths
    for name in lengths:
        expected[name] = (batch + 1,) if name.startswith("cu_") else (batch,)
    if a.page_table is not None:
        expected["page_table"] = (batch, a.page_table.shape[-1])
        tensors["page_table"] = a.page_table
    if a.learnable_sink is not None:
        expected["learnable_sink"] = (heads,)
        tensors["learnable_sink"] = a.learnable_sink
    for name in _DESCALES:
        x = getattr(a, name)
        if x is not None and not (
            x.dim() <= 2
            and all(n in (1, m) for n, m in zip(x.shape[::-1], (heads_k, batch), strict=False))
        ):
            raise ValueError(
                f"{name} has shape {_shape(x)}, must be [] or [batch, heads_k], {[batch, heads_k]}"
            )
    dimensions["v"] = f"{dimensions['k']}_v"
    check_shapes(tensors, expected, dimensions)
    if (heads_k == 0 and heads != 0) or (heads_k != 0 and heads % heads_k):
        raise ValueError(f"q has {heads} heads, must be a multiple of the heads of k, {heads_k}")
    check_tiles(a, table.smallest_tile("forward", *dims_of(a)))


def _check_q_beside_k(a: Arguments, lengths: dict[str, Tensor]) -> None:
    """Raise ValueError that names q, if k and v fit each other and not q."""
    q, k, v = a.q, a.k, a.v
    batches = a.page_table is None and not {"cu_seqlens_q", "cu_seqlens_k"} & lengths.keys()
    if batches and q.shape[0] != k.shape[0] and v.shape[:1] == k.shape[:1]:
        raise ValueError(
            f"q has shape {_shape(q)}, must have as many sequences as k and v, {k.shape[0]}"
        )
    if q.shape[-1] != k.shape[-1] and (*k.shape[-1:], *v.shape[-1:]) in table.shapes("forward"):
        raise ValueError(f"q has shape {_shape(q)}, must have head_dim {k.shape[-1]}, as k has")


def _check_pages(a: Arguments, page_table: Tensor) -> None:
    if page_table.dim() != 2:
        raise ValueError(f"page_table has shape {_shape(page_table)}, must be [batch, max_pages]")
    page_size = a.k.shape[1]
    if not page_size:
        raise ValueError("k has pages of 0 rows, must have at least 1")
    check_has_slots("k", a.k, "pages")
    if exceeds(page_table.shape[1] * page_size, MAX_SEQLEN - 1):
        raise ValueError(
            f"page_table has {page_table.shape[1]} pages of {page_size} rows, must be fewer than "
            f"{MAX_SEQLEN} rows"
        )
    if page_table.stride(1) != 1:
        raise ValueError(f"page_table has strides {page_table.stride()}, must have contiguous rows")


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
