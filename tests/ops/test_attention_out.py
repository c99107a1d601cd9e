"""`out`: the results of a call without it, in the tensor that is given, and nothing beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn.emulation import Emulation
from cute_attn.ops import operator
from cute_attn.ops.attention import call, forward
from cute_attn.ops.attention.arguments import has_readable_strides
from cute_attn.ops.attention.forward import FORWARD, PLANS
from cute_attn.ops.attention.into import INTO

from .attention_cases import CACHE, CAUSAL, VARLEN, Case, Machine, Target, on_target, run, same
from .attention_stand_ins import StandIns, stand_ins
from .test_attention_pages import in_pages

BF16 = torch.bfloat16


def poisoned(args: dict[str, Any], layout: str = "contiguous") -> torch.Tensor:
    """NaN, of q's shape, with free strides in rows and heads."""
    *rows, heads, dim = args["q"].shape
    whole = torch.full((*rows, heads + 1, dim + 8), math.nan, dtype=args["q"].dtype)
    view = whole[..., 1:, 8:]
    return view.contiguous() if layout == "contiguous" else view


@pytest.fixture
def launched() -> Iterator[StandIns]:
    """Launches of kernels for which a float64 reference stands in."""
    with stand_ins() as found, cute_attn.emulated("sm_100a"):
        yield found


# -- kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "case", "paged", "splits"),
    [
        (128, Case(CACHE, (1, 0, 2), (300,) * 3, unused_k=(0, 9, 299), group=2), False, 2),
        (128, Case(CACHE, (2, 1), (90,) * 2, unused_k=(7, 0), group=2), True, 1),
        (64, Case(CAUSAL, (70,), (300,), heads_k=2), False, 1),
    ],
    ids=["splits", "pages", "dense"],
)
def test_the_kernels_write_the_same_bits(head_dim: int, case: Case, paged: bool, splits: int):
    with on_target(Target("sm_90a", head_dim)):
        args = case.arguments()
        calls = in_pages(args, 16, 0) if paged else args
        expected = run(calls, num_splits=splits)
        out = poisoned(args, "gaps")
        result = run(calls, on=Machine(num_sms=3), num_splits=splits, out=out)
    assert result[0] is out and same(args, expected, result)
    whole = out._base
    assert whole is not None
    assert whole.isnan().sum() == whole.numel() - out.numel() + out.isnan().sum()


@pytest.mark.slow
def test_the_kernel_for_blackwell_writes_the_same_bits():
    args = Case(VARLEN, (3, 0, 70), (40, 9, 100), heads_k=2, tail=3).arguments()
    out = poisoned(args, "gaps")
    result = run(args, out=out)
    assert result[0] is out and same(args, run(args), result)


# -- what the operators do


def test_out_is_what_is_returned(launched: StandIns):
    args = Case(CAUSAL, (5,), (7,), heads_k=2).arguments()
    expected = cute_attn.flash_attn_func(**args)
    for layout in ("contiguous", "gaps"):
        out = poisoned(args, layout)
        before = out._version
        result = cute_attn.flash_attn_func(**args, out=out)
        assert result[0] is out and out._version > before
        assert all(map(torch.equal, result, expected))
        assert launched.launched[-1][2][3] is out
    _, none = cute_attn.flash_attn_func(**args | {"return_lse": False}, out=out)
    assert none is None


def test_a_dimension_of_one_element_may_have_any_stride(launched: StandIns):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    expected, _ = cute_attn.flash_attn_func(**args)
    out = poisoned(args).as_strided(args["q"].shape, (3, 256, 7, 1))
    assert cute_attn.flash_attn_func(**args, out=out)[0] is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("sink", [None, torch.tensor([1.0, -2.0])])
