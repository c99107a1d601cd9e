"""Hugging Face transformers with attn_implementation="cute_attn": small models of random weights.

What a model gives in bfloat16, prefill and decode through its own caches, may be no further from
its float32 self than twice what its own eager attention is in bfloat16. (Not float64: the mask that
eager attention then makes is -inf to its softmax, and rows of padding are NaN.)
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.reference.attention import attention_in_low_precision, attention_reference

transformers = pytest.importorskip("transformers")

from cute_attn.integrations import transformers as integration  # noqa: E402
from cute_attn.integrations.transformers import register  # noqa: E402

WINDOW = 6
HEADS, HEADS_K, HEAD_DIM = 4, 2, 256


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with cute_attn.emulated("sm_100a", Emulator(num_sms=2)), torch.inference_mode():
        yield


# Large enough that attention decides what comes out.
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_K,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}


def gemma3(**changes: Any) -> Any:
    """A sliding layer and a full one."""
    config = transformers.Gemma3TextConfig(
        **COMMON,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        **changes,
    )
    return transformers.Gemma3ForCausalLM(config)


def qwen3_next() -> Any:
    """A linear layer, which is plain PyTorch on a CPU, and a full one."""
    if importlib.util.find_spec("fla") is not None and not torch.cuda.is_available():
        pytest.skip("transformers calls flash-linear-attention's kernels, which need a GPU")
    config = transformers.Qwen3NextConfig(
        **COMMON,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mlp_only_layers=[0, 1],  # an expert chosen otherwise by rounding would drown the rest
    )
    return transformers.Qwen3NextForCausalLM(config)


MODELS = {"gemma3": gemma3, "qwen3_next": qwen3_next}


class Trio:
    """One model three times: with our attention, with its own in bfloat16, and in float32."""

    def __init__(self, make: Any, **changes: Any):
        torch.manual_seed(0)
        model = make(**changes).to(torch.bfloat16).eval()
        self.models = []
        for implementation, dtype in (
            ("cute_attn", torch.bfloat16),
            ("eager", torch.bfloat16),
            ("eager", torch.float32),
        ):
            other = make(**changes).to(torch.bfloat16).eval()
            other.load_state_dict(model.state_dict())
            other.set_attn_implementation(implementation)
            self.models.append(other.to(dtype))

    def errors(
        self,
        tokens: torch.Tensor,
        prompt: int,
        mask: torch.Tensor | None = None,
        cache: Any = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[float, float]:
        """Relative errors of the logits of ours and of eager: a prefill, then token by token."""
        kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        ours, eager, exact = (
            run(model, tokens, prompt, mask, cache, positions)[kept] for model in self.models
        )
        return relative_error(ours, exact), relative_error(eager, exact)


def run(
    model: Any,
    tokens: torch.Tensor,
    prompt: int,
    mask: torch.Tensor | None,
    cache: Any,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache(model)
    logits = []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, tokens.shape[1]))]:
        output = model(
            tokens[:, start:end],
            attention_mask=None if mask is None else mask[:, :end],
            position_ids=None if positions is None else positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def tokens_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "gemma3" else n for n in MODELS]
)
def test_prefill_and_decode(name: str) -> None:
    """The prompt is longer than the window, and decode drops what leaves the sliding cache."""
    ours, eager = Trio(MODELS[name]).errors(tokens_of(2, 17), 13)
    assert ours <= 2 * eager


@pytest.mark.parametrize(
    "other_window", [WINDOW - 1, pytest.param(WINDOW + 1, marks=pytest.mark.slow)]
)
def test_a_window_off_by_one_would_be_seen(other_window: int) -> None:
    """The bound of the test above is smaller than the effect of one key more or less."""
    trio = Trio(gemma3)
    trio.models[0].model.layers[0].self_attn.sliding_window = other_window
    ours, eager = trio.errors(tokens_of(2, 17), 13)
    assert ours > 4 * eager


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=24)


PADDINGS = {
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0] + [1] * 12],
    "right": [[1] * 9 + [0] * 4, [1] * 13],
    "both": [[0, 0] + [1] * 9 + [0, 0], [1] * 12 + [0]],
    "only one token": [[0] * 12 + [1], [1] * 13],
}


@pytest.mark.in_turn("cache")
@pytest.mark.parametrize("cache", [None, static_cache], ids=["dynamic", "static"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding(padding: str, cache: Any) -> None:
    """Left padding as generate makes it; else the prompt alone, since eager attention takes its
    windows from columns, and a hole between prompt and answer widens them by its size."""
    decode = 4 if padding in ("left", "only one token") else 0
    mask = torch.tensor(PADDINGS[padding])
    mask = torch.cat([mask, torch.ones(2, decode, dtype=mask.dtype)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ours, eager = Trio(gemma3).errors(tokens_of(2, 13 + decode), 13, mask, cache, positions)
    assert ours <= 2 * eager


def test_holes_do_not_matter() -> None:
    """Tokens with padding among them give what they give without any: with a full layer alone,
    and positions that leave the padding out."""
    model = Trio(full_layers).models[0]
    tokens = tokens_of(1, 9)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1]])
    spread = torch.zeros_like(mask)
    spread[mask.bool()] = tokens[0]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for prompt in (13, 8):
        dense = run(model, tokens, 9 if prompt == 13 else 5, None, None, None)
        holed = run(model, spread, prompt, mask, None, positions)
        assert torch.equal(holed[mask.bool()], dense[0])


def full_layers() -> Any:
    config = transformers.Gemma3TextConfig(**COMMON, layer_types=["full_attention"] * 2)
    return transformers.Gemma3ForCausalLM(config)


def test_static_cache() -> None:
    """The cache's rows beyond the tokens so far hold no keys."""
    ours, eager = Trio(gemma3).errors(tokens_of(2, 17), 13, cache=static_cache)
    assert ours <= 2 * eager


