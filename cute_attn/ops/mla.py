"""Multi-head latent attention: decode over a latent cache, in the absorbed form.

Two operators run one kernel: `torch.ops.cute_attn.mla_decode` allocates the results, and
`torch.ops.cute_attn.mla_decode_out` writes to a given `out`. A call never reads device memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import launch
from ..kernels.attention.spec import LARGEST_SCALE
from ..kernels.mla import table
from ..kernels.mla.heuristics import latent_decode_spec
from ..kernels.mla.spec import (
    ARCHS,
    DTYPES,
    FP8_DTYPES,
    MOST_HEADS,
    MOST_QUERIES,
    PART_COLUMNS,
    SHAPES,
    TILE_M,
    check_shape,
)
from .attention.arguments import (
    MAX_SEQLEN,
    MAX_SPLITS,
    SMALLEST_SCALE,
    check_alignment,
    check_length,
    check_strides,
    with_strides_for_tma,
)
from .checks import (
    DTYPE_NAMES,
    check_contiguous,
    check_dtype,
    check_dtypes_are,
    check_flags,
    check_has_slots,
    check_int32,
    check_is_number,
    check_not_expanded,
    check_shapes,
    exceeds,
)
from .counters import counter_for
from .memory import check_memory
from .operator import (
    PLAIN,
    Operator,
    dispatch_mode_depth,
    forward_ad,
    increment_version,
    is_dynamo_compiling,
)

# The operator, and the kernel's limits for callers that choose kernels before a call.
__all__ = [
    "DTYPES",
    "MOST_HEADS",
    "MOST_QUERIES",
    "SHAPES",
    "mla_decode",
    "plan_mla_decode",
]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FEWEST_COUNTERS = 64  # calls of nearly all sizes share counters


def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor | None,
    kv_cache: Tensor,
    *,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = True,
    num_splits: int = 0,
    return_lse: bool = False,
    out: Tensor | None = None,
    head_dim_v: int = 512,
    kv_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decode of multi-head latent attention over a latent cache, in the absorbed form (DeepSeek V3,
    Kimi K2, Kimi-Linear, Mistral 4), on Hopper.

    A cached token has head_dim columns, which all heads share: the first head_dim_v columns are the
    latent vector, the rest is the rotated key. With q the row (q_nope, q_rope) of a query and head,
    and c_j the columns of token j,

        s_j = softmax_scale * q . c_j
        lse = log(sum over visible j of exp(s_j))
        o   = sum over visible j of exp(s_j - lse) c_j[:head_dim_v]

    The caller has multiplied q_nope by W_UK, and multiplies o by W_UV. Any number of heads from 1
    to 128 needs no padding. Write the new tokens' rows to the cache before the call.

    Args:
        q_nope: `[batch, queries, heads, head_dim_v]`, bfloat16 or float16; 1 to 16 queries. The
            last dimension must be contiguous, and the other strides multiples of 8 elements.
        q_rope: `[batch, queries, heads, head_dim - head_dim_v]`, dtype of q_nope; None if a token
            has no rotated key.
        kv_cache: `[num_pages, page_size, head_dim]`, or `[num_pages, page_size, 1, head_dim]`,
            dtype of q_nope, or float8_e4m3fn. Pages have any size and stride. (head_dim,
            head_dim_v) is (576, 512), (512, 512) or (320, 256). The contents of unused rows and
            pages do not matter, NaN included.
        block_table: `[batch, max_pages]` int32, rows contiguous: the pages of each sequence.
            Entries past a sequence's last page are not read.
        cache_seqlens: `[batch]` int32: the tokens of each sequence, with the new tokens. 0: the
            sequence's o is 0, and its lse -inf. Lengths are not read by the host.
        softmax_scale: factor of the scores, of the expanded form: (head_dim of q before the
            absorption) ** -0.5, 192 ** -0.5 for DeepSeek V3, times the model's own factors.
        causal: whether the last query is the sequence's last token, and query i sees the tokens up
            to i + length - queries. Does not matter with one query.
        num_splits: into how many parts the tokens of every sequence are split. 0: long sequences
            are cut so that all SMs have equal work. With any other number, the bits of a sequence's
            result do not depend on what else is in the batch. A number from 2 on takes memory for
            num_splits float32 results of each sequence.
        return_lse: whether to return lse.
        out: tensor of o's shape and dtype to write o to. `out` must not overlap another argument.
        head_dim_v: columns of a token's latent vector.
        kv_descale: with an fp8 cache, its positive factor: a float32 tensor with one element. The
            result is as for kv_cache * kv_descale. The kernel reads the factor; None is 1.

    Returns:
        The pair (o, lse). o is `[batch, queries, heads, head_dim_v]`; lse is float32 `[batch,
        heads, queries]`, natural logarithm, or None without return_lse. With equal arguments on
        equal GPUs, the bits are equal. Neither is differentiable.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: wrong shapes, strides, devices or alignment, or an `out` that overlaps another
            argument.
        NotImplementedError: an architecture other than sm_90a, a shape of tokens without a kernel,
            a cache in float8_e5m2, or a tensor that requires a gradient.
    """
    plain = (
        not is_dynamo_compiling()
        and type(q_nope) in PLAIN
        and type(kv_cache) is type(block_table) is type(cache_seqlens) is Tensor
        and (q_rope is None or type(q_rope) in PLAIN)
        and (out is None or type(out) is Tensor)
        and (kv_descale is None or type(kv_descale) in PLAIN)
        and forward_ad._current_level < 0
        and not dispatch_mode_depth()
    )
    shared = block_table, cache_seqlens, softmax_scale, causal, num_splits, head_dim_v
    if out is None:
        call = DECODE.forward if plain else DECODE.routed
        found: tuple[Tensor, Tensor | None] = call(
            q_nope, q_rope, kv_cache, *shared, return_lse, kv_descale
        )
        return found
    check_flags(return_lse=return_lse)
    lse = None
    if return_lse:
        # An invalid q_nope is refused, or handles the call, below.
        q: Any = q_nope
        usable = isinstance(q, Tensor) and not q.is_nested and q.dim() == 4
        lse = empty_lse(q) if usable else torch.empty(0)
    into = INTO.forward if plain else INTO.routed
    into(q_nope, q_rope, kv_cache, out, lse, *shared, kv_descale)
    return out, lse


