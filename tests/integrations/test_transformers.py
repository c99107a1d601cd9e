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
from tests.integrations.transformers_cases import (  # noqa: E402
    COMMON,
    HEAD_DIM,
    HEADS,
    HEADS_K,
    PACKED,
    PADDINGS,
    WINDOW,
    Trio,
    answers,
    continuous_api,
    gradients,
    greedy,
    initialization,
    offsets_of,
    positions_of,
    relative_error,
    run,
    static_cache,
    tokens_of,
)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with cute_attn.emulated("sm_100a", Emulator(num_sms=2)), torch.inference_mode():
        yield


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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "gemma3" else n for n in MODELS]
)
def test_prefill_and_decode(name: str) -> None:
    """The prompt is longer than the window, and decode drops what leaves the sliding cache."""
    ours, eager = Trio(MODELS[name]).errors(tokens_of(2, 17), 13)
    assert ours <= 2 * eager


@pytest.mark.slow
@pytest.mark.parametrize("other_window", [WINDOW - 1, WINDOW + 1])
def test_a_window_off_by_one_would_be_seen(other_window: int) -> None:
    """The bound of the test above is smaller than the effect of one key more or less."""
    trio = Trio(gemma3)
    trio.models[0].model.layers[0].self_attn.sliding_window = other_window
    ours, eager = trio.errors(tokens_of(2, 17), 13)
    assert ours > 4 * eager


@pytest.mark.in_turn("cache")
@pytest.mark.parametrize("cache", [None, static_cache], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "padding",
    [
        pytest.param(name, marks=[] if i < 1 else pytest.mark.slow)
        for i, name in enumerate(PADDINGS)
    ],
)
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


@pytest.mark.slow  # `test_padding` has static caches too
def test_static_cache() -> None:
    """The cache's rows beyond the tokens so far hold no keys."""
    ours, eager = Trio(gemma3).errors(tokens_of(2, 17), 13, cache=static_cache)
    assert ours <= 2 * eager


@pytest.mark.slow  # `test_padding` has the calls that transformers' loop makes
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


@pytest.mark.slow  # tests/clients has models with each
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


@pytest.mark.slow  # the next test packs too, and tests/clients compares with eager attention
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
    model, tokens = ours(full_layers), tokens_of(1, 13)
    found = positions_of(PACKED[:1])
    expected = model(tokens, position_ids=found, use_cache=False).logits
    given: dict[str, Any] = offsets_of(PACKED[:1])
    if positions:
        given["position_ids"] = found
    logits = model(tokens, use_cache=False, **given).logits
    assert torch.equal(logits, expected) is positions
    # The first sequence has its positions either way.
    assert torch.equal(logits[:, :8], expected[:, :8])


# -- compiled models


@pytest.fixture
def compiled() -> Iterator[Any]:
    """A function that compiles a model as one graph."""
    torch._dynamo.reset()
    yield lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


def test_a_compiled_model(compiled: Any) -> None:
    """A compiler cannot read positions: the model asserts that they do not start again."""
    one = COMMON | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = transformers.Gemma3TextConfig(**one)
    model = transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation("cute_attn")
    function, tokens = compiled(model), tokens_of(1, 13)
    given = {"use_cache": False, "position_ids": torch.arange(13)[None]}
    expected = model(tokens, **given).logits
    assert torch.equal(function(tokens, **given).logits, expected)
    given["position_ids"] = positions_of(PACKED[:1])
    with pytest.raises(RuntimeError, match=r"packed sequences need cu_seq_lens_q"):
        function(tokens, **given)


@pytest.mark.slow
def test_packed_sequences_of_a_compiled_model(compiled: Any) -> None:
    """Offsets replace the assertion. Lengths that are tensors are not read."""
    model, tokens = ours(), tokens_of(1, 13)
    given = {"use_cache": False, "position_ids": positions_of(PACKED[:1])}
    given |= offsets_of(PACKED[:1])
    expected = model(tokens, **given).logits
    assert torch.equal(compiled(model)(tokens, **given).logits, expected)
    given["max_length_q"] = given["max_length_k"] = torch.tensor(8)
    assert torch.equal(compiled(model)(tokens, **given).logits, expected)


