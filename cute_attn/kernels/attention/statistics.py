"""The two statistics of each query row that the backward needs: its log-sum-exp, and delta.

The preprocess kernel writes the log-sum-exp and delta as float32 `[2, heads, padded rows]`, and the
dQ and dK/dV kernels read them. P is exp(score - lse), with the natural lse; delta is the sum of o *
do over head_dim, less the gradient of lse. Sequences start at multiples of STATS_ROWS, so that a
tile of queries is one aligned copy. Rows that see no key, and padding, have lse = inf, hence P = 0,
and delta = 0. But the lowest bit of delta is a flag in every row. It tells whether any row in the
row's aligned block of 32 rows has a large lse. Importing this loads no compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..common.sequences import Sequences

STATS_ROWS = 128  # rows of a query tile, to which a sequence's rows are padded
LSE, DELTA = 0, 1  # indices of the tensor's first mode
ORDER_COUNTERS = 4  # counters of `ordered_sums` for STATS_ROWS rows
FLAG_ROWS = 32  # rows whose deltas share a flag
# A finite lse whose absolute value is at least this is large. Below, the rounding of an exponent
# that is computed by one multiply-add changes P by at most 2^-14 of itself.
LARGE = 256.0


def padded_start(queries: Sequences, sequence: Any) -> Any:
    """The padded row of a sequence's first token."""
    if queries.cu_seqlens is None:
        return sequence * round_up(queries.tokens)
    return (queries.start(sequence) + STATS_ROWS * sequence) & -STATS_ROWS


def padded_rows(tokens: int, batch: int, varlen: bool) -> int:
    """The number of padded rows of a head; `tokens` counts each sequence, or all packed
    sequences."""
    return round_up(tokens + STATS_ROWS * batch) if varlen else batch * round_up(tokens)


def num_query_zeros(heads: int, rows: int, *, ordered: bool = False) -> int:
    """The length of `zeroed`, from the padded rows of each head: the numbers of `query_zeros`, or
    with `ordered` the counters of `ordered_sums`."""
    tiles = heads * (rows // STATS_ROWS)
    return tiles * ORDER_COUNTERS if ordered else 1 + tiles


def counters_of_tile(tile_m: int) -> int:
    """The distance of a tile's counters from the next tile's in `ordered_sums`."""
    return ORDER_COUNTERS * tile_m // STATS_ROWS


def num_tiles(tokens: int, batch: int, varlen: bool) -> int:
    """How many tiles of STATS_ROWS a head has: the number of parts of dsink. It is an upper bound
    with packed sequences."""
    return (
        tokens // STATS_ROWS + batch if varlen else padded_rows(tokens, batch, False) // STATS_ROWS
    )


def round_up(tokens: Any) -> Any:
    return (tokens + (STATS_ROWS - 1)) & -STATS_ROWS
