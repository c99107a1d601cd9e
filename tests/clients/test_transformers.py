"""Our attention in Hugging Face transformers: every feature with a small model of each family.

The models have random weights and head_dim 64, if not said otherwise, emulated for an H100. What a
model gives may be no further from its float32 self than twice what its own eager attention is in
bfloat16. A cell that does not work asserts its error first, and then says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import transformers

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.integrations import transformers as integration
from cute_attn.integrations.transformers import (
    register,
    use_gated_delta_rule,
    use_kimi_delta_attention,
)
from tests.integrations.transformers_cases import (
    COMMON,
    PACKED,
    PADDINGS,
    WINDOW,
    Trio,
    answers,
    gradients,
    greedily,
    greedy,
    positions_of,
    relative_error,
    static_cache,
    tokens_of,
)

SMALL = COMMON | {"head_dim": 64}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
# Qwen's linear layers, for `use_gated_delta_rule`.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
# All experts are chosen: one chosen otherwise by rounding would drown the rest.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    register()
    torch._dynamo.reset()
    with cute_attn.emulated("sm_90a", Emulator(num_sms=2)):
        yield


# Latent attention, whose expanded form has q and k of 192 and v of 128.
LATENT = {
    "num_key_value_heads": SMALL["num_attention_heads"],
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 32,
}


def of(name: str, **given: Any) -> Callable[[], Any]:
    """A function that makes a model with a language model's head."""

    def make() -> Any:
        prefix = name.removesuffix("Text")
        config = getattr(transformers, f"{name}Config")(**SMALL | given)
        return getattr(transformers, f"{prefix}ForCausalLM")(config)

    return make


PER_LAYER = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": of("Llama"),
    "Mistral": of("Mistral", sliding_window=WINDOW),
    "Qwen3": of("Qwen3"),
    "Gemma 2": of("Gemma2", **WINDOWS),
    "Gemma 3": of("Gemma3Text", **WINDOWS),
    "Gemma 3n": of(
        "Gemma3nText",
        **WINDOWS | PER_LAYER,
        num_kv_shared_layers=0,
        laurel_rank=8,
    ),
    "Gemma 4": of("Gemma4Text", **WINDOWS | PER_LAYER, head_dim=256),
    "Gemma 4, global layers of 256": of(
        "Gemma4Text", **WINDOWS | PER_LAYER, head_dim=256, global_head_dim=256
    ),
    "gpt-oss": of("GptOss", **WINDOWS | EXPERTS),
    "Qwen3-Next": of(
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mlp_only_layers=[0, 1],
    ),
    **{
        f"{name}, linear layers": of(config, **LINEAR, **dense)
        for name, config, dense in (
            ("Qwen3-Next", "Qwen3Next", {"mlp_only_layers": [0, 1]}),
            ("Qwen3.5", "Qwen3_5Text", {}),
        )
    },
    "MiniMax": of(
        "MiniMax", layer_types=["linear_attention", "full_attention"], block_size=4, **EXPERTS
    ),
    "DeepSeek V2": of("DeepseekV2", **LATENT, q_lora_rank=32, first_k_dense_replace=2),
    "DeepSeek V3": of("DeepseekV3", **LATENT, q_lora_rank=None, first_k_dense_replace=2),
    **{
        name: of(
            "KimiLinear",
            **LATENT,
            layer_types=["linear_attention", "full_attention"],
            linear_head_dim=64,
            linear_num_heads=1,
            mlp_layer_types=["dense", "dense"],
            bos_token_id=1,
            eos_token_id=2,
        )
        for name in ("Kimi Linear", "Kimi Linear, linear layers")
    },
    "LongCat-Flash": of(
        "LongcatFlash",
        **LATENT,
        q_lora_rank=32,
        num_layers=1,  # of two attentions
        n_routed_experts=2,
        zero_expert_num=1,
        moe_topk=3,
        expert_ffn_hidden_size=32,
    ),
    "MiMo-V2": of(
        "MiMoV2Flash",
        **WINDOWS | {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 1},
        mlp_layer_types=["dense", "dense"],
    ),
}
LATENT_ROWS = ("DeepSeek V2", "DeepSeek V3", "Kimi Linear", "LongCat-Flash", "MiMo-V2")


LINEAR_ROWS = {
    name: use_kimi_delta_attention if name.startswith("Kimi") else use_gated_delta_rule
    for name in MODELS
    if name.endswith(", linear layers")
}


def use_linear(model: Any, use: Callable[[], ExitStack]) -> None:
    """Make this model's linear layers run on our kernels, and no other model's."""
    model.use_ours = use
    entered: list[ExitStack] = []
    for module in model.modules():
        if type(module).__name__.endswith(("GatedDeltaNet", "DeltaAttention")):
            module.register_forward_pre_hook(
                lambda *_: entered.append(use()) if not tracing() else None
            )
            module.register_forward_hook(
                lambda *_: entered.pop().close() if not tracing() else None, always_call=True
            )