def llama4() -> Any:
    """Chunks of 4 tokens."""
    config = transformers.Llama4TextConfig(
        **COMMON,
        attention_chunk_size=4,
        layer_types=["chunked_attention"] * 2,
        num_local_experts=1,
        interleave_moe_layer_step=9,
        intermediate_size_mlp=64,
    )
    model = transformers.Llama4ForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation("cute_attn")
    return model


def test_chunks_are_refused() -> None:
    with refused("makes causal, full and causal sliding-window masks"):
        llama4()(tokens_of(1, 6), use_cache=False)


@pytest.mark.slow
def test_chunks_fail_the_assertion(compiled: Any) -> None:
    with pytest.raises(RuntimeError, match=r"asks for another \(chunks"):
        compiled(llama4())(tokens_of(1, 6), use_cache=False)


def asserted(mask_function: Any, window: int | None = None, causal: bool = True) -> bool:
    """What a compiled model asserts of its mask of 2 rows of 9 tokens, with a cache of 3 more."""
    rows, queries = torch.arange(2)[:, None, None], torch.arange(9)[None, :, None] + 3
    return bool(integration._follows_pattern(mask_function, rows, queries, 0, 12, window, causal))


def test_what_a_compiled_model_asserts() -> None:
    from transformers import masking_utils as masks

    causal, full = masks.causal_mask_function, masks.bidirectional_mask_function
    window = masks.sliding_window_causal_mask_function
    assert asserted(causal) and asserted(full, causal=False)
    assert not asserted(causal, causal=False) and not asserted(full)
    for width in (1, 2, 5, 12, 99):
        assert asserted(window(width), width)
        assert asserted(window(width)) is (width >= 12)  # no query has more keys
        assert not asserted(window(width), width + 1) or width >= 12
        assert not asserted(window(width + 1), width) or width >= 12
    chunks = masks.chunked_causal_mask_function
    assert not asserted(chunks(4, torch.zeros(2, dtype=torch.int64)), 4)
    assert asserted(chunks(12, torch.zeros(2, dtype=torch.int64)))
    blocks = torch.full((2, 12), -1)
    assert asserted(masks.or_masks(causal, masks.blockwise_overlay(blocks)))
    blocks[1, 7:9] = 0
    assert not asserted(masks.or_masks(causal, masks.blockwise_overlay(blocks)))
    sequences = torch.zeros(2, 12, dtype=torch.int64)
    packed = masks.packed_sequence_mask_function(sequences)
    assert asserted(masks.and_masks(causal, packed))
    sequences[1, 11] = 1
    assert not asserted(masks.and_masks(causal, packed))


# -- continuous batching


needs_batching = pytest.mark.skipif(
    not hasattr(initialization, "lazy_import_flash_attention"),
    reason="transformers before 5.19 gives paged attention another interface",
)


