"""Whether a contender computes attention. Its output is compared with float64 in a few heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...reference.attention import attention_in_low_precision, attention_reference
from ..harness.agreement import relative_error

MAX_ERROR_RATIO = 2.0  # our error over plain low-precision arithmetic's error
PEER_MAX_ERROR = 0.02  # relative to float64: a peer only has to compute attention
BLOCK = 1024  # rows compared at a time, because a row's scores take memory


@dataclass(frozen=True)
class Expected:
    """The expected output of some rows of a head.

    Attributes:
        rows: the rows of the head's queries.
        exact, plain: the output in float64, and in plain low-precision arithmetic.
    """

    batch: int
    head: int
    rows: torch.Tensor
    exact: torch.Tensor
    plain: torch.Tensor

    def of(self, o: torch.Tensor) -> torch.Tensor:
        """The expected rows, cut from an output `[B, SQ, H, D]`."""
        return o[self.batch, self.rows, self.head].double()


def error_ratio(o: torch.Tensor, expected: Sequence[Expected]) -> float:
    """The larger of two ratios of our error to plain arithmetic's error: in the norm, and in the
    worst element."""
    exact = torch.cat([head.exact for head in expected])
    own = (torch.cat([head.of(o) for head in expected]) - exact).abs()
    allowed = (torch.cat([head.plain for head in expected]).double() - exact).abs()
    norms = (torch.linalg.vector_norm, torch.amax)
    return max(float(norm(own) / norm(allowed)) for norm in norms)


def peer_error(o: torch.Tensor, expected: Sequence[Expected]) -> float:
    """The relative error in norm."""
    actual, exact = (
        torch.cat(rows)
        for rows in ([head.of(o) for head in expected], [head.exact for head in expected])
    )
    return relative_error(actual, exact)


def expected_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Iterable[tuple[int, int]],
    *,
    causal: bool,
    max_blocks: int | None = None,
) -> list[Expected]:
    """The expected output of each pair of a batch and a query head. q is `[B, SQ, H, D]`, and k and
    v are `[B, SK, HK, D]`.

    Args:
        max_blocks: the most blocks of BLOCK rows; the first and the last block are always checked.
    """
    group = q.shape[2] // k.shape[2]
    found = []
    for batch, head in heads:
        q_head = q[batch : batch + 1, :, head : head + 1]
        at = slice(batch, batch + 1), slice(None), slice(head // group, head // group + 1)
        blocks = _blocks(q.shape[1], max_blocks)
        rows = torch.cat([torch.arange(*block, device=q.device) for block in blocks])
        results = [_block(q_head, k[at], v[at], *block, causal) for block in blocks]
        exact, plain = (torch.cat(of_blocks) for of_blocks in zip(*results, strict=True))
        found.append(Expected(batch, head, rows, exact, plain))
    return found


def _blocks(rows: int, most: int | None) -> Sequence[tuple[int, int]]:
    found = [(start, min(start + BLOCK, rows)) for start in range(0, rows, BLOCK)]
    if most is None or len(found) <= most:
        return found
    return [found[i * (len(found) - 1) // (most - 1)] for i in range(most)]


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, end: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # The keys up to the last key that the last row sees.
    keys = k.shape[1] - (q.shape[1] - end) if causal else k.shape[1]
    rows = q[:, start:end], k[:, :keys], v[:, :keys]
    exact, plain = (
        definition(*rows, causal=causal)[0][0, :, 0]
        for definition in (attention_reference, attention_in_low_precision)
    )
    return exact, plain
