"""Qwen3-Next's and Qwen3.5's linear layers in vLLM, on `chunk_gated_delta_rule` and
`gated_delta_rule_decode`; importing this needs vLLM.

`vllm_delta_rule` has what these layers share with Kimi Linear's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

from ..ops.gated_delta_rule import chunk_gated_delta_rule, gated_delta_rule_decode
from .vllm_delta_rule import DeltaRule, register_layer

__all__ = ["register"]

NAME = "QwenGatedDeltaNetAttention"


def register() -> None:
    """Make vLLM build the linear layers of Qwen3-Next and Qwen3.5 as `CuteGatedDeltaNet`, from the
    next model on.

    With `CUTE_ATTN_SERVER_GDN=1` in the environment, vLLM calls this function in each of its
    processes. If another plugin has replaced the layer, the other layer stays, with a warning.
    """
    register_layer(NAME, CuteGatedDeltaNet)


class CuteGatedDeltaNet(
    DeltaRule,
    qwen_gdn_linear_attn.QwenGatedDeltaNetAttention,  # type: ignore[misc]
):
    """vLLM's layer, whose recurrence runs on this package's kernels."""

    theirs = qwen_gdn_linear_attn
    chunk = staticmethod(chunk_gated_delta_rule)
    step = staticmethod(gated_delta_rule_decode)
    kernels = "kernels for the Gated Delta Net"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.why_not:
            # Verification of drafts goes through `_forward_core` then, not through vLLM's kernel.
            self.enable_fused_gdn_spec_decode = False
            # The scheduler ends prefills where prefixes are cached: no call returns states within.
            self._checkpoint_alignment = None

    def _why_not(self) -> str | None:
        if self.activation != "silu":
            return f"the convolution's activation is {self.activation}, there are kernels for silu"
        return super()._why_not()

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads, heads_v = self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size
        return heads, heads_v, self.head_k_dim, self.head_v_dim

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        if self.why_not:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
        else:
            self.recur(mixed_qkv, a.unsqueeze(0), b.unsqueeze(0), core_attn_out.unsqueeze(0))
