"""Which tiles of keys queries see, and which tiles of queries see keys, on Python's integers.

Pairs of small lengths under small windows are compared with a mask of booleans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from cute_attn.kernels.attention.parts.visibility import Visibility

LENGTHS = (0, 1, 2, 3, 5, 8)
BOUNDS = (None, 0, 1, 4)
TILES = ((4, 2, 1), (4, 2, 2), (6, 3, 1))  # rows, keys, rows of a token


def mask(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> torch.Tensor:
    """[token, key] -> whether it is seen, on a grid that reaches past both sequences' ends."""
    token, key = torch.arange(24)[:, None], torch.arange(24)[None]
    distance = key - (token + seqlen_k - seqlen_q)
    seen = torch.ones(24, 24, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def windows() -> Iterator[tuple[int, int, int | None, int | None, torch.Tensor]]:
    for lengths in itertools.product(LENGTHS, LENGTHS):
        for window in itertools.product(BOUNDS, BOUNDS):
            yield *lengths, *window, mask(*lengths, *window)


def interval(first: int, end: int) -> list[int]:
    return list(range(first, end))


@pytest.mark.parametrize(("tile_m", "tile_n"), [(4, 8), (8, 8)])
def test_visitors_are_the_inverse_of_query_tiles(tile_m: int, tile_n: int) -> None:
    """Also with negative bounds, where a key tile may visit rows that see none of its keys."""
    lengths, bounds = (1, 3, 8, 17, 30), (None, -11, -3, 0, 2, 9)
    for *case, left, right in itertools.product(lengths, lengths, bounds, bounds):
        sees = Visibility(tile_m, tile_n, 1, left, right)
        seqlen_q, seqlen_k = case
        visits = [
            interval(*sees.query_tiles(key_tile, *case))
            for key_tile in range(-(-seqlen_k // tile_n))
        ]
        for tile in range(-(-seqlen_q // tile_m)):
            visitors = [n for n, tiles in enumerate(visits) if tile in tiles]
            assert interval(*sees.visitors(tile, *case)) == visitors, (case, left, right, tile)


@pytest.mark.parametrize(("tile_m", "tile_n", "rows_per_token"), TILES)
def test_tiles_are_those_of_the_mask(tile_m: int, tile_n: int, rows_per_token: int) -> None:
    """Exactly the tiles with a visible pair of an existing row and key."""
    for seqlen_q, seqlen_k, left, right, seen in windows():
        sees = Visibility(tile_m, tile_n, rows_per_token, left, right)
        rows = seen[:seqlen_q, :seqlen_k].repeat_interleave(rows_per_token, 0)
        blocks, key_tiles = -(-len(rows) // tile_m), -(-seqlen_k // tile_n)
        tiles = [
            [bool(tile.any()) for tile in block.split(tile_n, 1)] for block in rows.split(tile_m)
        ]
        if not seqlen_k:
            tiles = [[] for _ in range(blocks)]
        case = (seqlen_q, seqlen_k, left, right)
        for block in range(blocks):
            first, end = sees.key_tiles(block, seqlen_q, seqlen_k)
            assert 0 <= first <= end, case  # loops count on it
            assert interval(first, end) == [t for t in range(key_tiles) if tiles[block][t]], case
        for t in range(key_tiles):
            first, end = sees.query_tiles(t, seqlen_q, seqlen_k)
            assert 0 <= first <= end, case
            assert interval(first, end) == [b for b in range(blocks) if tiles[b][t]], case


@pytest.mark.parametrize(("tile_m", "tile_n", "rows_per_token"), TILES)
def test_whole_tiles_need_no_mask(tile_m: int, tile_n: int, rows_per_token: int) -> None:
    """A whole tile's keys all exist, and every row of half a tile sees them; for queries, the
    inverse."""
    for seqlen_q, seqlen_k, left, right, seen in windows():
        sees = Visibility(tile_m, tile_n, rows_per_token, left, right)
        rows = seen.repeat_interleave(rows_per_token, 0)
        case = (seqlen_q, seqlen_k, left, right)
        half = tile_m // 2
        for first_row in range(0, seqlen_q * rows_per_token, half):
            found = interval(*sees.whole_key_tiles(first_row, half, seqlen_q, seqlen_k))
            assert found == [
                t
                for t in range(seqlen_k // tile_n)
                if rows[first_row : first_row + half, t * tile_n : (t + 1) * tile_n].all()
            ], case
        for first_key, keys in itertools.product(range(seqlen_k), (1, tile_n)):
            found = interval(*sees.whole_query_tiles(first_key, keys, seqlen_q, seqlen_k))
            assert found == [
                b
                for b in range(seqlen_q * rows_per_token // tile_m)
                if rows[b * tile_m : (b + 1) * tile_m, first_key : first_key + keys].all()
            ], case


def test_rows_and_keys_agree_on_what_is_seen() -> None:
    for seqlen_q, seqlen_k, left, right, seen in windows():
        sees = Visibility(*TILES[0], left, right)
        by_token, by_key = torch.zeros(seqlen_q, seqlen_k), torch.zeros(seqlen_q, seqlen_k)
        for token in range(seqlen_q):
            low, high = sees.keys(token, seqlen_q, seqlen_k)
            by_token[token, max(low, 0) : max(high, 0)] = 1
        for key in range(seqlen_k):
            low, high = sees.tokens(key, seqlen_q, seqlen_k)
            by_key[max(low, 0) : max(high, 0), key] = 1
        assert torch.equal(by_token.bool(), seen[:seqlen_q, :seqlen_k])
        assert torch.equal(by_key.bool(), seen[:seqlen_q, :seqlen_k])
