"""The attention backend that `sglang.register` names to SGLang; importing it needs SGLang.

The KV cache of a layer is SGLang's pool of slots, one for each token, in pages of page_size slots.
Pages are read in place. A model with a pool of its own for sliding windows has a second page table,
which follows from the first by SGLang's mapping of slots.

Everything that changes from step to step is in tensors that only the device reads, and the device
computes these tensors from SGLang's own. Numbers that the host gives (the longest query, the
longest sequence) choose how the work is divided; no result depends on these numbers. So a CUDA
graph of a batch may be replayed for any batch of the same size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, NoOpMHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
from torch import Tensor

from ..ops.attention import flash_attn_varlen_func
from ..ops.attention.arguments import MOST_TREE_QUERIES
from ..ops.attention.support import forward_head_dims, page_step
from . import token_slots
from .sglang import NAME

DTYPES = torch.bfloat16, torch.float16
CHAINS = "(--speculative-eagle-topk 1, or for NGRAM --speculative-ngram-max-bfs-breadth 1)"
FP8 = torch.float8_e4m3fn, torch.float8_e5m2  # of a KV cache


@dataclass
class CuteAttnMetadata:
    """The metadata of a step, for the attention of every layer.

    Attributes:
        cu_seqlens_q: `[requests + 1]`: the first row of each request's queries.
        seqused_k: `[requests]`: number of each request's keys, including this step's keys.
        page_table: `[requests, pages]`.
        max_seqlen_q, max_seqlen_k: the longest query and the longest sequence, as far as the host
            knows.
        drafts: number of each request's tokens in this step that SGLang does not count in the
            lengths of sequences.
        unused_rows: whether queries may have rows that belong to no request.
        window_page_table, window_slots: the page table, and the slots of this step's tokens, in the
            pool of sliding windows; None without such a pool.
        tree_mask: int64, a number for each draft of each request's tree. Bit j says whether the
            draft sees draft j. None without trees.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    page_table: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    drafts: int = 0
    unused_rows: bool = False
    window_page_table: Tensor | None = None
    window_slots: Tensor | None = None
    tree_mask: Tensor | None = None


class CuteAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of all layers of a model that SGLang runs.

    Raises:
        ValueError: the GPU is a Blackwell, and page_size is not a multiple of 16.
        NotImplementedError: the model, a layer or an option of the server has no kernel.
    """

    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.refuse(runner)
        self.page_size: int = runner.page_size
        # MLA layers, and SGLang's wrapper of hybrid models, read these two attributes.
        self.token_to_kv_pool = self.pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.fp8 = runner.kv_cache_dtype in FP8
        self.slots: Tensor = runner.req_to_token_pool.req_to_token
        self.max_seqlen_k: int = runner.model_config.context_len
        self.max_context_len = self.max_seqlen_k  # EAGLE reads this name
        # A step may hold prefill and decode, so keys cannot be split.
        self.batch_invariant = bool(runner.server_args.enable_deterministic_inference)
        self.num_splits = 1 if self.batch_invariant else 0
        self.has_trees = has_trees()
        self.max_pages = token_slots.num_pages(self.slots.shape[1], self.page_size)
        self.forward_metadata: CuteAttnMetadata | None = None
        # By mode and number of requests: what a CUDA graph reads, in slices of one set of tensors.
        self.captured: dict[tuple[Any, int], CuteAttnMetadata] = {}
        self.static: CuteAttnMetadata | None = None

    def refuse(self, runner: Any) -> None:
        """Raise for a model or an option without a kernel, before anything is allocated."""
        refuse(runner)

    # -- metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a step that runs without a CUDA graph."""
        requests = forward_batch.batch_size
        tokens = 0 if forward_batch.out_cache_loc is None else len(forward_batch.out_cache_loc)
        metadata = self.described(forward_batch, self.allocated(requests, tokens))
        write(metadata, forward_batch, self)
        write_tree(metadata, forward_batch)
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what all CUDA graphs read."""
        self.static = self.allocated(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the metadata of a CUDA graph. The graph itself writes the metadata except a tree's
        mask: the size of SGLang's mask changes between replays."""
        requests = forward_batch.batch_size
        key = forward_batch.forward_mode, requests
        if in_capture:
            tokens = forward_batch.positions.numel()
            self.captured[key] = self.described(
                forward_batch, self.sliced(requests, tokens), tokens=tokens
            )
        self.forward_metadata = self.captured[key]
        write_tree(self.forward_metadata, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Write the metadata of a CUDA graph, by kernels that the graph records."""
        key = forward_batch.forward_mode, forward_batch.batch_size
        write(self.captured[key], forward_batch, self)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def allocated(self, requests: int, tokens: int) -> CuteAttnMetadata:
        """Metadata of up to `requests` requests with up to `tokens` tokens, with no contents."""
        int32 = functools.partial(self.slots.new_empty, dtype=torch.int32)
        table = requests, self.max_pages
        pool = isinstance(self.pool, SWAKVPool)
        return CuteAttnMetadata(
            cu_seqlens_q=int32(requests + 1),
            seqused_k=int32(requests),
            page_table=int32(table),
            max_seqlen_q=0,
            max_seqlen_k=0,
            window_page_table=int32(table) if pool else None,
            window_slots=self.slots.new_empty(tokens, dtype=torch.int64) if pool else None,
        )

    def sliced(self, requests: int, tokens: int) -> CuteAttnMetadata:
        """Metadata in the tensors of all CUDA graphs."""
        x = self.static
        fits = x is not None and requests <= len(x.seqused_k)
        if x is None or not fits or (x.window_slots is not None and tokens > len(x.window_slots)):
            x = self.static = self.allocated(requests, tokens)
        table, slots = x.window_page_table, x.window_slots
        return CuteAttnMetadata(
            # Each graph has starts of its own: a graph that decodes does not write them.
            cu_seqlens_q=torch.empty_like(x.cu_seqlens_q[: requests + 1]),
            seqused_k=x.seqused_k[:requests],
            page_table=x.page_table[:requests],
            max_seqlen_q=0,
            max_seqlen_k=0,
            window_page_table=None if table is None else table[:requests],
            window_slots=None if slots is None else slots[:tokens],
        )

    def described(
        self, forward_batch: Any, metadata: CuteAttnMetadata, tokens: int | None = None
    ) -> CuteAttnMetadata:
        """Metadata with the numbers that the host knows; `tokens` is given for a CUDA graph."""
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_decode_or_idle():
            each = 1
        elif mode.is_target_verify():
            if getattr(forward_batch.spec_info, "ragged_verify_layout", None) is not None:
                raise NotImplementedError(
                    f"{NAME} verifies the same number of draft tokens for each request: unset "
                    "SGLANG_RAGGED_VERIFY_MODE"
                )
            each = metadata.drafts = forward_batch.spec_info.draft_token_num
            if self.has_trees:
                shape = requests * each
                metadata.tree_mask = self.slots.new_empty(shape, dtype=torch.int64)
            # With data-parallel attention, SGLang may add rows to a step.
            metadata.unused_rows = forward_batch.positions.numel() > each * requests
        elif mode.is_extend() and not mode.is_dllm_extend():
            metadata.unused_rows = tokens is not None
            metadata.max_seqlen_q = tokens or int(max(forward_batch.extend_seq_lens_cpu, default=0))
            each = 0
        else:
            raise NotImplementedError(f"{NAME} has no attention for SGLang's mode {mode.name}")
        if each:
            metadata.max_seqlen_q = each
            starts = metadata.cu_seqlens_q
            torch.arange(0, len(starts) * each, each, dtype=starts.dtype, out=starts)
        longest = self.max_seqlen_k
        lengths = forward_batch.seq_lens_cpu if tokens is None else None
        if lengths is not None and len(lengths):
            longest = int(lengths.max()) + metadata.drafts
        metadata.max_seqlen_k = longest
        return metadata

    # -- a layer

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The attention of `q`, `[tokens, heads * head_dim]`, after `k` and `v` are in the pool."""
        check_options(others)
        x = self.forward_metadata
        assert x is not None, "init_forward_metadata comes before a layer's attention"
        scales = (layer.k_scale, layer.v_scale) if self.fp8 else ()
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=x.window_slots)
            self.pool.set_kv_buffer(layer, where, k, v, *scales)
        heads, heads_k = layer.tp_q_head_num, layer.tp_k_head_num
        q = q.reshape(-1, heads, layer.qk_head_dim)
        shape = len(q), heads, layer.v_head_dim
        given = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty(shape) if given is None else given.view(shape)
        if x.unused_rows:  # the next layer's keys must be finite
            out.zero_()
        k_pool, v_pool = self.pool.get_kv_buffer(layer.layer_id)
        left = layer.sliding_window_size  # without the query's own position; -1 is no window
        flash_attn_varlen_func(
            q,
            paged_kv_view(k_pool, self.page_size, heads_k, layer.qk_head_dim),
            paged_kv_view(v_pool, self.page_size, heads_k, layer.v_head_dim),
            cu_seqlens_q=x.cu_seqlens_q,
            max_seqlen_q=x.max_seqlen_q,
            max_seqlen_k=x.max_seqlen_k,
            seqused_k=x.seqused_k,
            page_table=x.window_page_table if self.in_window_pool(layer) else x.page_table,
            softmax_scale=layer.scaling,
            causal=True,
            window_size=(left, 0),
            learnable_sink=sinks,
            softcap=layer.logit_cap,
            num_splits=self.num_splits,
            batch_invariant=self.batch_invariant,
            out=out,
            tree_mask=x.tree_mask,
            **dict(zip(("k_descale", "v_descale"), scales, strict=False)),
        )
        return out.view(len(q), heads * layer.v_head_dim)

    forward_decode = forward_extend

    def in_window_pool(self, layer: Any) -> bool:
        if not isinstance(self.pool, SWAKVPool):
            return False
        _, in_window_pool = self.pool.layers_mapping[layer.layer_id]
        return bool(in_window_pool)


