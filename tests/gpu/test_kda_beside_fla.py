"""KDA on a GPU beside flash-linear-attention, both its Triton and its naive functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_attn
from cute_attn.bench.kda import problem
from cute_attn.bench.kda.cases import Case, DecodeCase
from cute_attn.reference import kda as reference
from tests.naive import naive_inputs
from tests.ops.lightning_cases import assert_no_worse
from tests.untuned import untuned

pytestmark = pytest.mark.usefixtures("no_gradients")

DTYPE = torch.bfloat16


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip(
        "fla.ops.kda", reason="needs flash-linear-attention", exc_type=ImportError
    )
    untuned(monkeypatch)
    monkeypatch.setenv("FLA_CUTE_ATTN", "0")  # in case that it is registered
    return package


BESIDE = [
    Case(2, 4, 200),
    Case(2, 2, 200, batch=2, gate="softplus"),
    Case(2, 4, 300, sequences=5, lengths="random"),
]


@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_chunk_kda_beside_fla(fla: Any, case: Case):
    """Both take the same arguments and match the reference, ours by the error rule."""
    arguments = problem.chunk_arguments(case, 17)
    calls = problem.chunk_calls(arguments, with_peer=True)
    errors = problem.check_chunk(case, arguments, calls)
    assert "fla o" in errors


@pytest.mark.parametrize("stage", ["intra", "recompute"])
def test_stages_beside_fla(fla: Any, stage: str):
    case = Case(2, 4, 200, batch=2)
    arguments = problem.stage_arguments(case, 17)
    make = {"intra": problem.intra_calls, "recompute": problem.recompute_calls}[stage]
    errors = problem.check_stage(stage, case, arguments, make(arguments, with_peer=True))
    assert "fla w" in errors


def test_decode_beside_fla(fla: Any):
    case = DecodeCase(9, 4, 8)
    arguments = problem.decode_arguments(case, 17)
    errors = problem.check_decode(case, arguments, problem.decode_calls(arguments, with_peer=True))
    assert "fla state" in errors


@pytest.mark.parametrize("name", ["naive_chunk_kda", "naive_recurrent_kda"])
def test_the_naive_functions_of_fla_are_a_reference_too(fla: Any, name: str):
    from fla.ops.kda import naive

    arguments = problem.chunk_arguments(Case(2, 4, 192), 17)
    given = {name: x for name, x in arguments.items() if name not in ("output_final_state",)}
    stages = reference.kda_chunk_reference(**given, dtype=torch.float32, stage_dtype=DTYPE)
    exact_o, exact_state = getattr(naive, name)(
        *naive_inputs(arguments),
        initial_state=arguments["initial_state"],
        output_final_state=True,
    )
    o, state = cute_attn.chunk_kda(**arguments)
    assert_no_worse(o, stages.o.to(DTYPE), exact_o.double())
    assert_no_worse(state, stages.states.final_state, exact_state.double())
