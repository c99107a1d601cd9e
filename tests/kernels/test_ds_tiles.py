"""The order of dS in global memory, and of how many heads it is kept at once, on Python's
integers."""

from __future__ import annotations

from typing import Any

import pytest

from cute_attn.kernels.attention import ds_tiles
from cute_attn.kernels.attention.heuristics import parts_with_ds
from cute_attn.kernels.attention.sm90.score_tile import word

GIB = 2**30


def test_each_element_has_the_place_that_wgmma_and_dq_expect() -> None:
    """A warp's lanes have two queries of each 8, of keys 16 warp + lane // 4 and 8 more. Row by
    row, wgmma undoes the swizzle, and its row of dQ is the element's place in the row."""
    found: dict[tuple[int, int], int] = {}
    for warp in range(4):
        for lane in range(32):
            for half in range(2):
                for lane_row in range(2):
                    key = 16 * warp + lane // 4 + 8 * lane_row
                    at = ds_tiles.lane_offset(warp, lane) ^ half * 4 * ds_tiles.UNIT_BYTES
                    row, byte = divmod(at + lane_row * 8 * ds_tiles.ROW_BYTES, ds_tiles.ROW_BYTES)
                    assert row == key
                    unit = byte // ds_tiles.UNIT_BYTES ^ row % 8
                    for i in range(4):
                        group = (word(lane_row, 8 * half + 2 * i) - lane_row) // 2  # of 8 queries
                        for j in range(2):
                            query = 8 * group + 2 * (lane % 4) + j
                            assert ds_tiles.query_of(8 * unit + 2 * i + j) == query
                            found[key, query] = 8 * unit + 2 * i + j
    assert len(found) == ds_tiles.TILE**2
    assert sorted(map(ds_tiles.query_of, range(64))) == list(range(64))


def parts(
    rows: int, keys: int, heads: int = 8, heads_k: int = 8, splits: int = 1, limit: int = 2 * GIB,
    arch: str = "sm_90a", head_dim: int = 256, batch: int = 1, clusters: int = 66,
    packed: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    found = parts_with_ds(
        arch, head_dim, rows=rows, keys=keys, heads=heads, heads_k=heads_k, splits=splits,
        limit=limit, batch=batch, clusters=clusters, packed=packed,
    )  # fmt: skip
    return tuple(found) if found.key_blocks else found[:2]


def test_the_parts_of_the_heads_fit_and_are_equal() -> None:
    assert ds_tiles.nbytes(1, 16384, 16384) == GIB // 2
    assert parts(16384, 16384) == (1, 4)
    assert parts(16384, 16384, 7, 7) == (1, 4)
    assert parts(16384, 16384, 9, 9) == (1, 3)
    assert parts(4096, 4096) == (1, 8)
    assert parts(128, 1) == (1, 8)


def test_a_group_that_does_not_fit_is_split() -> None:
    assert parts(16384, 16384, 8, 1) == (2, 1)
    assert parts(16384, 16384, 8, 2) == (1, 1)
    assert parts(16384, 16384, 12, 2) == (2, 1)
    assert parts(16384, 16384, 8, 1, splits=4) == (4, 2)
    assert parts(16384, 16384, 5, 1) == (5, 3)


def test_dq_does_without_where_no_head_fits() -> None:
    assert parts(16384, 16384, limit=GIB // 2) == (1, 1)
    assert parts(16384, 16384, limit=GIB // 8) == (1, 0)
    assert parts(16384, 16384, 8, 1, 2, limit=0) == (2, 0)
    assert parts(131072, 131072, limit=GIB) == (1, 0)


def test_dS_of_a_part_of_the_keys_is_kept_where_no_head_fits() -> None:
    """Of so many blocks of keys that two CTAs of each SM have work, or nearly."""
    assert parts(32768, 32768, limit=GIB) == (1, 1, 66)
    assert parts(32768, 32768, 8, 1, limit=GIB) == (8, 1, 66)
    assert parts(65536, 65536, limit=GIB) == (1, 1, 57)  # of 512, in 9 parts
    assert parts(65536, 65536, limit=2 * GIB) == (1, 1, 66)
    assert parts(16384, 16384, limit=GIB // 2 - 1) == (1, 1, 66)
    assert parts(4 * 32768, 32768, batch=4, limit=2 * GIB) == (1, 1, 52)  # of 256, in 5 parts
    assert parts(32768, 32768, limit=GIB, packed=True) == (1, 0)


@pytest.mark.parametrize("keys", [20_000, 32_768, 50_000])
@pytest.mark.parametrize("limit", [GIB // 2, GIB, 3 * GIB])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_what_is_kept_fits_the_limit(keys: int, limit: int, group: int) -> None:
    rows = -(-keys // 128) * 128
    splits, heads, *blocks = parts(rows, keys, 24, 24 // group, limit=limit)
    at_once = blocks[0] * ds_tiles.CLUSTER_KEYS if blocks else keys
    sums = 4 * rows * 256 if blocks else 0
    assert ds_tiles.nbytes(heads * group // splits, rows, at_once) + sums <= limit


@pytest.mark.parametrize("more", [{"arch": "sm_100a"}, {"head_dim": 128}], ids=str)
def test_kernels_that_need_none(more: dict[str, Any]) -> None:
    assert parts(4096, 4096, **more) == (1, 0)


def test_a_gpu_without_room_for_a_cluster() -> None:
    """The emulator's machine may have one SM, and runs clusters on it all the same."""
    assert parts(4096, 32768, 1, 1, limit=GIB // 8, clusters=0) == (1, 1, 86)


def test_nothing_to_do() -> None:
    assert parts(0, 100) == parts(100, 0) == parts(100, 100, 0, 0) == (1, 0)
