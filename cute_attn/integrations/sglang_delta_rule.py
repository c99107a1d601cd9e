"""What SGLang's kernels of Kimi Delta Attention and of the Gated Delta Net have in common on our
kernels; importing this needs SGLang.

SGLang's backends keep their convolution and their pools. The recurrence of each mode of a batch is
a method of a kernel class:

    extend          the operator for chunks, with the states in SGLang's pool
    packed_decode   the operator for steps, on q, k and v in the convolution's output
    target_verify   the operator for steps, with SGLang's tensor for the states after drafted tokens

Padding has a negative index, or slot 0, which SGLang gives to no request. The pool's slots hold 0
for new requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.checks import dtype_name
from ..ops.kda import limits

PADDING = 0  # the slot that `MambaSlotAllocator` leaves out


class DeltaRule:
    """The recurrence, for a class that derives from this one and from SGLang's Triton kernels. What
    has no kernel here runs on SGLang's.

    Attributes:
        chunk: the operator for prompts.
        step: the operator for decoding and for drafts.
    """

    chunk: ClassVar[Callable[..., Any]]
    step: ClassVar[Callable[..., Any]]

    @staticmethod
    def gate(a: Tensor, rows: torch.Size) -> Tensor:
        """A gate's input in the operators' shape, for the value heads of tokens, `rows`."""
        raise NotImplementedError

    supports_packed_decode = True

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
        if more.get("replayssm_d") is not None or not has_steps(mixed_qkv, ssm_states):
            found: Tensor = super().packed_decode(  # type: ignore[misc]
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states,
                cache_indices=cache_indices, num_v_heads=num_v_heads, head_v_dim=head_v_dim,
                lower_bound=lower_bound, **more,
            )  # fmt: skip
            return found
        dim_k, rows_v = ssm_states.shape[-1], num_v_heads * head_v_dim
        rows_k = (mixed_qkv.shape[1] - rows_v) // 2
        q, k, v = mixed_qkv.split([rows_k, rows_k, rows_v], dim=-1)
        return self.steps(
            q.unflatten(-1, (-1, dim_k)), k.unflatten(-1, (-1, dim_k)),
            v.unflatten(-1, (-1, head_v_dim)), a, b, A_log=A_log, dt_bias=dt_bias,
            ssm_states=ssm_states, cache_indices=cache_indices, lower_bound=lower_bound,
            scale=scale,
        ).unsqueeze(0)  # fmt: skip

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
        if not has_steps(q, ssm_states):
            found: Tensor = super().decode(  # type: ignore[misc]
                q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states,
                cache_indices=cache_indices, query_start_loc=query_start_loc,
                lower_bound=lower_bound, **more,
            )  # fmt: skip
            return found
        return self.steps(
            q[0], k[0], v[0], a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states,
            cache_indices=cache_indices, lower_bound=lower_bound,
        ).unsqueeze(0)  # fmt: skip

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
            or not has_steps(q, ssm_states)
        ):
            found: Tensor = super().target_verify(  # type: ignore[misc]
                A_log, dt_bias, q, k, v, a, b, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, intermediate_states_buffer=drafts,
                intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
                retrieve_parent_token=retrieve_parent_token, lower_bound=lower_bound, **more,
            )  # fmt: skip
            return found
        sequences = query_start_loc.shape[0] - 1
        return self.steps(
            q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=ssm_states,
            cache_indices=cache_indices[:sequences], lower_bound=lower_bound,
            cu_seqlens=query_start_loc, draft_states=drafts,
            draft_indices=intermediate_state_indices[:sequences],
        )  # fmt: skip

    def steps(
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
        **more: Any,
    ) -> Tensor:
        """The outputs of tokens, `[..., value heads, V]` as `v`, by the operator for steps."""
        rows = v.shape[:-1]
        o: Tensor = self.step(
            q,
            k,
            v,
            self.gate(a, rows),
            b.reshape(rows),
            ssm_states,
            A_log=A_log,
            dt_bias=dt_bias.reshape(-1),
            state_indices=cache_indices,
            pad_slot_id=PADDING,
            out=torch.empty(v.shape, dtype=v.dtype, device=v.device),
            **more,
        )
        return o

    def chunks(
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
        **more: Any,
    ) -> Tensor:
        """The outputs of prompts, by the operator for chunks."""
        tokens = q.shape[1]  # g and beta may have rows of padding
        o: Tensor = self.chunk(
            q,
            k,
            v,
            g[:, :tokens],
            beta[:, :tokens],
            initial_state=ssm_states,
            state_indices=cache_indices,
            cu_seqlens=query_start_loc,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
            **more,
        )[0]
        return o


def has_steps(x: Tensor, states: Tensor) -> bool:
    """Whether the operators for steps have a kernel for tokens like x and states
    `[slots, HV, V, K]`."""
    return (
        dtype_name(x.dtype) in limits.STEP_DTYPES
        and dtype_name(states.dtype) in limits.STEP_STATE_DTYPES
        and states.shape[-1] in limits.STEP_HEAD_DIMS["K"]
        and states.shape[-2] in limits.STEP_HEAD_DIMS["V"]
    )


def has_chunks(q: Tensor, v: Tensor, states: Tensor) -> bool:
    """Whether the operators for chunks have a kernel for these tensors."""
    return (
        dtype_name(q.dtype) in limits.DTYPES
        and dtype_name(states.dtype) in limits.STATE_DTYPES
        and q.shape[-1] in limits.HEAD_DIMS["K"]
        and v.shape[-1] in limits.HEAD_DIMS["V"]
    )
