"""A kernel whose every CTA, of one warp, writes the place of one tile of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_attn.kernels.attention.parts.work import TileMap
from cute_attn.kernels.common.sequences import Sequences
from cute_attn.kernels.common.spec import Spec

TILE = 8
HEADS, KV_HEADS = 4, 2


def tiled_heads(of_keys: bool, packed_heads: int) -> int:
    """Heads, or packs of heads, that have tiles of their own."""
    return KV_HEADS if of_keys else HEADS // packed_heads


@dataclass(frozen=True)
class TileMapSpec(Spec):
    of_keys: bool
    packed_heads: int
    longest_last: bool
    seqused: bool


class Places:
    def __init__(self, spec: TileMapSpec):
        self.spec = spec

    def fake_args(self) -> tuple[Any, ...]:
        def vector(length: Any) -> Any:
            return make_fake_tensor(Int32, (length,), (1,), assumed_align=4)

        batch, bounds, tiles = (cute.sym_int() for _ in range(3))
        places = make_fake_tensor(Int32, (tiles, 4), (4, 1), assumed_align=16)
        used = vector(batch) if self.spec.seqused else None
        return vector(bounds), used, Int32(0), places, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        cu_seqlens: cute.Tensor,
        seqused: cute.Tensor | None,
        tokens: Int32,
        places: cute.Tensor,
        stream: Any,
    ) -> None:
        self.kernel(cu_seqlens, seqused, tokens, places).launch(
            grid=[self.tile_map(cu_seqlens, seqused, tokens).count(), 1, 1],
            block=[32, 1, 1],
            stream=stream,
        )

    def tile_map(self, cu_seqlens: Any, seqused: Any, tokens: Any) -> TileMap:
        spec = self.spec
        packed, other = Sequences(tokens, cu_seqlens, seqused), Sequences(Int32(1))
        queries, keys = (other, packed) if spec.of_keys else (packed, other)
        return TileMap(
            TILE, spec.packed_heads, spec.longest_last, queries, keys,
            Int32(tiled_heads(spec.of_keys, spec.packed_heads)), HEADS // KV_HEADS,
            cu_seqlens.shape[0] - 1, 1, spec.of_keys,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        cu_seqlens: cute.Tensor,
        seqused: cute.Tensor | None,
        tokens: Int32,
        places: cute.Tensor,
    ) -> None:
        tile, _, _ = cute.arch.block_idx()
        exists, block, head, sequence = self.tile_map(cu_seqlens, seqused, tokens).locate(tile)
        if cute.arch.lane_idx() == 0:
            places[tile, 0] = Int32(exists)
            places[tile, 1] = block
            places[tile, 2] = head
            places[tile, 3] = sequence
