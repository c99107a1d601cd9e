"""Numbers of tiles and their places, for tiles of rows of queries and for tiles of keys.

Python's integers stand for the device's; but for packed sequences a warp works together, in the
emulator.
"""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import cutlass
import pytest
import torch

from cute_attn import cache
from cute_attn.cache import KernelDef
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention.parts.visibility import Visibility
from cute_attn.kernels.attention.parts.work import LAST_TILES, SplitTileMap, TileMap
from cute_attn.kernels.attention.spec import ORDERS
from cute_attn.kernels.common.sequences import Sequences

sys.path.insert(0, str(Path(__file__).parent))
from tile_map_kernel import HEADS, KV_HEADS, TILE, TileMapSpec, tiled_heads

PLACES = KernelDef(name="places", target="tile_map_kernel:Places")
BATCH = 3


def tile_map(
    of_keys: bool,
    packed_heads: int,
    longest_last: bool,
    at_once: int,
    last_tiles: int | None = None,
    group: int = HEADS // KV_HEADS,
) -> TileMap:
    queries, keys = Sequences(20), Sequences(33)
    return TileMap(
        TILE, packed_heads, longest_last, queries, keys, tiled_heads(of_keys, packed_heads),
        group, BATCH, at_once, of_keys, last_tiles,
    )  # fmt: skip


