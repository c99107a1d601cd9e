"""flash-linear-attention's `chunk_gated_delta_rule` with this package as a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_attn.integrations import fla as integration
from cute_attn.ops import gated_delta_rule as operators
from tests.ops.gated_delta_rule_cases import SMALL, Case
from tests.ops.kda_cases import assert_agrees, definition
from tests.ops.test_kda_gradients import INPUTS, weights
from tests.ops.test_kda_gradients import assert_agrees as assert_gradients_agree

CALL = "chunk_gated_delta_rule"


@pytest.fixture
def library(fla: Any) -> Any:
    """flash-linear-attention's module; `fla` registers the backend."""
    return pytest.importorskip("fla.ops.gated_delta_rule")


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of calls of our operator."""
    calls: list[dict[str, Any]] = []
    operator = operators.chunk_gated_delta_rule

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return operator(*args, **kwargs)

    monkeypatch.setattr(operators, CALL, counted)
    return calls


@pytest.mark.everywhere
def test_a_training_step_is_ours(
    library: Any, reached: list[Any], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The backend also takes the gradient, if it is off by then."""
    args = Case(SMALL, (70,), group=2).arguments(device)
    of = weights(args)
    names = [name for name in INPUTS if name in args]
    leaves = {name: args[name].detach().requires_grad_() for name in names}
    o, state = library.chunk_gated_delta_rule(**args | leaves, chunk_indices=None)
    assert len(reached) == 1
    monkeypatch.setenv(integration.ENVIRONMENT_VARIABLE, "0")
    assert_agrees(args, o.detach(), state.detach())
    found = torch.autograd.grad([o, state], list(leaves.values()), list(of.values()))
    assert_gradients_agree(args, of, dict(zip(names, found, strict=True)))
    assert definition(args)["g"].shape[-1] == 1


@pytest.mark.gpu
@torch.no_grad()
def test_off_by_the_environment(
    library: Any, reached: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients need another Triton on Hopper, so this is a forward."""
    monkeypatch.setenv(integration.ENVIRONMENT_VARIABLE, "0")
    args = Case(SMALL, (70,), group=2).arguments("cuda")
    assert_agrees(args, *library.chunk_gated_delta_rule(**args))
    assert not reached


@pytest.mark.everywhere
@pytest.mark.parametrize("size", [32, pytest.param(16, marks=pytest.mark.slow)])
@torch.no_grad()
def test_chunks_of_other_sizes_are_ours(
    library: Any, reached: list[Any], device: str, size: int
) -> None:
    """By flash-linear-attention's short name of the function too."""
    args = Case(SMALL, (70,), group=2).arguments(device)
    o, state = library.chunk_gdn(**args, chunk_size=size)
    assert len(reached) == 1
    assert_agrees(args, o, state)


def test_positional_arguments_keep_their_names(library: Any, reached: list[Any]) -> None:
    args = {name: torch.zeros(1, 5, 2, 64, device="meta") for name in ("q", "k", "v")}
    gates = [torch.zeros(1, 5, 2, device="meta")] * 2
    given = integration._named(
        integration._CHUNK_GDN,
        (*args.values(), *gates, 0.5, None, True, True, True, False, True),
        {"use_gate_in_kernel": False},
    )
    assert given["scale"] == 0.5 and given["state_v_first"] is True
    assert given["output_final_state"] is True and given["allow_neg_eigval"] is False


DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "a context": ({"cp_context": object()}, "no context parallelism"),
    "chunks of 128": ({"chunk_size": 128}, "chunk_size is 128"),
    "the former name": ({"transpose_state_layout": True}, "not its former name"),
    "heads first": ({"head_first": True}, "head_first"),
    "no A_log": ({"A_log": None}, "needs A_log"),
    "float32": ({"q": torch.float32, "k": torch.float32, "v": torch.float32}, "has dtype"),
    "a scale in a tensor": ({"scale": torch.tensor(1.0)}, "scale is a tensor"),
}


@pytest.mark.everywhere
@pytest.mark.parametrize("name", DECLINED)
def test_calls_that_are_declined(device: str, name: str) -> None:
    """With the reason that the library's log gives."""
    changes, reason = DECLINED[name]
    args = Case(SMALL, (5,), group=2).arguments(device)
    for key, x in changes.items():
        args[key] = args[key].to(x) if isinstance(x, torch.dtype) else x
    declined = integration._declines_chunk_gated_delta_rule(args)
    assert declined is not None and reason in declined


@pytest.mark.everywhere
def test_a_head_dimension_without_a_kernel_is_declined(device: str) -> None:
    args = Case(SMALL, (5,), group=1).arguments(device)
    for name in ("q", "k"):
        args[name] = args[name][..., :32]
    declined = integration._declines_chunk_gated_delta_rule(args)
    assert declined is not None and "K is 32" in declined
