"""Page tables for servers that store where each token is, rather than where each page is.

Such a server has a table of slots, `[rows, max_tokens]`: entry `(r, t)` is the slot of token t of
the request in row r. A pool of pages has page_size slots in each page, and a request's tokens t to
t + page_size - 1 are in one page, in order, if t is a multiple of page_size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_pages(tokens: int, page_size: int) -> int:
    """How many pages `tokens` tokens of a request take."""
    return -(-tokens // page_size)


def first_slots(slots: Tensor, rows: Tensor, page_size: int, out: Tensor | None = None) -> Tensor:
    """The slot of the first token of each page, `[requests, pages]`, for the requests in `rows`;
    written to `out` if `out` is given."""
    return torch.index_select(slots[:, ::page_size], 0, rows, out=out)


def write_page_table(out: Tensor, first: Tensor, page_size: int) -> None:
    """Write the pages of the slots `first` to `out`, int32, `[requests, pages]`."""
    torch.div(first, page_size, rounding_mode="floor", out=out)


def write_starts(out: Tensor, lengths: Tensor) -> None:
    """Write the first row of each request's queries to `out`, int32, `[requests + 1]`."""
    out[0] = 0
    torch.cumsum(lengths, 0, dtype=out.dtype, out=out[1:])
