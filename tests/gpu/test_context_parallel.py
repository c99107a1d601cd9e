"""Context parallelism over several GPUs with NCCL, beside one GPU and float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cute_attn
from cute_attn.distributed import context_parallel

from ..growth import Held
from . import processes
from .kernels_ahead import compiled
from .processes import exit_codes, on_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU, only to find the kernels
GPUS = torch.cuda.device_count()
WORLDS = [
    pytest.param(world, marks=pytest.mark.skipif(world > GPUS, reason=f"needs {world} GPUs"))
    for world in (2, 4)
]

LENGTHS = (500, 3, 0, 1200, 277)
# name -> (layout, lengths, batch or None for packed sequences, heads, heads_k, head_dim, options)
CASES: dict[str, tuple[Any, ...]] = {
    "zigzag": ("zigzag", (1980,), 1, 8, 4, 128, {"causal": True, "sink": True}),
    "batch": ("zigzag", (1001,), 2, 8, 4, 128, {"causal": True}),
    "dense": ("contiguous", (1024,), 1, 8, 4, 64, {}),
    "packed": ("zigzag", LENGTHS, None, 8, 4, 128, {"causal": True}),
    "documents": ("documents", LENGTHS, None, 8, 4, 128, {"causal": True}),
    "window": ("contiguous", (2000,), 1, 4, 4, 256, {"window_size": (255, 0)}),
    "both sides": ("zigzag", LENGTHS, None, 8, 4, 128, {"window_size": (130, 40)}),
}
MODES = ("gather", "ring", "heads", "mesh")
REPEATED = ("zigzag", "packed")  # the cases of deterministic calls


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """All kernels of this module's calls are compiled before the first test."""
    worlds = tuple(world for world in (2, 4) if world <= GPUS)
    if worlds:
        compiled(every_call, worlds)
    yield
    processes.close()