def tracing() -> bool:
    """Whether a compiler reads the layers, which cannot read a replacement: see `kernels_of`."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def kernels_of(trio: Trio) -> Any:
    """A context in which the first model may be traced."""
    return getattr(trio.models[0], "use_ours", nullcontext)()


def assert_no_worse(found: list[torch.Tensor]) -> None:
    ours, eager, exact = found
    assert relative_error(ours, exact) <= 2 * relative_error(eager, exact)


# What does not work with any implementation of attention: the exception, and why.
EVERYWHERE: dict[tuple[str, str], tuple[type[Exception], str, str]] = {
    ("Gemma 3n", "torch.export"): (
        RuntimeError,
        "a fake tensor in the exported program",
        "a number becomes a tensor while torch exports",
    ),
    ("Qwen3-Next", "torch.compile of training"): (
        RuntimeError,
        "view size is not compatible",
        "the linear layers' backward does not compile",
    ),
    **{
        ("MiniMax", feature): (
            ValueError,
            "MiniMax uses cache of its own",
            "the model takes no static cache",
        )
        for feature in ("static cache", "torch.compile of decoding")
    },
    **{
        (name, feature): (
            ValueError,
            "Invalid layer type: linear_attention",
            "continuous batching has no linear layers",
        )
        for name in ("Qwen3-Next", "MiniMax", "Kimi Linear")
        for feature in ("generate_batch", "generate_batch, pages")
    },
    **{
        ("Gemma 4", feature): (
            RuntimeError,
            "'head_dim' is a per-layer attribute",
            "continuous batching has one head_dim for all layers",
        )
        for feature in ("generate_batch", "generate_batch, pages")
    },
    **{
        (name, feature): (
            RuntimeError,
            "Source/destination tensor must have same slice shapes",
            "continuous batching keeps equally many heads of k and v, of one width, in all layers",
        )
        for name in LATENT_ROWS
        if name != "Kimi Linear"
        for feature in ("generate_batch", "generate_batch, pages")
    },
    **{
        ("LongCat-Flash", feature): (
            RuntimeError,
            "data-dependent expression",
            "the loop over experts does not trace",
        )
        for feature in ("torch.compile of training", "torch.compile of decoding", "torch.export")
    },
}
# The features that need gradients.
TRAINING = ("training with autocast", "gradient checkpointing", "torch.compile of training")
# What does not work with ours.
OURS: dict[tuple[str, str], tuple[type[Exception], str, str]] = {
    **{
        ("Gemma 4", feature): (
            NotImplementedError,
            "there is no attention backward for head_dim 512 on sm_90a",
            "there is no backward for the global layers' head_dim of 512",
        )
        for feature in TRAINING
    },
    ("MiniMax", "generate with padding"): (
        NotImplementedError,
        r"a mask of shape \[2, 1, 1, 3\] .* for 1 queries and 10 keys",
        "the mask of decoding, which transformers makes for one key of the cache, is refused",
    ),
}

# -- the features

Patch = pytest.MonkeyPatch


def forward(trio: Trio, _: Patch) -> None:
    assert_no_worse([model(tokens_of(2, 13)).logits for model in trio.models])


def padded(side: str) -> Callable[[Trio, Patch], None]:
    mask = torch.tensor(PADDINGS[side])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions}

    def check(trio: Trio, _: Patch) -> None:
        assert_no_worse(
            [model(tokens_of(2, 13), **given).logits[mask.bool()] for model in trio.models]
        )

    return check


def packed(trio: Trio, _: Patch) -> None:
    given = {"position_ids": positions_of(PACKED), "use_cache": False}
    assert_no_worse([model(tokens_of(2, 13), **given).logits for model in trio.models])


def own_cache(model: Any) -> Any:
    if model.config.model_type == "minimax":
        return transformers.models.minimax.modeling_minimax.MiniMaxCache()
    return transformers.DynamicCache(config=model.config)


def cached(cache: Callable[[Any], Any]) -> Callable[[Trio, Patch], None]:
    """The prompt is longer than the window, and decoding drops what leaves a sliding cache."""

    def check(trio: Trio, _: Patch) -> None:
        ours, eager = trio.errors(tokens_of(2, 13), 10, cache=cache)
        assert ours <= 2 * eager

    return check


def generated(padding: int) -> Callable[[Trio, Patch], None]:
    def check(trio: Trio, _: Patch) -> None:
        tokens, mask = tokens_of(2, 9), torch.ones(2, 9, dtype=torch.int64)
        mask[0, :padding] = 0
        found = trio.models[0].generate(
            tokens, attention_mask=mask, generation_config=greedily(max_new_tokens=4)
        )
        prompts = [tokens[0, padding:].tolist(), tokens[1].tolist()]
        assert greedy(trio, prompts, found[:, 9:].tolist())

    return check


def batched(pages: bool) -> Callable[[Trio, Patch], None]:
    def check(trio: Trio, monkeypatch: Patch) -> None:
        prompts = [tokens_of(1, n)[0].tolist() for n in (9, 17, 3)]
        found = answers(trio.models[0], prompts, 4, monkeypatch, pages)
        assert [len(x) for x in found] == [4, 4, 4]
        assert greedy(trio, prompts, found)

    return check


@torch.enable_grad()
def training(trio: Trio, _: Patch) -> None:
    """Of a float32 model, in bfloat16 by autocast."""
    found = []
    for model, mixed in zip(trio.models, (True, True, False), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            found.append(gradients(model.float().train(), tokens_of(2, 13), None))
    assert_no_worse(found)


@torch.enable_grad()
def checkpointed(trio: Trio, _: Patch) -> None:
    models = [trio.models[0].train(), copy.deepcopy(trio.models[0]).train()]
    models[1].gradient_checkpointing_enable()
    assert torch.equal(*(gradients(model, tokens_of(2, 9), None) for model in models))


def one_graph(model: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@torch.enable_grad()
def compiled(trio: Trio, _: Patch) -> None:
    ours, *others = trio.models
    with kernels_of(trio):
        found = [gradients(one_graph(ours.train()), tokens_of(2, 13), None, of=ours)]
    assert_no_worse(found + [gradients(model, tokens_of(2, 13), None) for model in others])


def compiled_decoding(trio: Trio, _: Patch) -> None:
    found = []
    for model in trio.models:
        cache, tokens = static_cache(model), tokens_of(2, 13)
        model(tokens[:, :10], past_key_values=cache, use_cache=True)
        ours = model is trio.models[0]
        step = one_graph(model) if ours else model
        with kernels_of(trio) if ours else nullcontext():
            logits = [
                step(tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits
                for i in (10, 11, 12)
            ]
        found.append(torch.cat(logits, dim=1))
    assert_no_worse(found)


@torch.enable_grad()
def exported(trio: Trio, _: Patch) -> None:
    """The forward of a training step, without a mask."""
    given = {"input_ids": tokens_of(2, 13), "use_cache": False}
    with kernels_of(trio):
        program = torch.export.export(trio.models[0].train(), (), given, strict=False).module()
    assert_no_worse([model(**given).logits.detach() for model in (program, *trio.models[1:])])


FEATURES: dict[str, Callable[[Trio, Patch], None]] = {
    "forward": forward,
    "padding on the left": padded("left"),
    "padding on the right": padded("right"),
    "packed sequences": packed,
    "dynamic cache": cached(own_cache),
    "static cache": cached(static_cache),
    "generate": generated(0),
    "generate with padding": generated(3),
    "generate_batch": batched(False),
    "generate_batch, pages": batched(True),
    "training with autocast": training,
    "gradient checkpointing": checkpointed,
    "torch.compile of training": compiled,
    "torch.compile of decoding": compiled_decoding,
    "torch.export": exported,
}


# What transformers' linear layers do not have: see the row of Qwen3-Next.
NOT_OF_LINEAR = ("packed sequences", "generate_batch", "generate_batch, pages")


def cells() -> list[Any]:
    names = [
        (name, feature)
        for name in MODELS
        for feature in FEATURES
        if not (name in LINEAR_ROWS and feature in NOT_OF_LINEAR)
    ]
    return [
        pytest.param(name, feature, marks=pytest.mark.clients(f"{name}: {feature}"))
        for name, feature in names
    ]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("name", "feature"), cells())
def test_feature(name: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trio, cell = Trio(MODELS[name]), (name, feature)
    if name in LINEAR_ROWS:
        use_linear(trio.models[0], LINEAR_ROWS[name])
    if cell in EVERYWHERE:
        for implementation in ("cute_attn", "eager"):
            trio.models[0].set_attn_implementation(implementation)
            why = fails(FEATURES[feature], trio, monkeypatch, *EVERYWHERE[cell])
        pytest.xfail(f"transformers: {why}")
    if cell in OURS:
        pytest.xfail(fails(FEATURES[feature], trio, monkeypatch, *OURS[cell]))
    FEATURES[feature](trio, monkeypatch)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", LATENT_ROWS)
def test_v_keeps_its_width(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' flash path pads v to the width of q and k; ours has kernels for both widths."""
    seen = []
    original = integration.flash_attn_func

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        o, lse = original(q, k, v, **options)
        seen.append(tuple(x.shape[-1] for x in (q, k, v, o)))
        return o, lse

    monkeypatch.setattr(integration, "flash_attn_func", call)
    trio = Trio(MODELS[name])
    forward(trio, monkeypatch)
    training(trio, monkeypatch)
    layers = 1 if name == "Kimi Linear" else 2
    assert seen == [(192, 192, 128, 128)] * 2 * layers


def fails(
    check: Callable[[Trio, Patch], None],
    trio: Trio,
    monkeypatch: Patch,
    error: type[Exception],
    message: str,
    why: str,
) -> str:
    with pytest.raises(error, match=message):
        check(trio, monkeypatch)
    return why