@launch.planner
def plan_mla_decode(
    arch: str,
    *,
    dtype: str = "bfloat16",
    head_dim: int = 576,
    head_dim_v: int | None = None,
    queries: int = 1,
    heads: int = 16,
    sequences: int | None = None,
    causal: bool = True,
    page_size: int = 64,
    return_lse: bool = False,
    kv_dtype: str | None = None,
    kv_descale: bool = False,
) -> list[launch.Request]:
    """The kernels that `mla_decode` uses for such tensors, for `cute_attn.warmup` and spec files.
    Which kernels these are does not depend on lengths.

    Args:
        arch: such as "sm_90a".
        dtype: dtype of q.
        head_dim: columns of a cached token.
        head_dim_v: as the operator's; None stands for the only one that there is for head_dim.
        queries: queries of a sequence.
        heads: query heads. With queries, they are rows of the kernels' tiles of 64: only whether
            queries is 1, and whether there is more than one tile, matters.
        sequences: sequences of a call with num_splits of 0. None stands for all calls: first comes
            the kernel of many sequences, which every other num_splits has too.
        causal: as the operator's.
        page_size: tokens of a page. All sizes that are no multiple of 16 have the same kernel.
        return_lse: as the operator's.
        kv_dtype: dtype of the cache, "float8_e4m3fn" or None for dtype.
        kv_descale: whether kv_descale is given.

    Returns:
        Pairs of a kernel and its specialisation.

    Raises:
        TypeError: a parameter has a wrong type.
        ValueError: a parameter has a value that kernels do not support; the message names the
            parameter.
        NotImplementedError: there is no kernel for this architecture or these head dimensions.
    """
    check_arch(arch)
    if head_dim_v is None:
        of_latent = dict(SHAPES)
        if head_dim not in of_latent:
            raise NotImplementedError(f"head_dim is {head_dim}, must be one of {tuple(of_latent)}")
        head_dim_v = of_latent[head_dim]
    check_shape(head_dim, head_dim_v)
    counts = {"queries": queries, "heads": heads, "page_size": page_size, "sequences": sequences}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}, must be positive")
    fp8 = "none" if kv_dtype in (None, dtype) else kv_dtype
    if fp8 not in ("none", *FP8_DTYPES):
        raise ValueError(f"kv_dtype is {kv_dtype!r}, must be dtype or one of {list(FP8_DTYPES)}")
    if kv_descale and fp8 == "none":
        raise ValueError(f"kv_descale is True, only a cache of {list(FP8_DTYPES)} has a factor")
    specs = [
        latent_decode_spec(
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            rows=queries * heads,
            sequences=number,
            causal=causal and queries > 1,
            page_size=page_size,
            lse=return_lse,
            fp8=str(fp8),
            descale=kv_descale,
        )
        for number in ((None, 1) if sequences is None else (sequences,))
    ]
    return [(table.find(spec), spec) for spec in dict.fromkeys(specs)]


