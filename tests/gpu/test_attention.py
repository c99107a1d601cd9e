"""Softmax attention on a GPU: the backward's small kernels on any, and training steps at the
head_dims that the GPU has a backward for. The emulator runs all kernels in tests/ops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import cute_attn
from cute_attn import cache, launch
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import table
from cute_attn.kernels.attention.spec import PreprocessSpec
from cute_attn.kernels.attention.statistics import num_query_zeros, num_tiles, padded_rows
from cute_attn.kernels.attention.table import BACKWARD_PREPROCESS
from cute_attn.kernels.common.sum_partials_spec import SumPartialsSpec
from cute_attn.kernels.common.table import SUM_PARTIALS
from cute_attn.reference.attention import attention_gradients
from tests.ops import attention_grid as grid
from tests.ops.attention_cases import FULL, Case, Target, head_dim_v_of, on_target
from tests.ops.attention_gradient_cases import (
    INPUTS,
    UPSTREAMS,
    Upstream,
    assert_gradients_agree,
    fused_where_possible,
    gradient_cases,
)

from .test_attention_forward import on_gpu

DEVICE = torch.device("cuda", 0)
ARCH = cache.current_arch() if torch.cuda.is_available() else "sm_90a"
SCHEDULERS = ["static", "clc"] if ARCH.startswith("sm_10") else ["static"]
of_every_head_dim = pytest.mark.parametrize("head_dim", table.head_dims("backward_dq", (ARCH,)))


def on_both(kernel: Any, spec: Any, *args: Any, written: tuple[int, ...]) -> list[Any]:
    """What the GPU and the emulator write."""
    arch = launch.arch_of(0)
    gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]
    launch.get(kernel, spec, arch)(*gpu)
    Emulator().load(cache.compile(kernel, spec, arch=arch))(*args)
    return [(gpu[i].cpu(), args[i]) for i in written]


@pytest.mark.parametrize("sums", [False, True], ids=["", "numbers of zeros"])
@pytest.mark.parametrize("sink_dtype", ["none", "float32"])
def test_statistics_of_rows_are_the_emulators(sink_dtype: str, sums: bool):
    torch.manual_seed(0)
    lengths, heads = (300, 0, 77), 4
    total = sum(lengths)
    spec = PreprocessSpec("bfloat16", True, False, sink_dtype, True, sums=sums)
    o, do = torch.randn(2, total, heads, 256).bfloat16()
    lse, dlse = torch.randn(2, heads, total)
    lse[:, ::5] = -math.inf if sink_dtype == "none" else 1.0
    has_sink = sink_dtype != "none"
    parts = torch.zeros(num_tiles(total, len(lengths), True), heads) if has_sink else None
    rows = padded_rows(total, len(lengths), True)
    zeroed = torch.full((num_query_zeros(heads, rows),), -1, dtype=torch.int32) if sums else None
    results = on_both(
        BACKWARD_PREPROCESS, spec, o, do, lse, dlse,
        torch.ones(heads) if has_sink else None,
        torch.tensor([0, 300, 300, 377], dtype=torch.int32), None,
        torch.zeros(2, heads, rows), zeroed, parts, None, None, None, 0, 0, None,
        written=(7, *([8] if sums else []), *([9] if has_sink else [])),
    )  # fmt: skip
    for found, emulated in results:
        torch.testing.assert_close(found, emulated, rtol=1e-5, atol=1e-3, equal_nan=True)
    if sums:
        taken, done = results[1][0][0], results[1][0][1:].view(heads, -1)
        assert taken == 0
        tiles = [0, 1, 2, 4]  # of the first and the last sequence
        assert not done[:, tiles].any()


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (SumPartialsSpec("bfloat16", 4, 1), (3, 50, 256)),
        (SumPartialsSpec("float32", 1, 32), (100, 1, 13)),
    ],
    ids=["of splits", "of tiles"],
)
def test_sums_of_partial_results_are_the_emulators(spec: SumPartialsSpec, shape: tuple[int, ...]):
    torch.manual_seed(0)
    out = torch.zeros(shape[1:], dtype=getattr(torch, spec.dtype))
    ((found, emulated),) = on_both(SUM_PARTIALS, spec, torch.randn(shape), out, written=(1,))
    assert torch.equal(found, emulated)


def test_clusters_that_run_at_once():
    """The driver answers, unless the GPU is older than clusters."""
    sms = launch.num_sms(DEVICE)
    if torch.cuda.get_device_capability()[0] < 9:
        assert launch.num_clusters(DEVICE, 4) == sms // 4
        return
    assert launch._resident_clusters(0, 1) == sms
    for size in (2, 4):
        assert sms // size * 3 // 4 <= launch.num_clusters(DEVICE, size) <= sms // size


# -- training steps


def inputs(head_dim: int, seqlen: int = 1000) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, seqlen, heads, dim, device=DEVICE).bfloat16().requires_grad_()
        for heads, dim in ((8, head_dim), (2, head_dim), (2, head_dim_v_of(head_dim)))
    ]


@of_every_head_dim
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_gradients_agree_and_repeat(head_dim: int, scheduler: str):
    q, k, v = inputs(head_dim)
    do = q.new_empty((*q.shape[:-1], v.shape[-1])).normal_()
    results = []
    for deterministic in (True, True, True, False):
        o, _ = cute_attn.flash_attn_func(
            q, k, v, causal=True, scheduler=scheduler, deterministic=deterministic
        )
        with fused_where_possible():
            results.append(torch.autograd.grad(o, (q, k, v), do))
    for again in results[1:3]:
        assert all(map(torch.equal, results[0], again))
    exact = attention_gradients(q, k, v, do, causal=True)
    for found in (results[0], results[3]):
        for x, true in zip(found, exact, strict=False):
            assert (x.double() - true).norm() <= 0.01 * true.norm()


def check_gradients(
    args: dict[str, Any], upstream: Upstream, *, deterministic: bool, splits: int = 1
) -> None:
    """The gradients of a call on the GPU, by the error rule. `args` are on the CPU."""
    do, dlse = upstream.gradients(args)
    given = on_gpu(args)
    leaves = {name: given[name].detach().requires_grad_() for name in INPUTS if name in given}
    varlen = any(name.startswith(("cu_", "seqused_")) for name in args)
    function = cute_attn.flash_attn_varlen_func if varlen else cute_attn.flash_attn_func
    options = {"return_lse": dlse is not None, "deterministic": deterministic}
    o, lse = function(**given | leaves | options, num_splits=splits)
    outputs, slopes = [o], [do.cuda()]
    if dlse is not None:
        outputs, slopes = [o, lse], [do.cuda(), dlse.cuda()]
    with fused_where_possible():
        found = torch.autograd.grad(outputs, list(leaves.values()), slopes)
    on_cpu = {name: x.cpu() for name, x in zip(leaves, found, strict=True)}
    assert_gradients_agree(args, on_cpu, do, dlse)


@of_every_head_dim
@pytest.mark.parametrize("deterministic", [False, True])
@settings(max_examples=200 if FULL else 5)
@given(case=gradient_cases(), upstream=UPSTREAMS)
def test_gradients_of_any_call(head_dim: int, deterministic: bool, case: Case, upstream: Upstream):
    """Masks, softcap, sinks, grouped heads, packed and used rows, and gradients of lse."""
    with on_target(Target(ARCH, head_dim)):
        check_gradients(case.arguments(), upstream, deterministic=deterministic)


SMALL_SHAPES = [x for x in grid.DENSE_SHAPES if max(x) <= 256]


@pytest.mark.slow
@of_every_head_dim
@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_gradients_of_the_dense_grid(head_dim: int, shape: tuple[int, int]):
    """FlashAttention-4's grid, see `attention_grid`."""
    with on_target(Target(ARCH, head_dim)):
        for number, point in enumerate(grid.drawn(grid.dense_points(shape))):
            args = grid.arguments(replace(point, batch=2), head_dim, "cpu")
            check_gradients(
                args, Upstream(seed=number), deterministic=number % 2 > 0, splits=point.splits
            )


