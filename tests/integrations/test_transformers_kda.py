"""Kimi Linear's linear layers in Hugging Face transformers, on our kernels.

tests/clients/test_transformers.py has each feature of the model, and
`test_transformers_gated_delta_rule` what both delta rules share.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn.emulator import Emulator

pytest.importorskip("transformers.models.kimi_linear")

from transformers.models.kimi_linear import modeling_kimi_linear as theirs

from cute_attn.integrations import transformers_kda as integration
from cute_attn.integrations.transformers import use_kimi_delta_attention
from tests.integrations.transformers_cases import relative_error


def inputs(tokens: int, **options: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v, g and beta of two sequences, and a call's other arguments."""
    torch.manual_seed(0)
    heads = [torch.randn(2, tokens, 1, 64).bfloat16() for _ in range(3)]
    gates = [-torch.rand(2, tokens, 1, 64), torch.rand(2, tokens, 1).bfloat16()]
    given = {"initial_state": torch.randn(2, 1, 64, 64), "output_final_state": True}
    return [*heads, *gates], given | {"use_qk_l2norm_in_kernel": True} | options


def compared(name: str, tokens: int, expected: str) -> None:
    """Our function of this name and theirs, which has float32 arithmetic."""
    tensors, given = inputs(tokens)
    exact, exact_state = getattr(theirs, name)(*tensors, **given)
    with (
        cute_attn.emulated("sm_90a", Emulator(num_sms=2)),
        use_kimi_delta_attention(),
        mock.patch.object(
            integration, expected, mock.Mock(wraps=getattr(integration, expected))
        ) as ours,
    ):
        # A layer hands on what else the model's forward was given.
        o, state = getattr(theirs, name)(*tensors, **given, position_ids=None)
    assert ours.call_count == 1
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert relative_error(o, exact) < 1e-2 and relative_error(state, exact_state) < 1e-2


@pytest.mark.slow
def test_a_decoding_step() -> None:
    compared("recurrent_kimi_delta_attention", 1, "fused_recurrent_kda")


@pytest.mark.slow
def test_a_prompt() -> None:
    compared("chunk_kimi_delta_attention", 70, "chunk_kda")


@pytest.mark.slow
def test_a_step_that_needs_gradients_has_them() -> None:
    """The token-by-token kernel has no backward."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        tensors, given = inputs(1)
        heads = [x.to(dtype).requires_grad_() for x in tensors[:3]]
        function = theirs.recurrent_kimi_delta_attention
        if dtype == torch.bfloat16:
            with use_kimi_delta_attention():
                function = theirs.recurrent_kimi_delta_attention
        with cute_attn.emulated("sm_90a", Emulator(num_sms=2)):
            o, state = function(*heads, *tensors[3:], **given)
            (o.float().sum() + state.square().sum()).backward()
        found.append(torch.cat([x.grad.float().flatten() for x in heads]))
    assert 0 < relative_error(*found) < 1e-2


def test_the_end_brings_the_functions_back() -> None:
    def functions() -> list[Any]:
        return [theirs.chunk_kimi_delta_attention, theirs.recurrent_kimi_delta_attention]

    before = functions()
    restored = use_kimi_delta_attention()
    assert functions() == [integration._chunk, integration._recurrent]
    restored.close()
    assert functions() == before