def test_without_keys_out_is_zero(launched: StandIns, sink: torch.Tensor | None):
    q, k = torch.randn(1, 3, 2, 256).to(BF16), torch.randn(1, 0, 1, 256).to(BF16)
    out = poisoned({"q": q}, "gaps")
    _, lse = cute_attn.flash_attn_func(q, k, k, learnable_sink=sink, return_lse=True, out=out)
    assert not out.any() and not launched.names
    wanted = torch.full((2,), -math.inf) if sink is None else sink
    assert torch.equal(lse, wanted[None, :, None].expand(1, 2, 3))


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (bf16(1, 5, 1, 128), ValueError, r"out has shape \[1, 5, 1, 128\], must be \[1, 5, 1, 256"),
        (bf16(5, 1, 256), ValueError, r"out has shape \[5, 1, 256\]"),
        (bf16(1, 5, 1, 256).half(), TypeError, r"out has dtype torch.float16, must be torch.bf"),
        (bf16(1, 5, 1, 256).to("meta"), ValueError, "out is on meta"),
        (bf16(1, 5, 1, 512)[..., ::2], ValueError, "out has strides .* last dimension contiguous"),
        (bf16(1, 5, 1, 260)[..., :256], ValueError, "out has strides .* multiples of 8 elements"),
        (bf16(1, 1, 1, 256).expand(1, 5, 1, 256), ValueError, "out is expanded"),
        (bf16(5 * 256 + 1)[1:].view(1, 5, 1, 256), ValueError, "out starts at .* 16-byte align"),
        (
            bf16(5 * 256).as_strided((1, 5, 1, 256), (1280, 128, 256, 1)),
            ValueError,
            "out has shape .* elements overlap in memory",
        ),
        ([1.0], TypeError, "out must be a torch.Tensor, got list"),
    ],
)
@pytest.mark.parametrize("splits", [1, 2])
def test_bad_tensors_are_refused_before_any_launch(
    out: Any, error: type[Exception], message: str, splits: int
):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    with stand_ins() as found, cute_attn.emulated("sm_90a"):
        with pytest.raises(error, match=message):
            cute_attn.flash_attn_func(**args, num_splits=splits, out=out)
        assert not found.names


def test_a_part_of_q_is_no_out(launched: StandIns):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        cute_attn.flash_attn_func(**args, out=args["q"])
    assert not launched.names


def test_gradients_need_a_call_without_out(launched: StandIns):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    args["q"].requires_grad_()
    out = torch.empty_like(args["q"], requires_grad=False)
    with pytest.raises(
        NotImplementedError, match=r"out is given, .* no backward, so leave it away"
    ):
        cute_attn.flash_attn_func(**args, out=out)
    assert not launched.names
    with torch.no_grad():
        cute_attn.flash_attn_func(**args, out=out)


@pytest.mark.parametrize("bad", [{"return_lse": "yes"}, {"q": None}, {"softmax_scale": "1"}])
def test_other_arguments_are_checked_as_ever(launched: StandIns, bad: dict[str, Any]):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    with pytest.raises(TypeError, match=next(iter(bad))):
        cute_attn.flash_attn_func(**args | bad, out=poisoned(args))
    assert not launched.names


# -- warm calls, on a GPU


def test_a_warm_call_checks_out_and_looks_up_once(monkeypatch: pytest.MonkeyPatch):
    """CPU tensors take this path where the slow one is forbidden. What compiled host code refuses,
    it leaves to that (`test_attention`)."""
    args = Case(CAUSAL, (5,), (7,)).arguments()
    keys: list[Any] = []
    monkeypatch.setattr(INTO, "ready", {})
    monkeypatch.setattr(INTO, "_first_call", lambda key, _: keys.append(key))
    cute_attn.flash_attn_func(**args, out=poisoned(args))
    given: list[Any] = []

    def function(*arguments: Any) -> None:
        _refuse_as_host_code(arguments)
        given.append(arguments)

    INTO.ready[keys[0]] = function, 0.0625, 1.0, 0, 0, 66, False, None, 0, None
    monkeypatch.setattr(INTO, "_first_call", None)
    out = poisoned(args)
    _, lse = cute_attn.flash_attn_func(**args, out=out)
    ((q, k, v, o, written, *_),) = given
    assert q is args["q"] and k is args["k"] and v is args["v"] and o is out and written is lse
    for bad in (out[:, :, :, ::2], out.expand(2, -1, -1, -1), args["q"], args["v"][:, :5]):
        with cute_attn.emulated("sm_100a"), pytest.raises((TypeError, ValueError), match="out"):
            cute_attn.flash_attn_func(**args, out=bad)
    assert len(given) == 1 and not FORWARD.ready and not PLANS


