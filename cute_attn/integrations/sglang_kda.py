"""KDA in SGLang, on `chunk_kda` and `kda_decode`; importing this needs SGLang.

SGLang's KDA backend keeps its convolution and its pools. The recurrence of each mode of a batch is
a method of a kernel class, here `CuteKDAKernel`:

    extend          `chunk_kda`, with the states in SGLang's pool
    packed_decode   `kda_decode`, on q, k and v in the convolution's output
    target_verify   `kda_decode`, with SGLang's tensor for the states after drafted tokens

Padding has a negative index, or slot 0, which SGLang gives to no request. The pool's slots hold 0
for new requests.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear import kda_backend
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from torch import Tensor

from ..ops.kda import chunk_kda, kda_decode, limits

__all__ = ["register"]

PADDING = 0  # the slot that `MambaSlotAllocator` leaves out


def register() -> None:
    """Make SGLang's KDA layers run on `CuteKDAKernel`, in backends made from now on.

    With `CUTE_ATTN_SERVER_KDA=1` in the environment, SGLang calls this function in each of its
    processes. The kernels take the place of `--linear-attn-backend triton`, SGLang's default.
    """
    kda_backend.TritonKDAKernel = CuteKDAKernel


class CuteKDAKernel(TritonKDAKernel):  # type: ignore[misc]
    """SGLang's kernels for KDA. What has no kernel here runs on SGLang's Triton kernels:

    - head dimensions and dtypes without a kernel
    - snapshots of states for the radix cache (`--mamba-radix-cache-strategy extra_buffer`)
    - trees of drafts, and ReplaySSM
    """

    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_fused_chain_verify = False  # a kernel of SGLang's, which would come first

    def packed_decode(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        ssm_states: Tensor,
        cache_indices: Tensor,
        num_v_heads: int,
        head_v_dim: int,
        lower_bound: float | None = None,
        **more: Any,
    ) -> Tensor:
        batch, dim_k = len(mixed_qkv), ssm_states.shape[-1]
        if more.get("replayssm_d") is not None or not _steps(mixed_qkv, ssm_states):
            found: Tensor = super().packed_decode(
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states,
                cache_indices=cache_indices, num_v_heads=num_v_heads, head_v_dim=head_v_dim,
                lower_bound=lower_bound, **more,
            )  # fmt: skip
            return found
        rows_v = num_v_heads * head_v_dim
        rows_k = (mixed_qkv.shape[1] - rows_v) // 2
        q, k, v = mixed_qkv.split([rows_k, rows_k, rows_v], dim=-1)
        o = kda_decode(
            q.unflatten(-1, (-1, dim_k)),
            k.unflatten(-1, (-1, dim_k)),
            v.unflatten(-1, (-1, head_v_dim)),
            a.reshape(batch, num_v_heads, dim_k),
            b.reshape(batch, num_v_heads),
            ssm_states,
            scale=scale,
            A_log=A_log,
            dt_bias=dt_bias.reshape(-1),
            lower_bound=lower_bound,
            state_indices=cache_indices,
            pad_slot_id=PADDING,
            out=mixed_qkv.new_empty(batch, num_v_heads, head_v_dim),
        )
        return o.unsqueeze(0)

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        lower_bound: float | None = None,
        **more: Any,
    ) -> Tensor:
        """Decode where q, k and v are not packed. Every sequence has one token."""
        if not _steps(q, ssm_states):
            found: Tensor = super().decode(
                q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states,
                cache_indices=cache_indices, query_start_loc=query_start_loc,
                lower_bound=lower_bound, **more,
            )  # fmt: skip
            return found
        tokens, heads = v.shape[1:3]
        o = kda_decode(
            q[0],
            k[0],
            v[0],
            a.reshape(tokens, heads, -1),
            b.reshape(tokens, heads),
            ssm_states,
            A_log=A_log,
            dt_bias=dt_bias.reshape(-1),
            lower_bound=lower_bound,
            state_indices=cache_indices,
            pad_slot_id=PADDING,
            out=torch.empty(v.shape[1:], dtype=v.dtype, device=v.device),
        )
        return o.unsqueeze(0)

    def target_verify(
        self,
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        intermediate_states_buffer: Tensor | None,
        intermediate_state_indices: Tensor,
        cache_steps: int,
        retrieve_parent_token: Tensor | None,
        lower_bound: float | None = None,
        **more: Any,
    ) -> Tensor:
        """Verify chains of drafts. The pool keeps its states, and SGLang commits accepted ones."""
        drafts = intermediate_states_buffer
        if (
            retrieve_parent_token is not None
            or more.get("cache_ring")
            or drafts is None
            or drafts.dtype != ssm_states.dtype
            or not _steps(q, ssm_states)
        ):
            found: Tensor = super().target_verify(
                A_log, dt_bias, q, k, v, a, b, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, intermediate_states_buffer=drafts,
                intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
                retrieve_parent_token=retrieve_parent_token, lower_bound=lower_bound, **more,
            )  # fmt: skip
            return found
        tokens, heads = v.shape[1:3]
        sequences = query_start_loc.shape[0] - 1
        return kda_decode(
            q,
            k,
            v,
            a.reshape(1, tokens, heads, -1),
            b.reshape(1, tokens, heads),
            ssm_states,
            A_log=A_log,
            dt_bias=dt_bias.reshape(-1),
            lower_bound=lower_bound,
            state_indices=cache_indices[:sequences],
            pad_slot_id=PADDING,
            cu_seqlens=query_start_loc,
            draft_states=drafts,
            draft_indices=intermediate_state_indices[:sequences],
            out=torch.empty(v.shape, dtype=v.dtype, device=v.device),
        )

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
            or not _chunks(q, v, ssm_states)
        ):
            return super().extend(
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, A_log=A_log, dt_bias=dt_bias,
                lower_bound=lower_bound, beta_is_raw=beta_is_raw,
                return_intermediate_states=return_intermediate_states, **more,
            )  # fmt: skip
        tokens = q.shape[1]  # g and beta may have rows of padding
        o: Tensor = chunk_kda(
            q,
            k,
            v,
            g[:, :tokens],
            beta[:, :tokens],
            initial_state=ssm_states,
            state_indices=cache_indices,
            pad_slot_id=PADDING,
            cu_seqlens=query_start_loc,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=A_log is not None,
            use_beta_sigmoid_in_kernel=beta_is_raw,
            state_v_first=True,
        )[0]
        return o


def _steps(x: Tensor, states: Tensor) -> bool:
    """Whether `kda_decode` has a kernel for tokens like x and states `[slots, HV, V, K]`."""
    return (
        _name(x) in limits.STEP_DTYPES
        and _name(states) in limits.STEP_STATE_DTYPES
        and set(states.shape[-2:]) <= set(limits.STEP_HEAD_DIMS["K"])
    )


def _chunks(q: Tensor, v: Tensor, states: Tensor) -> bool:
    """Whether `chunk_kda` has a kernel for these tensors."""
    return (
        _name(q) in limits.DTYPES
        and _name(states) in limits.STATE_DTYPES
        and q.shape[-1] in limits.HEAD_DIMS["K"]
        and v.shape[-1] in limits.HEAD_DIMS["V"]
    )


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
