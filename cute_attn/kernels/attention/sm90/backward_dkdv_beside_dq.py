"""dK, dV and dS of some query heads beside dQ of earlier heads, for SM90 at head_dim 192 with
head_dim_v 128: two kernels in one launch.

The memory of dS bounds the kernel of dQ, and the tensor cores bound the kernel of dK and dV. So a
launch has clusters of both kernels side by side:

    some clusters    as `backward_hd256_dkdv`: dK, dV and dS of the call's split heads
    all others       as `backward_ds_dq`: dQ from the dS of the launch before

The clusters of dQ are spread evenly among the clusters of dK and dV. Every launch but the first and
the last of a backward has both kinds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common.entry import entry, gathered, placeholders
from ...common.pipeline import CTAS
from ...common.smem import Pointers
from ..configs import backward
from ..parts.arguments import FakeArguments
from ..parts.softmax import Scaling
from ..parts.visibility import Visibility
from ..parts.work import TileMap
from ..spec import Sm90BackwardSpec
from . import backward_ds_dq, backward_hd256_dkdv
from .mma import WARPGROUP


class Arguments(NamedTuple):
    """The kernel's arguments; `backward_hd256_dkdv.Arguments` explains the names that are not here.

    Attributes:
        ds_before: dS of the query heads of dQ.
        first_head, num_heads: the query heads of dQ; none if num_heads is 0.
        num_split_heads: 0 if the launch has no clusters of dK and dV.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    stats: cute.Tensor
    ds: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    ds_before: cute.Tensor
    dq: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    num_splits: Int32
    first_split_head: Int32
    num_split_heads: Int32
    first_head: Int32
    num_heads: Int32
    num_clusters: Int32


class Sm90DkDvBesideDq:
    """The kernel for one Sm90BackwardSpec; see the module's docstring."""

    def __init__(self, spec: Sm90BackwardSpec):
        if not spec.stores_ds:
            raise ValueError("stores_ds is False, must be True")
        self.spec = spec
        self.keys = backward_hd256_dkdv.Sm90Hd256DkDv(spec)
        tile = backward("backward_ds_dq", "sm_90a", spec.head_dim, spec.head_dim_v).tile
        of_dq = replace(
            spec, tile_m=tile.m, tile_n=tile.n, stores_ds=False, softcap=False, partial=False
        )
        self.queries = backward_ds_dq.Sm90DsDq(of_dq)
        # A CTA of dQ uses the shared memory of a CTA of dK and dV.
        self.smem = self.keys.smem
        if self.queries.smem.nbytes > self.smem.nbytes:
            raise ValueError(f"dQ takes more than {self.smem.nbytes} bytes of shared memory")

    def names(self, shared_base: int) -> dict[str, dict[str, Any]]:
        return self.keys.names(shared_base)

    def fake_args(self) -> tuple[Any, ...]:
        """Placeholders for the arguments of `__call__`, in order."""
        fake = FakeArguments(self.spec, self.spec.head_dim, self.spec.head_dim_v)
        dk, dv = (fake.k_partial, fake.v_partial) if self.spec.partial else (fake.k, fake.v)
        given = {"ds": fake.ds_tiles(), "ds_before": fake.ds_tiles(), "dk": dk(), "dv": dv()}
        return placeholders(fake.arguments(Arguments, **given))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel."""
        a, stream = gathered(Arguments, args)
        none = {"sums": None, "first_tile": Int32(0), "first_block": None, "num_blocks": None}
        x, tiles, visible, scaling = self.keys.operands(_Named(a, none))
        y, y_tiles = self.queries.operands(_Named(a, none | {"ds": a.ds_before}))
        of_keys = Int32(cutlass.select_(a.num_split_heads > 0, tiles.count(), Int32(0)))
        of_queries = Int32(cutlass.select_(a.num_heads > 0, y_tiles.count(), Int32(0)))
        self.kernel(x, tiles, visible, scaling, y, y_tiles, of_queries).launch(
            grid=[CTAS * (of_keys + of_queries), 1, 1],
            block=[3 * WARPGROUP, 1, 1],
            cluster=[CTAS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, x: backward_hd256_dkdv.Operands, tiles: TileMap, visible: Visibility,
        scaling: Scaling, y: backward_ds_dq.Operands, y_tiles: TileMap, of_queries: Int32,
    ) -> None:  # fmt: skip
        """Share the cluster's number out among the two kinds of clusters."""
        storage = self.smem.allocate()
        number, clusters = cute.arch.cluster_idx()[0], cute.arch.cluster_dim()[0]
        before, up_to = (Int32(Int64(n) * of_queries // clusters) for n in (number, number + 1))
        if up_to > before:
            self.queries.compute(y, y_tiles, self.of_queries(storage), before)
        else:
            self.keys.compute(x, tiles, visible, scaling, storage, number - before)

    def of_queries(self, storage: Pointers) -> Pointers:
        """The buffers of a CTA of dQ."""
        smem, start = self.queries.smem, cute.recast_ptr(storage.q, dtype=cutlass.Int8)
        return Pointers(
            **{
                name: cute.recast_ptr(start + smem[name], dtype=buffer.element)
                for name, buffer in smem.buffers.items()
            }
        )


class _Named:
    """Arguments by name, some of them replaced."""

    def __init__(self, arguments: Arguments, replaced: dict[str, Any]):
        vars(self).update(arguments._asdict() | replaced)
