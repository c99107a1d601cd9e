"""Kimi Linear's linear layers in Hugging Face transformers, on KDA's kernels: see
`use_kimi_delta_attention`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ..ops.kda import chunk_kda, fused_recurrent_kda
from .transformers_gated_delta_rule import needs_gradients, replace, run

__all__ = ["use_kimi_delta_attention"]


def use_kimi_delta_attention() -> ExitStack:
    """Make the linear layers of Kimi Linear run on this package's kernels.

        use_kimi_delta_attention()                  # for good
        with use_kimi_delta_attention(): ...        # for a while

    The function does for Kimi Delta Attention what `use_gated_delta_rule` does for the Gated Delta
    Net: it replaces the two functions that transformers' layers call, in all models of this type in
    the process. The gate, the convolution, the norm and the cache stay transformers'. With
    `attn_implementation="cute_attn"` the model's softmax layers run on this package's kernels too.

    Supported are inference and training of heads of 64 or 128 dimensions on Hopper, in bfloat16,
    float16, or float32 under autocast to either dtype. A decoding step that needs gradients runs on
    the kernels for prompts, because those kernels have a backward.

    Calls without a kernel raise the exceptions of `cute_attn.chunk_kda` and
    `cute_attn.fused_recurrent_kda`: nothing falls back to PyTorch.

    Returns:
        A context manager, whose end or `close()` brings the previous functions back.
    """
    return replace(
        ["kimi_linear"],
        {
            "chunk_kimi_delta_attention": _chunk,
            "recurrent_kimi_delta_attention": _recurrent,
        },
    )


def _chunk(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return run(chunk_kda, *args, **kwargs)


def _recurrent(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    function = chunk_kda if needs_gradients(query) else fused_recurrent_kda
    return run(function, query, *args, **kwargs)
