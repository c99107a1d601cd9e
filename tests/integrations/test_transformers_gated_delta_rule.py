"""The linear layers of Qwen3-Next and Qwen3.5 in Hugging Face transformers, on our kernels.

What a model gives in bfloat16 may be no further from its float32 self, on transformers' own
functions, than twice what its own functions give in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn.emulator import Emulator

transformers = pytest.importorskip("transformers")

from cute_attn.integrations import transformers_gated_delta_rule as integration  # noqa: E402
from cute_attn.integrations.transformers import use_gated_delta_rule  # noqa: E402
from tests.integrations.transformers_cases import (  # noqa: E402
    COMMON,
    gradients,
    relative_error,
    run,
    tokens_of,
)

LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
CLASSES = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5Text"}


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with cute_attn.emulated("sm_90a", Emulator(num_sms=2)):
        yield


def model_of(name: str, **changes: Any) -> Any:
    """A model of a linear layer and a full one, which the cache needs to know its length."""
    torch.manual_seed(0)
    given = COMMON | LINEAR | changes
    if name == "qwen3_next":
        # An expert chosen otherwise by rounding would drown the rest.
        given["mlp_only_layers"] = [0, 1]
    config = getattr(transformers, f"{CLASSES[name]}Config")(**given)
    prefix = CLASSES[name].removesuffix("Text")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        if key.endswith(("A_log", "dt_bias")):  # some heads forget slowly, and others at once
            torch.nn.init.uniform_(parameter, -3, 1)
    return model.to(torch.bfloat16).eval()


def calls() -> Any:
    """Counts the calls of our functions."""
    names = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    return mock.patch.multiple(
        integration, **{name: mock.Mock(wraps=getattr(integration, name)) for name in names}
    )


def counts() -> tuple[int, int]:
    return (
        integration.chunk_gated_delta_rule.call_count,
        integration.fused_recurrent_gated_delta_rule.call_count,
    )


@torch.inference_mode()
@pytest.mark.parametrize("name", CLASSES)
def test_prefill_and_decode(name: str) -> None:
    model, tokens = model_of(name), tokens_of(2, 13)
    with calls(), use_gated_delta_rule():
        ours = run(model, tokens, 11, None, None, None)
        assert counts() == (1, 2)
    plain = run(model, tokens, 11, None, None, None)
    exact = run(model.float(), tokens, 11, None, None, None)
    assert 0 < relative_error(ours, exact) <= 2 * relative_error(plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_training_with_autocast(name: str) -> None:
    """The parameters are float32."""
    found = []
    for mixed, uses_ours in ((True, True), (True, False), (False, False)):
        model = model_of(name).float().train()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed), calls():
            if uses_ours:
                with use_gated_delta_rule():
                    found.append(gradients(model, tokens_of(1, 9), None))
                assert counts() == (1, 0)
            else:
                found.append(gradients(model, tokens_of(1, 9), None))
    ours, plain, exact = found
    assert 0 < relative_error(ours, exact) <= 2 * relative_error(plain, exact)


def test_a_step_that_needs_gradients_has_them() -> None:
    """The token-by-token kernel has no backward."""
    torch.manual_seed(0)
    heads = [torch.randn(2, 1, n, 64).to(torch.bfloat16) for n in (1, 1, 2)]
    gates = -torch.rand(2, 1, 2), torch.rand(2, 1, 2).to(torch.bfloat16)
    state = torch.randn(2, 2, 64, 64)
    given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    gradients = []
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    for dtype, replaced in ((torch.bfloat16, True), (torch.float32, False)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in heads]
        with use_gated_delta_rule():
            ours = module.torch_recurrent_gated_delta_rule
        function = ours if replaced else module.torch_recurrent_gated_delta_rule
        o, final = function(*inputs, *gates, **given)
        (o.float().sum() + final.square().sum()).backward()
        gradients.append(torch.cat([x.grad.float().flatten() for x in inputs]))
    assert 0 < relative_error(*gradients) < 1e-2


def test_the_end_brings_the_functions_back() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
    from transformers.models.qwen3_next import modeling_qwen3_next

    modules = (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe)

    def functions() -> list[Any]:
        names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
        return [getattr(module, name) for module in modules for name in names]

    theirs = functions()
    restored = use_gated_delta_rule()
    assert functions() == [integration._chunk, integration._recurrent] * 3
    with use_gated_delta_rule():
        pass
    assert functions() == [integration._chunk, integration._recurrent] * 3
    restored.close()
    assert functions() == theirs


@torch.inference_mode()
def test_sizes_and_dtypes_without_a_kernel_are_refused() -> None:
    with use_gated_delta_rule():
        with pytest.raises(NotImplementedError, match="16"):
            model_of("qwen3_next", linear_key_head_dim=16)(tokens_of(1, 3))
        with pytest.raises(TypeError, match="float32"):
            model_of("qwen3_next").float()(tokens_of(1, 3))


def test_a_plan_of_context_parallelism_is_refused() -> None:
    """transformers hands all arguments of a model's forward on, so the plan arrives too."""
    with pytest.raises(NotImplementedError, match="cp is given to a model with linear layers"):
        integration.run(cute_attn.chunk_kda, *[torch.empty(0)] * 5, cp=object())
