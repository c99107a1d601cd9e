"""The backends of latent attention (MLA) that `vllm.register` names to vLLM. Importing this module
needs vLLM.

vLLM multiplies by W_UK and W_UV, and keeps a token's latent vector and rotated key in a cache
`[num_blocks, block_size, head_size]`. In each layer, a step of decode is one call of `mla_decode`,
which reads the cache in place. Prompts run in the expanded form: vLLM gathers and expands a
request's earlier tokens in parts. `flash_attn_varlen_func` computes o and lse of each part, and
vLLM merges the parts by lse.

Between two steps of decode, only tensors change that the device reads. So a CUDA graph of a batch
may be replayed for any batch of the same size.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ..ops.attention import flash_attn_varlen_func
from ..ops.attention.support import head_dims_by_major
from ..ops.checks import dtype_name
from ..ops.mla import MOST_HEADS, MOST_QUERIES, SHAPES, mla_decode
from .vllm import MLA_NAME, NAME
from .vllm_backend import write_to_slots

MAJOR = 9  # the major compute capability that has kernels for latent caches
DTYPES = (torch.bfloat16, torch.float16)
FP8 = ("fp8", "fp8_e4m3")  # kv_cache_dtype of caches in float8_e4m3fn
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", *FP8)


def why_not_prefill(qk_head_dim: int, v_head_dim: int) -> str | None:
    """Why prompts with these head dimensions have no kernel on Hopper, or None."""
    pairs = head_dims_by_major()[MAJOR]
    if (qk_head_dim, v_head_dim) in pairs:
        return None
    return (
        f"{NAME} has no prefill with head_dim {qk_head_dim} (of v: {v_head_dim}), there are (of q "
        f"and k, of v): {list(pairs)}"
    )


class CuteAttnMLABackend(MLACommonBackend):  # type: ignore[misc]
    """The properties that vLLM asks for before it chooses a backend."""

    accept_output_buffer: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[CuteAttnMLAImpl]:
        return CuteAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CuteAttnMLAMetadataBuilder]:
        return CuteAttnMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [head_dim for head_dim, _ in SHAPES]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """False: the batch decides how vLLM's scheduler cuts a prompt into parts, and each merge of
        parts rounds."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == MAJOR)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        """Why the combination has no kernel, or None."""
        if kv_cache_dtype in (None, "auto", dtype_name(dtype), *FP8):
            return None
        return f"a latent cache of {kv_cache_dtype} beside a model of {dtype} has no kernel"


class CuteAttnMLAMetadataBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """The metadata of a step. Requests with at most `reorder_batch_threshold` new tokens, all with
    equally many, decode. The other requests are prompts."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM
    reorder_batch_threshold: int = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        # vLLM has already made a prefill backend for each layer. If the user named no backend, our
        # prefill replaces it, with the same arguments.
        if vllm_config.attention_config.mla_prefill_backend is None:
            layers = vllm_config.compilation_config.static_forward_context
            for name in layer_names:
                layers[name].prefill_backend = prefill_like(layers[name].prefill_backend)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata)
        if self.reorder_batch_threshold > MOST_QUERIES:
            raise NotImplementedError(
                f"{MLA_NAME} verifies at most {MOST_QUERIES - 1} draft tokens of a request, got "
                f"num_speculative_tokens = {self.reorder_batch_threshold - 1}"
            )