def check_arch(arch: str) -> None:
    if arch not in ARCHS:
        raise NotImplementedError(f"there is no mla_decode on {arch}; there is: {', '.join(ARCHS)}")


# -- the operators ------------------------------------------------------------------------------


class Arguments(NamedTuple):
    q_nope: Tensor
    q_rope: Tensor | None
    kv_cache: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    softmax_scale: float
    causal: bool = True
    num_splits: int = 0
    head_dim_v: int = 512
    return_lse: bool = False
    kv_descale: Tensor | None = None


class IntoArguments(NamedTuple):
    q_nope: Tensor
    q_rope: Tensor | None
    kv_cache: Tensor
    out: Tensor
    lse: Tensor | None
    block_table: Tensor
    cache_seqlens: Tensor
    softmax_scale: float
    causal: bool = True
    num_splits: int = 0
    head_dim_v: int = 512
    kv_descale: Tensor | None = None

    @property
    def return_lse(self) -> bool:
        return self.lse is not None


class Ready(NamedTuple):
    """What calls with one key share.

    Attributes:
        function: the loaded kernel.
        ctas: how many CTAs run at once.
        parts: the layout, shape and strides, of the pieces' results.
        counters: the number of counters.
    """

    function: Callable[..., None]
    ctas: int
    parts: tuple[tuple[int, ...], tuple[int, ...]]
    counters: int


_Called = TypeVar("_Called", bound=tuple[Any, ...])


