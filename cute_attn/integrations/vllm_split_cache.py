"""Attention over a KV cache whose tokens vLLM splits between ranks: decode context parallelism,
vLLM's option `-dcp`.

The ranks of a group have the same K/V heads, and different heads of q. A rank's cache has a part of
every request's tokens. vLLM gathers the queries of all heads, each rank attends to its own part of
the earlier tokens, and vLLM combines the parts by lse. A rank then has the result of its own heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def ranks_of_cache(kv_cache_spec: Any) -> tuple[int, int]:
    """The number of ranks between which a cache is split, and this rank's number; (1, 0) for a
    cache that is not split, and in releases of vLLM without this option."""
    try:
        from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
    except ImportError:
        return 1, 0
    world, rank = get_dcp_world_size_and_rank(getattr(kv_cache_spec, "dcp_sharded", True))
    return int(world), int(rank)


class EarlierTokens:
    """How many of each request's earlier tokens this rank's cache has, for one builder.

    The tensor of a step is a view of memory that stays, so that a CUDA graph may be replayed.
    """

    def __init__(self, world: int, rank: int, vllm_config: Any, device: torch.device) -> None:
        self.world, self.rank = world, rank
        self.interleave = int(vllm_config.parallel_config.cp_kv_cache_interleave_size)
        most = int(vllm_config.scheduler_config.max_num_seqs)
        self.memory = torch.zeros(most, dtype=torch.int32, device=device)

    def of_step(self, given: Any) -> tuple[Tensor, int]:
        """The number for each request, and an upper bound; 0 if no rank has earlier tokens.
        `given` is vLLM's CommonAttentionMetadata.

        All ranks compute the same bound, because all ranks must take part in the exchange.
        """
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        earlier = given.seq_lens - given.query_start_loc.diff()
        found = self.memory[: len(earlier)]
        found.copy_(get_dcp_local_seq_lens(earlier, self.world, self.rank, self.interleave))
        most = given.seq_lens_cpu_upper_bound
        if most is not None:
            count = len(given.query_start_loc_cpu) - 1
            if not bool((most[:count] > given.query_start_loc_cpu.diff()).any()):
                return found, 0
        shares = self.world * self.interleave
        return found, -(-int(given.max_seq_len) // shares) * self.interleave


class Exchange:
    """vLLM's messages between the ranks of a split cache."""

    def __init__(self) -> None:
        from vllm.config import get_current_vllm_config_or_none

        try:
            from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce
            from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
        except ImportError as error:
            raise NotImplementedError(
                "cute_attn has decode context parallelism with vLLM 0.33 or later only"
            ) from error
        config = get_current_vllm_config_or_none()
        by_all_to_all = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
        self.combine = dcp_a2a_lse_reduce if by_all_to_all else cp_lse_ag_out_rs
        self.merge = merge_attn_states

    @property
    def group(self) -> Any:
        from vllm.distributed.parallel_state import get_dcp_group

        return get_dcp_group()

    def all_heads(self, q: Tensor) -> Tensor:
        """The queries of all ranks' heads, `[tokens, ranks * heads, head_size]`."""
        found: Tensor = self.group.all_gather(q.contiguous(), dim=1)
        return found

    def over_ranks(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the results of all ranks' parts of the cache.

        Args:
            o: `[tokens, ranks * heads, head_size]`.
            lse: `[ranks * heads, tokens]`.

        Returns:
            o and lse of this rank's heads, of the same layouts.
        """
        o, lse = self.combine(o, lse.transpose(0, 1).contiguous(), self.group, return_lse=True)
        return o, lse.transpose(0, 1).contiguous()
