"""The order in which CTAs of the SM90 backward take query heads and tiles of queries."""

from __future__ import annotations

from collections import Counter

import cutlass
import pytest

from cute_attn.kernels.attention.parts.visibility import Visibility
from cute_attn.kernels.attention.parts.work import TileMap
from cute_attn.kernels.attention.sm90.uses import FixedOrder, HeadsInside, QueryOrder, Walk
from cute_attn.kernels.attention.spec import ORDERS
from cute_attn.kernels.common.sequences import Sequences

TILE_M, TILE_N = 64, 128
CLUSTERS = 12


@pytest.fixture(autouse=True)
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python's integers stand for the device's in `select_` too."""
    monkeypatch.setattr(cutlass, "select_", lambda condition, x, y: x if condition else y)


def tile_map(tokens: int, group: int, heads: int = 4) -> TileMap:
    sequences = Sequences(tokens)
    return TileMap(
        TILE_N, 1, False, sequences, sequences, heads, group, 1, 1, of_keys=True
    )  # fmt: skip


def steps(walk: Walk, group: int, tiles: int) -> list[tuple[int, int]]:
    tile, head = int(walk.start), int(walk.head)
    found = []
    for _ in range(tiles * group):
        found.append((tile, head))
        tile, head = (int(x) for x in walk.following(tile, head))
    return found


@pytest.mark.parametrize(
    ("order", "name"),
    [(QueryOrder(), ""), (HeadsInside(), ""), *((FixedOrder(), name) for name in ORDERS)],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tokens", [640, 1000])
def test_a_walk_takes_every_tile_of_every_head_once(
    order: QueryOrder, name: str, group: int, tokens: int
) -> None:
    tiles = tile_map(tokens, group)
    if name:
        tiles = tiles.ordered(name, CLUSTERS)
    sees = Visibility(TILE_M, TILE_N, 1, None, 0)
    for block in range(int(tiles.blocks(tokens))):
        work = tiles.work(block, 2, 0)
        first, end = sees.query_tiles(block, tokens, tokens)
        found = steps(order.walk(tiles, work, first, end), group, end - first)
        heads = range(2 * group, 3 * group)
        assert sorted(found) == [(tile, head) for tile in range(first, end) for head in heads]
        if group > 1 and (type(order) is HeadsInside or name == "alternating"):
            of_tiles = [tile for tile, _ in found]
            assert of_tiles == sorted(of_tiles, reverse=2 * block < tiles.blocks(tokens))


def test_ctas_of_a_head_are_at_the_same_tile_of_queries() -> None:
    """At most two tiles of queries of a head are in use at a time, however many tiles of keys."""
    tokens, group = 16 * TILE_N, 2
    tiles = tile_map(tokens, group).in_halves(CLUSTERS)
    sees = Visibility(TILE_M, TILE_N, 1, None, 0)
    ctas: list[list[tuple[int, int]]] = [[] for _ in range(8)]
    for number in range(16):  # the first head's tiles of keys, the longest first
        _, block, head, _ = (int(x) for x in tiles.locate(number * int(tiles.heads_at_once)))
        assert (block, head) == (number, 0)
        first, end = sees.query_tiles(block, tokens, tokens)
        walk = HeadsInside().walk(tiles, tiles.work(block, 0, 0), first, end)
        min(ctas, key=len).extend(steps(walk, group, end - first))
    assert max(map(len, ctas)) - min(map(len, ctas)) == 0
    for moment in zip(*ctas, strict=True):
        assert len({tile for tile, _ in moment}) <= 2


@pytest.mark.parametrize(("tokens", "heads"), [(1024, 20), (640, 5), (4096, 2), (128, 3)])
def test_groups_in_halves_have_two_tiles_for_each_cluster(tokens: int, heads: int) -> None:
    tiles = tile_map(tokens, 2, heads).in_halves(CLUSTERS)
    blocks = int(tiles.blocks(tokens))
    located = [tuple(map(int, tiles.locate(n)[1:3])) for n in range(int(tiles.count()))]
    assert Counter(located) == Counter((b, h) for b in range(blocks) for h in range(heads))
    assert int(tiles.heads_at_once) == max(1, min(2 * CLUSTERS // blocks, heads))
    of_group = located[: int(tiles.heads_at_once) * blocks]
    assert [block for block, _ in of_group] == sorted(block for block, _ in of_group)


def test_a_head_of_its_own_keeps_its_order() -> None:
    tiles = tile_map(1024, 1)
    assert tiles.in_halves(CLUSTERS).heads_at_once == tiles.heads_at_once
