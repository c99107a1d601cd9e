"""P and dS in fragments, for all SM90 kernels of the backward.

In the dQ kernel, rows of a warpgroup's tiles are queries. In the kernels of dK and dV, rows are
keys, so the tiles are S^T and dP^T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Numeric

from ...common.carried import Carried
from ...common.dtypes import DTYPE
from ...common.ptx.convert import pack, unpack
from ..parts import fragments
from ..parts.gradient import PROBABILITY_UNIT, probabilities, score_gradients
from ..parts.softmax import Scaling
from ..spec import Sm90BackwardSpec

STEP = 8  # columns of a lane row whose statistics are in registers at once

# Statistics of a range of a lane row's columns, for each lane row, in the form that `gradient`
# takes.
Statistics = Callable[[range], list[Any]]
Store = Callable[[int, range, list[Any], list[Any]], None]


@dataclass(frozen=True)
class ScoreTile(Carried):
    """Tiles of S and dP of a warpgroup, from which P and dS are computed, in registers.

    P' is P; with a softcap, P' is P times the slope of the cap.

    Attributes:
        s: S, then P' if it stays in float32.
        dp: dP.
        p: P as an operand; None where no product takes it.
        ds: dS as an operand.
        dtype: dtype of the operands.
        float32: P' stays in float32 until dS. A softcap needs float32: rounded, P' would underflow
            where the cap saturates.
        unit: the unit of P.
    """

    s: cute.Tensor
    dp: cute.Tensor
    p: cute.Tensor | None
    ds: cute.Tensor
    scaling: Scaling
    dtype: Any
    softcap: bool
    float32: bool
    unit: float

    @classmethod
    def of(
        cls, spec: Sm90BackwardSpec, columns: int, scaling: Scaling, *, float32: bool = False,
        rounds_p: bool = True,
    ) -> ScoreTile:  # fmt: skip
        """Registers for a given number of columns."""
        dtype = DTYPE[spec.dtype]
        float32 = float32 or spec.softcap
        return cls(
            s=fragments.accumulators(columns),
            dp=fragments.accumulators(columns),
            p=cute.make_rmem_tensor((columns // 4,), Int32) if rounds_p else None,
            ds=cute.make_rmem_tensor((columns // 4,), Int32),
            scaling=scaling,
            dtype=dtype,
            softcap=spec.softcap,
            float32=float32,
            unit=1.0 if float32 else PROBABILITY_UNIT.get(dtype, 1.0),
        )

    def exponentiate(self, lse: Statistics, *, small_lse: bool = False) -> None:
        """Compute P from S; `small_lse` as in `gradient.probabilities`."""
        exponentiate(
            self.s, lse, self.scaling, self._keep, softcap=self.softcap, unit=self.unit,
            small_lse=small_lse,
        )  # fmt: skip

    def differentiate(self, delta: Statistics) -> None:
        """Compute dS from P' and dP."""
        for columns in _steps(self.dp):
            statistics = delta(columns)
            for lane_row in range(fragments.LANE_ROWS):
                dp = self.dp[None, lane_row, None]
                ds = score_gradients(
                    self._kept(lane_row, columns), dp, columns, statistics[lane_row],
                    packed=False, unit=self.unit,
                )  # fmt: skip
                store_words(self.ds, lane_row, columns, ds, self.dtype)

    def _keep(self, lane_row: int, columns: range, p: list[Any], with_slope: list[Any]) -> None:
        if self.p is not None:
            store_words(self.p, lane_row, columns, p, self.dtype)
        if self.float32:
            keep_pairs(self.s, lane_row, columns, with_slope)

    def _kept(self, lane_row: int, columns: range) -> list[Any]:
        if self.float32:
            row = self.s[None, lane_row, None]
            return [(row[j], row[j + 1]) for j in columns[::2]]
        assert self.p is not None
        return [unpack(self.dtype, self.p[word(lane_row, j)]) for j in columns[::2]]


def exponentiate(
    s: cute.Tensor,
    lse: Statistics,
    scaling: Scaling,
    store: Store,
    *,
    softcap: bool,
    unit: float = 1.0,
    small_lse: bool = False,
) -> None:
    """Call store(lane row, columns, P, P') with pairs of values, in units. P' is P; with a softcap,
    P' is P times the slope of the cap. `small_lse` as in `gradient.probabilities`."""
    for columns in _steps(s):
        statistics = lse(columns)
        for lane_row in range(fragments.LANE_ROWS):
            row = s[None, lane_row, None]
            p, with_slope = probabilities(
                row, columns, statistics[lane_row], scaling, softcap=softcap, packed=False,
                unit=unit, small_lse=small_lse,
            )  # fmt: skip
            store(lane_row, columns, p, with_slope)


def keep_pairs(s: cute.Tensor, lane_row: int, columns: range, pairs: list[Any]) -> None:
    """Replace values of S, or another tile in registers, by pairs."""
    row = s[None, lane_row, None]
    for j, (x, y) in zip(columns[::2], pairs, strict=True):
        row[j], row[j + 1] = x, y


def store_words(
    words: cute.Tensor, lane_row: int, columns: range, pairs: list[Any], dtype: type[Numeric]
) -> None:
    """Round pairs of values to an operand."""
    for j, pair in zip(columns[::2], pairs, strict=True):
        words[word(lane_row, j)] = pack(dtype, *pair)


def word(lane_row: int, column: int) -> int:
    """The word of an operand with a lane row's columns `column` and `column` + 1; `column` is
    even."""
    return column // 2 * fragments.LANE_ROWS + lane_row


def _steps(x: cute.Tensor) -> list[range]:
    """The columns of a lane row, STEP at a time."""
    count = cute.size(x) // fragments.LANE_ROWS
    return [range(first, first + STEP) for first in range(0, count, STEP)]
