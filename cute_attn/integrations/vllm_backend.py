"""The attention backend that `vllm.register` names to vLLM; importing it needs vLLM.

The KV cache of a layer is `[num_blocks, heads_k, block_size, 2 * head_size]`, vLLM's standard
shape, with a token's key beside its value. vLLM chooses the order of the other dimensions in
memory. A block is a page of `flash_attn_varlen_func`, which reads keys and values in place.

Everything that changes from step to step is in tensors that only the device reads. Numbers that the
host gives (the longest query, the longest sequence) choose how the work is divided; no result
depends on these numbers. So a CUDA graph of a batch may be replayed for any batch of the same size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from ..ops.attention import flash_attn_varlen_func
from ..ops.attention.support import equal_head_dims
from ..ops.checks import dtype_name
from .vllm import NAME
from .vllm_split_cache import EarlierTokens, Exchange, ranks_of_cache

try:
    from vllm._custom_ops import reshape_and_cache_flash
except (ImportError, AttributeError):  # vLLM without its CUDA extension
    reshape_and_cache_flash = None

# Head sizes that have a kernel, by the compute capability's major number.
HEAD_SIZES, FP8_HEAD_SIZES = equal_head_dims(), equal_head_dims(fp8=True)
# vLLM makes the blocks of a hybrid model a multiple of this number.
BLOCK_STEP = 16
# The fp8 of a cache by vLLM's names; vLLM allocates such a cache as bytes.
FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", *FP8)
FP8_MAJOR = 9  # the compute capability's major number with kernels for fp8 caches


def is_batch_invariant() -> bool:
    """Whether vLLM runs with VLLM_BATCH_INVARIANT. Older releases have a function that says so."""
    if hasattr(envs, "VLLM_BATCH_INVARIANT"):
        return bool(envs.VLLM_BATCH_INVARIANT)
    try:
        from vllm.model_executor.layers.batch_invariant import vllm_is_batch_invariant
    except ImportError:
        return False
    return bool(vllm_is_batch_invariant())


def write_to_slots(pages: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Write tokens' rows, `[tokens, ...]`, to pages, `[num_blocks, block_size, ...]`.

    A token without a slot rewrites the present contents of block 0, which vLLM gives to no request.
    """
    slots = slot_mapping.clamp(min=0)
    where = slots // pages.shape[1], slots % pages.shape[1]
    valid = (slot_mapping >= 0).view(-1, *[1] * (rows.dim() - 1))
    pages[where] = torch.where(valid, rows[: len(slots)], pages[where])


class CuteAttnBackend(AttentionBackend):  # type: ignore[misc]
    """The properties that vLLM asks for before it chooses a backend."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """A name by which vLLM's registry finds this backend."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CuteAttnImpl]:
        return CuteAttnImpl

    @staticmethod
    def get_builder_cls() -> type[CuteAttnMetadataBuilder]:
        return CuteAttnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK_STEP)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return sorted(set().union(*HEAD_SIZES.values()))

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        if block_size % BLOCK_STEP:
            raise ValueError(f"block_size is {block_size}, must be a multiple of {BLOCK_STEP}")
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order of blocks, heads, tokens and content in memory: vLLM's layout, NHD or HND, by
        which KV connectors copy blocks. Only some releases of vLLM ask for the order."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if include_num_layers_dimension:
            raise NotImplementedError("cute_attn has no KV cache whose blocks hold all layers")
        return (0, 1, 2, 3) if get_kv_cache_layout() == "HND" else (0, 2, 1, 3)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major in HEAD_SIZES

    @classmethod
    def supports_combination(cls, head_size: int, *others: Any, **named: Any) -> str | None:
        """A reason against the combination. vLLM's releases pass different arguments between the KV
        cache's dtype and the last argument, the device's capability."""
        capability = named.get("device_capability") or others[-1]
        sizes = HEAD_SIZES.get(capability.major, ())
        if sizes and head_size not in sizes:
            return f"head_size {head_size} has no kernel on this GPU, there are: {sizes}"
        dtype, of_cache = (
            named[name] if name in named else others[i]
            for i, name in enumerate(("dtype", "kv_cache_dtype"))
        )
        if of_cache in FP8:
            if capability.major != FP8_MAJOR:
                return f"a KV cache of {of_cache} has no kernel on this GPU, only on Hopper"
            if head_size not in FP8_HEAD_SIZES[FP8_MAJOR]:
                return _no_fp8(of_cache, head_size)
        elif of_cache not in (None, "auto", dtype_name(dtype)):
            return f"a KV cache of {of_cache} beside a model of {dtype} has no kernel"
        return None