class CuteAttnMLAImpl(MLACommonImpl):  # type: ignore[misc]
    """The attention of a layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *of_mla: Any,
        **named_of_mla: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            *of_mla,
            **named_of_mla,
        )
        config = get_current_vllm_config()
        shape = head_size, self.kv_lora_rank
        # With decode context parallelism, decode has the heads of all ranks of the group.
        all_heads = num_heads * self.dcp_world_size
        cases = {
            f"tokens of {head_size} columns with a latent vector of {self.kv_lora_rank}, only of "
            f"(columns, latent vector): {list(SHAPES)}": shape not in SHAPES,
            f"{all_heads} heads, only up to {MOST_HEADS}": all_heads > MOST_HEADS,
            "ALiBi (alibi_slopes)": alibi_slopes is not None,
            "sliding windows of a latent cache": sliding_window is not None,
            "softcap (logits_soft_cap)": bool(logits_soft_cap),
            f"a latent cache of {kv_cache_dtype}": kv_cache_dtype not in KV_CACHE_DTYPES,
            f"attention of type {attn_type}, decoders only": attn_type != AttentionType.DECODER,
            "an indexer (sparse attention)": self.indexer is not None,
        }
        missing = [f"{MLA_NAME} has no {what}" for what, given in cases.items() if given]
        if config.attention_config.mla_prefill_backend is None:
            without = why_not_prefill(self.qk_head_dim, self.v_head_dim)
            if without:
                missing.append(f"{without}: name vLLM's prefill in mla_prefill_backend")
        if missing:
            raise NotImplementedError("; ".join(missing))
        self.supports_quant_query_input = False

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of absorbed queries over the cache.

        `q` is `[tokens, heads, head_size]`, or a pair of the latent and the rotated columns. The
        result is `[tokens, heads, kv_lora_rank]`, with lse `[tokens, heads]` if vLLM combines the
        results of several ranks. Each rank's cache then has a part of a request's tokens, and a
        request has one query, so that no token is masked.
        """
        parts = (
            q if isinstance(q, tuple) else q.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        )
        requests, decode = attn_metadata.num_decodes, attn_metadata.decode
        q_nope, q_rope = (x.unflatten(0, (requests, -1)) for x in parts)
        o, lse = mla_decode(
            q_nope,
            q_rope if self.qk_rope_head_dim else None,
            kv_c_and_k_pe_cache,
            block_table=decode.block_table,
            cache_seqlens=decode.seq_lens,
            softmax_scale=self.scale,
            causal=True,
            head_dim_v=self.kv_lora_rank,
            kv_descale=layer._k_scale if self.kv_cache_dtype in FP8 else None,
            return_lse=self.need_to_return_lse_for_decode,
        )
        if lse is None:
            return o.flatten(0, 1), None
        return o.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latent vectors, `[tokens, kv_lora_rank]`, and rotated keys to their slots."""
        if kv_cache.is_cuda:  # vLLM's kernel writes
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale
            )
            return
        if not kv_cache.numel():
            return
        rows = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)
        if kv_cache_dtype in FP8:
            kv_cache = kv_cache.view(torch.uint8)
            rows = (rows.float() / k_scale).to(torch.float8_e4m3fn).view(torch.uint8)
        write_to_slots(kv_cache, rows, slot_mapping)


class CuteAttnMLAPrefill(MLAPrefillBackend):  # type: ignore[misc]
    """Attention of prompts in the expanded form, for any of vLLM's MLA backends on Hopper."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major == MAJOR

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        x = mla_dimensions
        return why_not_prefill(x.qk_nope_head_dim + x.qk_rope_head_dim, x.v_head_dim) is None

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The causal attention of the step's tokens to each other."""
        if output_scale is not None:
            raise NotImplementedError(f"{NAME} has no quantised output (output_scale)")
        x = self._prefill_metadata
        starts, longest = x.query_start_loc, x.max_query_len
        o, lse = self.attention(
            q, k, v, starts, starts, longest, longest, causal=True, lse=return_softmax_lse, out=out
        )
        return (o, lse) if return_softmax_lse else o

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The attention of the step's tokens to a part of the earlier tokens."""
        o, lse = self.attention(
            q,
            k,
            v,
            chunk.query_start_loc,
            chunk.cu_seq_lens,
            chunk.max_query_len,
            chunk.max_seq_len,
            causal=False,
            lse=True,
            out=out,
        )
        return o, lse

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        lse: bool,
        out: Tensor | None,
    ) -> Any:
        """The pair (o, lse), `[tokens, heads, v_head_dim]` and `[heads, tokens]`."""
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=int(max_seqlen_q),
            max_seqlen_k=int(max_seqlen_k),
            softmax_scale=self.scale,
            causal=causal,
            num_splits=0,
            return_lse=lse,
            out=out,
        )


def prefill_like(other: MLAPrefillBackend) -> CuteAttnMLAPrefill:
    """Make a CuteAttnMLAPrefill with the constructor's arguments of another prefill backend."""
    names = inspect.signature(MLAPrefillBackend).parameters
    return CuteAttnMLAPrefill(**{name: getattr(other, name) for name in names})
