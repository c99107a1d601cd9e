"""Kimi Linear's layers in vLLM, on `chunk_kda` and `kda_decode`; importing this needs vLLM.

vLLM's layer keeps its projections, its convolution and its norm. What changes is the recurrence:

    prefill     `chunk_kda` reads and writes the states in vLLM's pool: vLLM gathers the states of a
                call, and scatters them afterwards. It reads q, k and v of one packed convolution.
    decode      `kda_decode`
    speculative `kda_decode` with a slot for each position, and sequences of different lengths

The rows of the block table are the slots, read in place. Block 0, vLLM's null block, is padding.
Nothing that changes from step to step is read on the host, so a step may be captured in a CUDA
graph as vLLM's own may.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as theirs

from ..ops.kda import chunk_kda, kda_decode, limits

__all__ = ["register"]

NAME = "KimiGatedDeltaNetAttention"
NULL_BLOCK = 0  # vllm.v1.attention.backends.utils.NULL_BLOCK_ID

logger = logging.getLogger(__name__)


def register() -> None:
    """Make vLLM build Kimi Linear's layers as `CuteKimiDeltaAttention`, from the next model on.

    With `CUTE_ATTN_SERVER_KDA=1` in the environment, vLLM calls this function in each of its
    processes. If another plugin has replaced the layer, the other layer stays, with a warning.
    """
    found = op_registry_oot.get(NAME)
    if found is CuteKimiDeltaAttention:
        return
    if found is not None:
        logger.warning("vLLM's %s is %s already: cute_attn leaves it", NAME, found)
        return
    PluggableLayer.register_oot(CuteKimiDeltaAttention, name=NAME)


class CuteKimiDeltaAttention(theirs.KimiGatedDeltaNetAttention):  # type: ignore[misc]
    """vLLM's layer, whose recurrence runs on this package's kernels.

    A layer of another size or dtype than the kernels have runs on vLLM's, with a warning.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.why_not = self._why_not()
        if self.why_not:
            logger.warning("%s: %s, so it runs on vLLM's KDA kernels", self.prefix, self.why_not)

    def _why_not(self) -> str | None:
        """Why the layer has no kernel, or None."""
        of_conv, of_state = self.get_state_dtype()
        for name, dtype, allowed in (
            ("activations", self.model_config.dtype, limits.DTYPES),
            ("convolution states", of_conv, limits.DTYPES),
            ("states", of_state, limits.STATE_DTYPES),
        ):
            if str(dtype).removeprefix("torch.") not in allowed:
                return f"the {name} are {dtype}, there are kernels for {allowed}"
        if self.head_dim not in limits.HEAD_DIMS["K"]:
            return f"head_dim is {self.head_dim}, there are kernels for {limits.HEAD_DIMS['K']}"
        return None

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        if self.why_not:
            super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)
            return
        of_layers = get_forward_context().attn_metadata
        m = None if of_layers is None else of_layers.get(self.prefix)
        if m is None:  # a dummy run, which only measures memory
            return
        tokens = m.num_actual_tokens
        mixed_qkv, g1, beta = mixed_qkv[:tokens], g1[:, :tokens], beta[:, :tokens]
        out = core_attn_out[:, :tokens]
        others = m.num_prefills + m.num_decodes
        if m.spec_sequence_masks is None:
            self._recur(m, mixed_qkv, g1, beta, out)
        elif not others:
            self._verify(m, mixed_qkv, g1, beta, out)
        else:
            for indices, run in (
                (m.spec_token_indx, self._verify),
                (m.non_spec_token_indx, self._recur),
            ):
                part = torch.empty_like(out[:, : len(indices)])
                g, b = (x.index_select(1, indices) for x in (g1, beta))
                run(m, mixed_qkv.index_select(0, indices), g, b, part)
                out.index_copy_(1, indices, part)
        core_attn_out.copy_(self.o_norm(core_attn_out, g2))

    def _conv(self) -> tuple[Tensor, Tensor]:
        """The weights of q, k and v together, and the pool of their last inputs."""
        states = self.kv_cache[0]
        if not theirs.is_conv_state_dim_first():
            states = states.transpose(-1, -2)
        return self.conv1d.weight.squeeze(1), states

    def _heads(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, `[1, tokens, heads, head_dim]`, as views of the convolution's output."""
        shape = (1, len(mixed_qkv), 3, self.local_num_heads, self.head_dim)
        q, k, v = mixed_qkv.view(shape).unbind(2)
        return q, k, v

    @property
    def _of_gate(self) -> dict[str, Any]:
        """The arguments that each call has."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.gate_lower_bound,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "state_v_first": True,
            "pad_slot_id": NULL_BLOCK,
        }

    def _verify(self, m: Any, mixed_qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """Drafted tokens: the state after each is kept, in the slot of its position."""
        weights, states = self._conv()
        count = m.num_spec_decodes
        slots = m.spec_state_indices_tensor[:count]
        accepted = m.num_accepted_tokens[:count]
        offsets = m.spec_query_start_loc[: count + 1]
        mixed_qkv = theirs.causal_conv1d_update(
            mixed_qkv,
            states,
            weights,
            self.conv1d.bias,
            activation="silu",
            conv_state_indices=slots[:, 0],
            num_accepted_tokens=accepted,
            query_start_loc=offsets,
            max_query_len=slots.shape[1],
            validate_data=False,
            out=torch.empty(mixed_qkv.shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device),
        )
        kda_decode(
            *self._heads(mixed_qkv),
            g,
            beta,
            self.kv_cache[1],
            state_indices=slots,
            num_accepted_tokens=accepted,
            cu_seqlens=offsets,
            out=out,
            **self._of_gate,
        )

    def _recur(self, m: Any, mixed_qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """A batch with prompts, or one token for each sequence."""
        weights, states = self._conv()
        slots = m.non_spec_state_indices_tensor
        if m.num_prefills:
            mixed_qkv = theirs.causal_conv1d_fn(
                mixed_qkv.transpose(0, 1),
                weights,
                self.conv1d.bias,
                activation="silu",
                conv_states=states,
                has_initial_state=m.has_initial_state,
                cache_indices=slots,
                query_start_loc=m.non_spec_query_start_loc,
                metadata=m,
            ).transpose(0, 1)
            chunk_kda(
                *self._heads(mixed_qkv),
                g,
                beta,
                initial_state=self.kv_cache[1],
                state_indices=slots,
                has_initial_state=m.has_initial_state,
                cu_seqlens=m.non_spec_query_start_loc,
                out=out,
                **self._of_gate,
            )
            return
        slots = slots[: len(mixed_qkv)]
        mixed_qkv = theirs.causal_conv1d_update(
            mixed_qkv,
            states,
            weights,
            self.conv1d.bias,
            activation="silu",
            conv_state_indices=slots,
            validate_data=True,
            out=torch.empty(mixed_qkv.shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device),
        )
        q, k, v = self._heads(mixed_qkv)
        kda_decode(
            q[0],
            k[0],
            v[0],
            g[0],
            beta[0],
            self.kv_cache[1],
            state_indices=slots,
            out=out[0],
            **self._of_gate,
        )