@pytest.fixture
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python's integers stand for the device's in `select_` too."""
    monkeypatch.setattr(cutlass, "select_", lambda condition, x, y: x if condition else y)


@pytest.mark.usefixtures("integers")
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("packed_heads", [1, 2])
@pytest.mark.parametrize("longest_last", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 5, 12])
@pytest.mark.parametrize("last_tiles", [None, 0, 7, 1000])
def test_every_tile_has_one_number(
    of_keys: bool, packed_heads: int, longest_last: bool, at_once: int, last_tiles: int | None
) -> None:
    tiles = tile_map(of_keys, packed_heads, longest_last, at_once, last_tiles)
    heads = tiled_heads(of_keys, packed_heads)
    blocks = -(-33 // TILE) if of_keys else -(-20 * packed_heads // TILE)
    assert tiles.count() == heads * blocks * BATCH
    places = [tiles.locate(tile)[1:] for tile in range(tiles.count())]
    assert sorted(places) == sorted(itertools.product(range(blocks), range(heads), range(BATCH)))


@pytest.mark.usefixtures("integers")
@pytest.mark.parametrize("packed_heads", [1, 2, 4])
def test_tiles_without_a_used_row_do_not_exist(
    packed_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of packed heads has fewer tokens than rows."""
    monkeypatch.setattr(cutlass, "max", max)
    monkeypatch.setattr(cutlass, "min", min)
    used = [20, 5, -3]
    tiles = replace(tile_map(False, packed_heads, False, 1), queries=Sequences(20, None, used))
    places = [tiles.locate(tile) for tile in range(tiles.count())]
    for sequence, count in enumerate(used):
        found = {block for exists, block, _, of in places if exists and of == sequence}
        assert found == set(range(-(-max(count, 0) * packed_heads // TILE)))


@pytest.mark.parametrize("of_keys", [False, True])
def test_the_longest_tiles_come_first(of_keys: bool) -> None:
    """The longest tiles of the heads that share the L2 cache come first."""
    for longest_last in (False, True):
        tiles = tile_map(of_keys, 1, longest_last, at_once=2)
        blocks = [tiles.locate(tile)[1] for tile in range(tiles.count())]
        of_two_heads = 2 * (max(blocks) + 1)
        for first in range(0, len(blocks), of_two_heads):
            part = blocks[first : first + of_two_heads]
            assert part == sorted(part, reverse=longest_last)


@pytest.mark.usefixtures("integers")
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("last_tiles", [1, 4, 13, 1000])
def test_the_last_heads_are_one_group(of_keys: bool, at_once: int, last_tiles: int) -> None:
    """The last group has at least `last_tiles` tiles, and no more heads than this and whole groups
    need."""
    tiles = tile_map(of_keys, 1, True, at_once, last_tiles)
    places = [tiles.locate(tile)[1:] for tile in range(tiles.count())]
    heads = BATCH * tiled_heads(of_keys, 1)
    of_head = len(places) // heads
    least = min(heads, -(-last_tiles // of_head))
    last = next(n for n in range(least, heads + 1) if (heads - n) % at_once == 0)
    for first in [*range(0, heads - last, at_once), heads - last]:
        width = last if first == heads - last else at_once
        part = places[first * of_head : (first + width) * of_head]
        assert len({(head, sequence) for _, head, sequence in part}) == width
        blocks = [block for block, _, _ in part]
        assert blocks == sorted(blocks, reverse=True)


BALANCED = SimpleNamespace(window_left=False, window_right=True)


@pytest.mark.usefixtures("integers")
def test_only_tiles_of_causal_calls_of_different_lengths_have_a_last_group() -> None:
    tiles = tile_map(True, 1, False, at_once=1)
    assert tiles.balanced(BALANCED, 10).last_tiles.value == LAST_TILES * 10
    for window_left, window_right in ((True, True), (True, False), (False, False)):
        spec = SimpleNamespace(window_left=window_left, window_right=window_right)
        assert tiles.balanced(spec, 10) is tiles
    packed = replace(tiles, keys=Sequences(33, cu_seqlens=[0, 33]))
    assert packed.balanced(BALANCED, 10) is packed
    few_queries = replace(tiles, queries=Sequences(16))
    assert few_queries.balanced(BALANCED, 10).last_tiles.value == 0


def test_work_of_a_tile_of_rows() -> None:
    work = tile_map(False, 2, False, at_once=1).work(block=1, head=1, sequence=2)
    assert (work.block, work.queries, work.keys) == (1, (1, 2, 0, 20), (1, 2, 0, 33))


@pytest.mark.parametrize("packed_heads", [1, 2])
def test_work_of_a_tile_of_keys(packed_heads: int) -> None:
    """The work's head is the first head, or pack, that shares the K/V head."""
    work = tile_map(True, packed_heads, False, at_once=1).work(block=4, head=1, sequence=0)
    assert (work.queries, work.keys) == ((2 // packed_heads, 0, 0, 20), (1, 0, 0, 33))


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits_of_a_tile_follow_one_another_and_share_its_key_tiles(splits: int) -> None:
    whole = tile_map(False, 2, True, at_once=2)
    given = {f.name: getattr(whole, f.name) for f in fields(whole)}
    tiles = SplitTileMap(**given, splits=splits)
    assert tiles.count() == splits * whole.count()
    for number in range(tiles.count()):
        _, *where, split = tiles.locate(number)
        assert (*where, split) == (*whole.locate(number // splits)[1:], number % splits)
        work = tiles.work(*where, split)
        assert (work.queries, work.keys) == (whole.work(*where).queries, whole.work(*where).keys)
        assert (work.split, work.splits) == (split, splits)
    for first, end in ((2, 2), (0, 1), (1, 8), (0, 9), (3, 40)):
        parts = [tiles.work(0, 0, 0, split).part(first, end) for split in range(splits)]
        assert [i for part in parts for i in range(*part)] == list(range(first, end))
        assert all(first <= a <= b <= end for a, b in parts)


@pytest.mark.usefixtures("integers")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("clusters", [1, 5, 9, 40])
@pytest.mark.parametrize("group", [1, 2])
def test_a_tile_adds_after_exactly_the_tiles_of_smaller_numbers(
    order: str, clusters: int, group: int
) -> None:
    """So no tile waits for one that may not have started."""
    ordered = tile_map(True, 1, False, at_once=1, group=group).ordered(order, clusters)
    sees = Visibility(4, TILE, 1, None, None if order == "rising" else 0)
    numbers = {
        tuple(map(int, ordered.locate(number)[1:])): number
        for number in range(int(ordered.count()))
    }
    directions = set()
    for head, sequence, tile in itertools.product(
        range(KV_HEADS), range(BATCH), range(-(-20 // 4))
    ):
        falls = bool(int(ordered.falls(sequence * KV_HEADS + head, sequence)))
        directions.add(falls)
        first, end = sees.visitors(tile, 20, 33)
        visitors = range(first, end)
        places = [int(ordered.place(block, first, end, falls)) for block in visitors]
        of_tile = [numbers[block, head, sequence] for block in visitors]
        assert places == [sorted(of_tile).index(number) for number in of_tile]
    alternates = order == "by_head" or (order == "alternating" and group == 1)
    assert directions == ({False, True} if alternates and clusters < 40 else {falls})
    assert falls == (order in ("alternating", "by_head"))  # the last group


def test_packed_sequences_have_starts_and_as_many_tokens_as_are_used() -> None:
    sequences = Sequences(12, cu_seqlens=[0, 5, 5, 12], seqused=[3, 4, 9])
    assert [sequences.start(i) for i in range(3)] == [0, 5, 5]
    assert [sequences.length(i) for i in range(3)] == [3, 0, 7]


@pytest.mark.parametrize(
    "spec",
    [
        TileMapSpec(of_keys=False, packed_heads=2, longest_last=True, seqused=True),
        TileMapSpec(of_keys=True, packed_heads=2, longest_last=False, seqused=False),
    ],
    ids=["of queries", "of keys"],
)
def test_every_tile_of_packed_sequences_has_one_number(spec: TileMapSpec) -> None:
    """More of them than a warp has lanes, some empty. Numbers that are left have no place."""
    numbers = random.Random(0)
    lengths = [numbers.choice([0, 1, TILE, numbers.randrange(3 * TILE)]) for _ in range(40)]
    used = [numbers.randrange(-1, length + 2) for length in lengths] if spec.seqused else None
    rows_per_token = 1 if spec.of_keys else spec.packed_heads
    heads = tiled_heads(spec.of_keys, spec.packed_heads)
    total = sum(lengths)
    places = torch.full((heads * (total * rows_per_token // TILE + len(lengths)), 4), -7).int()
    run = Emulator().load(cache.compile(PLACES, spec, arch="sm_90a"))
    run(
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        None if used is None else torch.tensor(used, dtype=torch.int32),
        total,
        places,
    )
    expected = []
    for sequence, length in enumerate(lengths):
        tokens = length if used is None else max(0, min(length, used[sequence]))
        blocks = list(range(-(-tokens * rows_per_token // TILE)))
        expected += itertools.product(
            blocks[::-1] if spec.longest_last else blocks, range(heads), [sequence]
        )
    found = [tuple(place) for exists, *place in places.tolist() if exists == 1]
    assert found == expected
    assert (places[len(expected) :, 0] == 0).all()