def check_options(others: dict[str, Any]) -> None:
    """Raise NotImplementedError for arguments of SGLang that the attention does not take."""
    unknown = sorted(name for name, value in others.items() if value is not None)
    if unknown:
        raise NotImplementedError(f"{NAME} has no attention with {', '.join(unknown)}")


def write(metadata: CuteAttnMetadata, forward_batch: Any, backend: CuteAttnBackend) -> None:
    """Write a step's metadata by work on the device alone: the host reads no tensor."""
    requests = forward_batch.batch_size
    mode, page_size = forward_batch.forward_mode, backend.page_size
    if mode.is_extend() and not mode.is_target_verify():
        token_slots.write_starts(metadata.cu_seqlens_q, forward_batch.extend_seq_lens[:requests])
    metadata.seqused_k.copy_(forward_batch.seq_lens[:requests]).add_(metadata.drafts)
    rows = forward_batch.req_pool_indices[:requests]
    pages = metadata.page_table if page_size == 1 else None  # then slots are pages
    first = token_slots.first_slots(backend.slots, rows, page_size, out=pages)
    if pages is None:
        token_slots.write_page_table(metadata.page_table, first, page_size)
    if metadata.window_page_table is not None:
        first = backend.pool.translate_loc_from_full_to_swa(first)
        token_slots.write_page_table(metadata.window_page_table, first, page_size)
        assert metadata.window_slots is not None
        if forward_batch.out_cache_loc is not None:
            metadata.window_slots.copy_(
                backend.pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
            )


def write_tree(metadata: CuteAttnMetadata, forward_batch: Any) -> None:
    """Write the mask of a step's trees from SGLang's mask. All work runs on the device.

    SGLang's mask has a bool matrix `[drafts, length + drafts]` for each request, one matrix after
    the other. In the mode QLEN_ONLY, a matrix has only the last columns, `[drafts, drafts]`.
    """
    if metadata.tree_mask is None:
        return
    mask, drafts = forward_batch.spec_info.custom_mask, metadata.drafts
    lengths = forward_batch.seq_lens[: forward_batch.batch_size].long()
    if default_tree_mask_mode() == TreeMaskMode.QLEN_ONLY:
        lengths = torch.zeros_like(lengths)
    columns = lengths + drafts
    ends = torch.cumsum(columns * drafts, 0)
    number = torch.arange(drafts, device=lengths.device)
    rows = (ends - columns * drafts)[:, None] + (number + 1) * columns[:, None] - drafts
    # Requests that fill up a CUDA graph's batch have no matrix.
    at = (rows[:, :, None] + number).clamp(max=len(mask) - 1)
    bits = mask[at].long() << number
    torch.sum(bits.flatten(0, 1), 1, out=metadata.tree_mask)


