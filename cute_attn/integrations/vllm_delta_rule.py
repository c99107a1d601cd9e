"""What vLLM's layers of Kimi Delta Attention and of the Gated Delta Net have in common on our
kernels; importing this needs vLLM.

vLLM's layer keeps its projections, its convolution of prompts and its norm. What changes is the
recurrence:

    prefill     the operator for chunks reads and writes the states in vLLM's pool: vLLM gathers the
                states of a call, and scatters them afterwards. The operator reads q, k and v of one
                packed convolution.
    decode      the operator for steps, convolution included: one launch
    speculative the same operator, with a slot for each position, and sequences of different lengths

The rows of the block table are the slots, read in place. Block 0, vLLM's null block, is padding.
Nothing that changes from step to step is read on the host, so a step may be captured in a CUDA
graph as vLLM's own may.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

from ..ops.checks import dtype_name
from ..ops.kda import limits

NULL_BLOCK = 0  # vllm.v1.attention.backends.utils.NULL_BLOCK_ID

logger = logging.getLogger(__name__)


def register_layer(name: str, layer: type) -> None:
    """Make vLLM build its layers called `name` as `layer`, unless another plugin replaces them."""
    found = op_registry_oot.get(name)
    if found is layer:
        return
    if found is not None:
        logger.warning("vLLM's %s is %s already: cute_attn leaves it", name, found)
        return
    PluggableLayer.register_oot(layer, name=name)


class DeltaRule:
    """The recurrence of a layer, for a class that derives from this one and from vLLM's layer.

    Attributes:
        chunk: the operator for prompts.
        step: the operator for decoding and for drafts.
        theirs: the module of vLLM's layer.
        kernels: what to call vLLM's kernels in a warning.
        why_not: why the layer has no kernel, or None. A layer of another size or dtype than the
            kernels have runs on vLLM's kernels, with a warning.
    """

    chunk: ClassVar[Callable[..., Any]]
    step: ClassVar[Callable[..., Any]]
    theirs: ClassVar[ModuleType]
    kernels: ClassVar[str]
    why_not: str | None

    # Of vLLM's layers.
    prefix: str
    conv1d: Any
    kv_cache: Any
    model_config: Any
    get_state_dtype: Callable[[], tuple[torch.dtype, ...]]
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.why_not = why_not = self._why_not()
        if why_not:
            logger.warning("%s: %s, so it runs on vLLM's %s", self.prefix, why_not, self.kernels)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, K and V of this process."""
        raise NotImplementedError

    def _why_not(self) -> str | None:
        of_conv, of_state = self.get_state_dtype()[:2]
        for name, dtype, dtypes in (
            ("activations", self.model_config.dtype, limits.DTYPES),
            ("convolution states", of_conv, (str(self.model_config.dtype)[len("torch.") :],)),
            ("states", of_state, limits.STATE_DTYPES),
        ):
            if dtype_name(dtype) not in dtypes:
                return f"the {name} are {dtype}, there are kernels for {dtypes}"
        for name, size, sizes in (
            ("the head_dim of keys", self.sizes[2], limits.HEAD_DIMS["K"]),
            ("the head_dim of values", self.sizes[3], limits.HEAD_DIMS["V"]),
            ("the convolution's width", self.conv1d.weight.shape[-1], (limits.CONV_TAPS,)),
        ):
            if size not in sizes:
                return f"{name} is {size}, there are kernels for {sizes}"
        return None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that each call has."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "state_v_first": True,
            "pad_slot_id": NULL_BLOCK,
        }

    def recur(self, mixed_qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> bool:
        """Write the outputs of the present batch's tokens to `out`; False in a dummy run, which
        only measures memory.

        Args:
            mixed_qkv: `[tokens, channels]`, before the convolution.
            g, beta, out: `[1, tokens, value heads, ...]`, as in the operators.
        """
        of_layers = get_forward_context().attn_metadata
        m = None if of_layers is None else of_layers.get(self.prefix)
        if m is None:
            return False
        tokens = m.num_actual_tokens
        mixed_qkv, g, beta, out = (
            mixed_qkv[:tokens],
            g[:, :tokens],
            beta[:, :tokens],
            out[:, :tokens],
        )
        if m.spec_sequence_masks is None:
            self._recur(m, mixed_qkv, g, beta, out)
        elif not m.num_prefills + m.num_decodes:
            self._verify(m, mixed_qkv, g, beta, out)
        else:
            for indices, run in (
                (m.spec_token_indx, self._verify),
                (m.non_spec_token_indx, self._recur),
            ):
                part = torch.empty_like(out[:, : len(indices)])
                chosen_g, chosen_beta = (x.index_select(1, indices) for x in (g, beta))
                run(m, mixed_qkv.index_select(0, indices), chosen_g, chosen_beta, part)
                out.index_copy_(1, indices, part)
        return True

    def _convolution(self) -> tuple[Tensor, Tensor]:
        """The weights of q, k and v together, and the pool of their last inputs."""
        states = self.kv_cache[0]
        if not self.theirs.is_conv_state_dim_first():
            states = states.transpose(-1, -2)
        return self.conv1d.weight.squeeze(1), states

    def _heads(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, `[1, tokens, heads, head_dim]`, as views."""
        heads, heads_v, dim, dim_v = self.sizes
        widths = [heads * dim, heads * dim, heads_v * dim_v]
        q, k, v = mixed_qkv.unsqueeze(0).split(widths, dim=-1)
        return (
            q.unflatten(-1, (heads, dim)),
            k.unflatten(-1, (heads, dim)),
            v.unflatten(-1, (heads_v, dim_v)),
        )

    def _step(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **more: Any) -> None:
        weights, states = self._convolution()
        self.step(
            q,
            k,
            v,
            g,
            beta,
            self.kv_cache[1],
            conv_state=states,
            conv_weight=weights,
            conv_bias=self.conv1d.bias,
            **more,
            **self.options,
        )

    def _verify(self, m: Any, mixed_qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """Drafted tokens: the state after each is kept, in the slot of its position."""
        count = m.num_spec_decodes
        self._step(
            *self._heads(mixed_qkv),
            g,
            beta,
            state_indices=m.spec_state_indices_tensor[:count],
            num_accepted_tokens=m.num_accepted_tokens[:count],
            cu_seqlens=m.spec_query_start_loc[: count + 1],
            out=out,
        )

    def _recur(self, m: Any, mixed_qkv: Tensor, g: Tensor, beta: Tensor, out: Tensor) -> None:
        """A batch with prompts, or one token for each sequence."""
        slots = m.non_spec_state_indices_tensor
        if not m.num_prefills:
            tokens = (x[0] for x in (*self._heads(mixed_qkv), g, beta))
            self._step(*tokens, state_indices=slots[: len(mixed_qkv)], out=out[0])
            return
        weights, states = self._convolution()
        mixed_qkv = self.theirs.causal_conv1d_fn(
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
        self.chunk(
            *self._heads(mixed_qkv),
            g,
            beta,
            initial_state=self.kv_cache[1],
            state_indices=slots,
            has_initial_state=m.has_initial_state,
            cu_seqlens=m.non_spec_query_start_loc,
            out=out,
            **self.options,
        )