class LatentDecode(Operator[_Called]):
    """Shared code of both operators."""

    def check(self, a: Any, given: dict[str, Tensor]) -> None:
        _check_scalars(a)
        check_q(a.q_nope)
        check_dtype("q_nope", a.q_nope, DTYPES)
        check_dtypes_are(given, ("q_rope",), a.q_nope.dtype)
        _check_cache_dtype(a)
        check_int32(given, ("block_table", "cache_seqlens"))
        _check_shapes(a, given)
        check_strides(given, tuple(x for x in ("q_nope", "q_rope", "kv_cache") if x in given))
        check_contiguous(given, ("cache_seqlens",))
        if a.block_table.stride(1) != 1 and a.block_table.shape[1] > 1:
            raise ValueError(
                f"block_table has strides {a.block_table.stride()}, must have contiguous rows"
            )

    def check_memory(self, a: Any) -> None:
        check_arch(launch.arch_for(a.q_nope.device))
        check_alignment(q_nope=a.q_nope, kv_cache=a.kv_cache)
        if a.q_rope is not None:
            check_alignment(q_rope=a.q_rope)

    def prepare(self, a: Any) -> Ready:
        device, shape = a.q_nope.device, a.q_nope.shape
        (kernel, spec), *_ = plan_mla_decode(
            launch.arch_for(device),
            dtype=DTYPE_NAMES[a.q_nope.dtype],
            head_dim=a.kv_cache.shape[-1],
            head_dim_v=a.head_dim_v,
            queries=shape[1],
            heads=shape[2],
            # With a number of splits, a sequence's bits do not depend on the batch.
            sequences=None if a.num_splits else shape[0],
            causal=bool(a.causal),
            page_size=a.kv_cache.shape[1],
            return_lse=bool(a.return_lse),
            kv_dtype=DTYPE_NAMES[a.kv_cache.dtype],
            kv_descale=a.kv_descale is not None,
        )
        ctas = launch.num_sms(device)
        segments = shape[0] * -(-shape[1] * shape[2] // TILE_M)
        slots = {0: 2 * ctas, 1: 1}.get(a.num_splits, segments * a.num_splits)
        columns = a.head_dim_v + PART_COLUMNS
        layout = (slots, TILE_M, columns), (TILE_M * columns, columns, 1)
        counters = max(FEWEST_COUNTERS, 1 << (1 + 2 * slots).bit_length())
        return Ready(launch.get_for(device, kernel, spec), ctas, layout, counters)

    def key(self, a: Any) -> tuple[Any, ...]:
        return (
            a.q_nope.shape,
            a.q_nope.dtype,
            a.q_nope.get_device(),
            a.q_rope is None,
            a.kv_cache.shape[1:],
            a.kv_cache.dtype,
            None if a.kv_descale is None else a.kv_descale.shape,
            a.kv_cache.shape[0] > 0,
            a.block_table.shape,
            a.cache_seqlens.shape,
            isinstance(a.softmax_scale, float | int)
            and a.softmax_scale is not True
            and SMALLEST_SCALE <= a.softmax_scale <= LARGEST_SCALE,
            a.causal,
            type(a.causal),
            a.num_splits,
            type(a.num_splits),
            a.head_dim_v,
            type(a.head_dim_v),
            a.return_lse,
            type(a.return_lse),
        )

    def launch(self, ready: Ready, a: Any) -> tuple[Tensor, Tensor | None]:
        o, lse = self.results_of(a)
        shape, strides = ready.parts
        parts = torch.empty_strided(shape, strides, dtype=torch.float32, device=o.device)
        cache, descale = a.kv_cache, a.kv_descale
        ready.function(
            a.q_nope, a.q_rope, cache.select(2, 0) if cache.dim() == 4 else cache, o, lse,
            a.block_table, a.cache_seqlens, counter_for(a.q_nope, None, ready.counters), parts,
            a.softmax_scale, a.num_splits, ready.ctas,
            None if descale is None else descale.view(1),
        )  # fmt: skip
        return o, lse

    def readable(self, a: Any) -> Any:
        q, cache = with_strides_for_tma(a.q_nope), with_strides_for_tma(a.kv_cache)
        rope = None if a.q_rope is None else with_strides_for_tma(a.q_rope)
        return a._replace(q_nope=q, q_rope=rope, kv_cache=cache)

    def results_of(self, a: Any) -> tuple[Tensor, Tensor | None]:
        """o and lse, given or new."""
        raise NotImplementedError

    def nothing(self, a: Any) -> Any:
        """The results if there are no sequences or no pages."""
        if a.q_nope.numel() and a.kv_cache.numel() and a.block_table.numel():
            return None
        o, lse = self.results_of(a)
        if lse is not None:
            lse.fill_(-math.inf)
        return o.zero_(), lse


class Decode(LatentDecode[Arguments]):
    name = "mla_decode"
    arguments = Arguments
    results = (("o", ""), ("lse", "return_lse"))

    def outputs(self, a: Arguments) -> tuple[Tensor, Tensor | None]:
        o = a.q_nope.new_empty(a.q_nope.shape)
        return o, empty_lse(a.q_nope) if a.return_lse else None

    def results_of(self, a: Arguments) -> tuple[Tensor, Tensor | None]:
        return self.outputs(a)


class Into(LatentDecode[IntoArguments]):
    name = "mla_decode_out"
    public_name = "mla_decode, with out,"
    arguments = IntoArguments
    written = ("out", "lse")

    def check(self, a: IntoArguments, given: dict[str, Tensor]) -> None:
        super().check(a, given)
        check_dtypes_are(given, ("out",), a.q_nope.dtype)
        batch, queries, heads, _ = a.q_nope.shape
        check_shapes(given, {"out": a.q_nope.shape, "lse": (batch, heads, queries)})
        check_not_expanded(given, self.written)
        check_strides(given, ("out",))
        if "lse" in given:
            check_dtype("lse", given["lse"], ("float32",))

    def check_memory(self, a: IntoArguments) -> None:
        super().check_memory(a)
        check_alignment(out=a.out)
        tensors = self.tensors(a)
        written = {name: tensors.pop(name) for name in self.written}
        check_memory(written, tensors)

    def results_of(self, a: IntoArguments) -> tuple[Tensor, Tensor | None]:
        return a.out, a.lse

    def readable(self, a: IntoArguments) -> IntoArguments:
        found: IntoArguments = super().readable(a)
        return found._replace(out=with_strides_for_tma(a.out))

    def launch(self, ready: Ready, a: IntoArguments) -> tuple[Tensor, Tensor | None]:
        results = super().launch(ready, a)
        increment_version((a.out,) if a.lse is None else (a.out, a.lse))
        return results


DECODE = Decode()
INTO = Into()


def empty_lse(q: Tensor) -> Tensor:
    """The log-sum-exp of a call, without values."""
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, heads, queries), dtype=torch.float32)


