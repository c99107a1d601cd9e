"""The tables of what runs where agree with the operators, and with what tests run."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import cute_attn
from cute_attn.families import FUNCTIONS
from docs import support_page
from tests.conftest import EMULATED_ARCHS
from tests.ops.test_other_gpus import CALLS, CASES

pages = functools.cache(support_page.pages)


@pytest.mark.parametrize(
    "page", [support_page.PAGE, *support_page.FIRST_SCREENS], ids=lambda page: page.name
)
def test_the_tables_are_current(page: Path) -> None:
    assert pages()[page] == page.read_text(), "python -m docs.support_page"


def test_every_page_with_a_table_is_compared() -> None:
    assert set(pages()) == {support_page.PAGE, *support_page.FIRST_SCREENS}


def test_every_operator_is_in_the_table() -> None:
    assert {name for row in support_page.ROWS for name in row.functions} == set(FUNCTIONS)


def test_what_is_emulated_is_emulated_by_a_test() -> None:
    """Every cell of the table: by the tests of each operator, or by those of other GPUs."""
    others = {(*row, case.values[1]) for case in CASES for row in CALLS[str(case.values[0])].covers}
    for row in support_page.ROWS:
        for arch in support_page.ARCHS:
            if not support_page.cell(row, (arch,)) or arch in EMULATED_ARCHS:
                continue
            assert (row.functions[0], row.direction, arch) in others, (row, arch)
    assert {case.values[0] for case in CASES} == set(CALLS)


@pytest.mark.parametrize(
    ("arch", "head_dim"), [("sm_80", 64), ("sm_100a", 128), ("sm_90a", 96), ("sm_120a", 256)]
)
def test_an_empty_cell_is_an_error_of_the_call(arch: str, head_dim: int) -> None:
    (row, *_) = support_page.ROWS
    assert head_dim not in row.sizes([arch])["head_dim"]
    q = torch.zeros(1, 8, 1, head_dim, dtype=torch.bfloat16)
    listed = "there is: head_dim|there are kernels for "
    with cute_attn.emulated(arch), pytest.raises(NotImplementedError, match=listed):
        cute_attn.flash_attn_func(q, q, q)