@pytest.mark.in_turn("cache")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "left padding"])
def test_generate(padded: bool, cache: str) -> None:
    trio = Trio(gemma3)
    tokens = tokens_of(2, 9)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :3] = 0
    given = {
        "attention_mask": mask,
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "cache_implementation": cache,
        "output_logits": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    result = trio.models[0].generate(tokens, **given)
    ours = torch.stack(result.logits, dim=1)
    mask = torch.cat([mask, mask.new_ones(2, 3)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    eager, exact = (
        run(model, result.sequences[:, :-1], 9, mask, None, positions)[:, 8:]
        for model in trio.models[1:]
    )
    assert ours.shape == exact.shape
    assert relative_error(ours, exact) <= 2 * relative_error(eager, exact)


def test_scaling_softcap_and_sink_reach_the_kernel() -> None:
    """Gemma 3 and Qwen3-Next use only the scaling."""
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["cute_attn"]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, 5, HEAD_DIM, generator=generator, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, HEADS_K, 9, HEAD_DIM, generator=generator, dtype=torch.bfloat16)
    sink = torch.randn(HEADS, generator=generator)
    o, weights = attention(
        torch.nn.Module(), q, k, v, None, scaling=0.2, softcap=2.0, s_aux=sink, sliding_window=3
    )
    assert weights is None
    call = {
        "softmax_scale": 0.2,
        "softcap": 2.0,
        "learnable_sink": sink,
        "causal": True,
        "window_size": (2, None),
    }
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    exact = attention_reference(q, k, v, **call)[0]
    plain = attention_in_low_precision(q, k, v, **call)[0]
    assert relative_error(o, exact) <= 2 * relative_error(plain, exact)


# -- packed sequences

# Lengths of the sequences of each row; some are longer than the window, and one has one token.
PACKED = [[8, 1, 4], [3, 10]]


def positions_of(lengths: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def offsets_of(lengths: list[list[int]]) -> dict[str, Any]:
    """What `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` adds to a batch."""
    counts = torch.tensor([n for row in lengths for n in row])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    longest = int(counts.max())
    return {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def test_packed_sequences() -> None:
    """Positions that start again start a sequence: in a sliding layer and in a full one."""
    positions = positions_of(PACKED)
    ours, eager, exact = (
        model(tokens_of(2, 13), position_ids=positions, use_cache=False).logits
        for model in Trio(gemma3).models
    )
    assert relative_error(ours, exact) <= 2 * relative_error(eager, exact)


@pytest.mark.parametrize("positions", [True, False])
def test_offsets_of_packed_sequences(positions: bool) -> None:
    """Offsets give the bits that positions give. Without positions, the rotary embedding differs
    from the second sequence on."""
    model, tokens = ours(), tokens_of(1, 13)
    found = positions_of(PACKED[:1])
    expected = model(tokens, position_ids=found, use_cache=False).logits
    given: dict[str, Any] = offsets_of(PACKED[:1])
    if positions:
        given["position_ids"] = found
    logits = model(tokens, use_cache=False, **given).logits
    assert torch.equal(logits, expected) is positions
    # The first sequence has its positions either way.
    assert torch.equal(logits[:, :8], expected[:, :8])


# -- training


def gradients(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor | None, **given: Any
) -> torch.Tensor:
    """The gradients of the attention layers' parameters, for a loss that weighs every logit of a
    token."""
    logits = model(tokens, attention_mask=mask, use_cache=False, **given).logits.float()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    if mask is not None:
        weights *= mask[:, :, None]
    (logits * weights).sum().backward()
    found = [x.grad for name, x in model.named_parameters() if "self_attn" in name]
    return torch.cat([x.double().flatten() for x in found])


@pytest.mark.slow
def test_training_of_packed_sequences() -> None:
    positions = positions_of(PACKED)
    with torch.inference_mode(False), torch.enable_grad():
        ours, eager, exact = (
            gradients(model.train(), tokens_of(2, 13), None, position_ids=positions)
            for model in Trio(gemma3).models
        )
    assert relative_error(ours, exact) <= 2 * relative_error(eager, exact)


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        pytest.param("gemma3", False, marks=pytest.mark.slow),  # six kernels more, as the next
        pytest.param("gemma3", True, marks=pytest.mark.slow),
        # `test_training_with_checkpoints` trains in make test.
        pytest.param("qwen3_next", False, marks=pytest.mark.slow),
    ],
)
def test_training(name: str, padded: bool) -> None:
    mask = torch.tensor(PADDINGS["left"]) if padded else None
    with torch.inference_mode(False), torch.enable_grad():
        ours, eager, exact = (
            gradients(model.train(), tokens_of(2, 13), mask) for model in Trio(MODELS[name]).models
        )
    assert relative_error(ours, exact) <= 2 * relative_error(eager, exact)


def test_training_with_checkpoints() -> None:
    """The gradients of a model that recomputes its activations are the same."""
    with torch.inference_mode(False), torch.enable_grad():
        plain, checkpointed = (Trio(full_layers).models[0].train() for _ in range(2))
        checkpointed.gradient_checkpointing_enable()  # the name that 5.16 has too
        found = [gradients(model, tokens_of(2, 9), None) for model in (plain, checkpointed)]
    assert torch.equal(*found)


# -- what is refused


def refused(match: str) -> Any:
    return pytest.raises(NotImplementedError, match=match)


def ours(**changes: Any) -> Any:
    model = gemma3(**changes).to(torch.bfloat16).eval()
    model.set_attn_implementation("cute_attn")
    return model


def test_autocast() -> None:
    """Autocast of a float32 model, whose norms and rotary embeddings leave q and k in float32."""
    models = []
    for implementation in ("cute_attn", "eager", "eager"):
        torch.manual_seed(0)
        models.append(full_layers().eval())
        models[-1].set_attn_implementation(implementation)
    seen: list[torch.dtype] = []
    original = integration.flash_attn_func

    def call(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(q.dtype)
        return original(q, *args, **kwargs)

    tokens = tokens_of(2, 9)
    with mock.patch.object(integration, "flash_attn_func", call):
        with torch.autocast("cpu", torch.bfloat16):
            ours, eager = (model(tokens).logits for model in models[:2])
        assert seen == [torch.bfloat16] * 2
        with pytest.raises(TypeError, match=r"q has dtype torch.float32"):
            models[0](tokens)
    exact = models[2](tokens).logits
    assert relative_error(ours, exact) <= 2 * relative_error(eager, exact)


def test_dropout_is_refused() -> None:
    model = ours(attention_dropout=0.1).train()
    with refused("no dropout"):
        model(tokens_of(1, 4))


def test_attention_weights_are_refused() -> None:
    with refused("no attention weights"):
        ours()(tokens_of(1, 4), output_attentions=True)


def test_masks_already_made_are_refused() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    with refused(r"shape \[1, 1, 4, 4\]"):
        ours()(tokens_of(1, 4), attention_mask=mask)


@pytest.mark.parametrize("missing", ["cu_seq_lens_k", "max_length_q"])
def test_offsets_without_lengths_are_refused(missing: str) -> None:
    given = offsets_of(PACKED[:1])
    del given[missing]
    with refused(f"without {missing}"):
        ours()(tokens_of(1, 13), use_cache=False, **given)


def test_offsets_of_several_rows_are_refused() -> None:
    with refused("one row .* has 2"):
        ours()(tokens_of(2, 13), use_cache=False, **offsets_of(PACKED))


def test_bidirectional_windows_are_refused() -> None:
    with refused("another"):
        ours(use_bidirectional_attention=True)(tokens_of(1, 5))


def test_other_head_dimensions_are_refused() -> None:
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**COMMON | {"head_dim": 64})
    ).to(torch.bfloat16)
    model.set_attn_implementation("cute_attn")
    with refused("head_dim"):
        model(tokens_of(1, 5))


def test_importing_the_module_does_not_import_transformers() -> None:
    code = (
        "import sys, cute_attn.integrations.transformers as m\n"
        "assert callable(m.register) and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
