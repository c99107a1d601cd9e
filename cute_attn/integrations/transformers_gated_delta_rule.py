"""Qwen3-Next's and Qwen3.5's linear layers in Hugging Face transformers, on the Gated Delta Net's
kernels: see `use_gated_delta_rule`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .autocast import in_autocast

__all__ = ["use_gated_delta_rule"]

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def use_gated_delta_rule() -> ExitStack:
    """Make the linear layers of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE run on this package's kernels.

        use_gated_delta_rule()                  # for good
        with use_gated_delta_rule(): ...        # for a while

    transformers' layers call two functions of their module: one for prompts and training, and one
    for a decoding step. This function replaces both functions, in all models of these types in the
    process, built before or afterwards. The projections, the convolution, the norm and the cache
    stay transformers'. The call does not depend on `attn_implementation`, which is about the
    softmax layers.

    Supported are inference and training of layers whose key heads have 64 or 128 dimensions and
    whose value heads have 64, 128, 192 or 256, in bfloat16, float16, or float32 under autocast to
    either dtype. The rule keeps packed sequences apart (`cu_seq_lens_q`); transformers' convolution
    needs `seq_idx` and the package causal-conv1d for them. A decoding step that needs gradients
    runs on the kernels for prompts, because those kernels have a backward.

    Calls without a kernel raise the exceptions of `cute_attn.chunk_gated_delta_rule` and
    `cute_attn.fused_recurrent_gated_delta_rule`: nothing falls back to PyTorch.

    Returns:
        A context manager, whose end or `close()` brings the previous functions back.
    """
    return replace(
        MODELS,
        {
            "torch_chunk_gated_delta_rule": _chunk,
            "torch_recurrent_gated_delta_rule": _recurrent,
        },
    )


def replace(models: Iterable[str], functions: dict[str, Callable[..., Any]]) -> ExitStack:
    """Replace functions in the modules of `models`, until the caller closes the result.

    Args:
        functions: the name of each replaced function, and the function that takes its place.
    """
    restored = ExitStack()
    for model in models:
        name = f"transformers.models.{model}"
        if importlib.util.find_spec(name) is None:
            continue  # an older release
        module = importlib.import_module(f"{name}.modeling_{model}")
        for replaced, ours in functions.items():
            restored.enter_context(mock.patch.object(module, replaced, ours))
    return restored


def _chunk(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    return run(chunk_gated_delta_rule, *args, **kwargs)


def _recurrent(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    function = (
        chunk_gated_delta_rule if needs_gradients(query) else fused_recurrent_gated_delta_rule
    )
    return run(function, query, *args, **kwargs)


def needs_gradients(query: Tensor) -> bool:
    """Whether a call needs a kernel with a backward."""
    return torch.is_grad_enabled() and query.requires_grad


def run(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cp: Any = None,
    **_: Any,  # what else the model's forward was given: transformers hands all of it on
) -> tuple[Tensor, Tensor | None]:
    """Call one of our delta rules with the arguments of transformers' layers."""
    if cp is not None:
        raise NotImplementedError(
            "cp is given to a model with linear layers, whose convolutions in transformers see own "
            "tokens only: call chunk_kda or chunk_gated_delta_rule with cp, and causal_halo"
        )
    result: tuple[Tensor, Tensor | None] = function(
        *in_autocast(query, key, value),
        g,
        beta=beta,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    return result
