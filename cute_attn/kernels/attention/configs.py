"""The rows of the attention kernels: what a pass, an architecture and head dimensions fix.

Heuristics choose among the rows. Specs, the table of kernels, messages and the kernels read them.
An architecture without a row has no kernel. Importing this loads no compiler.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, TypeVar

from ..common.spec import BOX
from .statistics import STATS_ROWS

# Columns of a row of a piece's results, beside o: a log-sum-exp for each CTA of a pair, and padding
# to 16 bytes.
PART_COLUMNS = 4

SM90 = ("sm_90a",)
SM100 = ("sm_100a", "sm_103a")


class Tile(NamedTuple):
    """A cluster's tile.

    Attributes:
        m: query rows.
        n: keys; 0 where the kernel reads none.
        stages: the number of K tiles, and of V tiles, in shared memory at once; 0 where the kernel
            decides.
    """

    m: int
    n: int
    stages: int = 0


class Fp8Tiles(NamedTuple):
    """The tiles of a forward over fp8 K and V.

    Attributes:
        tile: for any number of query rows; its stages count the tiles that warps have converted.
        few: for at most `few.m` query rows of a K/V head.
        loaded: the number of fp8 tiles of K, and of V, in shared memory at once.
        loaded_few: `loaded` beside `few`.
        held: columns of Q that a thread holds in registers.
        k_warps: warps that convert K; half as many convert V.
        k_warps_few: `k_warps` beside `few`.
    """

    tile: Tile
    few: Tile
    loaded: int
    loaded_few: int
    held: int
    k_warps: int = 2
    k_warps_few: int = 2


@dataclass(frozen=True)
class SplitCosts:
    """The clocks that a dK/dV kernel takes, for `heuristics.num_splits`.

    Attributes:
        tile: clocks of a query tile of a head.
        epilogue: clocks of a block of keys outside of the loop over query tiles.
        partial_epilogue: clocks of the epilogue where the block's partial sums are stored.
        sums: clocks of the whole GPU for writing, reading and adding up a block's partial sums of
            one split.
        drift: extra work of the busiest cluster, in units of (longest block - mean block).
        lag: in a fixed order of additions, extra work of blocks of keys in halves, see
            `uses.HeadsInside`, as a share of the work with one query head.
        least_gain: heads are split only if the splits take at most this share of the clocks without
            splits, because partial sums take memory.
    """

    tile: int
    epilogue: int
    partial_epilogue: int
    sums: int
    drift: float
    least_gain: float
    lag: float = 0.0


# Multiply-adds per tile: 4 x 128 x 256 x 256, by two SMs of SM100 or one SM of SM90.
ESTIMATED = SplitCosts(2048, 4096, 8192, 170, 0.0, 0.95)
# Costs of the fused kernels at 1.6 GHz, and of the partial sums of 128 keys at 4.2 TB/s.
MEASURED = {dim: SplitCosts(3400, 5100, 5100, dim * 4 // 5, 0.1, 0.98, 0.5) for dim in (64, 128)}


@dataclass(frozen=True)
class Row:
    """The fields that every pass has.

    Attributes:
        way: the pass: "forward", or "backward_" and what it computes.
        archs: the architectures.
        head_dim: head dimension of q and k.
        head_dim_v: head dimension of v and o.
        kernel: the kernel's name in `table`.
        tile: the cluster's tile.
        cluster: CTAs of a cluster.
        scheduler: the kernel's only scheduler. None if the caller chooses "static" or "clc".
    """

    way: str
    archs: tuple[str, ...]
    head_dim: int
    head_dim_v: int
    _: KW_ONLY
    kernel: str
    tile: Tile
    cluster: int = 1
    scheduler: str | None = None


@dataclass(frozen=True)
class ForwardRow(Row):
    """The forward.

    Attributes:
        few: the tile for at most `few.m` query rows of a K/V head. Its additional stages let K and
            V be loaded far ahead. None stands for `tile`. Both tiles have equally many keys, so a
            row's bits do not depend on the choice.
        pieces: the tile for more than `few.m`, and at most `pieces.m`, query rows of a K/V head,
            where long sequences' keys are cut into pieces; None: such calls take `tile`.
        capped_m: query rows of a tile with a softcap and a left window, for which `tile.m` rows
            leave too few registers; None: `tile.m`.
        most_packed_heads: the most query heads of a K/V head that share the rows of a tile.
        page_keys: the most keys that TMA loads from a page at once.
        page_step: pages have a multiple of `page_step` rows.
        held: columns of Q that a thread holds in registers.
        turns: whether the warpgroups of `tile` take turns to start products.
        v_stages: the number of V tiles in shared memory at once; 0: as many as K tiles.
        shared_keys: in long sequences whose queries all see the same keys, a cluster of two CTAs
            loads K and V once for two tiles.
        fma_step: one of every `fma_step` exponentials is computed on the FMA units; 0: none.
        sums_by_product: the product P V may compute the row sums of P, as further columns.
        fp8: the tiles where k and v are fp8; None: there is no such kernel.
    """

    _: KW_ONLY
    few: Tile | None = None
    pieces: Tile | None = None
    capped_m: int | None = None
    most_packed_heads: int
    page_keys: int
    page_step: int = 1
    held: int = 0
    turns: bool = True
    v_stages: int = 0
    shared_keys: bool = False
    fma_step: int = 0
    sums_by_product: bool = False
    fp8: Fp8Tiles | None = None

    @property
    def columns(self) -> int:
        """The columns of q and k that an SM90 CTA loads, in whole TMA boxes."""
        return -(-self.head_dim // (self.cluster * BOX)) * BOX

    @property
    def columns_v(self) -> int:
        """The columns of v and o that an SM90 CTA has."""
        return self.head_dim_v // self.cluster

    def tile_for(self, few: bool, pieces: bool = False, fp8: bool = False) -> Tile:
        """The tile for few query rows of a K/V head, or for more rows: with pieces, or for any
        number."""
        if fp8 and self.fp8:
            return self.fp8.few if few else self.fp8.tile
        if few and self.few:
            return self.few
        return self.pieces if pieces and self.pieces else self.tile


@dataclass(frozen=True)
class BackwardRow(Row):
    """A pass of the backward.

    Attributes:
        capped_m: query rows of a tile with a softcap, which needs registers for P times the slope
            of the cap; None: `tile.m`; 0: the kernel takes no softcap.
        registers: registers of a thread in the load warp's warpgroup and in a consumer warpgroup,
            where the numbers depend on head_dim.
        v_stages: the number of V tiles in shared memory at once; 0: as many as K tiles.
        costs: the costs of splitting the query heads of a group.
        ordered_queries: calls whose sequences have at most so many queries, on average, add to the
            sums of dQ in a fixed order, as deterministic calls do.
    """

    _: KW_ONLY
    capped_m: int | None = None
    registers: tuple[int, int] | None = None
    v_stages: int = 0
    costs: SplitCosts | None = None
    ordered_queries: int = 0

    def tile_m(self, softcap: bool) -> int:
        """Query rows of a tile, with or without a softcap."""
        return self.capped_m if softcap and self.capped_m else self.tile.m


Of = TypeVar("Of", bound=Row)


def _by_key(*rows: Of) -> dict[tuple[str, str, int, int], Of]:
    return {
        (row.way, arch, row.head_dim, row.head_dim_v): row for row in rows for arch in row.archs
    }


# Packed heads: an SM90 warpgroup stores its own 64 rows. 128 rows of an SM100 CTA must cover two
# tokens, so that TMA clips rows past the end of a packed sequence (`tma.py`). Page keys: a box lies
# in a K tile, on SM100 in the half of the tile that a CTA loads.
FORWARD = _by_key(
    ForwardRow(
        "forward", SM90, 64, 64, kernel="sm90_forward", scheduler="counter",
        tile=Tile(192, 128, 3), few=Tile(64, 128, 4), pieces=Tile(128, 128, 4), capped_m=128,
        most_packed_heads=32, page_keys=128, shared_keys=True, fma_step=8, sums_by_product=True,
        fp8=Fp8Tiles(Tile(128, 128, 2), Tile(64, 128, 3), 3, 4, held=64, k_warps_few=4),
    ),
    # 128 x 128 is 6 and 8 % slower dense at S=16384 and 4096 on an H200, 3 % causal.
    ForwardRow(
        "forward", SM90, 128, 128, kernel="sm90_forward", scheduler="counter",
        tile=Tile(192, 64, 3), few=Tile(64, 64, 4), pieces=Tile(128, 64, 4), most_packed_heads=32,
        page_keys=64, sums_by_product=True,
        fp8=Fp8Tiles(Tile(128, 64, 2), Tile(64, 64, 2), 3, 4, held=128),
    ),
    ForwardRow(
        "forward", SM90, 192, 128, kernel="sm90_forward", scheduler="counter",
        tile=Tile(192, 64, 2), few=Tile(64, 64, 4), pieces=Tile(128, 64, 4),
        most_packed_heads=32, page_keys=64, turns=False, sums_by_product=True,
        fp8=Fp8Tiles(Tile(128, 64, 2), Tile(64, 64, 2), 2, 4, held=192),
    ),
    ForwardRow(
        "forward", SM90, 256, 256, kernel="sm90_forward", scheduler="counter",
        tile=Tile(128, 64, 2), few=Tile(64, 64, 3), pieces=Tile(128, 64, 2), most_packed_heads=32,
        page_keys=64, held=64, shared_keys=True,
        fp8=Fp8Tiles(Tile(128, 64, 2), Tile(64, 64, 2), 1, 2, held=0, k_warps_few=4),
    ),
    ForwardRow(
        "forward", SM90, 320, 256, kernel="sm90_forward", scheduler="counter",
        tile=Tile(128, 64, 2), few=Tile(64, 64, 2), pieces=Tile(128, 64, 2), most_packed_heads=32,
        page_keys=64, held=64,
    ),
    # A cluster of two CTAs has a tile, and each CTA has a half of the columns.
    ForwardRow(
        "forward", SM90, 512, 512, kernel="sm90_forward", cluster=2, scheduler="counter",
        tile=Tile(128, 64, 2), few=Tile(64, 64, 2), pieces=Tile(128, 64, 2), most_packed_heads=32,
        page_keys=64,
    ),
    ForwardRow(
        "forward", SM90, 576, 512, kernel="sm90_forward", cluster=2, scheduler="counter",
        tile=Tile(128, 64, 2), few=Tile(64, 64, 2), pieces=Tile(128, 64, 2), most_packed_heads=32,
        page_keys=64, v_stages=1,
    ),
    ForwardRow(
        "forward", SM100, 256, 256, kernel="hd256_forward", cluster=2, tile=Tile(256, 128),
        most_packed_heads=64, page_keys=64, page_step=16,
    ),
)  # fmt: skip

BACKWARD = _by_key(
    *(
        BackwardRow(
            "backward_preprocess", archs, dim, dim, kernel="attention_backward_preprocess",
            tile=Tile(STATS_ROWS, 0),
        )
        for archs, dims in ((SM90, (64, 128, 256)), (SM100, (256,)))
        for dim in dims
    ),
    BackwardRow(
        "backward_preprocess", SM90, 192, 128, kernel="attention_backward_preprocess",
        tile=Tile(STATS_ROWS, 0),
    ),
    *(
        BackwardRow(
            "backward_postprocess", SM90, dim, dim, kernel="attention_backward_postprocess",
            tile=Tile(STATS_ROWS, 0),
        )
        for dim in (64, 128)
    ),
    # Kernels of dK, dV and sums of dQ. A fixed order needs no zeros in the sums, which saves 8 to
    # 16 % of calls of 1024 queries on an H100 at head_dim 128, and up to 8 % at 64.
    BackwardRow(
        "backward_fused", SM90, 64, 64, kernel="sm90_backward", scheduler="counter",
        tile=Tile(128, 128), capped_m=64, costs=MEASURED[64], ordered_queries=1024,
    ),
    BackwardRow(
        "backward_fused", SM90, 128, 128, kernel="sm90_hd128_backward", scheduler="counter",
        tile=Tile(64, 128), capped_m=0, costs=MEASURED[128], ordered_queries=1024,
    ),
    # Kernels of dK and dV.
    BackwardRow(
        "backward_dkdv", SM90, 64, 64, kernel="sm90_backward_dkdv", scheduler="counter",
        tile=Tile(64, 128), capped_m=64, costs=ESTIMATED,
    ),
    BackwardRow(
        "backward_dkdv", SM90, 128, 128, kernel="sm90_backward_dkdv", scheduler="counter",
        tile=Tile(64, 128), capped_m=32, costs=ESTIMATED,
    ),
    # "single" at head_dim 256: shared memory has no room for the next tile's operands.
    *(
        BackwardRow(
            "backward_dkdv", SM90, *dims, kernel="sm90_wide_backward_dkdv", scheduler=scheduler,
            tile=Tile(64, 128), cluster=2, costs=ESTIMATED,
        )
        for *dims, scheduler in ((192, 128, "counter"), (256, 256, "single"))
    ),
    BackwardRow(
        "backward_dkdv", SM100, 256, 256, kernel="hd256_backward_dkdv", tile=Tile(128, 256),
        cluster=4, costs=ESTIMATED,
    ),
    # Kernels of dQ. A K tile stays in use longer than its V tile: dS K runs beside the next tile's
    # products.
    BackwardRow(
        "backward_dq", SM90, 64, 64, kernel="sm90_backward_dq", scheduler="counter",
        tile=Tile(128, 128, 3), v_stages=2, registers=(40, 232),
    ),
    BackwardRow(
        "backward_dq", SM90, 128, 128, kernel="sm90_backward_dq", scheduler="counter",
        tile=Tile(128, 96, 3), v_stages=2, registers=(40, 232),
    ),
    BackwardRow(
        "backward_dq", SM90, 192, 128, kernel="sm90_backward_dq", scheduler="counter",
        tile=Tile(128, 64, 3), v_stages=2, registers=(40, 232),
    ),
    BackwardRow(
        "backward_dq", SM90, 256, 256, kernel="sm90_backward_dq", scheduler="counter",
        tile=Tile(128, 64, 2), v_stages=1, registers=(24, 240),
    ),
    BackwardRow(
        "backward_dq", SM100, 256, 256, kernel="hd256_backward_dq", tile=Tile(256, 128), cluster=2
    ),
    # Kernels of dQ from the dS that the dK/dV kernel has stored.
    *(
        BackwardRow(
            "backward_ds_dq", SM90, *dims, kernel="sm90_backward_ds_dq", scheduler=scheduler,
            tile=Tile(256, 64), cluster=2,
        )
        for *dims, scheduler in ((192, 128, "counter"), (256, 256, "single"))
    ),
)  # fmt: skip


ROWS: dict[tuple[str, str, int, int], Row] = {**FORWARD, **BACKWARD}


def head_dims(way: str, archs: Collection[str] | None = None) -> tuple[int, ...]:
    """The values of head_dim that one of the architectures has a row for; None: any
    architecture."""
    return tuple(sorted({head_dim for head_dim, _ in shapes(way, archs)}))


def head_dims_v(way: str, archs: Collection[str] | None = None) -> tuple[int, ...]:
    """The values of head_dim_v that one of the architectures has a row for."""
    return tuple(sorted({head_dim_v for _, head_dim_v in shapes(way, archs)}))


def shapes(way: str, archs: Collection[str] | None = None) -> tuple[tuple[int, int], ...]:
    """The pairs (head_dim, head_dim_v) that one of the architectures has a row for."""
    of_way = {key[2:] for key in ROWS if key[0] == way and (not archs or key[1] in archs)}
    return tuple(sorted(of_way))


def most_packed_heads(archs: Collection[str]) -> int:
    """The most query heads that share the rows of a tile in any row of the architectures."""
    return max(row.most_packed_heads for key, row in FORWARD.items() if key[1] in archs)


def forward(arch: str, head_dim: int, head_dim_v: int | None = None) -> ForwardRow:
    """The forward's row; head_dim_v is head_dim if None. Raises as `find`."""
    row = find("forward", arch, head_dim, head_dim_v)
    assert isinstance(row, ForwardRow)
    return row


