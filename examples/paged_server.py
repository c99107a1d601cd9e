"""An inference server's loop around softmax attention with a paged KV cache.

    python examples/paged_server.py [--requests 200]

What it shows:

- a pool of pages of 16 keys: a request gets pages as it grows, and returns them when it is done;
- chunked prefill: prompts are read in pieces, those of several requests packed into one call;
- decode with continuous batching: requests of different lengths arrive at random times, come and go
  at every step, and `num_splits=0` shares the keys of a small batch out among all SMs;
- batch invariance: `batch_invariant=True` in all calls, and other layers in blocks of one size. So
  a request's logits have the same bits in every batch;
- a CUDA graph for each batch size: page table and lengths stay on the device, where a graph reads
  them; rows that fill a batch up have no key;
- a prebuilt cache, found through CUTE_ATTN_PREBUILT, and `cache.freeze()`: nothing compiles while
  the server serves.

At the end some requests are served once more, each alone, and must get the same logits bit for bit.
Every request's tokens run once more, all at once with PyTorch's own attention, which must choose
the same tokens, except where its two best logits are nearly equal. For short requests the server's
logits must be as near to those with float64 attention as those with attention in bfloat16 are.
Without a GPU that has such kernels, a few requests are served in the emulator, for Hopper and for
Blackwell, with every check on, without graphs and prebuilt kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cute_attn
from cute_attn import cache
from cute_attn.emulator import EmulatorUnavailable
from cute_attn.reference.attention import attention_in_low_precision, attention_reference

LAYERS, HEADS, HEADS_K, HEAD_DIM, VOCABULARY = 2, 8, 2, 256, 500
WIDTH = 256
PAGE_SIZE = 16  # keys of a page
CHUNK = 64  # prompt tokens of a prefill step
BLOCK = 64  # rows of a product with weights
SHORTEST, LONGEST = 16, 16 * 1024  # prompts of the replay on a GPU
GAP = 4  # mean number of steps between two arrivals
SHORT = 1024  # tokens of requests that are compared with float64 attention
NEAR = 0.03  # two logits are nearly equal if they differ by less, in standard deviations of logits
GRAPH_BATCHES = (1, 2, 4, 8)
SCRATCH = 0  # the page that rows which fill up a batch write to

SPEC_FILE = """
[[operator]]
plan = "cute_attn.ops.attention:plan_attention"
heads = 8
heads_k = 2
causal = true
batch_invariant = true
varlen_q = {varlen_q}
seqused_k = true
page_size = 16
num_splits = {num_splits}
"""
ARCHS = ("sm_90a", "sm_100a", "sm_103a")

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Linear(torch.nn.Linear):
    """A layer without bias that multiplies BLOCK rows at a time: a library may choose another
    kernel, with other bits, for another number of rows."""

    def __init__(self, columns: int, out: int) -> None:
        super().__init__(columns, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        blocks = F.pad(x, (0, 0, 0, -len(x) % BLOCK)).split(BLOCK)
        return torch.cat([super(Linear, self).forward(block) for block in blocks])[: len(x)]


class Model(torch.nn.Module):
    """Attention layers with little else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        heads = HEADS + 2 * HEADS_K
        self.qkv = torch.nn.ModuleList(Linear(WIDTH, heads * HEAD_DIM) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(Linear(HEADS * HEAD_DIM, WIDTH) for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.unembedding = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """The logits after `tokens`, `[rows]`. `attend` gets a layer's number, and q, k and v,
        `[rows, heads, head_dim]`."""
        x = self.embedding(tokens)
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            heads = qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).to(torch.bfloat16)
            q, k, v = heads.split((HEADS, HEADS_K, HEADS_K), dim=-2)
            x = x + out(attend(layer, q, k, v).flatten(-2).to(x.dtype))
        return self.unembedding(self.norm(x))


@dataclass
class Request:
    """A prompt, the tokens to generate, and what has been done.

    Attributes:
        arrival: the step from which on the server knows the request.
        done: tokens whose keys and values are in the cache.
        logits: of each generated token.
    """

    tokens: list[int]
    wanted: int
    arrival: int = 0
    done: int = 0
    pages: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def again(self) -> Request:
        """The request before it was served, for a server that serves it alone."""
        return Request(self.tokens[: len(self.tokens) - self.wanted + 1], self.wanted)

    @property
    def prefilling(self) -> bool:
        return self.done < len(self.tokens) - 1 or not self.logits


class Server:
    """The server.

    Attributes:
        max_pages: pages of a request.
    """

    def __init__(self, model: Model, device: str, max_pages: int, *, graphs: bool):
        self.model, self.device, self.max_pages = model, device, max_pages
        num_pages = 1 + max(GRAPH_BATCHES) * max_pages
        shape = (2, LAYERS, num_pages, PAGE_SIZE, HEADS_K, HEAD_DIM)
        # NaN in rows that were never written would show if they were read.
        self.cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        self.free = list(range(num_pages - 1, SCRATCH, -1))
        self.graphs = {}
        if graphs:
            for batch in GRAPH_BATCHES:
                self.graphs[batch] = self.capture(batch)

    # -- what a step needs on the device

    def grow(self, request: Request, tokens: int) -> None:
        """Give the request pages for so many tokens in all."""
        while len(request.pages) * PAGE_SIZE < tokens:
            request.pages.append(self.free.pop())

    def tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def table(self, requests: list[Request], rows: int) -> Tensor:
        return self.tensor(
            [[*r.pages, *[SCRATCH] * (self.max_pages - len(r.pages))] for r in requests]
            + [[SCRATCH] * self.max_pages] * (rows - len(requests))
        )

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values to the cache; return the layer's pages."""
        for pages, new in zip(self.cache[:, layer], (k, v), strict=True):
            pages.view(-1, HEADS_K, HEAD_DIM).index_copy_(0, slots, new)
        return self.cache[0, layer], self.cache[1, layer]

    @staticmethod
    def slots(request: Request, first: int, end: int) -> list[int]:
        return [
            request.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(first, end)
        ]

    # -- steps

    def prefill(self, requests: list[Request]) -> None:
        """Read the next piece of each prompt; after the last one, the first token is generated."""
        pieces = [r.tokens[r.done : r.done + CHUNK] for r in requests]
        offsets, slots = [0], []
        for request, piece in zip(requests, pieces, strict=True):
            self.grow(request, request.done + len(piece))
            slots += self.slots(request, request.done, request.done + len(piece))
            request.done += len(piece)
            offsets.append(offsets[-1] + len(piece))
        where = self.tensor(slots).long()
        given = {
            "cu_seqlens_q": self.tensor(offsets),
            "max_seqlen_q": CHUNK,
            "seqused_k": self.tensor([r.done for r in requests]),
            "page_table": self.table(requests, len(requests)),
            "causal": True,
            "batch_invariant": True,
        }

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = self.store(layer, where, k, v)
            o, _ = cute_attn.flash_attn_varlen_func(q, *pages, **given)
            return o

        logits = self.model(self.tensor([t for piece in pieces for t in piece]), attend)
        for request, end in zip(requests, offsets[1:], strict=True):
            if request.done == len(request.tokens):
                self.generated(request, logits[end - 1])

    def decode(self, requests: list[Request]) -> None:
        """One token of each request."""
        for request in requests:
            self.grow(request, request.done + 1)
            request.done += 1
        rows = next((n for n in self.graphs if n >= len(requests)), len(requests))
        pad = rows - len(requests)
        last = [slot for r in requests for slot in self.slots(r, r.done - 1, r.done)]
        step = (
            self.tensor([r.tokens[-1] for r in requests] + [0] * pad),
            self.tensor(last + [SCRATCH * PAGE_SIZE] * pad).long(),
            self.tensor([r.done for r in requests] + [0] * pad),
            self.table(requests, rows),
        )
        if self.graphs:
            graph, buffers, logits = self.graphs[rows]
            for buffer, values in zip(buffers, step, strict=True):
                buffer.copy_(values)
            graph.replay()
        else:
            logits = self.decode_step(*step)
        for request, own in zip(requests, logits, strict=False):
            self.generated(request, own)

    def decode_step(self, tokens: Tensor, slots: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = self.store(layer, slots, k, v)
            o, _ = cute_attn.flash_attn_varlen_func(
                q[:, None], *pages, seqused_k=lengths, page_table=table, causal=True, num_splits=0,
                batch_invariant=True,
            )  # fmt: skip
            return o[:, 0]

        return self.model(tokens, attend)

    def capture(self, batch: int) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        """A decode step of so many rows, as a graph: (graph, its inputs, logits)."""
        buffers = (
            self.tensor([0] * batch),
            self.tensor([SCRATCH * PAGE_SIZE] * batch).long(),
            self.tensor([0] * batch),
            self.table([], batch),
        )
        self.decode_step(*buffers)  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.decode_step(*buffers)
        return graph, buffers, logits

    def generated(self, request: Request, logits: Tensor) -> None:
        request.logits.append(logits.clone())
        if len(request.logits) < request.wanted:
            request.tokens.append(int(logits.argmax()))
        else:
            self.free += request.pages
            request.pages = []

    def serve(self, waiting: list[Request]) -> tuple[int, int]:
        """Serve all requests; return the prefill and decode steps that it took."""
        running: list[Request] = []
        steps, now = [0, 0], 0
        most = max(GRAPH_BATCHES)
        while waiting or running:
            if not running:
                now = max(now, waiting[0].arrival)
            while waiting and waiting[0].arrival <= now and len(running) < most:
                running.append(waiting.pop(0))
            now += 1
            fresh = [r for r in running if r.prefilling]
            if fresh:
                self.prefill(fresh)
            else:
                self.decode(running)
            steps[not fresh] += 1
            running = [r for r in running if len(r.logits) < r.wanted]
        return steps[0], steps[1]


# -- the check


def logits_of(
    model: Model, request: Request, attention: Callable[..., tuple[Tensor, Tensor]]
) -> Tensor:
    """The logits of the generated tokens, all at once."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[None], k[None], v[None], causal=True)[0][0]

    tokens = torch.tensor(request.tokens, device=model.embedding.weight.device)
    return model(tokens, attend)[-request.wanted :]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, None]:
    """PyTorch's attention in float32."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_K, dim=1) for x in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return o.transpose(1, 2), None


def other_tokens(model: Model, requests: list[Request]) -> int:
    """How many tokens differ from those with PyTorch's attention, whose own logit is not nearly as
    large."""
    count = 0
    for request in requests:
        plain = logits_of(model, request, plain_attention)
        chosen = torch.stack(request.logits).argmax(-1, keepdim=True)
        behind = plain.amax(-1) - plain.gather(-1, chosen)[:, 0]
        count += int((behind > NEAR * plain.std()).sum())
    return count


def errors(model: Model, requests: list[Request]) -> tuple[float, float]:
    """The relative errors of the server's logits and of plain PyTorch's, over all requests."""
    ours, plain, size = 0.0, 0.0, 0.0
    for request in requests:
        exact = logits_of(model, request, attention_reference).double()
        low = logits_of(model, request, attention_in_low_precision).double()
        ours += float((torch.stack(request.logits).double() - exact).square().sum())
        plain += float((low - exact).square().sum())
        size += float(exact.square().sum())
    return (ours / size) ** 0.5, (plain / size) ** 0.5


# -- the run


def prebuild(directory: Path, arch: str) -> None:
    """Build the kernels, as the build of a server's image does, and point the server to them."""
    spec_file, prebuilt = directory / "server.toml", directory / "prebuilt"
    spec_file.write_text(
        SPEC_FILE.format(varlen_q="true", num_splits=1)
        + SPEC_FILE.format(varlen_q="false", num_splits=0)
    )
    command = [sys.executable, "-m", "cute_attn.cache", "build", str(spec_file)]
    subprocess.run([*command, "--arch", arch, "--out", str(prebuilt)], check=True)
    os.environ["CUTE_ATTN_PREBUILT"] = str(prebuilt)


@contextlib.contextmanager
def on_gpu() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        prebuild(Path(directory), cache.current_arch())
        cache.freeze()
        try:
            yield
        finally:
            cache.unfreeze()


@dataclass
class Outcome:
    """What a replay has shown.

    Attributes:
        prefills, decodes: steps.
        alone: requests that were served once more, alone.
        same: how many of these got the same logits, bit for bit.
        tokens: generated tokens.
        other: how many of these PyTorch's attention would not have chosen.
        ours, plain: errors of the logits of short requests.
    """

    prefills: int
    decodes: int
    alone: int
    same: int
    tokens: int
    other: int
    ours: float
    plain: float

    @property
    def passed(self) -> bool:
        return self.same == self.alone and not self.other and self.ours <= 2 * self.plain


def run(device: str, prompts: list[int], arrivals: list[int], wanted: int, alone: int) -> Outcome:
    """Serve the prompts, and the first `alone` of them once more, each alone."""
    torch.manual_seed(0)
    model = Model().to(device)
    requests = [
        Request(torch.randint(VOCABULARY, (n,)).tolist(), wanted + i % 3, arrival)
        for i, (n, arrival) in enumerate(zip(prompts, arrivals, strict=True))
    ]
    pages = -(-(max(prompts) + wanted + 2) // PAGE_SIZE)
    with torch.no_grad():
        server = Server(model, device, pages, graphs=device == "cuda")
        free = len(server.free)
        steps = server.serve(list(requests))
        again = [request.again() for request in requests[:alone]]
        for request in again:
            server.serve([request])
        assert len(server.free) == free, "a page was lost"
        same = sum(
            torch.equal(torch.stack(x.logits), torch.stack(y.logits))
            for x, y in zip(requests, again, strict=False)
        )
        short = [request for request in requests if len(request.tokens) <= SHORT]
        tokens = sum(len(request.logits) for request in requests)
        other = other_tokens(model, requests)
        return Outcome(*steps, alone, same, tokens, other, *errors(model, short))


def replay(requests: int) -> tuple[list[int], list[int]]:
    """Prompts with logarithms of uniform distribution, and arrivals of a Poisson process."""
    generator = torch.Generator().manual_seed(1)
    bounds = torch.tensor([SHORTEST, LONGEST]).log()
    part = torch.rand(requests, generator=generator)
    prompts = (bounds[0] + part * (bounds[1] - bounds[0])).exp().round().int()
    gaps = torch.empty(requests).exponential_(1 / GAP, generator=generator)
    return prompts.tolist(), gaps.cumsum(0).int().tolist()


def main(requests: int) -> bool:
    """Serve, and return whether all results agree."""
    gpu = torch.cuda.is_available() and cache.current_arch() in ARCHS
    if gpu:
        prompts, arrivals = replay(requests)
        given = prompts, arrivals, 40, requests // 10
        runs = {torch.cuda.get_device_name(): ("cuda", given, on_gpu())}
    else:
        given = [70, 1, 20], [0, 0, 2], 2, 1
        runs = {
            f"{arch} (emulated)": ("cpu", given, cute_attn.emulated(arch)) for arch in ARCHS[:2]
        }
    table = Table(
        "on", "prefill steps", "decode steps", "same alone", "other tokens", "error",
        "plain PyTorch", "",
    )  # fmt: skip
    passed = True
    for on, (device, values, machine) in runs.items():
        with machine:
            x = run(device, *values)
        passed &= x.passed
        table.add_row(
            on, f"{x.prefills}", f"{x.decodes}", f"{x.same} of {x.alone}",
            f"{x.other} of {x.tokens}", f"{x.ours:.1e}", f"{x.plain:.1e}",
            "agrees" if x.passed else "WRONG",
        )  # fmt: skip
    Console().print(table)
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    try:
        passed = main(parser.parse_args().requests)
    except EmulatorUnavailable as error:
        raise SystemExit(f"There is no GPU here, and {error}") from None
    raise SystemExit(0 if passed else 1)
