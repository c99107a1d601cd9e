"""Which mode calls take."""

from __future__ import annotations

import pytest

from cute_attn.distributed.choose import Shape, choose, gathered_bytes

# (heads, heads_k, tokens in all) -> the modes of forward and of training, for W = 2, 4, 8
CHOICES = {
    (32, 8, 2**15): ("gather gather", "gather heads", "heads heads"),
    (32, 8, 2**16): ("gather gather", "gather heads", "heads heads"),
    (32, 8, 2**17): ("gather heads", "heads heads", "heads heads"),
    (32, 32, 2**14): ("gather heads", "heads heads", "heads heads"),
    (32, 32, 2**15): ("gather heads", "heads heads", "heads heads"),
    (64, 8, 2**17): ("gather gather", "heads heads", "heads heads"),
    (16, 1, 2**17): ("gather gather", "gather gather", "gather gather"),
    (32, 32, 2**20): ("heads heads", "heads heads", "heads heads"),
}


def shape(heads: int, heads_k: int, total: int, world: int, *, gradient: bool) -> Shape:
    """A causal call of one sequence."""
    tokens, pairs = total // world, total * total // 2 // world
    received = tokens * (world - 1)
    return Shape(world, tokens, received, pairs, heads, heads_k, 128, 128, False, gradient)


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_the_choices(case: tuple[int, int, int]) -> None:
    found = tuple(
        " ".join(choose(shape(*case, world, gradient=gradient)) for gradient in (False, True))
        for world in (2, 4, 8)
    )
    assert found == CHOICES[case]


def test_a_mesh_does_not_exchange_heads_twice() -> None:
    of_column = shape(32, 32, 2**20, 8, gradient=True)
    assert choose(of_column) == "heads"
    assert choose(of_column, mesh=True) == "ring"  # 16 GiB of K and V
    assert choose(shape(32, 32, 2**18, 8, gradient=True), mesh=True) == "gather"


def test_whole_documents_are_gathered() -> None:
    """Ranks that receive few keys gather them, where they would otherwise exchange heads."""
    for world in (4, 8):
        long = shape(32, 8, 2**17, world, gradient=True)
        assert choose(long) == "heads"
        assert choose(long._replace(received=200, pairs=long.pairs // 20)) == "gather"


def test_windows_are_gathered() -> None:
    assert choose(shape(32, 32, 2**20, 8, gradient=True)._replace(window=True)) == "gather"


def test_more_than_the_limit_is_not_gathered_unless_it_must_be() -> None:
    large = shape(64, 12, 2**21, 8, gradient=False)
    assert gathered_bytes(large) > 8 * 2**30
    assert choose(large) == "ring"
    assert choose(large._replace(gradient=True)) == "ring"
    wide = large._replace(gradient=True, head_dim=256, head_dim_v=256)
    assert choose(wide) == "gather"  # the ring's backward gathers too
