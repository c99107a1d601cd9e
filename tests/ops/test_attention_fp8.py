"""Softmax attention over fp8 K and V on Hopper.

The rule for errors is the rule of `attention_cases`. The plain implementation and the float64
reference get the exact fp8 numbers times their factors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import heuristics
from cute_attn.kernels.attention.spec import Sm90ForwardSpec
from cute_attn.ops.attention import plan_attention
from cute_attn.reference.attention import attention_in_low_precision, attention_reference

from .attention_cases import (
    FULL,
    Case,
    Kind,
    Machine,
    Target,
    allocate,
    assert_agrees,
    assert_no_worse,
    on_target,
    reference_arguments,
    run,
    same,
    valid,
)
from .attention_stand_ins import stand_ins
from .test_attention_pages import in_pages, of_kind

ARCH = "sm_90a"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
HEADS = 32  # query heads of a K/V head in the quick tests, which share one kernel
DECODE = Kind(seqused_k=True, packed_heads=HEADS)
CAUSAL = Kind(window_right=True, seqused_k=True, packed_heads=2)
PACKED = Kind(window_right=True, varlen_q=True, varlen_k=True, lse=False)
EVERYTHING = Kind(
    dtype=torch.float16, window_left=True, window_right=True, softcap=True, sink=torch.float32,
    varlen_q=True, seqused_q=True, seqused_k=True, packed_heads=4,
)  # fmt: skip


def in_fp8(args: dict[str, Any], fp8: torch.dtype, factors: str, seed: int = 0) -> dict[str, Any]:
    """The call's arguments with k and v in fp8. `factors` is "none", "one" or "heads"."""
    args = args | {name: args[name].to(fp8) for name in ("k", "v")}
    if factors == "none":
        return args
    generator = torch.Generator().manual_seed(seed)
    cu = args.get("cu_seqlens_q")
    batch = len(args["q"]) if cu is None else len(cu) - 1
    shape = () if factors == "one" else (batch, args["k"].shape[-2])
    return args | {
        name: torch.rand(shape, generator=generator) + 0.5 for name in ("k_descale", "v_descale")
    }


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one K/V tile, so that short sequences have pieces too."""
    monkeypatch.setattr(heuristics, "LEAST_PIECE", 1)


def decode(**more: Any) -> dict[str, Any]:
    """A call of the quick tests' kernel."""
    return {"num_splits": 0, "return_lse": True, **more}


def test_a_decode_step_in_pages(short_pieces: None):
    with on_target(Target(ARCH, 128)):
        args = of_kind(DECODE, (300, 0, 64, 3), 1).arguments()
        paged = in_pages(in_fp8(args, E4M3, "heads"), 64, 0)
        unpaged = in_fp8(args, E4M3, "heads")
        for schedule in ("random", "adversarial"):
            found = run(paged, on=Machine(num_sms=5, schedule=schedule), **decode())
            assert_agrees(unpaged, *found)


