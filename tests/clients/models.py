"""Tiny models with random weights, and what transformers computes with them.

A server reads a model from its directory, which has a configuration and weights in 16 bits. The
reference is transformers' eager attention with the same weights, in float64 and in the model's
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    # Large enough that a token is chosen clearly, so that rounding cannot choose another one.
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def heads(heads: int, heads_k: int, head_dim: int) -> dict[str, int]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads_k,
        "head_dim": head_dim,
    }


LATENT = {
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,  # no experts
    "moe_layer_freq": 1,
}
DEEPSEEK = {
    **LATENT,
    "rope_parameters": {  # which change the softmax scale too
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

# Name -> transformers' model_type and what differs from COMMON.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", heads(4, 2, 64)),
    "head_dim 96": ("llama", heads(2, 2, 96)),
    "llama-mha": ("llama", heads(2, 2, 64)),
    "qwen3": ("qwen3", heads(4, 1, 128)),
    "mistral": ("mistral", {**heads(4, 2, 128), "sliding_window": 12}),
    "gemma2": (
        "gemma2",
        {
            **heads(2, 1, 256),
            "sliding_window": 12,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,  # vLLM knows no other Gemma 2
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **heads(2, 1, 256),
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "sliding_window": 12,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "granite": (  # with sinks and windows; head_dim follows from hidden_size
        "granite_swa",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 256,
            "attention_multiplier": 0.02,
            "initializer_range": 0.15,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 256,
            "block_ff_dim": 64,
            # vLLM reads these three, which transformers has not.
            "block_dim": 256,
            "conv_dim": 256,
            "conv_use_xavier_init": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **heads(2, 1, 256),
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "num_experts": 0,
            "mlp_only_layers": [0, 1],
        },
    ),
    # As the large models, but for the number of heads and the ranks: (192, 128), tokens of 576.
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 32}),
    "kimi_linear": (
        "kimi_linear",
        {
            **LATENT,
            "mla_use_nope": True,  # which vLLM reads
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "head_dim": 64,
                "num_heads": 2,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **heads(8, 1, 64),
            "sliding_window": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def make(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16, **change: Any) -> Path:
    """Write the model to `directory`/`name`, and return the path."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type, options = MODELS[name]
    # Not AutoConfig, which has a class of vLLM's for some models once vLLM has seen such a model.
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    config = config_class(**{**COMMON, **options, **change})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    if config.tie_word_embeddings:  # or the last token would be the next one
        model.get_input_embeddings().weight.data *= 0.1
    for key, parameter in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(directory / name)
    if name == "kimi_linear":
        rename_layers_without_experts(directory / name)
    return directory / name


def rename_layers_without_experts(path: Path) -> None:
    """transformers saves every layer of Kimi Linear as if it had experts."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    weights = {key.replace("block_sparse_moe", "mlp"): x for key, x in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def logits(path: Path, tokens: Sequence[int], dtype: torch.dtype, **change: Any) -> Tensor:
    """The logits after each of `tokens`, `[tokens, vocabulary]`, computed in `dtype`.

    `change` is of the configuration, and `sinks=None` takes gpt-oss's sinks away.
    """
    from transformers import AutoModelForCausalLM

    without_sinks = "sinks" in change and change.pop("sinks") is None
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **change
    )
    with torch.inference_mode():
        if without_sinks:
            for key, parameter in model.named_parameters():
                if key.endswith("sinks"):
                    parameter.fill_(-torch.inf)
        (found,) = model(torch.tensor([tokens])).logits
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens that are none of the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