def has_trees() -> bool:
    """Whether drafts are trees rather than chains."""
    return (get_spec().speculative_eagle_topk or 0) > 1


def refuse(runner: Any) -> None:
    """Raise for a model, or an option of the server, that has no kernel."""
    device = runner.req_to_token_pool.req_to_token.device
    check_pages(runner, page_step(device))
    dims = forward_head_dims(device, fp8=runner.kv_cache_dtype in FP8)
    found = ["MLA"] if runner.model_config.attention_arch == AttentionArch.MLA else []
    found += missing_for_server(runner)
    for layer in layers_of(runner):
        found += missing_for_layer(layer, dims)
    raise_for(found)


def check_pages(runner: Any, step: int) -> None:
    if runner.page_size % step:
        raise ValueError(
            f"{NAME} needs pages of a multiple of {step} tokens on this GPU, got pages of "
            f"{runner.page_size}: start SGLang with --page-size 64"
        )


def layers_of(runner: Any) -> list[Any]:
    """The attention of all layers."""
    return [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]


def raise_for(missing: list[str]) -> None:
    if missing:
        raise NotImplementedError(f"{NAME} has no kernel for {'; '.join(dict.fromkeys(missing))}")


def missing_for_server(runner: Any) -> list[str]:
    config, parallel = runner.model_config, get_parallel()
    # Gemma 3 has attention between an image's tokens, which SGLang computes by Triton alone.
    images = config.is_multimodal and hasattr(runner.model, "prepare_attn_masks")
    trees, drafts = has_trees(), get_spec().speculative_num_draft_tokens or 0
    device = runner.req_to_token_pool.req_to_token.device
    cases = {
        "cross-attention of an encoder-decoder": config.is_encoder_decoder,
        "local attention in chunks (Llama 4)": config.is_local_attention_model,
        "context parallelism (--attn-cp-size)": parallel.attn_cp_size > 1,
        "decode context parallelism (--dcp-size)": parallel.dcp_enabled,
        "draft models (--speculative-draft-attention-backend triton)": runner.is_draft_worker,
        "images whose tokens see each other (leave --enable-multimodal away)": images,
        "a model without a KV cache": isinstance(runner.token_to_kv_pool, NoOpMHATokenToKVPool),
        f"a KV cache of {runner.kv_cache_dtype} beside a model of {runner.dtype} "
        "(--kv-cache-dtype auto)": runner.kv_cache_dtype not in (runner.dtype, *FP8),
        f"a model of {runner.dtype} (--dtype bfloat16)": runner.dtype not in DTYPES,
        f"trees of draft tokens on this GPU {CHAINS}": trees and page_step(device) > 1,
        f"trees of {drafts} draft tokens (--speculative-num-draft-tokens {MOST_TREE_QUERIES})": (
            trees and drafts > MOST_TREE_QUERIES
        ),
    }
    return [what for what, given in cases.items() if given]


def missing_for_layer(layer: Any, dims: tuple[tuple[int, int], ...]) -> list[str]:
    shape = layer.qk_head_dim, layer.v_head_dim
    capped = bool(layer.logit_cap)
    cases = {
        f"head_dim {shape[0]} (of v: {shape[1]}) on this GPU, there are (of q and k, of v): "
        f"{list(dims)}": shape not in dims,
        "cross-attention": layer.is_cross_attention,
        f"attention of type {layer.attn_type.value}": layer.attn_type != AttentionType.DECODER,
        f"softcap by {layer.logit_capping_method}": capped and layer.logit_capping_method != "tanh",
        f"trees of draft tokens and sliding windows {CHAINS}": (
            has_trees() and layer.sliding_window_size >= 0
        ),
        "temperatures by length (Grok)": layer.xai_temperature_len > 0,
    }
    return [what for what, given in cases.items() if given]
