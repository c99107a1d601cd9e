"""A decode loop like an inference server's, around Lightning Attention layers.

    python examples/decode_server.py [--requests 40] [--layers 4]

What it shows:

- a prebuilt cache: the command that an image's build would run builds the kernels, and the server
  finds them through CUTE_ATTN_PREBUILT; nothing compiles while it serves;
- `cache.freeze()`: if a kernel were missing, the server would fail at once and not stall;
- a pool of state slots: a request gets one when it is admitted and frees it when it is done;
- continuous batching: requests of different lengths come and go at every step;
- a CUDA graph for each batch size: a step's batch is padded to the next captured size with rows
  whose slot is -1;
- q, k and v as views of one packed projection.

At the end some requests are decoded again, alone and in plain PyTorch, and must give the same
tokens. Without a GPU the example builds the cache for Hopper and Blackwell, and stops there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import cute_attn
from cute_attn import cache
from cute_attn.reference.lightning import lightning_attn_decode_reference

HEADS, HEAD_DIM, VOCABULARY = 8, 128, 1000
SLOTS = 32
GRAPH_BATCHES = (1, 2, 4, 8, 16, 32)

# The spec file of the image's build, with the kernels that this server needs. Activations are
# float32 so that tokens can be compared; cute_attn/models/serving.toml has those of real models.
SPEC_FILE = """
[[operator]]
plan = "cute_attn.ops.lightning:plan_decode"
dtype = "float32"
head_dim_k = {head_dim}
head_dim_v = {head_dim}
indexed = true
num_sms = {num_sms}
"""


def prebuild(directory: Path, arch: str, num_sms: int) -> Path:
    """Build the kernels for GPUs with so many SMs, as the build of a server's image does; return
    their directory."""
    spec_file, prebuilt = directory / "server.toml", directory / "prebuilt"
    spec_file.write_text(SPEC_FILE.format(head_dim=HEAD_DIM, num_sms=num_sms))
    command = [sys.executable, "-m", "cute_attn.cache", "build", str(spec_file)]
    subprocess.run([*command, "--arch", arch, "--out", str(prebuilt)], check=True)
    return prebuilt


class Model(torch.nn.Module):
    """A stack of Lightning Attention layers with little else, so that errors change tokens."""

    def __init__(self, layers: int):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(width, 3 * width, bias=False) for _ in range(layers)
        )
        self.norm = torch.nn.RMSNorm(width)
        self.unembedding = torch.nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("decay", torch.exp2(-8 * torch.arange(1, HEADS + 1) / HEADS))

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Return the next tokens `[B]` after `tokens` `[B]`.

        `states` is `[layers, slots, H, V, K]`; `attend(q, k, v, state, decay)` decodes one layer
        and updates its state in place.
        """
        x = self.embedding(tokens)
        for project, state in zip(self.qkv, states, strict=True):
            q, k, v = project(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
            x = x + attend(q, k, v, state, self.decay).flatten(-2)
        return self.unembedding(self.norm(x)).argmax(-1)


@dataclass
class Request:
    """A prompt of one token, and how many tokens to generate."""

    prompt: int
    length: int
    tokens: list[int] = field(default_factory=list)
    slot: int = -1


class Server:
    """Admits requests, and decodes one token of each active one per step."""

    def __init__(self, model: Model, layers: int):
        self.model = model
        self.states = torch.zeros(layers, SLOTS, HEADS, HEAD_DIM, HEAD_DIM, device="cuda")
        self.free = list(range(SLOTS))
        self.active: list[Request] = []
        # The graphs read these tensors; a smaller batch uses their first rows.
        self.tokens = torch.zeros(max(GRAPH_BATCHES), dtype=torch.long, device="cuda")
        self.slots = torch.full((max(GRAPH_BATCHES),), -1, dtype=torch.int32, device="cuda")
        self.graphs = {batch: self.capture(batch) for batch in GRAPH_BATCHES}

    def capture(self, batch: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a step of `batch` rows: the graph, and the tensor that gets the next tokens."""
        tokens, slots = self.tokens[:batch], self.slots[:batch]

        def attend(*qkv_state_decay: torch.Tensor) -> torch.Tensor:
            return cute_attn.lightning_attn_decode(*qkv_state_decay, state_indices=slots)

        self.model(tokens, self.states, attend)  # loads the kernels; every row is padding
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            following = self.model(tokens, self.states, attend)
        return graph, following

    def admit(self, request: Request) -> bool:
        """Give the request a slot, if one is free."""
        if not self.free:
            return False
        request.slot = self.free.pop()
        self.states[:, request.slot] = 0  # a real server would prefill the prompt here
        self.active.append(request)
        return True

    def step(self) -> None:
        """Decode one token of every active request."""
        batch = next(size for size in GRAPH_BATCHES if size >= len(self.active))
        padding = batch - len(self.active)
        last = [request.tokens[-1] if request.tokens else request.prompt for request in self.active]
        slots = [request.slot for request in self.active]
        self.tokens[:batch] = torch.tensor(last + [0] * padding)
        self.slots[:batch] = torch.tensor(slots + [-1] * padding, dtype=torch.int32)
        graph, following = self.graphs[batch]
        graph.replay()
        for request, token in zip(self.active, following.tolist(), strict=False):
            request.tokens.append(token)
        for request in [r for r in self.active if len(r.tokens) == r.length]:
            self.active.remove(request)
            self.free.append(request.slot)


def decode_alone(model: Model, layers: int, request: Request) -> list[int]:
    """Decode the same request by itself, in plain PyTorch."""
    states = torch.zeros(layers, 1, HEADS, HEAD_DIM, HEAD_DIM, device="cuda")

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor, decay: torch.Tensor
    ) -> torch.Tensor:
        o, new_state = lightning_attn_decode_reference(q, k, v, state, decay, dtype=torch.float32)
        state.copy_(new_state)
        return o

    tokens = [request.prompt]
    for _ in range(request.length):
        tokens.append(int(model(torch.tensor(tokens[-1:], device="cuda"), states, attend)))
    return tokens[1:]


def serve(requests: int, layers: int) -> bool:
    """Serve random requests, and return whether a sample of them agrees with plain PyTorch."""
    torch.manual_seed(0)
    model = Model(layers).cuda().eval()
    cache.freeze()

    started = time.perf_counter()
    server = Server(model, layers)
    print(f"captured {len(GRAPH_BATCHES)} graphs in {time.perf_counter() - started:.2f} s")

    everything = [
        Request(prompt=int(torch.randint(VOCABULARY, ())), length=int(torch.randint(5, 60, ())))
        for _ in range(requests)
    ]
    waiting = list(everything)
    sizes = []
    started = time.perf_counter()
    while waiting or server.active:
        while waiting and server.admit(waiting[0]):
            waiting.pop(0)
        sizes.append(len(server.active))
        server.step()
    seconds = time.perf_counter() - started
    generated = sum(len(request.tokens) for request in everything)
    print(
        f"{requests} requests, {generated} tokens in {len(sizes)} steps of {min(sizes)} to "
        f"{max(sizes)} sequences, {seconds / len(sizes) * 1e3:.2f} ms a step; kernels loaded from "
        f"the prebuilt cache: {cache.stats().prebuilt_hits}, compiled: {cache.stats().compiles}"
    )
    checked = everything[:: max(1, requests // 5)]
    agree = [decode_alone(model, layers, request) == request.tokens for request in checked]
    print(
        f"{sum(agree)} of {len(agree)} requests decode to the same tokens alone, in plain PyTorch"
    )
    return all(agree) and cache.stats().compiles == 0


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description="A decode loop like an inference server's.")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if not torch.cuda.is_available():
            prebuild(Path(directory), "sm_90a,sm_100a", 132)
            print("no GPU here: the image's cache is built, and there is nothing to serve on")
            return 0
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        prebuilt = prebuild(Path(directory), cache.current_arch(), num_sms)
        os.environ["CUTE_ATTN_PREBUILT"] = str(prebuilt)
        return 0 if serve(options.requests, options.layers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
