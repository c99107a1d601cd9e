"""The backend of latent attention (MLA) that `sglang.register` names to SGLang. Importing this
module needs SGLang.

SGLang multiplies by W_UK and W_UV, and keeps a token's latent vector and rotated key in a pool of
slots. In each layer, a step of decode or of verification is one call of `mla_decode`, which reads
the pool in place. A pool in float8_e4m3fn holds rounded vectors. SGLang's pool does not divide the
vectors by a checkpoint's factor (`k_scale`), so no factor multiplies them here. Prompts run in the
expanded form: SGLang gathers and expands a cached prefix in parts. `flash_attn_varlen_func`
computes o and lse of each part, and SGLang merges the parts.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.runtime_context import get_schedule, get_spec
from torch import Tensor

from ..ops.attention import flash_attn_varlen_func
from ..ops.attention.support import forward_head_dims
from ..ops.mla import MOST_HEADS, MOST_QUERIES, SHAPES, mla_decode
from .sglang import NAME
from .sglang_backend import (
    CHAINS,
    CuteAttnBackend,
    CuteAttnMetadata,
    check_options,
    has_trees,
    layers_of,
    missing_for_layer,
    missing_for_server,
    raise_for,
)


def forward_method(layer: Any, forward_batch: Any) -> AttnForwardMethod:
    """The form in which a layer computes a step: expanded for prompts, otherwise absorbed."""
    if forward_batch.forward_mode.is_extend_without_speculative():
        return AttnForwardMethod.MHA_CHUNKED_KV
    return AttnForwardMethod.MLA


# SGLang's layers look up the form by the backend's name. The second table says that the rotated
# part of q is a separate argument.
AttentionBackendRegistry.register(NAME, forward_method)
if NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
    FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)


class CuteAttnMLABackend(CuteAttnBackend):
    """Latent attention of all layers of a model that SGLang runs.

    Raises:
        NotImplementedError: the model, a layer or an option of the server has no kernel.
    """

    def refuse(self, runner: Any) -> None:
        raise_for(missing(runner))

    def described(
        self, forward_batch: Any, metadata: CuteAttnMetadata, tokens: int | None = None
    ) -> CuteAttnMetadata:
        found = super().described(forward_batch, metadata, tokens)
        if found.max_seqlen_q > 1 and tokens is not None and not found.drafts:
            raise NotImplementedError(
                f"{NAME} has no CUDA graph of prefill with MLA: --disable-prefill-cuda-graph"
            )
        return found

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """The attention of a step.

        In the absorbed form `q` is `[tokens, heads, kv_lora_rank]`, and `q_rope` has the rotated
        columns. In the expanded form `q_rope` is None, `q`, `k` and `v` have all heads, and the
        latent vectors are already in the pool. If SGLang asks for lse, the expanded form returns a
        pair of o and lse, `[tokens, heads]`.
        """
        check_options(others)
        if q_rope is None:
            return self.expanded(q, k, v, layer, forward_batch)
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch)
            self.pool.set_mla_kv_buffer(layer, where, k, k_rope)
        return self.absorbed(q, q_rope, layer)

    forward_decode = forward_extend

    def absorbed(self, q: Tensor, q_rope: Tensor, layer: Any) -> Tensor:
        """The attention of absorbed queries over the pool."""
        x = self.forward_metadata
        assert x is not None, "init_forward_metadata comes before a layer's attention"
        heads, requests = layer.tp_q_head_num, len(x.seqused_k)
        q, q_rope = (part.view(len(part), heads, -1) for part in (q, q_rope))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if x.unused_rows:  # the next layer's keys must be finite
            out.zero_()
        q_nope, q_rope, o = (
            part[: requests * x.max_seqlen_q].view(requests, x.max_seqlen_q, heads, -1)
            for part in (q, q_rope, out)
        )
        cache = self.pool.get_key_buffer(layer.layer_id)
        mla_decode(
            q_nope,
            q_rope if q_rope.shape[-1] else None,
            cache.view(-1, self.page_size, cache.shape[-1]),
            block_table=x.page_table,
            cache_seqlens=x.seqused_k,
            softmax_scale=layer.scaling,
            causal=True,
            out=o,
            head_dim_v=layer.v_head_dim,
        )
        return out.flatten(1)

    def expanded(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any
    ) -> Any:
        """The attention of a prompt's tokens to each other, or to a part of the cached prefix."""
        x = self.forward_metadata
        assert x is not None and k is not None and v is not None
        of_prefix = bool(forward_batch.attn_attend_prefix_cache)
        starts_k, longest_k = x.cu_seqlens_q, x.max_seqlen_q
        if of_prefix:
            part = forward_batch.prefix_chunk_idx
            starts_k = forward_batch.prefix_chunk_cu_seq_lens[part]
            longest_k = int(forward_batch.prefix_chunk_max_seq_lens[part])
        with_lse = bool(forward_batch.mha_return_lse)
        out, lse = flash_attn_varlen_func(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim),
            cu_seqlens_q=x.cu_seqlens_q,
            cu_seqlens_k=starts_k,
            max_seqlen_q=x.max_seqlen_q,
            max_seqlen_k=longest_k,
            softmax_scale=layer.scaling,
            causal=not of_prefix,
            num_splits=0,
            return_lse=with_lse,
        )
        if lse is None:
            return out.flatten(1)
        return out, lse.T.contiguous()


def missing(runner: Any) -> list[str]:
    """The features of the model and the server's options that have no kernel."""
    config = runner.model_config
    drafts = get_spec().speculative_num_draft_tokens or 0
    cases = {
        "a latent cache in float8_e5m2 (--kv-cache-dtype fp8_e4m3)": (
            runner.kv_cache_dtype == torch.float8_e5m2
        ),
        "sparse attention (DeepSeek V3.2)": is_deepseek_dsa(config.hf_config),
        "MLA with --disable-chunked-prefix-cache": get_schedule().disable_chunked_prefix_cache,
        "MLA with --enable-deterministic-inference": (
            runner.server_args.enable_deterministic_inference
        ),
        f"{drafts} draft tokens of a request, at most {MOST_QUERIES}": drafts > MOST_QUERIES,
        f"trees of draft tokens with MLA {CHAINS}": has_trees(),
        "CUDA graphs of prefill with MLA (--disable-prefill-cuda-graph)": not (
            check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED)
        ),
    }
    found = [what for what, given in cases.items() if given] + missing_for_server(runner)
    dims = forward_head_dims(runner.req_to_token_pool.req_to_token.device)
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    # Triton's backend divides what it writes by a layer's k_scale; SGLang's pool does not.
    fp8 = runner.kv_cache_dtype == torch.float8_e4m3fn
    backends = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
    for layer in layers_of(runner):
        absorbed = layer.tp_k_head_num == 1 and layer.qk_head_dim == latent
        found += missing_for_layer(layer, SHAPES if absorbed else dims)
        if absorbed and layer.tp_q_head_num > MOST_HEADS:
            found.append(f"{layer.tp_q_head_num} heads of MLA on a GPU, at most {MOST_HEADS}")
        scaled = fp8 and layer.k_scale_float not in (None, 1.0)
        if absorbed and scaled and len(backends) > 1:
            found.append("fp8 latents with a factor, k_scale, in two backends (one for all modes)")
    return found
