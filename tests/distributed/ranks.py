"""Processes that are the ranks of a group on the CPU: gloo, and kernels in the emulator.

Processes of a group stay for many cases, because each takes seconds to import torch. A case is a
function of this module, which every rank calls with equal arguments, or with `of_rank` of them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.utils.checkpoint
from torch import Tensor

from ..growth import Held

INPUTS = ("q", "k", "v", "learnable_sink")


class RankError(Exception):
    """What a rank raised, with its traceback as text."""


class Ranks:
    """A group of processes."""

    def __init__(self, world: int, *, timeout: float = 60) -> None:
        context = mp.get_context("spawn")
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="cute-attn-ranks-")
        store = f"file://{Path(self._folder.name) / 'store'}"
        pairs = [context.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, world, store, timeout), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def call(self, name: str, *of_rank: dict[str, Any], **arguments: Any) -> list[Any]:
        """What the function `name` of this module returns on each rank."""
        found = self.outcomes(name, *of_rank, **arguments)
        for rank, outcome in enumerate(found):
            if isinstance(outcome, RankError):
                raise RankError(f"rank {rank}: {outcome}")
        return found

    def outcomes(self, name: str, *of_rank: dict[str, Any], **arguments: Any) -> list[Any]:
        """As `call`, with a RankError in place of the result of a rank that raises."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((name, arguments | (of_rank[rank] if of_rank else {})))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@contextmanager
def ranks(world: int, **options: Any) -> Iterator[Ranks]:
    found = Ranks(world, **options)
    try:
        yield found
    finally:
        found.close()


