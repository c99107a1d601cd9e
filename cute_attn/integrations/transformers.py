"""Hugging Face transformers: `attn_implementation="cute_attn"`.

    from cute_attn.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cute_attn")

transformers needs two functions of an attention implementation: one that makes a mask, once for
each forward pass and kind of layer, and the attention itself. The kernel computes causal masks and
windows from numbers, so the mask that the first function returns holds only the lengths and the
padding:

- None: all keys are used, and the last query is at the position of the last key.
- `[batch, 1, 1, 1]` int32: the number of keys used (a static cache that is not full).
- `[batch, 1, 1, 1 + queries + keys]` int32, with padding: the number of keys used, a permutation of
  the queries that moves padding to the front, and a permutation of the keys that moves padding to
  the end. After the permutation the sequences end at the last query and start at the first key, as
  the kernel requires. The permutation costs a copy of k and v, but the host does not wait for the
  GPU.
- `[1, 1, longest sequence, 1 + sequences]` int64, for packed sequences: their offsets in the tokens
  of the batch, expanded to as many rows as the longest sequence has tokens.
- `[1, 1, 1, 1]` bool, while torch compiles: whether all keys are used and the mask has a pattern of
  the kernel. The attention asserts this on the device, unless the call brings the offsets of packed
  sequences.

The mask has four dimensions because transformers passes on a four-dimensional mask unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import flash_attn_func, flash_attn_varlen_func
from .autocast import in_autocast
from .transformers_context_parallel import REGISTERED, use_context_parallel
from .transformers_gated_delta_rule import use_gated_delta_rule
from .transformers_kda import use_kimi_delta_attention

__all__ = [
    "register",
    "use_context_parallel",
    "use_gated_delta_rule",
    "use_kimi_delta_attention",
]

NAME = "cute_attn"
# Without quotation marks, which torch does not escape in an assertion of a compiled CPU kernel.
_OTHER_PATTERN = (
    f"attn_implementation={NAME} makes causal, full and causal sliding-window masks, with padding "
    "or packed sequences; this model asks for another (chunks, blocks, or a mask function of its "
    "own): use sdpa or eager for it"
)
_PACKED_OR_OTHER_PATTERN = (
    f"{_OTHER_PATTERN}. While torch compiles, packed sequences need cu_seq_lens_q, cu_seq_lens_k, "
    "max_length_q and max_length_k"
)
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to Hugging Face transformers.

    This package has inference and training for attention layers of head_dim 64, 128 or 256 on
    Hopper, and of 256 on Blackwell (Gemma 2 and 3, Qwen3-Next, Qwen3.5 ...). Hopper also has 192
    with values of 128 (DeepSeek V2 and V3, Kimi Linear, LongCat-Flash, MiMo-V2). The dtype is
    bfloat16, float16, or float32 under autocast to either dtype. On Hopper, layers of 512, as in
    Gemma 4, run inference only; a training step raises NotImplementedError. Masks may be causal,
    bidirectional, or causal sliding windows. Softcap, sinks, grouped heads, dynamic and static
    caches, and padding on either side or in between work too. A sliding window counts tokens, not
    padding, as in FlashAttention; eager attention differs if there is padding in between. With
    padding, k and v are copied in each layer, so give a batch without padding no mask, as
    `generate` does.

    A row of the batch may hold several sequences. Without a mask and a cache, a sequence starts
    where `position_ids` start again. A batch of one row may instead come with the four arguments of
    `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`.

    `generate_batch` reads and writes its pages in place, in decoding steps of models without
    windows. Other steps gather keys and values from the pages first, as transformers does for each
    implementation.

    A sequence may be split between ranks. `use_context_parallel(model, mesh)` splits the inputs and
    the loss of all calls. A call may also have a plan of `cute_attn.distributed.context_parallel`:
    `model(input_ids=plan.shard(ids, 1), position_ids=plan.position_ids(device)[None], cp=plan,
    use_cache=False)`. Each rank gets the outputs of its own tokens.

    Models compile as one graph (`torch.compile(fullgraph=True)`) and can be exported. A compiler
    cannot read `position_ids`, so packed sequences need the four arguments there. Without these
    arguments, a compiled model asserts on the device that sequences are not packed. A failed
    assertion is a RuntimeError on a CPU, and ends the use of a GPU.

    A model raises NotImplementedError if it needs dropout, attention weights as an output, or other
    masks (chunks, blocks of images, bidirectional windows), or if `cute_attn.flash_attn_func` has
    no kernel for a call. A compiled model makes other masks fail the assertion.

    The integration needs transformers 5.16.1 or later, and 5.19 for `generate_batch`.

    Args:
        name: the value for `attn_implementation`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
    REGISTERED.add(name)
    _register_for_continuous_batching(name)


# -- continuous batching --------------------------------------------------------------------------

_names: set[str] = set()  # registered for continuous batching


def _register_for_continuous_batching(name: str) -> None:
    """Let `generate_batch` take the implementation. transformers has no list of implementations
    for it: it asks whether "flash" is in the name. So this function replaces the question in the
    modules of continuous batching."""
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    if not hasattr(initialization, "lazy_import_flash_attention"):
        return  # an older release, in which a paged attention has another interface
    if not _names:
        for module in (cache, continuous_api, initialization):
            module.is_flash_attention_requested = _or_ours(module.is_flash_attention_requested)
        initialization.lazy_import_flash_attention = _with_ours(
            initialization.lazy_import_flash_attention
        )
    _names.add(name)


def _or_ours(is_requested: Callable[..., bool]) -> Callable[..., bool]:
    def requested(
        config: Any = None, requested_attention_implementation: str | None = None, **version: Any
    ) -> bool:
        given = requested_attention_implementation
        asked = config._attn_implementation if given is None else given
        return asked in _names or is_requested(config, given, **version)

    return requested


def _with_ours(lazy_import: Callable[..., Any]) -> Callable[..., Any]:
    """The functions of an implementation, of which continuous batching looks at the third: whether
    there is one for pages."""

    def imported(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation in _names:
            return (None, flash_attn_varlen_func, _decoded_in_pages), None
        return lazy_import(implementation, *args, **kwargs)

    return imported


# -- the mask -------------------------------------------------------------------------------------


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """The mask for `_attention`; takes the arguments of transformers' `sdpa_mask`.

    Args:
        q_offset, kv_offset: positions of the first query and the first key.
        attention_mask: `[batch, positions]`, False at padding, from the first position on.
        local_size: the window.
        use_vmap: whether a part of mask_function is a user's.
    """
    tracing = torch.compiler.is_compiling()
    if tracing:
        if use_vmap:
            raise NotImplementedError(_OTHER_PATTERN)
        as_assumed = _follows_pattern(
            mask_function,
            torch.arange(batch_size, device=device)[:, None, None],
            torch.arange(q_length, device=device)[None, :, None] + q_offset,
            kv_offset,
            kv_length,
            local_size,
            causal="allow_is_bidirectional_skip" not in others,
        )
    else:
        mask_function, sequence_of_token = _without_packing(mask_function)
        _check_pattern(mask_function)
        if sequence_of_token is not None:
            return _offsets(sequence_of_token)
        if attention_mask is not None and bool(attention_mask.all()):  # the host waits only here
            attention_mask = None
    end = q_offset + q_length - kv_offset  # position after the last query, and so after the keys
    whole = attention_mask is None and not isinstance(end, Tensor) and end == kv_length
    if tracing:
        if whole:
            return as_assumed.reshape(1, 1, 1, 1)  # offsets, which are not known here, may do
        torch._assert_async(as_assumed, _OTHER_PATTERN)
    if whole:
        return None
    if attention_mask is None:
        if not isinstance(end, Tensor):
            end = torch.tensor(end, device=device)
        return end.to(torch.int32).expand(batch_size).reshape(batch_size, 1, 1, 1)

    # Positions past the mask belong to a static cache that is not full.
    missing = kv_offset + kv_length - attention_mask.shape[1]
    counts = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
    counts = counts[:, kv_offset : kv_offset + kv_length]
    columns = torch.arange(q_length, device=device) + (end - q_length)
    return torch.cat(
        [
            counts.sum(dim=1, keepdim=True),
            counts[:, columns].int().argsort(dim=1, stable=True),
            (~counts).int().argsort(dim=1, stable=True),
        ],
        dim=1,
    ).to(torch.int32)[:, None, None, :]


def _follows_pattern(
    mask_function: Callable[..., Any] | None,
    rows: Tensor,
    queries: Tensor,
    first: int,
    keys: int,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Whether the mask is full, causal, or a causal window, without packed sequences: a bool on the
    device.

    A compiler cannot look into mask_function. So the mask of each query is computed at the keys
    where other masks differ: next to the query's position, at the ends of the window, and at the
    first key.
    """
    if mask_function is None:
        return queries.new_ones((), dtype=torch.bool)
    steps = (-1, 0, 1) if window is None else (-window, 1 - window, -1, 0, 1)
    near = queries + torch.tensor(steps, device=queries.device)
    keys_seen = torch.cat([near, torch.zeros_like(queries)], dim=-1).clamp(first, first + keys - 1)
    expected = keys_seen <= queries if causal else keys_seen >= 0
    if causal and window is not None:
        expected = expected & (keys_seen > queries - window)
    mask: Tensor = mask_function(rows, rows.new_zeros(()), queries, keys_seen)
    return (mask == expected).all()