COMBINED = 5  # arguments of the combination


def _refuse_as_host_code(arguments: tuple[Any, ...]) -> None:
    """Bad shapes, strides, and memory that two tensors share."""
    q, k, v, out, *_ = arguments
    if len(arguments) == COMBINED or out.dim() > q.dim():  # with splits
        return
    if out.shape != q.shape or not has_readable_strides(out):
        raise RuntimeError("host code refuses out")
    if any(out.data_ptr() == x.data_ptr() for x in (q, k, v)):
        raise RuntimeError("host code refuses memory")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The launches of kernels that do nothing, where calls with CPU tensors are remembered, as
    those on a GPU."""
    given: list[Any] = []

    def launch(*arguments: Any) -> None:
        _refuse_as_host_code(arguments)
        given.append(arguments)

    monkeypatch.setattr(operator, "may_remember", lambda _: True)
    monkeypatch.setattr(forward, "may_remember", lambda _: True)
    monkeypatch.setattr(INTO, "ready", {})
    monkeypatch.setattr(FORWARD, "ready", {})
    monkeypatch.setattr(Emulation, "function", lambda *_: launch)
    with cute_attn.emulated("sm_100a"):
        yield given
    PLANS.clear()


@pytest.mark.parametrize("into", [True, False], ids=["out", "new"])
@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"num_splits": 2}], ids=str)
def test_a_planned_call_is_one_look_up(
    planned: list[Any], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], into: bool
):
    args = Case(CAUSAL, (5,), (7,)).arguments() | {"return_lse": False} | more
    for _ in range(2):  # cold, then by key
        cute_attn.flash_attn_func(**args, out=poisoned(args) if into else None)
    ((_, scale, *_),) = PLANS.values()
    assert scale == args["q"].shape[-1] ** -0.5
    planned.clear()
    with monkeypatch.context() as only_plans:
        only_plans.setattr(call, "_attend_into", None)
        only_plans.setattr(call, "_forward", None)
        out = poisoned(args) if into else None
        o, lse = cute_attn.flash_attn_func(**args, out=out)
    if out is not None:
        assert o is out and out._version == 1
    assert o.shape == args["q"].shape and o.is_contiguous()
    assert (lse is None) != args["return_lse"]
    (q, k, v, written, of_lse, *rest), *combined = planned
    assert q is args["q"] and k is args["k"] and v is args["v"]
    assert rest[:6] == [None] * 6 and rest[6:8] == [scale, 1.0]
    if "num_splits" in more:
        ((parts, _, combined_o, combined_lse, _),) = combined
        assert written is parts and combined_o is o and combined_lse is None
    else:
        assert written is o and of_lse is lse and not combined


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"out": bf16(1, 5, 1, 512)[..., ::2]}, ValueError),
        ({"out": bf16(1, 6, 1, 256)}, ValueError),
        ({"out": "q"}, ValueError),
        ({"softmax_scale": True}, TypeError),
        ({"softmax_scale": math.inf}, ValueError),
        ({"scheduler": "single"}, ValueError),
        ({"causal": [1]}, TypeError),
        ({"k": bf16(2, 7, 1, 256)}, ValueError),
        ({"learnable_sink": torch.zeros(3)}, ValueError),
        ({"learnable_sink": torch.zeros(1, requires_grad=True)}, NotImplementedError),
        ({"q": bf16(1, 5, 1, 256).requires_grad_()}, NotImplementedError),
        ({"out": bf16(1, 5, 1, 256).requires_grad_()}, NotImplementedError),
    ],
    ids=str,
)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_plan_skips_no_check(
    planned: list[Any], change: dict[str, Any], error: type[Exception], splits: int
):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    args |= {"return_lse": False, "softmax_scale": 1.0, "num_splits": splits}
    for _ in range(2):
        cute_attn.flash_attn_func(**args, out=poisoned(args))
    planned.clear()
    given = {"out": poisoned(args), **args, **change}
    if given["out"] == "q":
        given["out"] = args["q"]
    with pytest.raises(error):
        cute_attn.flash_attn_func(**given)
    assert not planned


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_saved_for_a_gradient_is_not_overwritten_unseen(planned: list[Any], mode: Any):
    """As by torch's functions with `out`, whose writes count without gradients too."""
    args = Case(CAUSAL, (5,), (7,)).arguments() | {"return_lse": False}
    for _ in range(3):  # cold, by key, and by plan
        x, out = torch.ones(1, 5, 1, 256, requires_grad=True), torch.zeros(1, 5, 1, 256).to(BF16)
        y = (x * out).sum()
        with mode():
            cute_attn.flash_attn_func(**args, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    assert len(planned) == 3 and PLANS


@pytest.mark.parametrize("into", [True, False], ids=["out", "new"])
def test_the_number_of_splits_is_checked_in_every_call(planned: list[Any], into: bool):
    args = Case(CAUSAL, (5,), (7,)).arguments() | {"return_lse": False}
    for splits in (1, -1, -1):
        with pytest.raises(ValueError, match="num_splits is -1") if splits < 0 else nullcontext():
            out = poisoned(args) if into else None
            cute_attn.flash_attn_func(**args, num_splits=splits, out=out)
    assert len(planned) == 1


def test_a_given_lse_is_no_part_of_out(planned: list[Any]):
    """lse can be given only in a direct call of the operator: the public functions allocate it."""
    args = [Case(CAUSAL, (5,), (7,)).arguments()[name] for name in "qkv"]
    memory = torch.zeros(5 * 256 + 10, dtype=BF16)
    out = memory[: 5 * 256].view(1, 5, 1, 256)
    within, beside = (x.view(torch.float32).view(1, 1, 5) for x in (memory[:10], memory[-10:]))
    for lse in (torch.zeros(1, 1, 5), beside):
        torch.ops.cute_attn.flash_attn_out(*args, out, lse, num_splits=2)
    assert len(planned) == 4
    with pytest.raises(ValueError, match="out overlaps lse"):
        torch.ops.cute_attn.flash_attn_out(*args, out, within, num_splits=2)
    assert len(planned) == 4


def test_a_plan_is_of_shapes_and_of_the_settings(planned: list[Any]):
    for rows in (5, 5, 6, 6):
        args = Case(CAUSAL, (rows,), (7,)).arguments() | {"return_lse": False}
        cute_attn.flash_attn_func(**args, out=poisoned(args))
    assert len(PLANS) == 2 and len(planned) == 4
    cute_attn.reload_settings()
    assert not PLANS


# -- torch.compile


def test_the_schema_declares_what_is_written():
    schema = torch.ops.cute_attn.flash_attn_out.default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["out", "lse"] and not schema.returns


def test_compiled_code_writes_to_out(launched: StandIns):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    expected = cute_attn.flash_attn_func(**args)

    def attend(out: torch.Tensor, *qkv: torch.Tensor) -> Any:
        _, lse = cute_attn.flash_attn_func(*qkv, causal=True, return_lse=True, out=out)
        return out + 0, lse

    out = poisoned(args)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    result = compiled(out, *(args[name] for name in "qkv"))
    assert all(map(torch.equal, result, expected)) and torch.equal(out, expected[0])


def test_the_registered_operator_is_well_behaved(launched: StandIns):
    args = Case(CAUSAL, (5,), (7,)).arguments()
    torch.library.opcheck(
        torch.ops.cute_attn.flash_attn_out.default,
        (args["q"], args["k"], args["v"], torch.zeros_like(args["q"]), torch.zeros(1, 1, 5)),
        {"causal": True},
    )


def test_fake_tensors_are_checked():
    args = Case(CAUSAL, (5,), (7,)).arguments()
    with FakeTensorMode():
        fake = {n: torch.empty(args[n].shape, dtype=BF16, device="cuda") for n in "qkv"}
        o, lse = cute_attn.flash_attn_func(**fake, out=(out := fake["q"].new_empty(1, 5, 1, 256)))
        assert o is out and lse is None
        with pytest.raises(ValueError, match="out has shape"):
            cute_attn.flash_attn_func(**fake, out=fake["k"])