@pytest.mark.slow
@of_every_head_dim
@pytest.mark.parametrize("shape", [x for x in grid.VARLEN_SHAPES if max(x) <= 256], ids=str)
def test_gradients_of_the_grid_of_packed_sequences(head_dim: int, shape: tuple[int, int]):
    with on_target(Target(ARCH, head_dim)):
        for number, point in enumerate(grid.drawn(grid.varlen_points(shape))):
            args = grid.arguments(replace(point, batch=6), head_dim, "cpu")
            check_gradients(
                args, Upstream(seed=number), deterministic=number % 2 > 0, splits=point.splits
            )


@of_every_head_dim
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_see_no_key_do_not_count(head_dim: int, packed: bool, deterministic: bool):
    """The gradient of o may hold NaN there: 50 rows, which share a tile with others."""
    q, k, v = inputs(head_dim)
    k, v = (x[:, :950].detach().requires_grad_() for x in (k, v))
    lengths: dict[str, Any] = {}
    if packed:
        q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v))
        for name, rows in (("q", 1000), ("k", 950)):
            offsets = torch.tensor([0, rows, 2 * rows], dtype=torch.int32, device=DEVICE)
            lengths[f"cu_seqlens_{name}"] = offsets
    do = q.new_empty((*q.shape[:-1], v.shape[-1])).normal_()
    hidden = do.clone()
    hidden.view(2, 1000, *do.shape[-2:])[:, :50] = math.nan
    o, _ = cute_attn.flash_attn_varlen_func(
        q, k, v, causal=True, deterministic=deterministic, **lengths
    )
    with fused_where_possible():
        results = [torch.autograd.grad(o, (q, k, v), x, retain_graph=True) for x in (do, hidden)]
    names = slice(0, 3) if deterministic else slice(1, 3)  # whose bits are always the same
    assert all(map(torch.equal, *(found[names] for found in results)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0.02, atol=0.02)


LAYOUTS_OF_DO: dict[str, Any] = {
    "one for all rows": lambda x: torch.randn_like(x[:, :1]).expand(x.shape),
    "one for all heads": lambda x: torch.randn_like(x[:, :, :1]).expand(x.shape),
    "one number": lambda x: torch.randn_like(x.flatten()[:1]).expand(x.shape),
    "heads first": lambda x: torch.randn_like(x.transpose(1, 2)).transpose(1, 2),
    "negated": lambda x: torch._neg_view(torch.randn_like(x)),
}


@of_every_head_dim
@pytest.mark.parametrize("layout", LAYOUTS_OF_DO)
def test_the_gradient_of_o_may_have_any_layout(head_dim: int, layout: str):
    q, k, v = inputs(head_dim, 300)
    o, _ = cute_attn.flash_attn_func(q, k, v, causal=True, deterministic=True)
    do = LAYOUTS_OF_DO[layout](o)
    found, expected = (
        torch.autograd.grad(o, (q, k, v), x, retain_graph=True)
        for x in (do, do.clone(memory_format=torch.contiguous_format))
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "head_dim",
    [
        pytest.param(n, marks=pytest.mark.skipif(
            not table.has("backward_ds_dq", ARCH, n, head_dim_v_of(n)),
            reason=f"no kernel keeps dS on {ARCH}",
        ))
        for n in (192, 256)
    ],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_dS_of_a_part_of_the_keys_changes_no_bit(
    head_dim: int, causal: bool, monkeypatch: pytest.MonkeyPatch
):
    """16 MiB hold about half of the dS of a query head."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, rows, 2, dim, device=DEVICE).bfloat16().requires_grad_()
        for rows, dim in ((700, head_dim), (20_000, head_dim), (20_000, head_dim_v_of(head_dim)))
    )
    do = torch.randn(*q.shape[:-1], v.shape[-1], device=DEVICE).bfloat16()
    results = []
    for mib in ("16", "512"):
        monkeypatch.setenv("CUTE_ATTN_WORKSPACE_MIB", mib)
        cute_attn.reload_settings()
        o, _ = cute_attn.flash_attn_func(q, k, v, causal=causal)
        results.append(torch.autograd.grad(o, (q, k, v), do))
    monkeypatch.undo()
    cute_attn.reload_settings()
    assert all(map(torch.equal, *results))
    for x, true in zip(results[0], attention_gradients(q, k, v, do, causal=causal), strict=False):
        assert (x.double() - true).norm() <= 0.01 * true.norm()


@of_every_head_dim
def test_a_compiled_step(head_dim: int):
    q, k, v = inputs(head_dim)

    def step(q: Any, k: Any, v: Any) -> Any:
        return cute_attn.flash_attn_func(q, k, v, causal=True)[0].float().square().mean()

    plain = torch.autograd.grad(step(q, k, v), (q, k, v))
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(q, k, v), (q, k, v))
    for x, y in zip(found, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=1e-6)


@of_every_head_dim
def test_a_graph_of_a_training_step(head_dim: int):
    """Forward, backward and optimiser: replayed, it does what eager steps do."""
    finals = []
    for captured in (False, True):
        tensors = inputs(head_dim)
        optimiser = torch.optim.SGD(tensors, lr=0.01)

        def step(tensors: Any = tensors, optimiser: Any = optimiser) -> None:
            optimiser.zero_grad(set_to_none=True)
            o, _ = cute_attn.flash_attn_func(*tensors, causal=True, deterministic=True)
            o.float().square().sum().backward()
            optimiser.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(3):
                graph.replay()
        else:
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        finals.append([x.detach().clone() for x in tensors])
    assert all(x.isfinite().all() for x in finals[0])
    assert all(map(torch.equal, *finals))