def _without_packing(
    mask_function: Callable[..., Any] | None,
) -> tuple[Callable[..., Any] | None, Tensor | None]:
    """The mask within a sequence, and the number of each token's sequence, `[batch, tokens]`."""
    from transformers import masking_utils

    same_sequence = masking_utils.packed_sequence_mask_function(torch.empty(0))
    if not _has_code_of(mask_function, masking_utils.and_masks(same_sequence)):
        return mask_function, None
    *within, last = _closure(mask_function)["mask_functions"]
    if len(within) != 1 or not _has_code_of(last, same_sequence):
        return mask_function, None
    # Positions that count from a sequence's start change neither causal masks nor windows.
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # newer releases
    if remap is not None and _has_code_of(within[0], remap(same_sequence, torch.empty(0))):
        within = [_closure(within[0])["mask_function"]]
    return within[0], _closure(last)["packed_sequence_mask"]


def _has_code_of(function: Any, other: Any) -> bool:
    return getattr(function, "__code__", None) is other.__code__


def _closure(function: Any) -> dict[str, Any]:
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _offsets(sequence_of_token: Tensor) -> Tensor:
    """The mask of packed sequences. The host waits for the device here, once for a forward pass and
    kind of layer."""
    first = torch.ones_like(sequence_of_token, dtype=torch.bool)
    first[:, 1:] = sequence_of_token.diff(dim=1) != 0
    starts = first.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(starts, (0, 1), value=first.numel())
    longest = int(offsets.diff().max())
    return offsets.expand(1, 1, longest, -1)