def every_call() -> None:
    """Each kind of call that a test of this module makes."""
    for name in CASES:
        for mode in MODES:
            over_ranks(Inputs(name), mode, False)
        Inputs(name).alone()
    for name in REPEATED:
        for mode in MODES:
            over_ranks(Inputs(name), mode, True)
    for heads, mode in ((8, "gather"), (8, "ring"), (8, "heads"), (8, None), (32, None)):
        for deterministic in (False, True):
            plan = plan_of("zigzag", (2048,), False, mode)
            q, k, v = leaves_of(plan.tokens, heads, heads // (2 if heads == 8 else 4))
            o, _ = cute_attn.flash_attn_func(
                q, k, v, causal=True, cp=plan, deterministic=deterministic
            )
            o.sum().backward()
            with torch.no_grad():
                cute_attn.flash_attn_func(q, k, v, causal=True, cp=plan)
    plan = plan_of("zigzag", (256,), False, "gather")
    with torch.no_grad():
        call_with(plan, plan.tokens)


def leaves_of(tokens: int, heads: int, heads_k: int, dim: int = 128) -> list[Tensor]:
    """q, k and v that need a gradient."""
    return [
        torch.randn(1, tokens, n, dim, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, heads_k, heads_k)
    ]


def plan_of(layout: str, lengths: tuple[int, ...], packed: bool, mode: str | None) -> Any:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    of_lengths: Any = {"cu_seqlens": bounds} if packed else {"seqlen": lengths[0]}
    group = None
    if mode == "mesh":
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (2, dist.get_world_size() // 2)
        group = init_device_mesh("cuda", sizes, mesh_dim_names=("tokens", "heads"))
    of_plan = None if mode == "mesh" else mode
    return context_parallel(group, layout=layout, mode=of_plan, **of_lengths)


def exact(
    inputs: list[Tensor], do: Tensor, lengths: tuple[int, ...], options: dict[str, Any]
) -> list[Tensor]:
    """o and gradients in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    q, k, v, *sink = leaves
    left, right = options.get("window_size", (None, None))
    right = 0 if options.get("causal") else right
    rows = (x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v))
    lengths = lengths * (q.shape[0] if q.dim() == 4 else 1)
    found = []
    for parts in zip(*(x.split(lengths) for x in rows), strict=True):
        at = torch.arange(len(parts[0]), device=q.device)
        distance = at[None] - at[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        group = q.shape[-2] // k.shape[-2]
        keys, values = (x.repeat_interleave(group, 1) for x in parts[1:])
        scores = torch.einsum("qhd,khd->hqk", parts[0], keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        if sink:
            column = sink[0][:, None, None].expand(-1, len(at), 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : len(at)]
        found.append(torch.einsum("hqk,khd->qhd", weights, values))
    o = torch.cat(found).view(do.shape)
    o.backward(do.double())
    return [o.detach(), *(x.grad for x in leaves if x.grad is not None)]


class Inputs:
    """The tensors of a case, equal on all ranks.

    Attributes:
        tensors: q, k and v, and the sink if the case has one.
        of_sequences: the arguments for packed sequences on one GPU.
    """

    def __init__(self, name: str) -> None:
        self.layout, self.lengths, batch, heads, heads_k, dim, options = CASES[name]
        self.options = dict(options)
        torch.manual_seed(1)
        self.packed = batch is None
        rows = (sum(self.lengths),) if self.packed else (batch, *self.lengths)
        q, k, v, self.do = (
            torch.randn(*rows, n, dim, device=DEVICE, dtype=torch.bfloat16)
            for n in (heads, heads_k, heads_k, heads)
        )
        self.tensors = [q, k, v]
        if self.options.pop("sink", False):
            self.tensors.append(torch.randn(heads, device=DEVICE))
        self.of_sequences: dict[str, Any] = {}
        if self.packed:
            bounds = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
            offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
            self.of_sequences = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}

    def run(self, tensors: list[Tensor], upstream: Tensor, **given: Any) -> list[Tensor]:
        """o and the gradients."""
        name = "flash_attn_varlen_func" if self.packed else "flash_attn_func"
        leaves = [x.clone().requires_grad_() for x in tensors]
        sink = leaves[3] if len(leaves) > 3 else None
        o, _ = getattr(cute_attn, name)(*leaves[:3], learnable_sink=sink, **self.options, **given)
        o.backward(upstream)
        return [o.detach(), *(x.grad for x in leaves if x.grad is not None)]

    def alone(self) -> list[Tensor]:
        return self.run(self.tensors, self.do, **self.of_sequences)


def over_ranks(x: Inputs, mode: str, deterministic: bool) -> list[Tensor]:
    """o and gradients of all tokens. A mesh needs 4 ranks."""
    if mode == "mesh" and dist.get_world_size() < 4:
        return []
    plan = plan_of(x.layout, x.lengths, x.packed, mode)
    own = [*map(plan.shard, x.tensors[:3]), *x.tensors[3:]]
    found = x.run(own, plan.shard(x.do), cp=plan, deterministic=deterministic)
    for gradient in found[4:]:
        dist.all_reduce(gradient)
    return [*map(plan.unshard, found[:4]), *found[4:]]


def agrees(name: str, mode: str, deterministic: bool) -> None:
    """o and gradients over ranks are about as near to float64 as one GPU's."""
    x = Inputs(name)
    found = over_ranks(x, mode, deterministic)
    if not found:
        return
    true = exact(x.tensors, x.do, x.lengths, x.options)
    for ours, one, right in zip(found, x.alone(), true, strict=True):
        errors = [float((got.double() - right).norm()) for got in (ours, one)]
        assert errors[0] <= 1.3 * errors[1] + 1e-12, (name, mode, errors)
    if deterministic:
        again = over_ranks(x, mode, deterministic)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), (name, mode)


def every_case(names: list[str], modes: tuple[str, ...], deterministic: bool) -> None:
    for name in names:
        for mode in modes:
            print(f"rank {dist.get_rank()}: {name}, {mode}", flush=True)
            agrees(name, mode, deterministic)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_layout(world: int, mode: str) -> None:
    on_ranks(world, every_case, list(CASES), (mode,), False)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", REPEATED)
def test_deterministic_calls_repeat(world: int, name: str) -> None:
    on_ranks(world, every_case, [name], MODES, True)


def replays(mode: str) -> None:
    """A graph of forward and backward gives what calls give, for other values too."""
    plan = plan_of("zigzag", (2048,), False, mode)
    q, k, v = leaves_of(plan.tokens, 8, 4)
    do = torch.randn_like(q)

    def call() -> tuple[Tensor, ...]:
        o, _ = cute_attn.flash_attn_func(q, k, v, causal=True, cp=plan, deterministic=True)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for _ in range(2):
        with torch.no_grad():
            for x in (q, k, v):
                x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, call(), strict=True)), mode


def every_replay() -> None:
    for mode in ("gather", "ring", "heads"):
        replays(mode)


@pytest.mark.parametrize("world", WORLDS)
def test_calls_in_a_graph(world: int) -> None:
    on_ranks(world, every_replay)


AHEAD = 10  # steps that the host may be ahead of the GPU
SEGMENT = 20 * 2**20  # bytes that torch's allocator reserves at once for blocks of 1 to 10 MiB


