"""What SGLang's kernels of Kimi Delta Attention and of the Gated Delta Net have in common on our
kernels; importing this needs SGLang.

SGLang's backends keep their pools, and the convolution of prompts and drafts. A backend's decode
step is one launch, convolution included (`DecodeBackend`). The recurrence of each mode of a batch
is a method of a kernel class (`DeltaRule`):

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
        return self.steps(
            *heads_of(mixed_qkv, ssm_states), a, b, A_log=A_log, dt_bias=dt_bias,
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


class DecodeBackend:
    """A decode step in one launch, for a class that derives from this one and from SGLang's
    backend. Where the kernel has no such launch, SGLang's backend runs its convolution, and then
    the kernel."""

    # Of SGLang's backends.
    kernel_dispatcher: Any
    req_to_token_pool: Any
    forward_metadata: Any
    _track_mamba_state_decode: Callable[..., None]

    @staticmethod
    def windows(conv_states: Tensor) -> Tensor:
        """The pool of the convolution's last inputs, `[slots, channels, inputs]`."""
        return conv_states

    def takes(self, layer: Any) -> bool:
        """Whether the layer's convolution ends with a SiLU, and no other fused kernel of SGLang's
        runs the layer's decode step."""
        return layer.activation in ("silu", "swish")

    def forward_decode(
        self,
        layer: Any,
        forward_batch: Any,
        mixed_qkv: Tensor | tuple[Tensor, Tensor],
        a: Tensor,
        b: Tensor,
        **more: Any,
    ) -> Any:
        """Decode, one token a sequence. Of Qwen3.5, mixed_qkv may be the projections: q, k, v and
        z in one tensor, b and a in another. The result then has z, too."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        states, windows = cache.temporal, self.windows(cache.conv[0])
        kernel, z = self.kernel_dispatcher.decode_kernel, None
        rows = mixed_qkv if isinstance(mixed_qkv, Tensor) else mixed_qkv[0]
        if (
            not isinstance(kernel, DeltaRule)
            or cache.replayssm_d is not None
            or not self.takes(layer)
            or not has_steps(rows, states)
            or not has_convolution(layer, rows, windows)
        ):
            return super().forward_decode(  # type: ignore[misc]
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **more
            )
        if not isinstance(mixed_qkv, Tensor):
            rows, z = rows.split([windows.shape[1], layer.v_dim], dim=-1)
            z = z.unflatten(-1, (-1, layer.head_v_dim))
            b, a = mixed_qkv[1].chunk(2, dim=-1)
        indices = self.forward_metadata.mamba_cache_indices
        o = kernel.steps(
            *heads_of(rows, states), a, b, A_log=layer.A_log, dt_bias=layer.dt_bias,
            ssm_states=states, cache_indices=indices, lower_bound=layer.lower_bound,
            conv_state=windows, conv_weight=layer.conv_weights, conv_bias=layer.bias,
        ).unsqueeze(0)  # fmt: skip
        self._track_mamba_state_decode(
            forward_batch, cache.conv[0], states, indices, layer.layer_id
        )
        return o if z is None else (o, z)


def heads_of(mixed_qkv: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, `[tokens, heads, head_dim]`, as views of rows of all three. The sizes are those
    of the states, `[slots, HV, V, K]`."""
    heads_v, dim_v, dim_k = states.shape[1:]
    rows_k = (mixed_qkv.shape[1] - heads_v * dim_v) // 2
    q, k, v = mixed_qkv.split([rows_k, rows_k, heads_v * dim_v], dim=-1)
    q, k = (x.unflatten(-1, (-1, dim_k)) for x in (q, k))
    return q, k, v.unflatten(-1, (-1, dim_v))


def has_convolution(layer: Any, x: Tensor, windows: Tensor) -> bool:
    """Whether the operators for steps have the layer's convolution of tokens like x."""
    weight, bias = layer.conv_weights, layer.bias
    return (
        isinstance(weight, Tensor)
        and weight.is_contiguous()
        and weight.shape == (windows.shape[1], limits.CONV_TAPS)
        and windows.shape[2] == limits.CONV_TAPS - 1
        and windows.dtype == x.dtype
        and dtype_name(weight.dtype) in limits.STEP_DTYPES
        and (bias is None or (isinstance(bias, Tensor) and bias.dtype == weight.dtype))
    )


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