def _check_pattern(mask_function: Callable[..., Any] | None) -> None:
    """Raise NotImplementedError unless the mask is causal, full, or a causal sliding window.

    transformers describes a mask by a function of positions. The library's own functions are
    recognised by their code and closures; a user's function could do anything.
    """
    from transformers import masking_utils

    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if mask_function is None or mask_function in plain:
        return
    window = masking_utils.sliding_window_causal_mask_function(1)
    if _same_make(mask_function, window):
        return
    raise NotImplementedError(_OTHER_PATTERN)


def _same_make(function: Any, other: Any) -> bool:
    """Whether two mask functions are equal except for ints in their closures."""
    if function is other:
        return True
    if isinstance(function, tuple) and isinstance(other, tuple):
        return len(function) == len(other) and all(map(_same_make, function, other))
    if callable(function) and callable(other):
        if getattr(function, "__code__", None) is not getattr(other, "__code__", 0):
            return False
        cells, others = ([c.cell_contents for c in f.__closure__ or ()] for f in (function, other))
        return len(cells) == len(others) and all(map(_same_make, cells, others))
    return type(function) is int and type(other) is int


# -- the attention --------------------------------------------------------------------------------


def _attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`_attend`, which says in what layer it refuses a call: layers of a model may differ."""
    try:
        return _attend(module, *args, **kwargs)
    except NotImplementedError as error:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise
        raise NotImplementedError(f"layer {layer}: {error}") from error


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The output, `[batch, queries, heads, head_dim]`, and None for the attention weights.

    Args:
        query, key, value: `[batch, heads, tokens, head_dim]`.
        attention_mask: the result of `_mask`.
        sliding_window: number of keys that a query sees, including its own.
        s_aux: the learnable sink.
    """
    over_ranks = others.pop("cp", None)
    _check_request(dropout, others)
    if (cache := others.pop("cache", None)) is not None:
        key, value = _from_pages(cache, key, value, module.layer_idx, others)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if sliding_window is not None and not is_causal:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} has no bidirectional sliding window: transformers does "
            'not say whether its end is seen; use "sdpa" or "eager"'
        )
    q, k, v = (x.transpose(1, 2) for x in in_autocast(query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": is_causal,
        "window_size": (None if sliding_window is None else sliding_window - 1, None),
        "learnable_sink": s_aux,
        "softcap": softcap or 0.0,
    }
    if over_ranks is not None:
        return _over_ranks(over_ranks, q, k, v, attention_mask, options), None
    if others.get("block_table") is not None:
        return _decoded_in_pages(q, k, v, others, options), None
    packed = _packed(attention_mask, q, k, others)
    if packed is not None:
        # Dimensions of batch and tokens become one.
        o, _ = flash_attn_varlen_func(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **packed, **options
        )
        return o.unflatten(0, q.shape[:2]), None
    if _is_dense(attention_mask):
        return flash_attn_func(q, k, v, **options)[0], None

    plan = _checked(attention_mask, q, k)
    used = plan[:, 0].contiguous()
    if plan.shape[1] == 1:
        return flash_attn_varlen_func(q, k, v, seqused_k=used, **options)[0], None
    rows, keys = plan[:, 1:].long().split([q.shape[1], k.shape[1]], dim=1)
    k, v = _take(k, keys), _take(v, keys)
    if q.shape[1] == 1:
        return flash_attn_varlen_func(q, k, v, seqused_k=used, **options)[0], None
    o = flash_attn_varlen_func(_take(q, rows), k, v, seqused_k=used, **options)[0]
    return _take(o, rows.argsort(dim=1)), None


def _over_ranks(
    plan: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, options: Any
) -> Tensor:
    """The output for a rank's tokens, with the plan of `model(..., cp=plan)`. The plan has the
    sequences' lengths. Lengths that transformers derives from a rank's positions would be wrong."""
    if attention_mask is not None and attention_mask.dtype != torch.int64:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} takes cp without a cache and without padding"
        )
    if not plan.packed:
        return flash_attn_func(q, k, v, cp=plan, **options)[0]
    flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    o: Tensor = flash_attn_varlen_func(*flat, cp=plan, **options)[0].unflatten(0, q.shape[:2])
    return o


