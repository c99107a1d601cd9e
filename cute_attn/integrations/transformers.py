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

The mask has four dimensions because transformers passes on a four-dimensional mask unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import flash_attn_func, flash_attn_varlen_func

__all__ = ["register"]

NAME = "cute_attn"


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to Hugging Face transformers.

    Supported are inference and training of models whose attention layers have head_dim 64, 128 or
    256 on Hopper, or 256 on Blackwell (Gemma 2 and 3, Qwen3-Next, Qwen3.5 ...), in bfloat16,
    float16, or float32 under autocast to either dtype. Masks may be causal, bidirectional, or
    causal sliding windows; softcap, sinks, grouped heads, dynamic and static caches, and padding on
    either side or in between work too. A sliding window counts tokens, not padding, as in
    FlashAttention; eager attention differs if there is padding in between. With padding, k and v
    are copied in each layer, so give a batch without padding no mask, as `generate` does.

    A model raises NotImplementedError if it needs dropout, attention weights as an output, paged
    caches, or other masks (packed sequences, chunks, blocks of images, bidirectional windows). It
    also raises NotImplementedError if `cute_attn.flash_attn_func` has no kernel for a call.

    The integration needs transformers 5.16.1 or later.

    Args:
        name: the value for `attn_implementation`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)


# -- the mask -------------------------------------------------------------------------------------


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """The mask for `_attention`; takes the arguments of transformers' `sdpa_mask`.

    Args:
        q_offset, kv_offset: positions of the first query and the first key.
        attention_mask: `[batch, positions]`, False at padding, from the first position on.
    """
    _check_pattern(mask_function)
    if attention_mask is not None and not _any_padding(attention_mask):
        attention_mask = None
    end = q_offset + q_length - kv_offset  # position after the last query, and so after the keys
    if attention_mask is None:
        if not isinstance(end, Tensor):
            if end == kv_length:
                return None
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


def _any_padding(attention_mask: Tensor) -> bool:
    """Whether the mask may have padding. The host waits for the device only here."""
    return torch.compiler.is_compiling() or not bool(attention_mask.all())


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
    raise NotImplementedError(
        f"attn_implementation={NAME!r} makes causal, full and causal sliding-window masks, with "
        "padding; this model asks for another (packed sequences, chunks, blocks, or a mask "
        'function of its own): use "sdpa" or "eager" for it'
    )


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


def _attention(
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
    _check_request(dropout, others)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if sliding_window is not None and not is_causal:
        raise NotImplementedError(
            f"attn_implementation={NAME!r} has no bidirectional sliding window: transformers does "
            'not say whether its end is seen; use "sdpa" or "eager"'
        )
    q, k, v = (x.transpose(1, 2) for x in _in_autocast(query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": is_causal,
        "window_size": (None if sliding_window is None else sliding_window - 1, None),
        "learnable_sink": s_aux,
        "softcap": softcap or 0.0,
    }
    if attention_mask is None:
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


def _in_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, converted to autocast's dtype if autocast is on and one of q, k and v is float32,
    as torch's own attention does. Under autocast, norms and rotary embeddings return float32.
    """
    given = query, key, value
    device = query.device.type
    if torch.float32 in {x.dtype for x in given} and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return given


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
    for name in ("position_bias", "cache", "block_table", "cu_seq_lens_q", "cu_seq_lens_k"):
        if others.get(name) is not None:
            raise NotImplementedError(f"attn_implementation={NAME!r} does not take {name}")