def test_every_fp8_number_is_converted_exactly(short_pieces: None):
    """A query that sees one key gets the key's row of v, and the key's score as lse. A query with a
    single 1 has one number of k as its score."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).view(2, 1, 1, 128)
    q = torch.eye(128, dtype=torch.bfloat16).repeat(2, 1, 1, 1)
    k = torch.where(numbers.float().isfinite(), numbers.float(), 0.0)
    args = {"q": q, "k": k.to(E4M3), "v": numbers.clone(), "seqused_k": torch.tensor([1, 1])}
    args |= {"seqused_k": args["seqused_k"].int(), "softmax_scale": 1.0}
    args |= {"k_descale": torch.tensor(0.5), "v_descale": torch.tensor([2.0])}
    with on_target(Target(ARCH, 128)):
        o, lse = run(in_pages(args, 64, 0), **decode())
    expected = (numbers.float() * 2).bfloat16().expand(2, 1, 128, 128)
    assert torch.equal(o.isnan(), expected.isnan())
    assert torch.equal(o.nan_to_num(), expected.nan_to_num())
    torch.testing.assert_close(lse[:, :, 0], k[:, 0, 0] / 2, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k", "v"])
def test_numbers_that_are_not_finite(name: str):
    """A NaN in k or v reaches the rows that see it; e5m2 has infinities too."""
    with on_target(Target(ARCH, 64)):
        args = in_fp8(of_kind(CAUSAL, (70, 70, 70), 2, scale=0.02).arguments(), E5M2, "none")
        args[name][0, 5, 0, 3] = math.nan
        args[name][1, 5, 0, 3] = math.inf
        args["q"] = args["q"].abs()
        o, _ = run(args)
    exact, _ = attention_reference(**reference_arguments(args))
    plain, _ = attention_in_low_precision(**reference_arguments(args))
    assert not exact[:2].isfinite().all() and exact[2].isfinite().all()
    for test in (torch.isnan, torch.isposinf):
        assert torch.equal(test(o), test(exact))
    finite = exact.isfinite()
    assert_no_worse(o[finite], [plain[finite]], exact[finite])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@settings(max_examples=60 if FULL else 12)
@given(
    kind=st.sampled_from([DECODE, CAUSAL, PACKED, EVERYTHING]),
    lengths=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from([0, 1, 64, 65, 200, 300])),
        min_size=1,
        max_size=4,
    ),
    heads_k=st.integers(1, 2),
    fp8=st.sampled_from(FP8),
    factors=st.sampled_from(["none", "one", "heads"]),
    page_size=st.sampled_from([0, 16, 64, 80]),
    num_splits=st.sampled_from([0, 1, 3]),
    schedule=st.sampled_from(["random", "adversarial"]),
    seed=st.integers(0, 2**31),
)
def test_any_call(
    head_dim: int, kind: Kind, lengths: list[tuple[int, int]], heads_k: int, fp8: torch.dtype,
    factors: str, page_size: int, num_splits: int, schedule: str, seed: int,
):  # fmt: skip
    queries, keys = zip(*lengths, strict=True)
    if kind.packed_heads > 4:
        queries = (1,) * len(queries)
    if not kind.varlen_q:
        queries = (max(1, queries[0]),) * len(queries)
    most = max(1, *keys)
    case = Case(
        kind, queries, keys if kind.varlen_k else (most,) * len(keys),
        unused_k=tuple(most - n for n in keys) if kind.seqused_k else (0,) * len(keys),
        unused_q=(0,) * len(keys), heads_k=heads_k, group=kind.packed_heads, left=70, seed=seed,
    )  # fmt: skip
    if not sum(queries):
        return
    with on_target(Target(ARCH, head_dim)):
        args = in_fp8(case.arguments(), fp8, factors, seed)
        if kind.varlen_q:
            args["max_seqlen_q"] = max(queries)
        given = in_pages(args, page_size, seed) if page_size and kind.seqused_k else args
        on = Machine(num_sms=3, schedule=schedule, seed=seed % 1000)
        assert_agrees(args, *run(given, on=on, num_splits=num_splits))


@pytest.mark.slow
def test_tiles_of_few_and_of_many_rows_give_the_same_bits():
    """The tiles have equally many keys."""
    with on_target(Target(ARCH, 128)):
        kind = replace(CAUSAL, varlen_q=True)
        args = in_fp8(of_kind(kind, (200, 70), 20).arguments(), E4M3, "heads")
        few, many = (run(args, max_seqlen_q=n) for n in (20, 100))
        assert_agrees(args, *few)
        assert same(args, few, many)


@pytest.mark.slow
def test_factors_are_the_factors_of_k_and_v():
    """A factor of 2 gives the bits of k and v times 2."""
    with on_target(Target(ARCH, 64)):
        args = in_fp8(of_kind(CAUSAL, (200, 70), 3).arguments(), E5M2, "none")
        twice = args | {name: (args[name].float() * 2).to(E5M2) for name in ("k", "v")}
        two = torch.full((2, 1), 2.0)
        found = run(args, k_descale=two, v_descale=two)
        assert same(args, found, run(twice))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_on_a_gpu(head_dim: int, fp8: torch.dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    kind = replace(CAUSAL, packed_heads=8)
    with on_target(Target(ARCH, head_dim)):
        for queries, num_splits in ((1, 0), (1, 3), (100, 1)):
            lengths = (3000, 17, 0, 1300) if queries == 1 else (900, 17, 0, 300)
            args = in_fp8(of_kind(kind, lengths, queries, heads_k=2).arguments(), fp8, "heads")
            paged = {
                name: x.cuda() if isinstance(x, torch.Tensor) else x
                for name, x in in_pages(args, 64, 0).items()
            }
            out = allocate((*args["q"].shape[:-1], args["v"].shape[-1]), kind.dtype, "", "").cuda()
            o, lse = cute_attn.flash_attn_varlen_func(**paged, num_splits=num_splits, out=out)
            assert lse is not None
            assert_agrees(args, o.cpu(), lse.cpu())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again, _ = cute_attn.flash_attn_varlen_func(**paged, num_splits=num_splits)
            again.fill_(math.nan)
            graph.replay()
            assert torch.equal(*(valid(args, x.cpu())[0] for x in (o, again)))


# -- arguments


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call(**changes: Any) -> dict[str, Any]:
    """A good call of flash_attn_func."""
    q = torch.zeros(2, 3, 4, 128, dtype=torch.bfloat16)
    return {"q": q, "k": fp8(2, 5, 2, 128), "v": fp8(2, 5, 2, 128)} | changes


ONE = torch.ones(())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k_descale": ONE},
        {"v_descale": torch.ones(1)},
        {"k_descale": torch.ones(2, 2), "v_descale": torch.ones(2, 4)[:, ::2]},
        {"k": fp8(2, 5, 2, 128, dtype=E5M2), "v": fp8(2, 5, 2, 128, dtype=E5M2)},
        {"q": torch.zeros(2, 3, 4, 128, dtype=torch.float16)},
    ],
    ids=str,
)
def test_good_arguments_are_refused_for_the_device_alone(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        cute_attn.flash_attn_func(**call(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v": fp8(2, 5, 2, 128, dtype=E5M2)}, TypeError, "v has dtype .*e5m2, must be .*e4m3fn"),
        ({"v": call()["q"][:, :, :2]}, TypeError, "v has dtype torch.bfloat16, must be .*e4m3fn"),
        ({"k": call()["q"][:, :, :2]}, TypeError, "v has dtype .*e4m3fn, must be torch.bfloat16"),
        ({"q": fp8(2, 3, 4, 128)}, TypeError, "q has dtype torch.float8_e4m3fn, must be one of"),
        ({"k": fp8(2, 5, 2, 128, dtype=torch.float8_e4m3fnuz)}, TypeError, "k has dtype .*fnuz"),
        ({"k_descale": 0.5}, TypeError, "k_descale must be a torch.Tensor, got float"),
        ({"v_descale": ONE.half()}, TypeError, "v_descale has dtype torch.float16, must be"),
        (
            {"k_descale": torch.ones(2, 4)},
            ValueError,
            r"k_descale has shape \[2, 4\], must be \[\]",
        ),
        ({"v_descale": torch.ones(1, 2, 2)}, ValueError, r"v_descale has shape \[1, 2, 2\]"),
        ({"v_descale": torch.ones(2, 2, device="meta")}, ValueError, "v_descale is on meta"),
        ({"k": fp8(2, 5, 2, 136)[..., :128]}, ValueError, "k has strides .* multiples of 16 elem"),
        (
            {"k": call()["q"][:, :, :2], "v": call()["q"][:, :, :2], "k_descale": ONE},
            ValueError,
            "k_descale is given, and k has dtype torch.bfloat16: only fp8",
        ),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        cute_attn.flash_attn_func(**call() | changes)


@pytest.mark.parametrize("name", ["q", "k_descale"])
def test_there_is_no_gradient(name: str):
    args = call(k_descale=ONE)
    args[name] = args[name].clone().requires_grad_()
    with cute_attn.emulated(ARCH), pytest.raises(NotImplementedError, match="fp8 have no backward"):
        cute_attn.flash_attn_func(**args)


def test_blackwell_has_no_kernel():
    args = {name: torch.zeros(2, 5, 2, 256, dtype=E4M3) for name in ("k", "v")}
    args["q"] = torch.zeros(2, 3, 4, 256, dtype=torch.bfloat16)
    message = "k and v have dtype float8_e4m3fn, and sm_100a has no kernel .* on sm_90a"
    with cute_attn.emulated("sm_100a"), pytest.raises(NotImplementedError, match=message):
        cute_attn.flash_attn_func(**args)
    with pytest.raises(NotImplementedError, match=message):
        plan_attention("sm_100a", kv_dtype="float8_e4m3fn")


def test_plans():
    with pytest.raises(ValueError, match="dtype of k and v is 'float32', must be q's or one of"):
        plan_attention(ARCH, head_dim=128, kv_dtype="float32")
    with pytest.raises(ValueError, match="they need kv_dtype"):
        plan_attention(ARCH, head_dim=128, k_descale=True)
    ((_, spec),) = plan_attention(
        ARCH, head_dim=128, kv_dtype="float8_e5m2", v_descale=True, short=False
    )
    assert isinstance(spec, Sm90ForwardSpec)
    assert (spec.fp8, spec.k_descale, spec.v_descale) == ("float8_e5m2", False, True)
    with pytest.raises(NotImplementedError, match="pages of 8 rows; the kernel for fp8 takes mul"):
        plan_attention(
            ARCH, head_dim=128, kv_dtype="float8_e5m2", seqused_k=True, page_size=8, short=False
        )
    for changes in ({"loaded": 0}, {"k_warps": 0}, {"fp8": "none"}):
        with pytest.raises(ValueError, match=r"must be positive with fp8|need fp8"):
            replace(spec, **changes)


def test_what_the_kernel_is_given():
    """Warm calls take the same kernel; the factors are [batch, heads_k], whatever their shape."""
    heads = torch.rand(2, 2)
    with stand_ins() as launched, cute_attn.emulated(ARCH, Emulator(num_sms=3)):
        for _ in range(2):
            cute_attn.flash_attn_func(**call(k_descale=ONE, v_descale=heads))
        cute_attn.flash_attn_func(**call(k_descale=torch.ones(1), v_descale=heads.T.contiguous().T))
        cute_attn.flash_attn_func(**call(), num_splits=3)
        with pytest.raises(ValueError, match="v_descale has shape"):
            cute_attn.flash_attn_func(**call(k_descale=ONE, v_descale=torch.rand(3, 2)))
    first, *others, split, _ = launched.launched
    assert all(spec == first[1] for _, spec, _ in others)
    for _, _, passed in (first, *others):
        k_descale, v_descale, _tree_mask = passed[-3:]
        assert torch.equal(k_descale, torch.ones(2, 2)) and torch.equal(v_descale, heads)
    assert split[1].split and split[2][-3:] == (None, None, None)


def test_fake_tensors_and_the_registered_operator():
    with FakeTensorMode() as mode:
        args = {name: mode.from_tensor(x) for name, x in call(k_descale=ONE).items()}
        with cute_attn.emulated(ARCH):
            o, lse = cute_attn.flash_attn_func(**args, return_lse=True)
    assert o.shape == (2, 3, 4, 128) and o.dtype == torch.bfloat16
    assert lse is not None and lse.shape == (2, 4, 3)


def test_under_torch_compile():
    def step(args: dict[str, Any]) -> torch.Tensor:
        return cute_attn.flash_attn_func(**args)[0]

    args = call(k_descale=ONE, v_descale=torch.rand(2, 2))
    with stand_ins(), cute_attn.emulated(ARCH, Emulator(num_sms=3)):
        found = torch.compile(step, backend="aot_eager", fullgraph=True)(args)
        assert torch.equal(found, step(args))