def _from_pages(
    cache: Any, key: Tensor, value: Tensor, layer: Any, others: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """All keys and values of continuous batching's sequences, or the new ones and, in `others`, the
    pages. From release 5.24 on, the model calls `update` before the attention."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    if not isinstance(cache, PagedAttentionCache):
        name = type(cache).__name__
        raise NotImplementedError(f"attn_implementation={NAME!r} does not take a {name} as cache")
    keys, values = cache.update(key, value, layer, others)
    return keys, values


# transformers disables compiling each function that takes pages.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _decoded_in_pages(
    q: Tensor, k: Tensor, v: Tensor, others: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """A decoding step of continuous batching: each token is the next of its own sequence, and its
    key and value are written to the sequence's page first.

    A row that pads the batch has length 0, and -1 for its pages. It writes nothing.
    """
    table, k_cache, v_cache = (others[name] for name in ("block_table", "k_cache", "v_cache"))
    tokens, page_size = q.shape[1], k_cache.shape[1]
    lengths = others["cu_seq_lens_k"].diff()[:tokens]
    last = (lengths - 1).clamp(min=0)
    page = table.gather(1, (last // page_size)[:, None].long())[:, 0].long()
    at = page.clamp(min=0), last.long() % page_size
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[at] = torch.where((page >= 0)[:, None, None], new[0], cache[at])
    o, _ = flash_attn_varlen_func(
        q[0, :, None],
        k_cache,
        v_cache,
        seqused_k=lengths.to(torch.int32),
        page_table=table,
        num_splits=0,
        **options,
    )
    return o.transpose(0, 1)


def _is_dense(attention_mask: Tensor | None) -> bool:
    """Whether all keys are used, and sequences are not packed."""
    if attention_mask is not None and _is_condition(attention_mask):
        torch._assert_async(attention_mask, _PACKED_OR_OTHER_PATTERN)
        return True
    return attention_mask is None


def _is_condition(attention_mask: Any) -> bool:
    """Whether the mask says, on the device, if the call is dense: a mask of a compiled model."""
    return (
        isinstance(attention_mask, Tensor)
        and attention_mask.dtype == torch.bool
        and tuple(attention_mask.shape) == (1, 1, 1, 1)
    )


def _packed(
    attention_mask: Tensor | None, q: Tensor, k: Tensor, others: dict[str, Any]
) -> dict[str, Any] | None:
    """The sequences' offsets and greatest lengths for `flash_attn_varlen_func`, None for a call
    without packed sequences."""
    from_mask = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int64
    given = {name: others[name] for name in _PACKING if others.get(name) is not None}
    if given:
        if missing := set(_PACKING) - set(given):
            raise NotImplementedError(
                f"attn_implementation={NAME!r} got {', '.join(sorted(given))} without "
                f"{', '.join(sorted(missing))}: give all of them or none"
            )
        no_mask = attention_mask is None or from_mask or _is_condition(attention_mask)
        if q.shape[0] != 1 or not no_mask:
            raise NotImplementedError(
                f"attn_implementation={NAME!r} takes {', '.join(_PACKING)} with a batch of one row "
                f"and no attention_mask: the batch has {q.shape[0]}"
            )
        offsets_q, offsets_k = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
        longest_q, longest_k = (
            _length_on_the_host(given[name], x)
            for name, x in (("max_length_q", q), ("max_length_k", k))
        )
    elif from_mask:
        assert attention_mask is not None
        offsets_q = offsets_k = attention_mask[0, 0, 0]
        longest_q = longest_k = attention_mask.shape[2]
    else:
        return None
    return {
        "cu_seqlens_q": offsets_q.to(torch.int32),
        "cu_seqlens_k": offsets_k.to(torch.int32),
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
    }


def _length_on_the_host(length: Any, x: Tensor) -> int:
    """The greatest length of a sequence, or an upper bound if it is a tensor that is traced."""
    if isinstance(length, Tensor) and torch.compiler.is_compiling():
        return x.shape[1]
    return int(length)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """x[b, rows[b]] for each b, contiguous."""
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[batch, rows]


def _checked(attention_mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """The mask as `[batch, n]`, after checking that `_mask` made it for tensors of these sizes."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    sizes = (1, 1 + queries + keys)
    if (
        not isinstance(attention_mask, Tensor)
        or attention_mask.dtype != torch.int32
        or tuple(attention_mask.shape[:-1]) != (batch, 1, 1)
        or attention_mask.shape[-1] not in sizes
    ):
        what = type(attention_mask).__name__
        if isinstance(attention_mask, Tensor):
            what = f"a mask of shape {list(attention_mask.shape)} and {attention_mask.dtype}"
        raise NotImplementedError(
            f"attn_implementation={NAME!r} got {what} for {queries} queries and {keys} keys: give "
            "the model a 2-dimensional attention_mask (1 at tokens, 0 at padding) or none; masks "
            "already made have no kernel"
        )
    return attention_mask[:, 0, 0]


def _check_request(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} has no dropout, asked for {dropout}"
        )
    if others.get("output_attentions"):
        raise NotImplementedError(
            f'attn_implementation={NAME!r} keeps no attention weights: use "eager" for them'
        )
    if others.get("position_bias") is not None:
        raise NotImplementedError(f"attn_implementation={NAME!r} does not take position_bias")