def does_not_grow(steps: int) -> None:
    """Memory after all steps is no more than memory after 20 steps.

    NCCL's stream reads messages, so their memory is free again only when the GPU has sent them. How
    far ahead the host was decides how much memory is reserved: at most the memory of `AHEAD` steps,
    in whole segments of two streams. A step that kept 2 % of what it allocates would reserve more.
    """
    plan = plan_of("zigzag", (1024,), False, None)
    inputs = leaves_of(plan.tokens, 8, 4)
    found, of_step = {}, 0
    for step in range(steps):
        before = allocated_so_far()
        o, _ = cute_attn.flash_attn_func(*inputs, causal=True, cp=plan)
        o.sum().backward()
        del o
        of_step = allocated_so_far() - before
        if step % AHEAD == 0 or step == steps - 1:
            torch.cuda.synchronize()
        if step in (20, steps // 2, steps - 1):
            found[step] = Held.now()
    first, half, last = found.values()
    grew = (
        f"a step allocates {of_step} bytes; since step 20:\n{last.grew(first)}\nsince step "
        f"{steps // 2}:\n{last.grew(half)}"
    )
    assert last.memory["allocated"] <= first.memory["allocated"], grew
    assert not last.tensors - first.tensors, grew
    most = first.memory["allocated"] + AHEAD * of_step + 2 * SEGMENT
    assert last.memory["reserved"] <= max(most, first.memory["reserved"]), grew
    more = last.memory["resident on the host"] - half.memory["resident on the host"]
    assert more < 2**14 * steps, grew  # less than 32 KiB a step
    # Each step would leave an object; torch and NCCL keep some of their own.
    of_steps = {name: n for name, n in (last.objects - half.objects).items() if n >= steps // 4}
    assert not of_steps, grew


def allocated_so_far() -> int:
    """The bytes of all allocations so far."""
    return int(torch.cuda.memory_stats()["allocated_bytes.all.allocated"])


def test_memory_does_not_grow() -> None:
    if GPUS < 2:
        pytest.skip("needs 2 GPUs")
    on_ranks(2, does_not_grow, 1000)


def peak(tokens: int, heads: int, heads_k: int, dim: int) -> None:
    """The most memory of a forward and of a backward, beside their inputs, is at most what
    docs/context_parallel.md says."""
    world = dist.get_world_size()
    n, columns = tokens // world, 2 * heads_k * dim
    o, kv = 2 * n * heads * dim, 2 * n * columns
    # The backward's kernels: sums of dq, and statistics of rows. Then dq, dk and dv.
    kernels = 4 * n * heads * (dim + 2) + o + kv
    expected = {
        "gather": (world * kv + o, 5 * world * kv + 2 * (world - 1) * kv + kernels),
        "ring": (
            kv * min(3, world - 1) + 2 * o * min(world, 4) + o,
            min(world - 1, 2) * 5 * kv + 4 * kv + 6 * o + kernels,
        ),
        "heads": (o + kv + 3 * o, 2 * (o + kv + 3 * o) + 2 * kv + kernels),
    }
    for mode, (most, most_backward) in expected.items():
        plan = plan_of("zigzag", (tokens,), False, mode)
        inputs = leaves_of(n, heads, heads_k, dim)
        do = torch.randn_like(inputs[0])
        attention = partial(cute_attn.flash_attn_func, *inputs, causal=True, cp=plan)
        for _ in range(2):
            with torch.no_grad():
                found = most_memory(attention)
            out, _ = attention()
            of_backward = most_memory(partial(torch.autograd.grad, out, inputs, do))
            del out
        assert found <= 1.03 * most + 2**21, (mode, found / 2**20, most / 2**20)
        sizes = (of_backward / 2**20, most_backward / 2**20)
        assert of_backward <= 1.03 * most_backward + 2**23, (mode, "backward", sizes)


def most_memory(call: Callable[[], Any]) -> int:
    """The most bytes that a call allocates at once."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("world", WORLDS)
def test_peak_memory_is_the_formula(world: int) -> None:
    on_ranks(world, peak, 2**14, 32, 8, 128)


def leaves() -> None:
    """Rank 1 ends before the call."""
    plan = plan_of("zigzag", (256,), False, "gather")
    if dist.get_rank() == 1:
        os._exit(3)
    ends_after(plan, plan.tokens)


def passes_a_wrong_shape() -> None:
    """Rank 1 has a token less than the plan says."""
    plan = plan_of("zigzag", (256,), False, "gather")
    ends_after(plan, plan.tokens - dist.get_rank())


def ends_after(plan: Any, tokens: int) -> None:
    """Call attention, and end this process: 0 without an error, 1 after a wrong shape."""
    try:
        call_with(plan, tokens)
    except Exception as error:
        os._exit(1 if isinstance(error, ValueError) and "has shape" in str(error) else 2)
    os._exit(0)


def call_with(plan: Any, tokens: int) -> None:
    x = torch.randn(1, tokens, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    cute_attn.flash_attn_func(x, x, x, causal=True, cp=plan)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(("function", "code"), [(leaves, 3), (passes_a_wrong_shape, 1)])
def test_a_rank_that_fails_ends_the_others(function: Any, code: int) -> None:
    """Rank 0 ends by itself, with an error, after the group's 10 seconds."""
    if GPUS < 2:
        pytest.skip("needs 2 GPUs")
    waits, fails = exit_codes(2, function, timeout=10.0, limit=60.0)
    assert fails == code and waits not in (0, None), (waits, fails)
