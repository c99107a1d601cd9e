"""The gradient of attention as an operator: what is launched with what, and torch around it.

Kernels are stood in for; tests/ops/test_attention_gradients.py compares the kernels' own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cute_attn
from cute_attn.cache.specfile import plan_file
from cute_attn.emulation import Emulation
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import configs, table
from cute_attn.kernels.common.table import SUM_PARTIALS, ZERO_UNUSED
from cute_attn.ops import operator
from cute_attn.ops.attention import plan_attention_backward
from cute_attn.ops.attention.backward import BACKWARD, BackwardArguments
from cute_attn.ops.attention.forward import FORWARD
from cute_attn.reference.attention import attention_gradients

from .attention_stand_ins import StandIns, stand_ins

ARCH = "sm_100a"
INPUTS = ("q", "k", "v", "learnable_sink")
PREPROCESS, DQ, DKDV = (
    kernel.name
    for kernel in (
        table.BACKWARD_PREPROCESS,
        table.HD256_BACKWARD_DQ,
        table.HD256_BACKWARD_DKDV,
    )
)
SUM, ZERO = SUM_PARTIALS.name, ZERO_UNUSED.name


@pytest.fixture(autouse=True)
def kernels() -> Iterator[StandIns]:
    with stand_ins() as found, cute_attn.emulated(ARCH, Emulator(num_sms=8)):
        yield found


def dense(requires: tuple[str, ...] = INPUTS, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 256).bfloat16()
    k, v = torch.randn(2, 2, 7, 2, 256).bfloat16()
    args = {"q": q, "k": k, "v": v, **more}
    return {name: x.requires_grad_(name in requires) if isinstance(x, Tensor) and
            x.is_floating_point() else x for name, x in args.items()}  # fmt: skip


def packed(**more: Any) -> dict[str, Any]:
    """Rows of no sequence hold NaN."""
    args = dense(())
    args = {name: x.flatten(0, 1).clone() for name, x in args.items()}
    for name, rows in (("q", 9), ("k", 12), ("v", 12)):
        args[name][rows:] = math.nan
    args["cu_seqlens_q"] = torch.tensor([0, 0, 6, 9], dtype=torch.int32)
    args["cu_seqlens_k"] = torch.tensor([0, 3, 5, 12], dtype=torch.int32)
    for name in INPUTS[:3]:
        args[name].requires_grad_()
    return args | more


def sink() -> Tensor:
    return torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, -math.inf]))


def call(args: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    varlen = any(name.startswith(("cu_", "seqused_")) for name in args)
    function = cute_attn.flash_attn_varlen_func if varlen else cute_attn.flash_attn_func
    return function(**args)


def expected(
    args: dict[str, Any], do: Tensor | None, dlse: Tensor | None = None
) -> dict[str, Tensor | None]:
    options = {
        name: x
        for name, x in args.items()
        if name not in ("return_lse", "scheduler", "deterministic")
    }
    found = attention_gradients(do=do, dlse=dlse, **options)
    return dict(zip(INPUTS, found, strict=True))


def assert_gradients(args: dict[str, Any], exact: dict[str, Tensor | None]) -> None:
    """Check the gradients of arguments that require one, up to the rounding of o and of the
    result."""
    for name in INPUTS:
        x = args.get(name)
        if not isinstance(x, Tensor):
            continue
        if not x.requires_grad:
            assert x.grad is None
            continue
        true = exact[name]
        assert x.grad is not None and true is not None and x.grad.dtype == x.dtype
        scale = true.abs().max().item()
        torch.testing.assert_close(x.grad.double(), true, rtol=0.01, atol=0.01 * scale + 1e-12)


KINDS: dict[str, Any] = {
    "dense": dense,
    "causal": lambda: dense(causal=True, deterministic=True),
    "window, softcap": lambda: dense(window_size=(2, 1), softcap=2.0, softmax_scale=0.2),
    "sink": lambda: dense(learnable_sink=sink(), causal=True, scheduler="clc"),
    "packed": lambda: packed(causal=True),
    "packed, sink": lambda: packed(learnable_sink=sink(), window_size=(1, 0)),
    "used": lambda: packed(
        seqused_q=torch.tensor([0, 4, 2], dtype=torch.int32),
        seqused_k=torch.tensor([3, 0, 5], dtype=torch.int32),
    ),
    "a cache": lambda: {
        **dense(), "seqused_k": torch.tensor([4, 7], dtype=torch.int32), "causal": True,
    },
}  # fmt: skip


# -- what is computed


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_definition(kind: str, with_lse: bool):
    args = KINDS[kind]()
    o, lse = call(args | {"return_lse": with_lse})
    do, dlse = torch.randn_like(o), None
    outputs, gradients = [o], [do]
    if with_lse:
        assert lse is not None
        dlse = torch.randn_like(lse)
        outputs, gradients = [o, lse], [do, dlse]
    else:
        assert lse is None
    torch.autograd.backward(outputs, gradients)
    assert_gradients(args, expected(args, do, dlse))


@pytest.mark.parametrize("kind", ["dense", "sink", "packed"])
def test_the_log_sum_exp_alone_has_a_gradient(kind: str):
    args = KINDS[kind]()
    _, lse = call(args | {"return_lse": True})
    assert lse is not None
    dlse = torch.randn_like(lse)
    lse.backward(dlse)
    exact = expected(args, None, dlse)
    exact["v"] = torch.zeros(args["v"].shape, dtype=torch.float64)
    assert_gradients(args, exact)


@pytest.mark.parametrize(
    ("requires", "launched"),
    [
        (("q",), [PREPROCESS, DQ]),
        (("k",), [PREPROCESS, DKDV]),
        (("v",), [PREPROCESS, DKDV]),
        (("k", "v"), [PREPROCESS, DKDV]),
        (("learnable_sink",), [PREPROCESS, SUM]),
        (("q", "v", "learnable_sink"), [PREPROCESS, SUM, DQ, DKDV]),
    ],
    ids=lambda x: " ".join(x) if x and x[0] in INPUTS else "",
)
def test_only_what_is_needed_is_computed(
    kernels: StandIns, requires: tuple[str, ...], launched: list[str]
):
    args = dense(requires, learnable_sink=sink().detach())
    o, _ = call(args)
    kernels.launched.clear()
    do = torch.randn_like(o)
    o.backward(do)
    assert kernels.names == launched
    assert_gradients(args, expected(args, do))


def test_lse_is_kept_exactly_when_a_gradient_is_taken(kernels: StandIns):
    args = dense()
    with torch.no_grad():
        call(args)
    call(dense(()))
    call(args)
    assert [spec.lse for _, spec, _ in kernels.launched] == [False, False, True]


def test_query_heads_are_split_where_clusters_are_few(kernels: StandIns):
    """In parts of float32, 0 where no kernel writes, that are added up in order."""
    q = torch.randn(700, 4, 256).bfloat16().requires_grad_()
    k, v = (torch.randn(300, 1, 256).bfloat16().requires_grad_() for _ in range(2))
    offsets = torch.tensor([0, 690], dtype=torch.int32), torch.tensor([0, 290], dtype=torch.int32)
    for args in (
        {"q": q[None], "k": k[None], "v": v[None]},
        {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]},
    ):
        with cute_attn.emulated(ARCH, Emulator(num_sms=148)):
            o, _ = call(args)
            kernels.launched.clear()
            do = torch.randn_like(o)
            found = torch.autograd.grad(o, [args[name] for name in "qkv"], do)
        zeros = "cu_seqlens_q" in args
        launched = [PREPROCESS, *[ZERO] * zeros, DQ, *[ZERO] * (2 * zeros), DKDV, SUM, SUM]
        assert kernels.names == launched
        _, spec, given = kernels.launched[-3]
        assert spec.partial and given[5].shape == (4, *args["k"].shape)
        for x, exact in zip(found, attention_gradients(do=do, **args), strict=False):
            torch.testing.assert_close(x.double(), exact, rtol=0.01, atol=0.02)


@pytest.mark.parametrize(
    "layout",
    {
        "expanded": lambda x: torch.ones(1).to(x.dtype).expand(x.shape),
        "heads first": lambda x: torch.randn(2, 4, 5, 256).to(x.dtype).transpose(1, 2),
        "last dimension strided": lambda x: torch.randn(2, 5, 256, 4).to(x.dtype).transpose(2, 3),
        "rows at odd strides": lambda x: torch.randn(2, 5, 4, 257).to(x.dtype)[..., 1:],
        "misaligned": lambda x: torch.randn(x.numel() + 1).to(x.dtype)[1:].view(x.shape),
        "negated": lambda x: torch._neg_view(torch.randn(x.shape).to(x.dtype)),
        "sparse": lambda x: torch.randn(x.shape).relu().to(x.dtype).to_sparse(),
        "zero without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    }.items(),
    ids=lambda x: x[0],
)
def test_the_gradient_of_o_may_have_any_layout(
    kernels: StandIns, monkeypatch: pytest.MonkeyPatch, layout: Any
):
    """On a call that loads kernels, and on one that finds them loaded. What kernels can read is not
    copied."""
    monkeypatch.setattr(operator, "may_remember", lambda _: True)
    for op in (FORWARD, BACKWARD):
        monkeypatch.setattr(op, "ready", {})
    for _ in range(2):
        args = dense()
        o, _ = call(args)
        contiguous = torch.randn_like(o)
        o.backward(contiguous, retain_graph=True)
        assert kernels.launched[-1][2][3] is contiguous or (
            kernels.launched[-1][2][3].data_ptr() == contiguous.data_ptr()
        )
        for name in INPUTS[:3]:
            args[name].grad = None
        do = layout[1](o)
        o.backward(do)
        assert_gradients(args, expected(args, do.to_dense()))
        in_place = kernels.launched[-1][2][3] is do
        assert in_place == (layout[0] == "heads first")
    assert len(BACKWARD.ready) == 1


SHORT = torch.tensor([0, 2, 4], dtype=torch.int32)
LONG = torch.tensor([0, 3, 5], dtype=torch.int32)
COPIES: dict[str, tuple[bool, dict[str, Any]]] = {  # whether do is copied
    "more queries than keys": (True, {"q": 5, "k": 3, "causal": True}),
    "as many": (False, {"q": 5, "k": 5, "causal": True}),
    "fewer": (False, {"q": 3, "k": 5, "causal": True}),
    "no mask": (False, {"q": 5, "k": 3}),
    "a bound to the left": (False, {"q": 5, "k": 3, "window_size": (1, None)}),
    "a bound to the right": (True, {"q": 5, "k": 3, "window_size": (None, 1)}),
    "a bound farther away": (False, {"q": 5, "k": 3, "window_size": (None, 2)}),
    "used keys": (True, {"q": 5, "k": 5, "causal": True, "seqused_k": SHORT[1:]}),
    "packed": (True, {"q": 5, "k": 4, "causal": True, "cu_seqlens_q": LONG, "cu_seqlens_k": SHORT}),
    "packed alike": (
        False, {"q": 5, "k": 5, "causal": True, "cu_seqlens_q": LONG, "cu_seqlens_k": LONG},
    ),
    "packed alike, used keys": (
        True, {"q": 5, "k": 5, "causal": True, "cu_seqlens_q": LONG, "cu_seqlens_k": LONG,
        "seqused_k": SHORT[1:]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_rows_that_see_no_key_do_not_count(kernels: StandIns, name: str):
    """do may hold NaN there. It is copied only where the host does not know that there is no such
    row next to others."""
    copied, args = COPIES[name][0], dict(COPIES[name][1])
    torch.manual_seed(0)
    shape = () if "cu_seqlens_q" in args else (2,)
    counts = args.pop("q"), args.pop("k")
    q, k, v = (
        torch.randn(*shape, n, 2, 256).bfloat16().requires_grad_()
        for n in (counts[0], *[counts[1]] * 2)
    )
    args = {"q": q, "k": k, "v": v} | args
    o, _ = call(args)
    do = torch.randn_like(o)
    do[o.eq(0).all(-1)] = math.nan  # no key, no output
    assert do.isnan().any() == copied
    o.backward(do)
    assert_gradients(args, expected(args, do))
    (of_dkdv,) = (given[3] for name, _, given in kernels.launched if name == DKDV)
    assert (of_dkdv.data_ptr() != do.data_ptr()) == copied
    for x in (q, k, v):
        x.grad = None
    o, _ = call(args | {"k": k.detach(), "v": v.detach()})
    kernels.launched.clear()
    o.backward(do)  # dq needs no copy
    assert not any(
        spec.rows_without_keys for name, spec, _ in kernels.launched if name == PREPROCESS
    )


@pytest.mark.parametrize("as_sparse", [False, True])
def test_gradients_that_other_functions_leave_without_values_in_memory(
    kernels: StandIns, as_sparse: bool
):
    """The caller does not hold them."""
    args = dense()
    o, lse = call(args | {"return_lse": True})
    if as_sparse:
        rows = torch.zeros(o.shape[0], 1, *o.shape[2:], dtype=torch.int64)
        torch.gather(o, 1, rows, sparse_grad=True).sum().backward()
        do, dlse = torch.zeros_like(o), None
        do[:, 0] = 1.0
    else:
        z = torch.complex(torch.zeros_like(lse), lse).conj()
        (z * z).real.sum().backward()  # the gradient of lse is the imaginary part of a conjugate
        do, dlse = torch.zeros_like(o), -2 * lse.detach()
    assert_gradients(args, expected(args, do, dlse))


def test_a_kernel_of_one_head_dim_is_not_used_for_another():
    def key(head_dim: int) -> tuple[Any, ...]:
        q, o, do = torch.zeros(3, 1, 2, 1, head_dim)
        return BACKWARD.key(BackwardArguments(q, q, q, o, do, torch.zeros(1, 1, 2)))

    with cute_attn.emulated("sm_90a"):
        assert key(64) != key(128)


def test_inputs_may_be_views():
    """q, k and v are views of one projection, whose gradient is one tensor."""
    qkv = torch.randn(2, 5, 8, 256).bfloat16().requires_grad_()
    q, k, v = qkv.split([4, 2, 2], dim=2)
    o, _ = cute_attn.flash_attn_func(q, k, v, causal=True)
    do = torch.randn_like(o)
    o.backward(do)
    exact = attention_gradients(q, k, v, do, causal=True)
    assert qkv.grad is not None
    torch.testing.assert_close(qkv.grad.double(), torch.cat(exact[:3], dim=2), rtol=0.01, atol=0.02)


# -- rows without a key, and empty tensors


def test_rows_without_a_key_have_gradient_zero():
    """Whatever the gradient of o is there; that of lse goes to the sink alone."""
    args = dense(learnable_sink=sink(), causal=True, return_lse=True)
    args["k"], args["v"] = (args[name].detach()[:, :3].requires_grad_() for name in "kv")
    o, lse = call(args)  # queries 0 and 1 see no key
    assert lse is not None
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    torch.autograd.backward([o, lse], [do, dlse])
    assert (args["q"].grad[:, :2] == 0).all()
    assert_gradients(args, expected(args, do, dlse))


@pytest.mark.parametrize(
    "shape",
    [
        ((2, 0, 4), (2, 7, 2)),
        ((2, 5, 4), (2, 0, 2)),
        ((0, 5, 4), (0, 7, 2)),
        ((2, 5, 0), (2, 7, 0)),
    ],
    ids=["no queries", "no keys", "no sequences", "no heads"],
)
def test_empty_tensors_have_gradients(kernels: StandIns, shape: Any):
    q = torch.randn(*shape[0], 256).half().requires_grad_()
    k, v = (torch.randn(*shape[1], 256).half().requires_grad_() for _ in range(2))
    of_heads = sink().detach()[: q.shape[2]].requires_grad_()
    args = {"q": q, "k": k, "v": v, "learnable_sink": of_heads, "return_lse": True}
    o, lse = call(args)
    assert lse is not None
    dlse = torch.randn_like(lse)
    torch.autograd.backward([o, lse], [torch.ones_like(o), dlse])
    assert not kernels.launched
    assert all((x.grad == 0).all() for x in (q, k, v))
    torch.testing.assert_close(args["learnable_sink"].grad, dlse.sum((0, 2)))


def test_without_keys_the_sink_has_the_gradient_of_rows_of_sequences():
    """Other rows of dlse may hold anything, as where the kernels run."""
    q = torch.randn(12, 4, 256).bfloat16()
    k = torch.zeros(2, 0, 2, 256).bfloat16()
    args = {
        "q": q,
        "k": k,
        "v": k,
        "cu_seqlens_q": torch.tensor([1, 1, 9], dtype=torch.int32),
        "seqused_q": torch.tensor([0, 5], dtype=torch.int32),
        "learnable_sink": sink(),
    }
    _, lse = call(args | {"return_lse": True})
    assert lse is not None
    dlse = torch.full_like(lse, math.nan)
    dlse[:, 1:6] = torch.randn(4, 5)
    lse.backward(dlse)
    torch.testing.assert_close(args["learnable_sink"].grad, dlse[:, 1:6].sum(1))


def test_no_packed_sequences_have_gradients(kernels: StandIns):
    args = packed(learnable_sink=sink(), return_lse=True)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        args[name] = args[name][:1]
    o, lse = call(args)
    torch.autograd.backward([o, lse], [torch.ones_like(o), torch.ones_like(lse)])
    assert not kernels.launched
    assert all((args[name].grad == 0).all() for name in INPUTS)


# -- torch's machinery


def test_gradients_of_some_tensors_and_two_backwards():
    args = dense(learnable_sink=sink())
    o, _ = call(args)
    do = torch.randn_like(o)
    dk, dsink = torch.autograd.grad(o, [args["k"], args["learnable_sink"]], do, retain_graph=True)
    again = torch.autograd.grad(o, [args[name] for name in INPUTS], do)
    assert torch.equal(again[1], dk) and torch.equal(again[3], dsink)
    with pytest.raises(RuntimeError, match="second time"):
        o.backward(do)


def test_what_a_gradient_needs_must_not_be_changed():
    args = dense()
    o, _ = call(args)
    with torch.no_grad():
        args["k"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("kind", ["dense", "sink", "packed"])
def test_a_compiled_step(kind: str):
    """The whole graph of forward and backward, once with dynamic shapes."""
    for dynamic in (False, True):
        args = KINDS[kind]()
        tensors = {name: x for name, x in args.items() if isinstance(x, Tensor)}
        rest = {name: x for name, x in args.items() if name not in tensors}
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda rest=rest, **tensors: call(tensors | rest)[0].sin(),
            fullgraph=True,
            backend="aot_eager",
            dynamic=dynamic,
        )
        o = compiled(**tensors)
        o.backward(torch.ones_like(o))
        compiled_gradients = [args[name].grad for name in INPUTS if name in args]
        for name in INPUTS:
            if name in args:
                args[name].grad = None
        o, _ = call(args)
        o.sin().backward(torch.ones_like(o))
        for name, found in zip(
            [name for name in INPUTS if name in args], compiled_gradients, strict=True
        ):
            torch.testing.assert_close(found, args[name].grad, rtol=0.02, atol=0.02)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_step_that_packs(dynamic: bool):
    """The number of packed rows is in a tensor, so that no size of theirs is known to the graph."""
    torch._dynamo.reset()
    x = dense()["q"].detach().flatten(0, 1).requires_grad_()
    real = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
    offsets = torch.tensor([0, 4, 7], dtype=torch.int32)

    def step(x: Tensor, real: Tensor, offsets: Tensor) -> Tensor:
        q = x[real]
        k, v = q.split(2, dim=1)
        args = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
        return cute_attn.flash_attn_varlen_func(q, k, v, **args)[0].sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    do = torch.randn(7, 4, 256).bfloat16()
    found, exact = (torch.autograd.grad(f(x, real, offsets), x, do) for f in (compiled, step))
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)


def test_activation_checkpointing(kernels: StandIns):
    """The forward runs again in the backward, and the gradients are the same."""
    args = dense()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cute_attn.flash_attn_func(q, k, v, causal=True)[0]

    inputs = [args[name] for name in INPUTS[:3]]
    do = torch.randn_like(args["q"])
    plain = torch.autograd.grad(layer(*inputs), inputs, do)
    for reentrant in (False, True):
        kernels.launched.clear()
        for x in inputs:
            x.grad = None
        o = checkpoint(layer, *inputs, use_reentrant=reentrant)
        o.backward(do)
        assert kernels.names.count("hd256_forward") == 2
        for x, gradient in zip(inputs, plain, strict=True):
            assert torch.equal(x.grad, gradient)


def test_a_second_derivative_is_refused():
    args = dense()
    o, _ = call(args)
    (dq,) = torch.autograd.grad(o, args["q"], torch.ones_like(o), create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_the_registered_operators_are_sound():
    args = dense(learnable_sink=sink())
    forward = torch.ops.cute_attn.flash_attn.default
    torch.library.opcheck(forward, (args["q"], args["k"], args["v"]), {"return_lse": True})
    with pytest.raises(ValueError, match="return_lse is False, must be True for a gradient"):
        forward(args["q"], args["k"], args["v"])
    q, k, v = (args[name].detach() for name in "qkv")
    o, lse = forward(q, k, v, return_lse=True)
    op = torch.ops.cute_attn.flash_attn_backward.default
    torch.library.opcheck(op, (q, k, v, o, torch.randn_like(o), lse))
    torch.library.opcheck(
        op,
        (q, k, v, o, torch.randn_like(o), lse, torch.randn_like(lse)),
        {"learnable_sink": sink().detach(), "need_dq": False, "need_dsink": True},
    )


# -- what is refused


def test_arguments_of_the_backward_are_checked():
    args = dense(())
    q, k, v = (args[name] for name in "qkv")
    o, lse = torch.ops.cute_attn.flash_attn(q, k, v, return_lse=True)
    good = {"q": q, "k": k, "v": v, "o": o, "do": o, "lse": lse}

    def refused(kind: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(kind, match=match):
            torch.ops.cute_attn.flash_attn_backward(**good | changed)

    refused(ValueError, r"do has shape \[2, 4, 4, 256\], must be \[2, 5, 4, 256\]", do=o[:, :4])
    refused(ValueError, r"lse has shape \[2, 5, 4\], must be \[2, 4, 5\]", lse=lse.mT)
    refused(ValueError, "dlse has shape", dlse=lse[0])
    refused(TypeError, "do has dtype torch.float16, must be torch.bfloat16", do=o.half())
    refused(TypeError, "lse has dtype torch.float64", lse=lse.double())
    refused(ValueError, "one must be True", need_dq=False, need_dkdv=False)
    refused(ValueError, "need_dsink is True, it needs learnable_sink", need_dsink=True)
    refused(ValueError, "k has shape", k=k[:1])


def test_deterministic_is_a_flag():
    with pytest.raises(TypeError, match="deterministic must be a bool, got str"):
        call(dense(deterministic="yes"))


def test_an_architecture_without_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch):
    args = dense()
    o, _ = call(args)
    monkeypatch.delitem(configs.ROWS, ("backward_dq", ARCH, 256, 256))
    with pytest.raises(
        NotImplementedError, match="no attention backward for head_dim 256 on sm_100"
    ):
        o.sum().backward()


# -- plans


def requests_of_a_step(args: dict[str, Any]) -> set[tuple[str, Any]]:
    """The kernels of a forward and backward, with and without splits."""
    found = set()
    for num_sms in (4, 148):
        with stand_ins() as kernels, cute_attn.emulated(ARCH, Emulator(num_sms=num_sms)):
            o, _ = call(args)
            o.sum().backward()
            found |= {(name, spec) for name, spec, _ in kernels.launched}
    return found


def test_models_name_the_kernels_of_a_step():
    models = Path(cute_attn.__file__).parent / "models" / "training.toml"
    planned = {(kernel.name, spec) for kernel, spec in plan_file(models, ARCH)}
    q = torch.randn(1, 600, 4, 256).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 600, 1, 256).bfloat16().requires_grad_() for _ in range(2))
    offsets = torch.tensor([0, 150, 600], dtype=torch.int32)
    steps: list[dict[str, Any]] = [
        {"q": q, "k": k, "v": v},
        {"q": q, "k": k, "v": v, "window_size": (50, None)},
        *(
            {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": offsets, "cu_seqlens_k": of_keys}
            for of_keys in (offsets, offsets.clone())
        ),
    ]
    used = set().union(*(requests_of_a_step(args | {"causal": True}) for args in steps))
    assert SUM in {name for name, _ in used}
    assert used == planned


def test_a_plan_holds_only_what_is_needed():
    def names(**options: Any) -> list[str]:
        return [kernel.name for kernel, _ in plan_attention_backward(ARCH, **options)]

    assert names(split=False) == [PREPROCESS, DQ, DKDV]
    assert names(split=True) == [PREPROCESS, DQ, DKDV, SUM]
    assert names() == [PREPROCESS, DQ, DKDV, DKDV, SUM]
    assert names(dkdv=False, sink="float32") == [PREPROCESS, DQ, SUM]
    assert names(dq=False, split=False) == [PREPROCESS, DKDV]
    assert names(varlen_q=True, seqused_k=True, split=False) == [PREPROCESS, DQ, DKDV, ZERO, ZERO]
    assert names(varlen_q=True, dq=False, split=False) == [PREPROCESS, DKDV]
    with pytest.raises(NotImplementedError, match="head_dim 64 on sm_100a"):
        plan_attention_backward("sm_100a", head_dim=64)
    with pytest.raises(ValueError, match="scheduler is 'fast'"):
        plan_attention_backward(ARCH, scheduler="fast")


# -- Hopper's kernel that adds up dq in any order


HOPPER = "sm_90a"
OWN_DQ, OWN_DKDV, FUSED, POST = (
    table.find(f"backward_{name}", HOPPER, 128).kernel.name
    for name in ("dq", "dkdv", "fused", "postprocess")
)


def launched_on_hopper(
    specs: list[Any] | None = None, *, batch: int = 1, tokens: int = 1100, **options: Any
) -> list[str]:
    """The kernels of a backward behind the preprocess; they do nothing. Into `specs`, the specs of
    all kernels."""
    names: list[str] = []
    made: list[Any] = [] if specs is None else specs

    def function(_: Any, kernel: Any, spec: Any) -> Any:
        names.append(kernel.name)
        made.append(spec)
        return lambda *_: None

    leaves = [torch.randn(batch, tokens, 2, 128).bfloat16().requires_grad_() for _ in range(3)]
    with mock.patch.object(Emulation, "function", function), cute_attn.emulated(HOPPER):
        o, _ = cute_attn.flash_attn_func(*leaves, **options)
        names.clear()
        made.clear()
        torch.autograd.grad(o.sum(), leaves)
    return names[1:]


def test_a_call_or_torch_asks_for_the_same_bits():
    """Torch, when the gradient is taken."""

    def orders(**options: Any) -> str:
        specs: list[Any] = []
        assert launched_on_hopper(specs, **options) == [FUSED, POST]
        preprocess, fused, _ = specs
        assert preprocess.ordered == fused.ordered
        return fused.order

    assert orders() == orders(causal=True) == "any"
    # A fixed order is faster for short sequences.
    assert orders(tokens=1024, batch=2) == "rising" and orders(tokens=1025, batch=2) == "any"
    assert orders(tokens=20, causal=True) == "alternating"
    assert orders(deterministic=True) == "rising"
    assert orders(deterministic=True, causal=True) == "alternating"
    assert orders(deterministic=True, window_size=(9, 0)) == "rising"
    assert orders(batch_invariant=True, causal=True) == "rising"
    torch.use_deterministic_algorithms(True)
    try:
        assert orders(causal=True) == "alternating"
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_the_fused_kernel_cannot_do_is_planned_apart():
    def names(**options: Any) -> list[str]:
        return [
            kernel.name for kernel, _ in plan_attention_backward(HOPPER, short=False, **options)
        ][1:]

    assert names(head_dim=128, split=False) == [FUSED, POST]
    of_64 = table.find("backward_fused", HOPPER, 64).kernel.name
    assert names(head_dim=64, split=False, softcap=True) == [of_64, POST]
    assert names(head_dim=128, split=False, softcap=True) == [OWN_DQ, OWN_DKDV]
    assert names(head_dim=128, split=False, deterministic=True) == [FUSED, POST]
    assert names(head_dim=128, split=False, deterministic=True, softcap=True) == [OWN_DQ, OWN_DKDV]
    assert names(head_dim=64, dkdv=False) == [OWN_DQ]
    assert names(head_dim=64, dq=False, split=False) == [OWN_DKDV]


@pytest.mark.parametrize("varlen_k", [False, True])
def test_parts_of_packed_keys_are_not_planned(varlen_k: bool):
    plans = plan_attention_backward(HOPPER, head_dim=256, varlen_q=varlen_k, varlen_k=varlen_k)
    partial = {spec.partial for kernel, spec in plans if kernel.name == "sm90_backward_ds_dq"}
    assert partial == ({False} if varlen_k else {False, True})
