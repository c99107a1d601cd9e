"""Small models of Hugging Face transformers, three times: with our attention and with eager."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import continuous_api, initialization

WINDOW = 6
HEADS, HEADS_K, HEAD_DIM = 4, 2, 256


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


def static_cache(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=24)


PADDINGS = {
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0] + [1] * 12],
    "right": [[1] * 9 + [0] * 4, [1] * 13],
    "both": [[0, 0] + [1] * 9 + [0, 0], [1] * 12 + [0]],
    "only one token": [[0] * 12 + [1], [1] * 13],
}


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


def gradients(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor | None, of: Any = None, **given: Any
) -> torch.Tensor:
    """The gradients of the attention layers' parameters, for a loss that weighs every logit of a
    token.

    Args:
        of: the module that has the parameters, if model is a compiled module.
    """
    logits = model(tokens, attention_mask=mask, use_cache=False, **given).logits.float()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    if mask is not None:
        weights *= mask[:, :, None]
    (logits * weights).sum().backward()
    parameters = (model if of is None else of).named_parameters()
    found = [x.grad for name, x in parameters if "_attn" in name]
    return torch.cat([x.double().flatten() for x in found])


def answers(
    model: Any,
    prompts: list[list[int]],
    length: int,
    monkeypatch: pytest.MonkeyPatch,
    pages: bool = False,
    **options: Any,
) -> list[list[int]]:
    """What `generate_batch` gives, emulated: it generates in a thread of its own.

    Args:
        pages: decode from pages in place, which transformers does on GPUs only. Here transformers
            believes that there is an XPU.
        options: of the ContinuousBatchingConfig.
    """
    context = contextvars.copy_context()
    manager = continuous_api.ContinuousBatchingManager
    loop = manager._run_generation_loop
    monkeypatch.setattr(
        manager, "_run_generation_loop", lambda self, **kw: context.run(loop, self, **kw)
    )
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda *_, **__: pages)
    config = transformers.ContinuousBatchingConfig(
        max_batch_tokens=64, num_blocks=8, page_size=16, use_async_batching=False, **options
    )
    found = model.generate_batch(
        prompts,
        generation_config=greedily(max_new_tokens=length),
        continuous_batching_config=config,
    )
    for answer in found.values():
        if answer.error is not None:
            raise RuntimeError(answer.error)
    return [x.generated_tokens for x in found.values()]


def greedily(**given: Any) -> Any:
    """Greedy generation that no token ends."""
    return transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, disable_compile=True, **given
    )


def greedy(trio: Trio, prompts: list[list[int]], found: list[list[int]]) -> bool:
    """Whether each token found has the greatest logit in float32, or is less below it than the
    logits of eager attention in bfloat16 differ."""
    for prompt, answer in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt + answer])
        eager, exact = (
            model(tokens[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
            for model in trio.models[1:]
        )
        chosen = exact.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        if (exact.max(dim=1).values - chosen > 2 * (eager - exact).abs().max()).any():
            return False
    return True
