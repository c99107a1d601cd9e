"""KDA in SGLang, on `chunk_kda` and `kda_decode`; importing this needs SGLang.

`sglang_delta_rule` has what KDA shares with the Gated Delta Net.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear import kda_backend
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from torch import Tensor

from ..ops.kda import chunk_kda, kda_decode
from .sglang_delta_rule import PADDING, DecodeBackend, DeltaRule, has_chunks

__all__ = ["register"]


def register() -> None:
    """Make SGLang's KDA layers run on `CuteKDAKernel`, in backends made from now on.

    With `CUTE_ATTN_SERVER_KDA=1` in the environment, SGLang calls this function in each of its
    processes. The kernels take the place of `--linear-attn-backend triton`, SGLang's default. A
    decode step is one launch, convolution included (`CuteKDABackend`).
    """
    kda_backend.TritonKDAKernel = CuteKDAKernel
    kda_backend.KDAAttnBackend = CuteKDABackend


class CuteKDAKernel(DeltaRule, TritonKDAKernel):  # type: ignore[misc]
    """SGLang's kernels for KDA. What has no kernel here runs on SGLang's Triton kernels:

    - head dimensions and dtypes without a kernel
    - snapshots of states for the radix cache (`--mamba-radix-cache-strategy extra_buffer`)
    - trees of drafts, and ReplaySSM
    """

    supports_packed_decode_safe_gate = True
    supports_fused_chain_verify = False  # a kernel of SGLang's, which would come first
    chunk = staticmethod(chunk_kda)
    step = staticmethod(kda_decode)

    @staticmethod
    def gate(a: Tensor, rows: torch.Size) -> Tensor:
        return a.reshape(*rows, -1)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        beta_is_raw: bool = False,
        return_intermediate_states: bool = False,
        **more: Any,
    ) -> Any:
        if (
            return_intermediate_states
            or more.get("track_state") is not None
            or not has_chunks(q, v, ssm_states)
        ):
            return super().extend(
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, beta_is_raw=beta_is_raw,
                return_intermediate_states=return_intermediate_states, **more,
            )  # fmt: skip
        return self.chunks(
            q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
            query_start_loc=query_start_loc, pad_slot_id=PADDING, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, use_gate_in_kernel=A_log is not None,
            use_beta_sigmoid_in_kernel=beta_is_raw,
        )  # fmt: skip


class CuteKDABackend(DecodeBackend, kda_backend.KDAAttnBackend):  # type: ignore[misc]
    """SGLang's backend, with a decode step in one launch. Kimi K3 keeps SGLang's fused kernels,
    which also have the layer's norm."""

    @staticmethod
    def windows(conv_states: Tensor) -> Tensor:
        return conv_states.transpose(-1, -2)

    def takes(self, layer: Any) -> bool:  # SGLang's backend has a SiLU for every layer
        names = ("_k3_deferred_f_b", "_k3_fused_decode_args", "_k3_hip_fused_decode_args")
        return not any(getattr(layer, name, None) for name in names)