def _serve(pipe: Any, rank: int, world: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    from cute_attn.emulator import build

    build.directory = Path(__file__).parents[2] / "build" / "emulator"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    while (work := pipe.recv()) is not None:
        name, arguments = work
        try:
            pipe.send(globals()[name](**arguments))
        except Exception as error:
            # Other ranks may wait for this rank until the group's time is over.
            print(
                f"rank {rank} raised {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
            pipe.send(RankError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may wait for ranks that are gone


# -- what ranks do


def plan_of(layout: Any, mode: str | None, mesh: Sequence[int] | None, **lengths: Any) -> Any:
    from cute_attn.distributed import context_parallel

    group = None if mesh is None else _mesh(tuple(mesh))
    return context_parallel(group, layout=layout, mode=mode, **lengths)


_meshes: dict[tuple[int, ...], Any] = {}


def _mesh(sizes: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if sizes not in _meshes:
        names = ("tokens", "heads")[: len(sizes)]
        _meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _meshes[sizes]


@contextmanager
def kernels(emulated: bool) -> Iterator[None]:
    """Kernels in the emulator, whose checks must find nothing, or what stands in for kernels.
    Memory without values holds NaN."""
    import cute_attn
    from cute_attn.emulator import Emulator

    from ..ops.attention_stand_ins import stand_ins

    emulator = Emulator(num_sms=4)
    arch = "sm_90a" if emulated else "sm_100a"
    standing_in: AbstractContextManager[Any] = nullcontext() if emulated else stand_ins()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with cute_attn.emulated(arch, emulator), standing_in:
        yield
    torch.use_deterministic_algorithms(False)
    bad = [str(x) for x in emulator.report.findings if x.severity != "note"]
    assert not bad, bad


def attention(
    args: dict[str, Any],
    do: Tensor | None,
    dlse: Tensor | None,
    *,
    layout: Any,
    mode: str | None,
    mesh: Sequence[int] | None = None,
    emulated: bool = True,
    heads_first: bool = False,
    **lengths: Any,
) -> dict[str, Tensor]:
    """What `attention_of` returns for a new plan."""
    plan = plan_of(layout, mode, mesh, **lengths)
    return attention_of(plan, args, do, dlse, emulated=emulated, heads_first=heads_first)


def in_turn(
    calls: Sequence[dict[str, Any]], *, layout: Any, mode: str | None, **lengths: Any
) -> Any:
    """What `attention_of` returns for calls that share a plan."""
    plan = plan_of(layout, mode, None, **lengths)
    return [attention_of(plan, emulated=False, **call) for call in calls]


def attention_of(
    plan: Any,
    args: dict[str, Any],
    do: Tensor | None,
    dlse: Tensor | None,
    *,
    emulated: bool,
    heads_first: bool,
    leaves: Sequence[str] = INPUTS,
) -> dict[str, Tensor]:
    """o, lse and gradients of the rank's tokens, as whole tensors.

    Args:
        heads_first: whether q, k and v are transposed views.
        leaves: the inputs that require a gradient.
    """
    import cute_attn

    function = cute_attn.flash_attn_varlen_func if plan.packed else cute_attn.flash_attn_func
    own = dict(args)
    tokens = ("q", "k", "v")
    for name in tokens:
        own[name] = plan.shard(args[name]).clone()
        if heads_first:
            own[name] = own[name].transpose(-3, -2).contiguous().transpose(-3, -2)
    if args.get("learnable_sink") is None:
        own.pop("learnable_sink", None)
    leaves = [name for name in leaves if name in own]
    if do is not None:
        for name in leaves:
            own[name].requires_grad_()
    with kernels(emulated):
        o, lse = function(**own, return_lse=True, cp=plan)
        if do is not None:
            upstream = [plan.shard(do)]
            outputs = [o]
            if dlse is not None:
                outputs.append(lse)
                upstream.append(plan.shard(dlse, -1))
            torch.autograd.backward(outputs, upstream)
    found = {"o": plan.unshard(o), "lse": plan.unshard(lse, -1)}
    if do is not None:
        for name in leaves:
            gradient = own[name].grad
            if name in tokens:
                found[name] = plan.unshard(gradient)
            else:
                total = gradient.float()
                dist.all_reduce(total)
                found[name] = total.to(gradient.dtype)
    return found


def growth(args: dict[str, Any], do: Tensor, modes: Sequence[str], steps: int) -> str:
    """What this process holds more after `steps` steps of each mode than after half of them. No
    kernel runs."""
    import cute_attn
    from cute_attn import launch

    plans = [plan_of("zigzag", mode, None, seqlen=2 * args["q"].shape[1]) for mode in modes]
    leaves = [args[name].clone().requires_grad_() for name in ("q", "k", "v")]

    def no_kernel(*_: Any) -> Callable[..., None]:  # a Mock would keep each call
        return lambda *_: None

    def step() -> None:
        with cute_attn.emulated("sm_90a"), mock.patch.object(launch, "get_for", no_kernel):
            for plan in plans:
                for window in ((None, 0), (5, 0)):
                    o, _ = cute_attn.flash_attn_func(*leaves, window_size=window, cp=plan)
                    torch.autograd.grad(o, leaves, do)

    for _ in range(steps // 2):
        step()
    tracemalloc.start()
    try:
        Held.now()  # the first may import modules
        half = Held.now()
        for _ in range(steps // 2):
            step()
        # An object, or 100 bytes of a line, for each step.
        last = Held.now()
    finally:
        tracemalloc.stop()
    lines = {name: n for name, n in (last.lines - half.lines).items() if n >= 50 * steps}
    objects = {name: n for name, n in (last.objects - half.objects).items() if n >= steps // 2}
    grew = last.tensors - half.tensors or lines or objects
    return last.grew(half) if grew else ""


def wrapped(
    args: dict[str, Any], do: Tensor, way: str, mode: str, seqlen: int
) -> tuple[list[Tensor], list[list[str]]]:
    """o and gradients of the rank's tokens, of a layer that torch compiles or computes again, or
    whose saved tensors a buffer holds; and the operations of each compiled graph."""
    import cute_attn

    plan = plan_of("contiguous", mode, None, seqlen=seqlen)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, _ = cute_attn.flash_attn_func(q * 2.0, k, v.sin(), causal=True, cp=plan)
        return o.cos() * 0.5

    graphs: list[list[str]] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append([node.name for node in module.graph.nodes if node.op.startswith("call")])
        return module.forward

    leaves = [plan.shard(args[name]).clone().requires_grad_() for name in ("q", "k", "v")]
    with kernels(emulated=False):
        if way == "compile":
            o = torch.compile(layer, backend=backend)(*leaves)
        elif way == "checkpoint":
            o = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
        elif way == "buffer":
            with torch.autograd.graph.saved_tensors_hooks(_into_buffer, _out_of_buffer):
                o = layer(*leaves)
        else:
            o = layer(*leaves)
        o.backward(plan.shard(do))
    return [o.detach(), *(x.grad for x in leaves)], graphs


def _into_buffer(x: Tensor) -> tuple[Tensor, torch.Size]:
    """A buffer that has x after other numbers, and x's shape."""
    return torch.cat([x.new_zeros(64), x.detach().reshape(-1)]), x.shape


def _out_of_buffer(packed: tuple[Tensor, torch.Size]) -> Tensor:
    return packed[0][64:].view(packed[1])


DELTA_TOKENS = ("q", "k", "v", "g", "beta")
DELTA_INPUTS = (*DELTA_TOKENS, "A_log", "dt_bias", "initial_state")


def delta_rule(
    args: dict[str, Any],
    do: Tensor | None,
    dfinal: Tensor | None,
    *,
    function: str,
    layout: Any,
    pieces: tuple[int, int] | None = None,
    arch: str = "sm_90a",
    **lengths: Any,
) -> dict[str, Tensor]:
    """o, final states and gradients of a delta rule over ranks, as whole tensors. Every rank has a
    part of the final states' gradient.

    Args:
        pieces: the chunks of a span's last piece, and the most pieces.
    """
    import cute_attn
    from cute_attn.emulator import Emulator
    from cute_attn.ops.kda import chunk_spans

    plan = plan_of(layout, None, None, **lengths)
    own = dict(args)
    for name in DELTA_TOKENS:
        own[name] = plan.shard(args[name], 1).clone()
    leaves = [name for name in DELTA_INPUTS if isinstance(own.get(name), Tensor)]
    if do is not None:
        for name in leaves:
            own[name] = own[name].clone().requires_grad_()
    if pieces is not None:
        chunk_spans.FIRST_PIECE, chunk_spans.MOST_PIECES = pieces
    emulator = Emulator(num_sms=4)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with cute_attn.emulated(arch, emulator):
        o, final = getattr(cute_attn, function)(**own, cp=plan)
        if do is not None:
            outputs, upstream = [o], [plan.shard(do, 1)]
            if final is not None:
                outputs.append(final)
                upstream.append(dfinal if plan.rank == 0 else torch.zeros_like(final))
            torch.autograd.backward(outputs, upstream)
    torch.use_deterministic_algorithms(False)
    bad = [str(x) for x in emulator.report.findings if x.severity != "note"]
    assert not bad, bad
    found = {"o": plan.unshard(o, 1)}
    if final is not None:
        found["final_state"] = final.detach()
    if do is not None:
        for name in leaves:
            if name in DELTA_TOKENS:
                found[name] = plan.unshard(own[name].grad, 1)
            else:
                found[name] = own[name].grad.float()
                dist.all_reduce(found[name])
    return found


def convolved(
    x: Tensor, weight: Tensor, dy: Tensor, layout: Any, **lengths: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, dx, dweight) of a causal convolution over ranks, of x `[batch, tokens, channels]`."""
    from torch.nn.functional import conv1d

    from cute_attn.distributed import causal_halo

    plan = plan_of(layout, None, None, **lengths)
    own, weight = plan.shard(x, 1).requires_grad_(), weight.clone().requires_grad_()
    before = causal_halo(plan, own, weight.shape[1] - 1)
    spans = own.split(plan.span_lengths, 1) if plan.span_lengths else ()
    found = [
        conv1d(torch.cat([halo, span], 1).mT, weight[:, None], groups=x.shape[2]).mT
        for halo, span in zip(before.unbind(1), spans, strict=True)
    ]
    y = torch.cat(found or [own * 1], 1)
    torch.autograd.backward([y, before], [plan.shard(dy, 1), torch.zeros_like(before)])
    dweight = torch.zeros_like(weight) if weight.grad is None else weight.grad
    dist.all_reduce(dweight)
    return plan.unshard(y, 1), plan.unshard(own.grad, 1), dweight


def raised(layout: Any = "zigzag", mode: str | None = None, **lengths: Any) -> str:
    """What making a plan raises."""
    try:
        plan_of(layout, mode, None, **lengths)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(args: dict[str, Any], **lengths: Any) -> str:
    """What a call raises before any kernel."""
    import cute_attn

    plan = plan_of("zigzag", None, None, **lengths)
    function = cute_attn.flash_attn_varlen_func if plan.packed else cute_attn.flash_attn_func
    try:
        function(**args, cp=plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_decode(args: dict[str, Any]) -> str:
    """What `decode_over_ranks` raises before any kernel."""
    import cute_attn
    from cute_attn.distributed import decode_over_ranks

    try:
        with cute_attn.emulated("sm_90a"):
            decode_over_ranks(**args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sharded(x: Tensor, layout: Any, **lengths: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """(own tokens of x, all tokens of these, position ids, number of tokens)."""
    plan = plan_of(layout, None, None, **lengths)
    own = plan.shard(x)
    return own, plan.unshard(own), plan.position_ids(), plan.tokens


def decoded(
    args: dict[str, Any], own: Sequence[slice], used: Tensor | None, emulated: bool
) -> tuple[Tensor, Tensor]:
    """(o, lse) over the keys of all ranks, of which a rank has `own`."""
    from cute_attn.distributed import decode_over_ranks

    keys = {name: args[name][:, own[dist.get_rank()]].contiguous() for name in ("k", "v")}
    with kernels(emulated):
        return decode_over_ranks(**args | keys, seqused_k=used, return_lse=True)


def model_of(kind: str, implementation: str, dtype: torch.dtype) -> Any:
    """A small model of transformers with seeded weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
        initializer_range=0.1, pad_token_id=0, attn_implementation=implementation,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to(torch.bfloat16).to(dtype)


def logits_and_gradients(model: Any, upstream: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of all parameters as one vector, for a gradient of the logits."""
    logits = model(use_cache=False, **inputs).logits
    logits.backward(upstream.to(logits.dtype))
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(found)


def trained(kind: str, tokens: Tensor, upstream: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """All logits of a model over ranks, and the sum of the ranks' gradients."""
    import cute_attn
    from cute_attn.integrations.transformers import register

    register()
    plan = plan_of(layout, None, None, seqlen=tokens.shape[1])
    model = model_of(kind, "cute_attn", torch.bfloat16)
    with cute_attn.emulated("sm_90a"):
        logits, gradients = logits_and_gradients(
            model,
            plan.shard(upstream),
            input_ids=plan.shard(tokens),
            position_ids=plan.position_ids()[None],
            cp=plan,
        )
    dist.all_reduce(gradients)
    return plan.unshard(logits), gradients


def split(
    kind: str, ids: Tensor, labels: Tensor, *, layout: str, way: str, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """The loss of a model with `use_context_parallel`, and the ranks' gradients together.

    Args:
        way: "sum" or "mean" of gradients, "checkpoint" for layers that are computed again, or
            "fsdp" for parameters that FSDP2 splits.
    """
    from torch.distributed.fsdp import fully_shard

    import cute_attn
    from cute_attn.integrations.transformers import register, use_context_parallel

    register()
    model = model_of(kind, "cute_attn", torch.bfloat16)
    if way == "checkpoint":
        model.gradient_checkpointing_enable()
        model.train()
    mesh = _mesh((dist.get_world_size(),))
    if way == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    gradients_of = "mean" if way in ("mean", "fsdp") else "sum"
    use_context_parallel(model, mesh["tokens"], layout=layout, gradients=gradients_of)
    with cute_attn.emulated("sm_90a"):
        loss = model(input_ids=ids, labels=labels, **inputs).loss
        loss.backward()
    if way == "fsdp":  # which has averaged the gradients
        found = [p.grad.full_tensor().float().flatten() for p in model.parameters()]
        return loss.detach(), torch.cat(found)
    gradients = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    dist.all_reduce(gradients)
    return loss.detach(), gradients / (dist.get_world_size() if way == "mean" else 1)


def refused_model(kind: str, implementation: str, **config: Any) -> str:
    """What `use_context_parallel` raises for a model."""
    from cute_attn.integrations.transformers import register, use_context_parallel

    register()
    model = model_of(kind, implementation, torch.bfloat16)
    for name, value in config.items():
        setattr(model.config, name, value)
    try:
        use_context_parallel(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
