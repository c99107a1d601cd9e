"""The Gated Delta Net in SGLang (Qwen3-Next, Qwen3.5), on `chunk_gated_delta_rule` and
`gated_delta_rule_decode`; importing this needs SGLang.

`sglang_delta_rule` has what the Gated Delta Net shares with KDA.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from torch import Tensor

from ..ops.gated_delta_rule import chunk_gated_delta_rule, gated_delta_rule_decode
from ..ops.kda.limits import CHUNK
from .sglang_delta_rule import DecodeBackend, DeltaRule, has_chunks

__all__ = ["register"]


def register() -> None:
    """Make SGLang's Gated Delta Net layers run on `CuteGDNKernel`, in backends made from now on.

    With `CUTE_ATTN_SERVER_GDN=1` in the environment, SGLang calls this function in each of its
    processes. The kernels take the place of `--linear-attn-backend triton`, SGLang's default, and
    of FlashInfer where SGLang would choose FlashInfer for prefill by itself. With
    `--linear-attn-prefill-backend flashinfer`, FlashInfer stays. A decode step is one launch,
    convolution included (`CuteGDNBackend`).
    """
    gdn_backend.TritonGDNKernel = CuteGDNKernel
    gdn_backend.GDNAttnBackend = CuteGDNBackend
    gdn_backend.flashinfer_gdn_prefill_default = _no_default


def _no_default(_: Any) -> None:
    """The prefill backend that takes the place of the default one."""


class CuteGDNKernel(DeltaRule, TritonGDNKernel):  # type: ignore[misc]
    """SGLang's kernels for the Gated Delta Net. What has no kernel here runs on SGLang's Triton
    kernels:

    - head dimensions and dtypes without a kernel
    - snapshots of states for the radix cache (`--mamba-radix-cache-strategy extra_buffer`)
    - trees of drafts, ReplaySSM, and scores of several items (`--enable-mis`)
    """

    supports_track_state_snapshot = True  # so that SGLang says when it needs a snapshot
    chunk = staticmethod(chunk_gated_delta_rule)
    step = staticmethod(gated_delta_rule_decode)

    @staticmethod
    def gate(a: Tensor, rows: torch.Size) -> Tensor:
        return a.reshape(rows)

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
        inplace_update: bool = True,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None, Tensor | None]:
        """Prefill. With a pool that is not contiguous, SGLang gives copies of the states, of which
        slot 0 is a request's: so only negative indices are padding."""
        if track_state is not None or not inplace_update or not has_chunks(q, v, ssm_states):
            o, _, h = super().extend(
                q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, inplace_update=inplace_update, **more,
            )  # fmt: skip
            if track_state is not None and track_chunk_idx is not None:
                _snapshot(track_state, track_chunk_idx, h, query_start_loc)
            return o, None, h
        o = self.chunks(
            q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices,
            query_start_loc=query_start_loc,
        )  # fmt: skip
        return o, None, None


class CuteGDNBackend(DecodeBackend, gdn_backend.GDNAttnBackend):  # type: ignore[misc]
    """SGLang's backend, with a decode step in one launch."""


def _snapshot(out: Tensor, chunks: Tensor, h: Tensor, query_start_loc: Tensor) -> None:
    """Write each request's state at the start of its chunk, one of `chunks`, to `out`. Requests
    without a snapshot have -1.

    Args:
        h: `[1, chunks, ...]`, the states at the start of all chunks.
    """
    counts = (query_start_loc.diff() + CHUNK - 1) // CHUNK
    first = torch.cumsum(counts, 0) - counts
    out.copy_(h[0].index_select(0, first + chunks.clamp(min=0)))