@needs_batching
@pytest.mark.slow  # the tests of single calls, below, have the kernels
@pytest.mark.parametrize("pages", [False, True])
def test_generate_batch(monkeypatch: pytest.MonkeyPatch, pages: bool) -> None:
    """Sequences that join and leave a batch get the tokens that each has alone."""
    trio, calls = Trio(full_layers), []
    original = integration._decoded_in_pages

    def decoded(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(integration, "_decoded_in_pages", decoded)
    prompts = [tokens_of(1, n)[0].tolist() for n in (9, 17, 3)]
    found = answers(trio.models[0], prompts, 4, monkeypatch, pages)
    assert [len(x) for x in found] == [4, 4, 4]
    assert greedy(trio, prompts, found)
    assert bool(calls) is pages
    assert trio.models[0].config._attn_implementation == "cute_attn"


@needs_batching
@pytest.mark.slow
def test_generate_batch_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    trio, prompts = Trio(full_layers), [tokens_of(1, n)[0].tolist() for n in (9, 3)]
    found = answers(trio.models[0], prompts, 3, monkeypatch, pages=True, default_compile_level=1)
    assert [len(x) for x in found] == [3, 3]
    assert greedy(trio, prompts, found)


@needs_batching
@pytest.mark.slow
def test_generate_batch_with_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    trio = Trio(gemma3)
    prompts = [tokens_of(1, n)[0].tolist() for n in (9, 17, 3)]
    assert greedy(trio, prompts, answers(trio.models[0], prompts, 4, monkeypatch))


@needs_batching
def test_other_implementations_are_asked_for_by_name() -> None:
    for name, flash in (("cute_attn", True), ("sdpa", False), ("flash_attention_2", True)):
        asked = continuous_api.is_flash_attention_requested
        assert asked(requested_attention_implementation=name) is flash
        assert asked(mock.Mock(_attn_implementation=name), version=2) is flash


def test_a_paged_cache_as_releases_before_5_24_give_it() -> None:
    """The attention updates the cache itself, which gives the offsets of this kind of layer."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    class Cache(PagedAttentionCache):
        def __init__(self) -> None:
            self.given: list[Any] = []

        def update(self, *given: Any) -> Any:
            *tensors, layer, others = given
            self.given.append(layer)
            others["cu_seq_lens_k"] = others["cu_seq_lens_k"]["full_attention"]
            return tensors

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, 13, HEAD_DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, 1, HEADS_K, 13, HEAD_DIM, generator=generator).bfloat16()
    given, cache, module = offsets_of(PACKED[:1]), Cache(), torch.nn.Module()
    module.layer_idx = 7
    expected, _ = integration._attention(module, q, k, v, None, **given)
    given["cu_seq_lens_k"] = {"full_attention": given["cu_seq_lens_k"]}
    found, _ = integration._attention(module, q, k, v, None, cache=cache, **given)
    assert torch.equal(found, expected) and cache.given == [7]
    with refused("layer 7: .* does not take a dict as cache"):
        integration._attention(module, q, k, v, None, cache={})


def test_rows_that_pad_a_batch_write_no_page() -> None:
    """CUDA graphs pad a decoding step with rows of length 0, whose pages are -1."""
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.randn(2, 3, 16, HEADS_K, HEAD_DIM, generator=generator).bfloat16()
    before = k_cache.clone(), v_cache.clone()
    q = torch.randn(1, HEADS, 3, HEAD_DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, 1, HEADS_K, 3, HEAD_DIM, generator=generator).bfloat16()
    o, _ = integration._attention(
        torch.nn.Module(),
        q,
        k,
        v,
        None,
        block_table=torch.tensor([[2, 1], [-1, -1], [-1, -1]], dtype=torch.int32),
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seq_lens_q=torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        cu_seq_lens_k=torch.tensor([0, 20, 20, 20], dtype=torch.int32),
        max_length_q=1,
        max_length_k=1,
    )
    for cache, old, new in zip((k_cache, v_cache), before, (k, v), strict=True):
        assert torch.equal(cache[1, 3], new[0, :, 0])
        cache[1, 3] = old[1, 3]
        assert torch.equal(cache, old)
        cache[1, 3] = new[0, :, 0]
    keys, values = (torch.cat([x[2], x[1, :4]])[None] for x in (k_cache, v_cache))
    first = q[:, :, :1].transpose(1, 2)
    exact = attention_reference(first, keys, values, causal=True)[0]
    plain = attention_in_low_precision(first, keys, values, causal=True)[0]
    assert relative_error(o[:, :1], exact) <= 2 * relative_error(plain, exact)
    assert not o[:, 1:].any()


# -- training


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


@pytest.mark.slow
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


def ours(make: Any = gemma3, **changes: Any) -> Any:
    model = make(**changes).to(torch.bfloat16).eval()
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
    with refused("layer 0: .* head_dim 64 on sm_100a"):
        model(tokens_of(1, 5))


def test_importing_the_module_does_not_import_transformers() -> None:
    code = (
        "import sys, cute_attn.integrations.transformers as m\n"
        "assert callable(m.register) and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
