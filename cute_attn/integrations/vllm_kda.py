"""Kimi Linear's layers in vLLM, on `chunk_kda` and `kda_decode`; importing this needs vLLM.

`vllm_delta_rule` has what these layers share with Qwen3-Next's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn

from ..ops.kda import chunk_kda, kda_decode
from .vllm_delta_rule import DeltaRule, register_layer

__all__ = ["register"]

NAME = "KimiGatedDeltaNetAttention"


def register() -> None:
    """Make vLLM build Kimi Linear's layers as `CuteKimiDeltaAttention`, from the next model on.

    With `CUTE_ATTN_SERVER_KDA=1` in the environment, vLLM calls this function in each of its
    processes. If another plugin has replaced the layer, the other layer stays, with a warning.
    """
    register_layer(NAME, CuteKimiDeltaAttention)


class CuteKimiDeltaAttention(
    DeltaRule,
    kimi_gdn_linear_attn.KimiGatedDeltaNetAttention,  # type: ignore[misc]
):
    """vLLM's layer, whose recurrence runs on this package's kernels."""

    theirs = kimi_gdn_linear_attn
    chunk = staticmethod(chunk_kda)
    step = staticmethod(kda_decode)
    kernels = "KDA kernels"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.local_num_heads, self.local_num_heads, self.head_dim, self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"lower_bound": self.gate_lower_bound}

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        if self.why_not:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)
        elif self.recur(mixed_qkv, g1, beta, core_attn_out):
            core_attn_out.copy_(self.o_norm(core_attn_out, g2))
