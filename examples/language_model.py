"""A small language model for the examples of training, without its attention.

A layer's attention is a module of the example, `attention(x, rules, past)`. `rules` are the
functions that it computes with: the operators, or their references. `past` is what a layer keeps
between calls while the model generates, None in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cute_attn.reference.attention import attention_reference

WIDTH = 128
VOCABULARY = 61
LEARNING_RATE = 3e-3
DTYPE = torch.bfloat16


class Rules(NamedTuple):
    """The functions that the layers call."""

    delta: Callable[..., Any]
    softmax: Callable[..., Any]


class Ways(NamedTuple):
    """Three ways to compute a model: float64 references, the operators, and plain PyTorch."""

    exact: Rules
    ours: Rules
    plain: Rules


def exact_softmax(q: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The float64 reference; the gradient is autograd's."""
    o, lse = attention_reference(q, *inputs, **options)
    return o.to(q.dtype), lse


def exact_delta(
    reference: Callable[..., Any], q: Tensor, *inputs: Tensor, **options: Any
) -> tuple[Tensor, Any]:
    """A delta rule's float64 reference, token by token; the gradient is autograd's."""
    return reference(q, *inputs, **_without_state(options)).o.to(q.dtype), None


def plain_delta(
    chunk_reference: Callable[..., Any], q: Tensor, *inputs: Tensor, **options: Any
) -> tuple[Tensor, Any]:
    """A delta rule in plain PyTorch, in chunks, with 16-bit operands."""
    stages = chunk_reference(
        q, *inputs, **_without_state(options), dtype=torch.float32, stage_dtype=q.dtype
    )
    return stages.o.to(q.dtype), None


def _without_state(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a delta rule that its references take."""
    return {name: x for name, x in options.items() if name != "output_final_state"}


class Layer(torch.nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual around it."""

    def __init__(self, attention: torch.nn.Module):
        super().__init__()
        self.norm, self.norm_mlp = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.attention = attention
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, rules: Any, past: Any = None) -> Tensor:
        x = x + self.attention(self.norm(x), rules, past)
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Model(torch.nn.Module):
    def __init__(self, attentions: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(map(Layer, attentions))
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def logits(self, tokens: Tensor, rules: Any, pasts: list[Any] | None = None) -> Tensor:
        """The logits after each token. `pasts` has an entry for each layer."""
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, rules, pasts[i]) if pasts else self._again(layer, x, rules)
        return self.head(self.norm(x))

    def _again(self, layer: Layer, x: Tensor, rules: Any) -> Tensor:
        """The layer, whose forward runs again in the backward: activation checkpointing."""
        return checkpoint(layer, x, rules, use_reentrant=False)

    def loss(self, tokens: Tensor, rules: Any) -> Tensor:
        """The mean cross entropy of each next token."""
        logits = self.logits(tokens, rules)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def repeated_tokens(batch: int, length: int, device: str) -> Tensor:
    """Random tokens whose second half repeats the first, which a model can learn from."""
    half = torch.randint(VOCABULARY, (batch, length // 2), device=device)
    return torch.cat([half, half], dim=1)


def gradients(model: Model, tokens: Tensor, rules: Any, names: tuple[str, ...]) -> list[Tensor]:
    """The gradients of the attentions' parameters whose names begin with one of `names`."""
    model.zero_grad()
    with torch.autocast(tokens.device.type, DTYPE):
        model.loss(tokens, rules).backward()
    return [
        parameter.grad.double()
        for layer in model.layers
        for name, parameter in layer.attention.named_parameters()
        if name.split(".")[0] in names
    ]


def relative_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error, in which every tensor counts alike."""
    each = [(x - y).norm() / y.norm() for x, y in zip(found, exact, strict=True)]
    return float(torch.stack(each).square().mean().sqrt())


def errors(exact: list[Tensor], ours: list[Tensor], plain: list[Tensor]) -> tuple[float, float]:
    """The relative errors of the operators and of plain PyTorch."""
    return relative_error(ours, exact), relative_error(plain, exact)


@torch.no_grad()
def generate(
    model: Model, prompt: Tensor, count: int, ways: Ways, past: Callable[[], Any]
) -> list[list[Tensor]]:
    """Generate tokens with the operators, and return the tokens' logits: of the references, of the
    operators, and of plain PyTorch. Only the operators use what each layer keeps. The references
    and plain PyTorch compute the whole sequence.

    Args:
        count: the number of tokens.
        past: makes the object that a layer keeps between calls.
    """
    pasts = [past() for _ in model.layers]
    tokens, new, logits = prompt, prompt, []
    with torch.autocast(prompt.device.type, DTYPE):
        for _ in range(count):
            logits.append(model.logits(new, ways.ours, pasts)[:, -1:].double())
            new = logits[-1].argmax(dim=-1)
            tokens = torch.cat([tokens, new], dim=1)
        exact, plain = (
            model.logits(tokens[:, :-1], rules)[:, prompt.shape[1] - 1 :].double()
            for rules in (ways.exact, ways.plain)
        )
    return [list(exact.split(1, dim=1)), logits, list(plain.split(1, dim=1))]


def fit(model: torch.nn.Module, loss: Callable[[], Tensor], steps: int, device: str) -> list[float]:
    """Train the model; returns the loss of each step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        with torch.autocast(device, DTYPE):
            value = loss()
        value.backward()
        optimiser.step()
        losses.append(value.item())
    return losses


def report(console: Console, losses: dict[str, list[float]], errors: dict[str, Any]) -> bool:
    """Print the losses and the errors, and return whether all is well.

    Args:
        losses: the columns of the table, a row for each step.
        errors: of what; the kernels' error and that of plain PyTorch.
    """
    table = Table("step", *losses)
    for step, row in enumerate(zip(*losses.values(), strict=True)):
        table.add_row(str(step), *(f"{loss:.3f}" for loss in row))
    console.print(table)
    for what, (ours, plain) in errors.items():
        console.print(f"Error of the {what}: {ours:.1e}; plain PyTorch's: {plain:.1e}.")
    fell = all(x[-1] < x[0] for x in losses.values())
    console.print("The loss fell." if fell else "The loss did NOT fall.")
    return fell and all(ours <= 2 * plain for ours, plain in errors.values())