def backward(way: str, arch: str, head_dim: int, head_dim_v: int | None = None) -> BackwardRow:
    """The row of a pass of the backward; head_dim_v is head_dim if None. Raises as `find`."""
    row = find(way, arch, head_dim, head_dim_v)
    assert isinstance(row, BackwardRow)
    return row


def has(way: str, arch: str, head_dim: int, head_dim_v: int | None = None) -> bool:
    """Whether the pass has a row; head_dim_v is head_dim if None."""
    return (way, arch, head_dim, head_dim if head_dim_v is None else head_dim_v) in ROWS


def has_fp8(arch: str, head_dim: int, head_dim_v: int | None = None) -> bool:
    """Whether the forward takes fp8 K and V."""
    row = ROWS.get(("forward", arch, head_dim, head_dim if head_dim_v is None else head_dim_v))
    return isinstance(row, ForwardRow) and row.fp8 is not None


def find(way: str, arch: str, head_dim: int, head_dim_v: int | None = None) -> Row:
    """The row of a pass, such as ("forward", "sm_100a", 256); head_dim_v is head_dim if None.

    Raises:
        NotImplementedError: there is no such row; the message lists the rows of the pass.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    found = ROWS.get((way, arch, head_dim, head_dim_v))
    if found is None:
        archs = {
            _shown(*dims): [a for w, a, *of in ROWS if (w, tuple(of)) == (way, dims)]
            for dims in sorted({key[2:] for key in ROWS if key[0] == way})
        }
        there_is = "; ".join(f"{dims} on {', '.join(of)}" for dims, of in archs.items())
        raise NotImplementedError(
            f"there is no attention {way.partition('_')[0]} for {_shown(head_dim, head_dim_v)} on "
            f"{arch}; there is: {there_is}"
        )
    return found


def _shown(head_dim: int, head_dim_v: int) -> str:
    of_v = "" if head_dim == head_dim_v else f" and head_dim_v {head_dim_v}"
    return f"head_dim {head_dim}{of_v}"
