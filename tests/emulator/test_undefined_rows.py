"""Rows of A that nothing has written make rows of D undefined, and are no finding where those rows
are not stored. Attention kernels leave such rows of Q beyond the last query."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from . import planted_kernels as small
from .mutations import SEEDS, Ptx
from .test_planted_bugs import launch_small

LAST = 60  # the first row of A that is not filled
FILL = "setp.ge.u32 %p1, %thread, 72;"
SECOND = "st.global.v2.f32 [%rd2+256], {%f3, %f4};"  # rows 8 to 15 of each warp's 16


def kernel(store: str) -> small.Small:
    """The product with 60 rows of A; `store` stores the second half of each warp's rows."""
    skip = (
        f"setp.ge.u32 %p5, %thread, {LAST}; setp.lt.u32 %p6, %thread, 64; and.pred %p5, %p5, %p6;"
    )
    text = small.WGMMA.text.replace(FILL, f"{skip} {FILL} or.pred %p1, %p1, %p5;")
    text = text.replace(SECOND, f"{store} // @second")
    expected = small.WGMMA_SUM.copy()
    expected[LAST:] = 0
    return dataclasses.replace(small.WGMMA, text=text, expected=expected)


@pytest.mark.parametrize(("schedule", "seed"), SEEDS)
def test_rows_that_are_not_stored_may_be_undefined(schedule: int, seed: int) -> None:
    guard = "setp.ge.u32 %p7, %thread, 112; @!%p7 "
    done, right = launch_small(kernel(guard + SECOND))(None)(schedule, seed)
    assert done.findings == [] and right


@pytest.mark.parametrize(("schedule", "seed"), SEEDS)
def test_undefined_rows_that_are_stored_are_an_error(schedule: int, seed: int) -> None:
    planted = kernel(SECOND)
    lines = Ptx(planted.text)
    done, _ = launch_small(planted)(None)(schedule, seed)
    found = [f for f in done.errors if f.check == "uninitialised"]
    assert {f.line for f in found} == {lines.mark("second")}
    assert {f.other_line for f in found} == {lines.mark("wgmma")}
    assert "lanes 0xffff0000" in found[0].message


def test_undefined_columns_of_b_are_an_error() -> None:
    text = small.WGMMA.text.replace(FILL, FILL.replace("72", "71"))
    done, _ = launch_small(dataclasses.replace(small.WGMMA, text=text))(None)(0, 0)
    assert {f.check for f in done.errors} == {"uninitialised"}
    assert "wgmma reads shared memory" in done.errors[0].message
    assert np.isfinite(small.WGMMA_SUM).all()
