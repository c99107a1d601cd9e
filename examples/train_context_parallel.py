"""Training steps of a small model whose sequences are split between ranks: context parallelism.

    torchrun --nproc-per-node 2 examples/train_context_parallel.py
    torchrun --nproc-per-node 4 examples/train_context_parallel.py --fsdp

What it shows:

- a zigzag plan that every rank makes once, `shard` for tokens and labels, and `position_ids`;
- attention with `cp=plan`, the only operator that reads other ranks' tokens;
- the sum of all ranks' gradients, as in data parallelism, then one optimizer step on each rank;
- with `--fsdp`, a mesh of two dimensions. Ranks of the second dimension (2 ranks) split the tokens
  of one text, and the first dimension has other texts. FSDP2 (`fully_shard`) splits parameters over
  the second dimension, and averages gradients over all ranks.

The example compares every loss, and the gradients of the first step, with a model that has all
tokens in one process. With GPUs, ranks communicate through NCCL. Without GPUs, ranks communicate
through gloo, and the kernels run in the emulator.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional

import cute_attn
from cute_attn.distributed import context_parallel

WIDTH, HEADS, HEADS_K, HEAD_DIM = 64, 4, 2, 64
VOCABULARY, TOKENS, LAYERS = 61, 70, 2
STEPS = 3
LEARNING_RATE = 3e-3
# Losses are means over bfloat16 results, and differ by a few roundings.
TOLERANCE = 5e-3

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(torch.nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        x = x + self.out(attention(*qkv.split([HEADS, HEADS_K, HEADS_K], dim=-2)).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Model(torch.nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(TOKENS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def loss(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """The cross entropy, as a sum over these tokens divided by the length of a text."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = self.embedding(tokens) + self.positions(positions)
            for layer in self.layers:
                x = layer(x, attention)
            logits = self.head(self.norm(x))
        flat = logits.flatten(0, 1).float(), labels.flatten()
        return functional.cross_entropy(*flat, reduction="sum") / TOKENS


def shard(model: Model, mesh: Any) -> None:
    """Split the parameters over the mesh's second dimension; the first dimension has copies."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")


def whole(x: Tensor) -> Tensor:
    """All of a parameter's gradient, which may be split over ranks."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train(device: str, fsdp: bool) -> tuple[list[float], list[float], float]:
    """(losses over ranks, losses of one process, relative error of the first gradients)."""
    torch.manual_seed(0)  # the same model and texts on every rank
    model, alone = Model().to(device), Model().to(device)
    alone.load_state_dict(model.state_dict())
    mesh, text, texts = None, 0, 1
    if fsdp:
        texts = dist.get_world_size() // 2
        mesh = init_device_mesh(device.split(":")[0], (texts, 2), mesh_dim_names=("data", "tokens"))
        text = mesh.get_local_rank("data")
        shard(model, mesh)
    drawn = torch.randint(VOCABULARY, (texts, TOKENS + 1), device=device)
    tokens, labels = drawn[:, :-1], drawn[:, 1:]
    plan = context_parallel(mesh and mesh["tokens"], seqlen=TOKENS, layout="zigzag")

    def over_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, _ = cute_attn.flash_attn_func(q, k, v, causal=True, cp=plan)
        return o

    def on_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, _ = cute_attn.flash_attn_func(q, k, v, causal=True)
        return o

    own = plan.shard(tokens[text][None]), plan.shard(labels[text][None]), plan.position_ids(device)
    everything = tokens, labels, torch.arange(TOKENS, device=device)
    steps = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    steps_alone = torch.optim.AdamW(alone.parameters(), LEARNING_RATE)
    losses, losses_alone, error = [], [], 0.0
    for step in range(STEPS):
        loss = model.loss(*own, over_ranks)
        # A text's loss is the sum of its ranks' losses. FSDP takes the mean over all ranks.
        (loss * plan.world if fsdp else loss).backward()
        if not fsdp:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / texts)

        loss = alone.loss(*everything, on_one) / texts
        loss.backward()
        losses_alone.append(loss.item())
        if step == 0:
            ours, theirs = (
                torch.cat([whole(p.grad).flatten() for p in m.parameters()]) for m in (model, alone)
            )
            error = ((ours - theirs).norm() / theirs.norm()).item()
        for optimizer in (steps, steps_alone):
            optimizer.step()
            optimizer.zero_grad()
    return losses, losses_alone, error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--fsdp", action="store_true", help="a mesh of texts and tokens, with FSDP2"
    )
    args = parser.parse_args()
    gpus = torch.cuda.is_available()
    running: Any = contextlib.nullcontext()
    device = "cpu"
    if gpus:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        running = cute_attn.emulated("sm_90a")
    dist.init_process_group("nccl" if gpus else "gloo")
    with running:
        losses, alone, error = train(device, args.fsdp)
    agree = error < 0.02 and all(
        abs(a - b) < TOLERANCE * b for a, b in zip(losses, alone, strict=True)
    )
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        for step, (a, b) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}: loss {a:.4f} over {world} ranks, {b:.4f} in one process")
        print(f"gradients differ by {error:.1e}: {'as rounding does' if agree else 'WRONG'}")
    dist.destroy_process_group()
    return 0 if agree and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("run this with: torchrun --nproc-per-node 2 examples/train_context_parallel.py")
    sys.exit(main())