def _no_fp8(of_cache: str, head_size: int) -> str:
    sizes = FP8_HEAD_SIZES[FP8_MAJOR]
    return f"a KV cache of {of_cache} has no kernel for head_size {head_size}, there are: {sizes}"


@dataclass
class CuteAttnMetadata:
    """The metadata of a step, for the attention of every layer.

    Attributes:
        num_actual_tokens: rows of queries that count; further rows are padding of a CUDA graph.
        max_query_len, max_seq_len: upper bounds for the batch.
        query_start_loc: `[requests + 1]`: the first row of each request's queries.
        seq_lens: `[requests]`: number of each request's keys, including this step's keys.
        block_table: `[requests, max_blocks]`.
        slot_mapping: each token's slot in the cache for its key and value; a negative slot stores
            nothing.
        causal: whether keys after a query are masked.
        earlier: `[requests]`: with decode context parallelism, how many of a request's keys before
            this step's keys are in this rank's cache; otherwise None.
        most_earlier: an upper bound of `earlier` on all ranks; 0 if no rank has such keys.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True
    earlier: Tensor | None = None
    most_earlier: int = 0


class CuteAttnMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # abstract in vLLM
        self.split: EarlierTokens | None = None
        world, rank = ranks_of_cache(kv_cache_spec)
        if world > 1:
            self.split = EarlierTokens(world, rank, vllm_config, device)
            # A draft's step has fewer earlier keys than `most_earlier` may say.
            self.supports_draft_decode_metadata_update = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CuteAttnMetadata:
        """Make a step's metadata. `common_prefix_len` is not used: the prefix is in every request's
        blocks."""
        given = common_attn_metadata
        if not isinstance(given.causal, bool):
            raise NotImplementedError(
                "cute_attn has no attention that is causal for some requests of a batch"
            )
        if getattr(given, "rswa_prefix_lens", None) is not None:
            raise NotImplementedError(
                "cute_attn has no R-SWA, a window beside a prefix that every token sees"
            )
        earlier, most_earlier = (None, 0) if self.split is None else self.split.of_step(given)
        return CuteAttnMetadata(
            num_actual_tokens=given.num_actual_tokens,
            max_query_len=int(given.max_query_len),  # a NumPy number in chunked local attention
            max_seq_len=int(given.max_seq_len),
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            causal=given.causal,
            earlier=earlier,
            most_earlier=most_earlier,
        )

    def update_block_table(
        self, metadata: CuteAttnMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> CuteAttnMetadata:
        found = copy.copy(metadata)
        found.block_table, found.slot_mapping = blk_table, slot_mapping
        return found

    def update_draft_decode_metadata(self, metadata: CuteAttnMetadata) -> None:
        """Do nothing between a draft's steps: `metadata` refers to vLLM's own tensors, which vLLM
        updates, and the numbers in `metadata` are bounds of any step."""


class CuteAttnImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of a layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    # A step's own keys are read from `key` and `value`, wherever the cache has them.
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if head_size not in CuteAttnBackend.get_supported_head_sizes():
            raise NotImplementedError(
                f"cute_attn has no kernel for head_size {head_size}, there are: "
                f"{CuteAttnBackend.get_supported_head_sizes()}"
            )
        if alibi_slopes is not None:
            raise NotImplementedError("cute_attn has no ALiBi (alibi_slopes)")
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise NotImplementedError(
                f"cute_attn has no KV cache of dtype {kv_cache_dtype!r}, there are: "
                f"{KV_CACHE_DTYPES}"
            )
        if kv_cache_dtype in FP8 and head_size not in FP8_HEAD_SIZES[FP8_MAJOR]:
            raise NotImplementedError(f"cute_attn: {_no_fp8(kv_cache_dtype, head_size)}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"cute_attn has no attention of type {attn_type!r} in vLLM: decoders only"
            )
        self.exchange: Exchange | None = None
        if getattr(self, "dcp_world_size", 1) > 1:
            missing = {
                "sliding windows": sliding_window is not None,
                f"a KV cache of dtype {kv_cache_dtype}": kv_cache_dtype in FP8,
                "layers that share a KV cache": kv_sharing_target_layer_name is not None,
                "VLLM_BATCH_INVARIANT": is_batch_invariant(),
            }
            for what, given in missing.items():
                if given:
                    raise NotImplementedError(
                        f"cute_attn has no decode context parallelism with {what}"
                    )
            self.exchange = Exchange()
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(f"sinks has {sinks.shape[0]} heads, must have {num_heads}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        # vLLM's window counts the query's own position.
        self.left = None if sliding_window is None else sliding_window - 1
        self.softcap = float(logits_soft_cap or 0.0)
        self.kv_cache_dtype = kv_cache_dtype
        self.fp8 = FP8.get(kv_cache_dtype)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        # A step may hold prefill and decode, so keys cannot be split.
        self.batch_invariant = is_batch_invariant()
        self.num_splits = 1 if self.batch_invariant else 0

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CuteAttnMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of `query`, `[tokens, heads, head_size]`, to `output`, of query's
        shape, and return `output`. `key` and `value` are in the cache already."""
        if output is None:
            raise ValueError("output is None, must be a tensor: the backend accepts a buffer")
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("cute_attn has no quantised output (output_scale)")
        if attn_metadata is None:  # vLLM measures how much memory a step takes
            return output.fill_(0)
        rows = attn_metadata.num_actual_tokens
        k, v = self.pages(kv_cache)
        if self.exchange is not None:
            step = query[:rows], key[:rows], value[:rows], k, v
            self.over_ranks(self.exchange, *step, attn_metadata, output[:rows])
            return output
        flash_attn_varlen_func(
            query[:rows],
            k,
            v,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            max_seqlen_k=attn_metadata.max_seq_len,
            seqused_k=attn_metadata.seq_lens,
            page_table=attn_metadata.block_table,
            softmax_scale=self.scale,
            causal=attn_metadata.causal,
            window_size=(self.left, self.left),  # causal has no right side
            learnable_sink=self.sinks,
            softcap=self.softcap,
            num_splits=self.num_splits,
            batch_invariant=self.batch_invariant,
            out=output[:rows],
            **self.factors(layer),
        )
        return output

    def over_ranks(
        self,
        exchange: Exchange,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        step: CuteAttnMetadata,
        output: Tensor,
    ) -> None:
        """Write the attention over a cache that is split between ranks: each query's attention to
        its step's own keys, merged with its attention to the earlier keys of all ranks."""
        shared: dict[str, Any] = {
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_q": step.max_query_len,
            "softmax_scale": self.scale,
            "softcap": self.softcap,
            "num_splits": self.num_splits,
            "return_lse": True,
        }
        _, lse = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_k=step.query_start_loc,
            max_seqlen_k=step.max_query_len,
            causal=step.causal,
            learnable_sink=self.sinks,  # once: earlier keys have no sink
            out=output,
            **shared,
        )
        if not step.most_earlier:
            return
        o_earlier, lse_earlier = flash_attn_varlen_func(
            exchange.all_heads(query),
            k_pages,
            v_pages,
            max_seqlen_k=step.most_earlier,
            seqused_k=step.earlier,
            page_table=step.block_table,
            causal=False,
            **shared,
        )
        assert lse_earlier is not None
        o_earlier, lse_earlier = exchange.over_ranks(o_earlier, lse_earlier)
        exchange.merge(output, o_earlier, lse_earlier, output, lse)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values, `[tokens, heads_k, head_size]`, to their slots."""
        if self.kv_sharing_target_layer_name is not None:
            return  # another layer has written keys and values
        k, v = self.pages(kv_cache)
        if reshape_and_cache_flash is not None and key.is_cuda:
            # vLLM's kernel takes an fp8 cache as bytes.
            name = self.kv_cache_dtype if self.fp8 else "auto"
            if self.fp8:
                k, v = k.view(torch.uint8), v.view(torch.uint8)
            reshape_and_cache_flash(
                key, value, k, v, slot_mapping, name, layer._k_scale, layer._v_scale
            )
            return
        for name, pages, rows in (("_k_scale", k, key), ("_v_scale", v, value)):
            if self.fp8:
                most = torch.finfo(self.fp8).max
                rows = (rows / getattr(layer, name)).clamp(-most, most).to(self.fp8)
                pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
            write_to_slots(pages, rows, slot_mapping)

    def factors(self, layer: Any) -> dict[str, Any]:
        """The factors of the keys and values in a layer's cache, for the operator."""
        if self.fp8 is None:
            return {}
        return {"k_descale": layer._k_scale, "v_descale": layer._v_scale}

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a cache, `[num_blocks, block_size, heads_k, head_size]` each."""
        if self.fp8:
            kv_cache = kv_cache.view(self.fp8)
        if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * self.head_size:
            raise ValueError(
                f"kv_cache has shape {list(kv_cache.shape)}, must be [num_blocks, "
                f"{self.num_kv_heads}, block_size, {2 * self.head_size}]"
            )
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k, v
