"""Which keys a query sees, and which queries see a key, by tokens and by tiles.

Positions of queries and keys are aligned at the ends of their sequences. With d = i + seqlen_k -
seqlen_q, query i sees the existing keys j with d - left <= j <= d + right. A row of a query tile is
a token; with packed heads, `rows_per_token` rows share a token.

All methods work on Python integers and on device integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass
from cutlass import Int32

from ...common.carried import Carried


@dataclass(frozen=True)
class Visibility(Carried):
    """A window, and tiles of rows and keys.

    Attributes:
        tile_m: rows of a query tile.
        tile_n: keys of a K/V tile.
        rows_per_token: heads packed into the rows of a tile; a power of two.
        left, right: how far left and right of the diagonal a query sees; None is no bound. Causal
            is right = 0. With a negative number a query does not see the diagonal.
        tree: whether a tree_mask may hide some of the last seqlen_q keys. Their tiles need a mask.
    """

    tile_m: int
    tile_n: int
    rows_per_token: int
    left: Any = None
    right: Any = None
    tree: bool = field(default=False, kw_only=True)

    @classmethod
    def of(
        cls, spec: Any, tile_m: int, tile_n: int, rows_per_token: int, left: Any, right: Any
    ) -> Visibility:
        """A Visibility with the bounds that the kernel's spec has."""
        return cls(
            tile_m, tile_n, rows_per_token,
            left if spec.window_left else None,
            right if spec.window_right else None,
            tree=getattr(spec, "tree_mask", False),
        )  # fmt: skip

    def token(self, row: Any) -> Any:
        return row >> _log2(self.rows_per_token)

    def keys(self, token: Int32, seqlen_q: Int32, seqlen_k: Int32) -> tuple[Any, Any]:
        """Return [low, high), the keys that a token sees; low may be negative."""
        diagonal = token + seqlen_k - seqlen_q
        low, high = 0, seqlen_k
        if self.right is not None:
            high = cutlass.min(high, diagonal + self.right + 1)
        if self.left is not None:
            low = diagonal - self.left
        return low, high

    def tokens(self, key: Any, seqlen_q: Int32, seqlen_k: Int32) -> tuple[Any, Any]:
        """Return [low, high), the tokens that see a key; low may be negative."""
        diagonal = key + seqlen_q - seqlen_k
        low, high = 0, seqlen_q
        if self.left is not None:
            high = cutlass.min(high, diagonal + self.left + 1)
        if self.right is not None:
            low = diagonal - self.right
        return low, high

    def key_tiles(self, block: Any, seqlen_q: Int32, seqlen_k: Int32) -> tuple[Any, Any]:
        """Return [first, end), the K/V tiles with a key that some row of query tile `block`
        sees."""
        return self.key_tiles_of_rows(block * self.tile_m, self.tile_m, seqlen_q, seqlen_k)

    def key_tiles_of_rows(
        self, first_row: Int32, rows: int, seqlen_q: Int32, seqlen_k: Int32
    ) -> tuple[Any, Any]:
        """Return [first, end), the K/V tiles with a key that at least one of the rows sees."""
        shift = seqlen_k - seqlen_q
        low, high = 0, seqlen_k
        if self.right is not None:
            last_token = cutlass.min(self.token(first_row + (rows - 1)), seqlen_q - 1)
            high = cutlass.min(high, last_token + shift + self.right + 1)
        if self.left is not None:
            low = cutlass.max(low, self.token(first_row) + shift - self.left)
        return _tiles(low, high, self.tile_n)

    def whole_key_tiles(
        self, first_row: Int32, rows: int, seqlen_q: Int32, seqlen_k: Int32
    ) -> tuple[Any, Any]:
        """Return [first, end), the K/V tiles that need no mask, because each of `rows` rows sees
        every key."""
        low, _ = self.keys(self.token(first_row + rows - 1), seqlen_q, seqlen_k)
        _, high = self.keys(self.token(first_row), seqlen_q, seqlen_k)
        if self.tree:
            high = cutlass.min(high, seqlen_k - seqlen_q)
        return _whole_tiles(low, high, self.tile_n)

    def query_tiles(self, key_tile: Any, seqlen_q: Int32, seqlen_k: Int32) -> tuple[Any, Any]:
        """Return [first, end), the query tiles with a row that sees some key of a K/V tile."""
        shift = seqlen_q - seqlen_k
        low, high = 0, seqlen_q
        if self.left is not None:
            last_key = key_tile * self.tile_n + (self.tile_n - 1)
            high = cutlass.min(high, last_key + shift + self.left + 1)
        if self.right is not None:
            low = cutlass.max(low, key_tile * self.tile_n + shift - self.right)
        return _tiles(low * self.rows_per_token, high * self.rows_per_token, self.tile_m)

    def visitors(self, query_tile: Any, seqlen_q: Int32, seqlen_k: Int32) -> tuple[Any, Any]:
        """Return [first, end), the K/V tiles whose `query_tiles` have a query tile that has rows.
        At the ends of a negative window, such a K/V tile may have no key that a row sees."""
        shift = seqlen_k - seqlen_q
        first, end = 0, _divided(seqlen_k + (self.tile_n - 1), self.tile_n)
        if self.left is not None:
            low = query_tile * self.tile_m + shift - self.left
            first = cutlass.max(0, _divided(low, self.tile_n))
        if self.right is not None:
            high = query_tile * self.tile_m + (self.tile_m - 1) + shift + self.right
            end = cutlass.min(end, _divided(high, self.tile_n) + 1)
        return first, end

    def whole_query_tiles(
        self, first_key: Any, keys: int, seqlen_q: Int32, seqlen_k: Int32
    ) -> tuple[Any, Any]:
        """Return [first, end), the query tiles that need no mask, because every row sees each of
        `keys` keys."""
        low, _ = self.tokens(first_key + keys - 1, seqlen_q, seqlen_k)
        _, high = self.tokens(first_key, seqlen_q, seqlen_k)
        return _whole_tiles(low * self.rows_per_token, high * self.rows_per_token, self.tile_m)


@dataclass(frozen=True)
class HeadsVisibility(Visibility):
    """A Visibility in which a token has a row for each of any number of heads.

    Attributes:
        by_heads: the divisor for divisions by the number of heads.
    """

    by_heads: Any = None

    def token(self, row: Any) -> Any:
        return divmod(Int32(row), self.by_heads)[0]


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _divided(x: Any, size: int) -> Any:
    """x // size; x is not negative where `size` is no power of two."""
    return x // size if size & (size - 1) else x >> _log2(size)


def _tiles(low: Any, high: Any, size: int) -> tuple[Any, Any]:
    """Return [first, end), the tiles that [low, high) touches. The result is empty if [low, high)
    is empty."""
    first = _divided(low, size)
    end = _divided(cutlass.max(high, 0) + (size - 1), size)
    return first, cutlass.max(first, end)


def _whole_tiles(low: Any, high: Any, size: int) -> tuple[Any, Any]:
    """Return [first, end), the tiles that lie in [low, high); first may be past end."""
    first = _divided(cutlass.max(low, 0) + (size - 1), size)
    return first, _divided(cutlass.max(high, 0), size)
