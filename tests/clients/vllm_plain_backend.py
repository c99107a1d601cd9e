"""An attention backend of vLLM in plain PyTorch, for layers that ours does not serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl

from cute_attn.integrations.vllm_backend import CuteAttnBackend, CuteAttnImpl
from cute_attn.reference.attention import attention_reference

NAME = "PLAIN"


class PlainBackend(CuteAttnBackend):
    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return PlainImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [512]

    @classmethod
    def supports_combination(cls, *_: Any, **__: Any) -> str | None:
        return None


class PlainImpl(AttentionImpl):
    """Full attention of each request over its pages; the cache and its writes are as in ours."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *_: Any, **__: Any
    ) -> None:
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = scale
        self.kv_cache_dtype, self.fp8 = "auto", None
        self.kv_sharing_target_layer_name = None

    pages = CuteAttnImpl.pages
    do_kv_cache_update = CuteAttnImpl.do_kv_cache_update

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **_: Any,
    ) -> Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        starts = attn_metadata.query_start_loc.tolist()
        for i, length in enumerate(attn_metadata.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            k, v = (x[attn_metadata.block_table[i]].flatten(0, 1) for x in self.pages(kv_cache))
            output[rows] = attention_reference(
                query[None, rows], k[None, :length], v[None, :length],
                softmax_scale=self.scale, causal=True, dtype=torch.float32,
            )[0][0]  # fmt: skip
        return output