def check_q(q: Tensor) -> None:
    if q.dim() != 4:
        raise ValueError(
            f"q_nope has shape {list(q.shape)}, must be [batch, queries, heads, head_dim_v]"
        )


def _check_scalars(a: Any) -> None:
    check_is_number("softmax_scale", a.softmax_scale)
    check_flags(causal=a.causal, return_lse=a.return_lse)
    if not SMALLEST_SCALE <= a.softmax_scale <= LARGEST_SCALE:
        raise ValueError(
            f"softmax_scale is {a.softmax_scale}, must be positive and finite in float32, also "
            f"times log2(e): from {SMALLEST_SCALE:.3g} to {LARGEST_SCALE:.3g}"
        )
    check_length("num_splits", a.num_splits)
    if a.num_splits > MAX_SPLITS:
        raise ValueError(f"num_splits is {a.num_splits}, must be at most {MAX_SPLITS}")
    check_length("head_dim_v", a.head_dim_v)


def _check_cache_dtype(a: Any) -> None:
    """Raise the documented exception for a cache whose dtype has no kernel, and for kv_descale."""
    dtype, own = a.kv_cache.dtype, a.q_nope.dtype
    allowed = (own, *(x for x in FP8 if DTYPE_NAMES[x] in FP8_DTYPES))
    if dtype in FP8 and dtype not in allowed:
        raise NotImplementedError(
            f"kv_cache has dtype {dtype}, there are kernels for q_nope's dtype and {allowed[1:]}"
        )
    if dtype not in allowed:
        raise TypeError(f"kv_cache has dtype {dtype}, must be q_nope's, {own}, or {allowed[1:]}")
    if a.kv_descale is None:
        return
    if dtype == own:
        raise ValueError(
            f"kv_descale is given, and kv_cache has dtype {dtype}: only an fp8 cache has a factor"
        )
    check_dtype("kv_descale", a.kv_descale, ("float32",))
    if a.kv_descale.numel() != 1:
        raise ValueError(
            f"kv_descale has shape {list(a.kv_descale.shape)}, must have a single number"
        )


def _check_shapes(a: Any, given: dict[str, Tensor]) -> None:
    cache = a.kv_cache
    if cache.dim() not in (3, 4) or (cache.dim() == 4 and cache.shape[2] != 1):
        raise ValueError(
            f"kv_cache has shape {list(cache.shape)}, must be [num_pages, page_size, head_dim] or "
            "[num_pages, page_size, 1, head_dim]"
        )
    check_has_slots("kv_cache", cache, "pages")
    check_shape(int(cache.shape[-1]), int(a.head_dim_v))
    if isinstance(cache.shape[1], int) and cache.shape[1] < 1:
        raise ValueError(
            f"kv_cache has shape {list(cache.shape)}, must have pages of 1 token or more"
        )
    batch, queries, heads, _ = a.q_nope.shape
    for what, size, most in (("queries", queries, MOST_QUERIES), ("heads", heads, MOST_HEADS)):
        if exceeds(size, most) or (isinstance(size, int) and size < 1):
            raise ValueError(f"q_nope has {size} {what}, must have 1 to {most}")
    rope = cache.shape[-1] - a.head_dim_v
    if rope and a.q_rope is None:
        raise ValueError(f"q_rope is None, but tokens of kv_cache have a rotated key of {rope}")
    if not rope and a.q_rope is not None:
        raise ValueError(
            f"q_rope is given, but tokens of kv_cache have only {a.head_dim_v} columns"
        )
    if a.block_table.dim() != 2:
        raise ValueError(
            f"block_table has shape {list(a.block_table.shape)}, must be [batch, max_pages]"
        )
    if exceeds(a.block_table.shape[1] * cache.shape[1], MAX_SEQLEN - 1):
        raise ValueError(
            f"block_table has {a.block_table.shape[1]} pages of {cache.shape[1]} tokens, must be "
            f"fewer than {MAX_SEQLEN} tokens"
        )
    expected = {
        "q_nope": (batch, queries, heads, a.head_dim_v),
        "q_rope": (batch, queries, heads, rope),
        "block_table": (batch, a.block_table.shape[1]),
        "cache_seqlens": (batch,),
    }
    dimensions = {
        "q_nope": "batch, queries, heads, head_dim_v",
        "q_rope": "batch, queries, heads, head_dim - head_dim_v",
        "block_table": "batch, max_pages",
        "cache_seqlens": "batch",
    }
    check_shapes(given, expected, dimensions)
