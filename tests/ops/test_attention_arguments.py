"""Bad arguments to the attention functions, without a GPU: each gives the documented exception.

The checks run in one order, the device last: CPU tensors reach every one of them.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_attn
from cute_attn.emulation import Emulation
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import configs
from cute_attn.kernels.attention.heuristics import SHORT_SEQLEN_Q, packed_heads
from cute_attn.ops.attention import plan, plan_attention
from cute_attn.ops.attention.forward import FORWARD
from cute_attn.settings import settings


def dense(
    batch: int = 2,
    sq: int = 3,
    sk: int = 5,
    heads: int = 4,
    heads_k: int = 2,
    dim: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> dict[str, Any]:
    """A good call of flash_attn_func."""
    return {
        "q": torch.zeros(batch, sq, heads, dim, dtype=dtype),
        "k": torch.zeros(batch, sk, heads_k, dim, dtype=dtype),
        "v": torch.zeros(batch, sk, heads_k, dim, dtype=dtype),
        **more,
    }


def varlen(
    batch: int = 2, sq: int = 6, sk: int = 10, heads: int = 4, heads_k: int = 2, **more: Any
) -> dict[str, Any]:
    """A good call of flash_attn_varlen_func."""
    return {
        "q": torch.zeros(sq, heads, 256, dtype=torch.bfloat16),
        "k": torch.zeros(sk, heads_k, 256, dtype=torch.bfloat16),
        "v": torch.zeros(sk, heads_k, 256, dtype=torch.bfloat16),
        "cu_seqlens_q": torch.zeros(batch + 1, dtype=torch.int32),
        "cu_seqlens_k": torch.zeros(batch + 1, dtype=torch.int32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 7,
        **more,
    }


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


GOOD_DENSE: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16},
    {"causal": True, "window_size": (3, None)},
    {"window_size": [-1, 4]},
    {"learnable_sink": torch.zeros(4), "softcap": 30, "softmax_scale": 1},
    {"learnable_sink": bf16(4), "softcap": 0.5, "scheduler": "clc", "return_lse": True},
    {"sq": 0},
    {"sk": 0},
    {"batch": 0},
    {"heads": 0, "heads_k": 0},
]
GOOD_VARLEN: list[dict[str, Any]] = [
    {},
    {"seqused_q": i32(2), "seqused_k": i32(2)},
    {"max_seqlen_q": torch.tensor(3), "max_seqlen_k": torch.tensor(3, dtype=torch.int32)},
    {"max_seqlen_q": None, "max_seqlen_k": None},
    {"cu_seqlens_k": None, "k": bf16(2, 5, 2, 256), "v": bf16(2, 5, 2, 256), "seqused_k": i32(2)},
    {"cu_seqlens_q": None, "q": bf16(2, 5, 4, 256)},
    {"cu_seqlens_q": None, "q": bf16(2, 5, 4, 256), "seqused_q": i32(2)},
    {"batch": 0},
]


@pytest.mark.parametrize("change", GOOD_DENSE, ids=str)
def test_good_arguments_on_the_cpu_are_refused_for_the_device_alone(change: dict[str, Any]):
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        cute_attn.flash_attn_func(**dense(**change))


@pytest.mark.parametrize("change", GOOD_VARLEN, ids=lambda change: "-".join(change))
def test_good_varlen_arguments_are_refused_for_the_device_alone(change: dict[str, Any]):
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        cute_attn.flash_attn_varlen_func(**varlen(**change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        # not tensors, wrong dtypes
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
        ({"learnable_sink": 1.0}, TypeError, "learnable_sink must be a torch.Tensor, got float"),
        ({"dtype": torch.float32}, TypeError, r"q has dtype torch.float32, must be one of \('bf"),
        ({"dtype": torch.float8_e4m3fn}, TypeError, "q has dtype torch.float8_e4m3fn"),
        ({"k": bf16(2, 5, 2, 256).half()}, TypeError, "k has dtype torch.float16, must be torch.b"),
        ({"v": bf16(2, 5, 2, 256).half()}, TypeError, "v has dtype torch.float16, must be torch.b"),
        ({"learnable_sink": torch.zeros(4).double()}, TypeError, "learnable_sink has dtype"),
        # numbers
        ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a float, got str"),
        ({"softmax_scale": torch.tensor(1.0)}, TypeError, "softmax_scale must be a float, got Ten"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0, must be positive and finite"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan"),
        ({"softmax_scale": 1e39}, ValueError, r"softmax_scale is 1e\+39"),
        ({"softmax_scale": 1e-39}, ValueError, "softmax_scale is 1e-39"),
        ({"softmax_scale": 2.4e38}, ValueError, r"softmax_scale is 2.4e\+38.* to 2.36e\+38"),
        ({"softcap": 2.0**65}, ValueError, r"softcap is 3.68.*e\+19.* to 1.84e\+19"),
        ({"softcap": "x"}, TypeError, "softcap must be a float, got str"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0, must be positive"),
        ({"softcap": math.nan}, ValueError, "softcap is nan"),
        ({"softcap": math.inf}, ValueError, "softcap is inf"),
        ({"causal": "yes"}, TypeError, "causal must be a bool, got str"),
        ({"causal": None}, TypeError, "causal must be a bool, got NoneType"),
        ({"return_lse": "yes"}, TypeError, "return_lse must be a bool, got str"),
        ({"window_size": None}, TypeError, "window_size is None, must be a pair"),
        ({"window_size": 5}, TypeError, "window_size is 5, must be a pair"),
        ({"window_size": (1,)}, TypeError, r"window_size is \(1,\), must be a pair"),
        ({"window_size": (1.0, 0)}, TypeError, "window_size holds a float"),
        ({"window_size": (torch.tensor(1), 0)}, TypeError, "window_size holds a Tensor"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\): no query sees a key"),
        ({"window_size": [0, -7]}, ValueError, r"window_size is \(0, -7\): no query sees a key"),
        ({"scheduler": "single"}, ValueError, r"scheduler is 'single', must be one of \('static'"),
        ({"scheduler": 1}, ValueError, "scheduler is 1, must be one of"),
        # devices
        ({"k": torch.zeros(2, 5, 2, 256, device="meta")}, ValueError, "k is on meta, must be on"),
        ({"learnable_sink": torch.zeros(4, device="meta")}, ValueError, "learnable_sink is on m"),
        # shapes
        ({"q": bf16(2, 4, 256)}, ValueError, r"q has shape \[2, 4, 256\], must be \[batch, seqlen"),
        ({"q": bf16(3, 5, 4, 256)}, ValueError, r"q has shape \[3, 5, 4, 256\], must have as m"),
        ({"q": bf16(2, 5, 4, 64)}, ValueError, r"q has shape .* must have head_dim 256, as k has"),
        ({"k": bf16(5, 2, 256)}, ValueError, r"k has shape \[5, 2, 256\], must be \[batch, seqlen"),
        ({"k": bf16(3, 5, 2, 256)}, ValueError, r"k has shape \[3, 5, 2, 256\], must be \[2, 5"),
        ({"k": bf16(2, 5, 2, 128)}, ValueError, r"k has shape .* must be \[2, 5, 2, 256\]"),
        ({"k": bf16(2, 5, 2, 128)}, ValueError, r": \[batch, seqlen_k, heads_k, head_dim\]"),
        ({"v": bf16(2, 6, 2, 256)}, ValueError, r"v has shape .* must be \[2, 5, 2, 256\]"),
        ({"v": bf16(2, 5, 1, 256)}, ValueError, r"v has shape .* must be \[2, 5, 2, 256\]"),
        (
            {"v": bf16(2, 5, 2, 128)},
            NotImplementedError,
            r"head_dim of v is 128 and of q 256, there are kernels for .*\(64, 64\), \(128, 128\)",
        ),
        ({"heads": 3}, ValueError, "q has 3 heads, must be a multiple of the heads of k, 2"),
        ({"heads": 1}, ValueError, "q has 1 heads, must be a multiple of the heads of k, 2"),
        ({"heads_k": 0}, ValueError, "q has 4 heads, must be a multiple of the heads of k, 0"),
        ({"learnable_sink": torch.zeros(2)}, ValueError, r"learnable_sink has shape \[2\], must b"),
        ({"learnable_sink": torch.zeros(())}, ValueError, r"learnable_sink has shape \[\]"),
        (
            {"dim": 96},
            NotImplementedError,
            r"head_dim of q is 96, there are kernels for \(of q, of v\): \(\(64, 64\), ",
        ),
        ({"dim": 0}, NotImplementedError, "head_dim of q is 0"),
        # strides
        ({"q": bf16(2, 256, 4, 3).mT.transpose(1, 2)[:, :, :, ::1]}, NotImplementedError, "head_d"),
        ({"q": bf16(2, 3, 256, 4).mT}, ValueError, r"q has strides \(3072, 1024, 1, 4\): TMA"),
        ({"q": bf16(2, 3, 4, 260)[..., :256]}, ValueError, "q has strides .* multiples of 8 elem"),
        ({"k": bf16(2, 5, 2, 512)[..., ::2]}, ValueError, "k has strides .* last dimension contig"),
        ({"v": bf16(2, 5, 514)[..., :512].unflatten(-1, (2, 256))}, ValueError, "v has strides"),
        ({"learnable_sink": torch.zeros(8)[::2]}, ValueError, "learnable_sink has strides"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        cute_attn.flash_attn_func(**dense(**change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": [0, 3, 6]}, TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
        ({"cu_seqlens_q": i32(3).long()}, TypeError, "cu_seqlens_q has dtype torch.int64, must be"),
        ({"cu_seqlens_k": i32(3).float()}, TypeError, "cu_seqlens_k has dtype torch.float32"),
        ({"seqused_q": i32(2).long()}, TypeError, "seqused_q has dtype torch.int64"),
        ({"seqused_k": i32(2).long()}, TypeError, "seqused_k has dtype torch.int64"),
        ({"max_seqlen_q": 4.0}, TypeError, "max_seqlen_q must be an int, got float"),
        ({"max_seqlen_k": "4"}, TypeError, "max_seqlen_k must be an int, got str"),
        (
            {"max_seqlen_q": torch.zeros(1).int()},
            TypeError,
            r"max_seqlen_q is a tensor of shape \[",
        ),
        ({"max_seqlen_k": torch.tensor(1.0)}, TypeError, "max_seqlen_k is a tensor of shape"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1, must be at least 0"),
        ({"cu_seqlens_q": i32(3).to("meta")}, ValueError, "cu_seqlens_q is on meta"),
        ({"q": bf16(2, 3, 4, 256)}, ValueError, r"must be \[total_q, heads, head_dim\] where cu_s"),
        ({"k": bf16(2, 3, 2, 256)}, ValueError, r"must be \[total_k, heads_k, head_dim\] where cu"),
        ({"cu_seqlens_q": None}, ValueError, r"must be \[batch, seqlen_q, .*cu_seqlens_q is not g"),
        ({"cu_seqlens_k": None}, ValueError, r"must be \[batch, seqlen_k, .*cu_seqlens_k is not g"),
        ({"cu_seqlens_q": i32(0)}, ValueError, r"cu_seqlens_q has shape \[0\], must be \[batch \+"),
        ({"cu_seqlens_q": i32(1, 3)}, ValueError, r"cu_seqlens_q has shape \[1, 3\], must be"),
        ({"cu_seqlens_k": i32(4)}, ValueError, r"cu_seqlens_k has shape \[4\], must be \[3\]"),
        ({"seqused_q": i32(3)}, ValueError, r"seqused_q has shape \[3\], must be \[2\]"),
        ({"seqused_k": i32(1)}, ValueError, r"seqused_k has shape \[1\], must be \[2\]"),
        ({"cu_seqlens_q": i32(6)[::2]}, ValueError, "cu_seqlens_q has strides"),
        (
            {"cu_seqlens_k": None, "k": bf16(3, 5, 2, 256), "v": bf16(3, 5, 2, 256)},
            ValueError,
            r"k has shape \[3, 5, 2, 256\], must be \[2, 5, 2, 256\]",
        ),
    ],
)
def test_bad_varlen_arguments(change: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        cute_attn.flash_attn_varlen_func(**varlen(**change))


@pytest.mark.filterwarnings("ignore")  # of torch's prototype
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_nested_tensors(name: str, layout: torch.layout):
    """The message says how to call `flash_attn_varlen_func`."""
    rows = [torch.zeros(n, 4 if name in ("q", "out") else 2, 256) for n in (3, 2)]
    nested = torch.nested.nested_tensor(rows, dtype=torch.bfloat16, layout=layout)
    message = f"{name} is nested, must be one strided tensor: give flash_attn_varlen_func the"
    with pytest.raises(TypeError, match=message):
        cute_attn.flash_attn_func(**dense(**{name: nested}))


def test_sizes_that_int32_cannot_hold():
    one = bf16(1, 1, 1, 256)
    with pytest.raises(ValueError, match="k has 1073741824 rows, must be fewer than 1073741824"):
        cute_attn.flash_attn_func(one, *[one.expand(1, 2**30, 1, 256)] * 2)
    many = one.expand(2**16, 1, 2**15, 256)
    with pytest.raises(ValueError, match="2147483648 tiles of 128 rows: fewer than 2147483648"):
        cute_attn.flash_attn_func(many, many, many)


ALONE = ("scheduler", "out", "k_descale", "v_descale", "batch_invariant", "tree_mask", "cp")


def test_signatures_are_flash_attentions():
    """Names and defaults of FlashAttention-4's arguments, without those that it or we alone have.

    What goes by position here has the same position there. Read from its source: importing it needs
    a GPU's libraries.
    """
    package = importlib.util.find_spec("flash_attn")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs flash-attn-4, which is not installed")
    interface = Path(package.submodule_search_locations[0]) / "cute" / "interface.py"
    functions = {
        node.name: node.args
        for node in ast.parse(interface.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        ours = inspect.signature(getattr(cute_attn, name)).parameters
        theirs = functions[name]
        shared = [argument.arg for argument in theirs.args if argument.arg in ours]
        assert [name for name in ours if name not in ALONE] == shared
        positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == [argument.arg for argument in theirs.args[: len(positional)]]
        required = len(theirs.args) - len(theirs.defaults)
        for argument, default in zip(theirs.args[required:], theirs.defaults, strict=True):
            if argument.arg in ours:
                assert ours[argument.arg].default == ast.literal_eval(default)


def test_autocast_converts_no_argument():
    for name in "qkv":
        args = dense()
        args[name] = args[name].float()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="float32"):
            cute_attn.flash_attn_func(**args)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_only_q_k_and_v_go_by_position(name: str):
    """In fourth place FlashAttention-2 has dropout_p, 3 softmax_scale, 4 qv: none is guessed."""
    tensors = [dense()[argument] for argument in "qkv"]
    with pytest.raises(TypeError, match=rf"{name}\(\) takes 3 positional arguments but 4"):
        getattr(cute_attn, name)(*tensors, 0.1)


# -- where there is no kernel


def test_architectures_without_a_kernel_are_named():
    with (
        cute_attn.emulated("sm_80"),
        pytest.raises(
            NotImplementedError, match="head_dim 256 on sm_80; there is: head_dim 64 on sm_90a; "
        ),
    ):
        cute_attn.flash_attn_func(**dense())


@pytest.mark.parametrize(("head_dim", "arch"), [(128, "sm_100a"), (96, "sm_90a"), (256, "sm_120a")])
def test_planning_without_a_kernel(head_dim: int, arch: str):
    with pytest.raises(NotImplementedError, match=f"head_dim {head_dim} on {arch}; there is: head"):
        plan_attention(arch, head_dim=head_dim)


def test_misaligned_addresses_are_refused():
    args = dense()
    args["k"] = bf16(2 * 5 * 2 * 256 + 1)[1:].view(2, 5, 2, 256)
    with (
        cute_attn.emulated("sm_100a"),
        pytest.raises(ValueError, match=r"k starts at address 0x.*: TMA, .* 16-byte alignment"),
    ):
        cute_attn.flash_attn_func(**args)


# -- nothing to do


@pytest.mark.parametrize("sink", [None, torch.tensor([1.0, -2.0, 0.5, math.inf])])
@pytest.mark.parametrize(
    "empty",
    [{"batch": 0}, {"sq": 0}, {"sk": 0}, {"sq": 0, "sk": 0}, {"heads": 0, "heads_k": 0}],
    ids=str,
)
def test_empty_inputs_launch_nothing(empty: dict[str, int], sink: torch.Tensor | None):
    args = dense(**empty)
    heads = args["q"].shape[2]
    with cute_attn.emulated("sm_100a") as emulator:
        o, lse = cute_attn.flash_attn_func(
            **args, learnable_sink=None if sink is None else sink[:heads], return_lse=True
        )
    assert not emulator.report.launches
    assert o.shape == args["q"].shape
    assert not o.any()
    assert lse is not None and lse.dtype == torch.float32
    expected = torch.full((heads,), -math.inf) if sink is None else sink[:heads]
    assert torch.equal(lse, expected[:, None].expand(o.shape[0], heads, o.shape[1]))


@pytest.mark.parametrize("empty", [{"batch": 0}, {"sk": 0}, {"sq": 0}], ids=str)
def test_empty_packed_inputs_launch_nothing(empty: dict[str, int]):
    args = varlen(**empty)
    with cute_attn.emulated("sm_100a") as emulator:
        o, lse = cute_attn.flash_attn_varlen_func(**args, return_lse=True)
    assert not emulator.report.launches
    assert o.shape == args["q"].shape and not o.any()
    assert lse is not None and torch.equal(lse, torch.full((4, len(o)), -math.inf))


def test_lse_comes_only_when_asked_for():
    with cute_attn.emulated("sm_100a"):
        _, lse = cute_attn.flash_attn_func(**dense(sk=0))
    assert lse is None


# -- counts on the device, which nothing reads before the kernel


def test_no_more_rows_count_than_a_sequence_has():
    """Rows past a sequence's end belong to another sequence, or to none. (test_attention.py tests
    results with counts within the rows.)"""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 256, generator=generator).bfloat16() for n in (6, 9, 9))

    def call(used_q: list[int], used_k: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with cute_attn.emulated("sm_100a"), torch.no_grad():
            o, lse = cute_attn.flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=torch.tensor([0, 2, 4, 6], dtype=torch.int32),
                cu_seqlens_k=torch.tensor([0, 3, 6, 9], dtype=torch.int32),
                max_seqlen_q=2,
                seqused_q=torch.tensor(used_q, dtype=torch.int32),
                seqused_k=torch.tensor(used_k, dtype=torch.int32),
                window_size=(5, None),  # with all of these it is a kernel that other tests have
                softcap=5.0,
                learnable_sink=torch.zeros(1, dtype=torch.float16),
                return_lse=True,
            )
        counts = torch.tensor([0, 1, 4, 5])
        return o[counts], lse[:, counts]

    expected = call([2, 0, 2], [3, 3, 0])
    for a, b in zip(call([3, -1000, 200], [4, 1000, -5]), expected, strict=True):
        assert torch.equal(a, b)


# -- what a kernel is chosen by


@pytest.mark.parametrize(
    ("heads", "heads_k", "packed"),
    [(1, 1, 1), (8, 8, 1), (8, 4, 2), (8, 1, 8), (6, 1, 2), (24, 2, 4), (7, 1, 1), (512, 1, 64)],
)
@pytest.mark.parametrize(("arch", "most"), [("sm_100a", 64), ("sm_90a", 32)])
def test_short_sequences_pack_the_power_of_two_in_the_group(
    arch: str, most: int, heads: int, heads_k: int, packed: int
):
    group = {"heads": heads, "heads_k": heads_k}
    assert packed_heads(arch, 256, **group, short=True) == min(packed, most)
    assert packed_heads(arch, 256, **group, short=False) == 1


def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs of the kernels that calls in the emulator load, which then do nothing."""
    specs: list[Any] = []

    def function(_self: Emulation, _kernel: Any, spec: Any) -> Any:
        specs.append(spec)
        return lambda *arguments: specs.append(arguments)

    monkeypatch.setattr(Emulation, "function", function)
    return specs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"window_left": False, "window_right": False, "lse": False, "softcap": False}),
        ({"causal": True}, {"window_left": False, "window_right": True}),
        ({"causal": True, "window_size": (-1, 5)}, {"window_left": False, "window_right": True}),
        ({"causal": True, "window_size": (7, None)}, {"window_left": True, "window_right": True}),
        ({"window_size": (None, 0)}, {"window_left": False, "window_right": True}),
        ({"window_size": (2**30, 2**40)}, {"window_left": False, "window_right": False}),
        ({"softcap": 0.1}, {"softcap": True}),
        ({"learnable_sink": torch.zeros(4)}, {"sink_dtype": "float32"}),
        ({"learnable_sink": bf16(4)}, {"sink_dtype": "bfloat16"}),
        ({"return_lse": True}, {"lse": True}),
        ({"scheduler": "clc"}, {"scheduler": "clc"}),
        ({"scheduler": "static"}, {"scheduler": "static"}),
        ({"dtype": torch.float16}, {"dtype": "float16"}),
        ({"sq": SHORT_SEQLEN_Q}, {"packed_heads": 2}),
        ({"sq": SHORT_SEQLEN_Q + 1}, {"packed_heads": 1}),
    ],
    ids=str,
)
def test_the_spec_follows_the_arguments(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: dict[str, Any]
):
    specs = planned(monkeypatch)
    with cute_attn.emulated("sm_100a", Emulator(num_sms=7)):
        cute_attn.flash_attn_func(**dense(**options))
    spec, arguments = specs
    assert {name: getattr(spec, name) for name in expected} == expected
    assert len(arguments) == 16
    assert arguments[-1] == 3  # clusters of two on 7 SMs


def test_on_hopper_every_scheduler_is_the_counter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    specs = planned(monkeypatch)
    plan._say_static.cache_clear()
    with cute_attn.emulated("sm_90a", Emulator(num_sms=7)), caplog.at_level("INFO", "cute_attn"):
        for scheduler in ("static", "clc", "clc"):
            cute_attn.flash_attn_func(**dense(dim=128, scheduler=scheduler))
    assert [spec.scheduler for spec in specs[::2]] == ["counter"] * 3
    assert [spec.head_dim for spec in specs[::2]] == [128] * 3
    for *_, ctas, counter, parts, k_descale, v_descale, tree_mask in specs[1::2]:
        assert ctas == 7
        assert counter.dtype == torch.int32 and counter.tolist() == [0]
        assert parts is k_descale is v_descale is tree_mask is None
    (record,) = caplog.records
    assert "sm_90a has no cluster launch control" in record.getMessage()


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch):
    specs = planned(monkeypatch)
    args = dense(window_size=(3, 4), softcap=2.5, learnable_sink=torch.zeros(4), return_lse=True)
    with cute_attn.emulated("sm_100a"):
        o, lse = cute_attn.flash_attn_func(**args)
        cute_attn.flash_attn_func(**args | {"causal": True, "softmax_scale": 0.7, "softcap": 0})
    _, first, _, second = specs
    assert first[:3] == (args["q"], args["k"], args["v"])
    assert first[3] is o and first[4] is lse and first[5] is args["learnable_sink"]
    assert first[6:] == (None, None, None, None, None, 256**-0.5, 2.5, 3, 4, 2)
    assert second[11:] == (0.7, 1.0, 3, 0, 2)


@pytest.mark.parametrize(
    ("max_seqlen", "total", "packed"),
    [
        (SHORT_SEQLEN_Q, 600, 2),
        (SHORT_SEQLEN_Q + 1, 6, 1),
        (None, 2 * SHORT_SEQLEN_Q, 2),
        (None, 2 * SHORT_SEQLEN_Q + 1, 1),
        (torch.tensor(1), 2 * SHORT_SEQLEN_Q + 1, 1),
    ],
)
def test_max_seqlen_q_is_a_hint(
    monkeypatch: pytest.MonkeyPatch, max_seqlen: Any, total: int, packed: int
):
    specs = planned(monkeypatch)
    with cute_attn.emulated("sm_100a"):
        cute_attn.flash_attn_varlen_func(**varlen(sq=total, max_seqlen_q=max_seqlen))
    assert specs[0].packed_heads == packed
    assert specs[0].varlen_q and specs[0].varlen_k


def test_the_plan_holds_what_calls_will_need(monkeypatch: pytest.MonkeyPatch):
    plan = plan_attention(
        "sm_100a", heads=4, heads_k=2, causal=True, sink="float32", return_lse=True, scheduler="clc"
    )
    specs = planned(monkeypatch)
    options = {"causal": True, "learnable_sink": torch.zeros(4), "return_lse": True}
    with cute_attn.emulated("sm_100a"):
        for sq in (1, 1000):
            cute_attn.flash_attn_func(**dense(sq=sq, scheduler="clc", **options))
    assert {spec for _, spec in plan} == set(specs[::2])
    assert len(plan) == 2
    assert len(plan_attention("sm_100a", heads=3, heads_k=3)) == 1
    assert [s.packed_heads for _, s in plan_attention("sm_100a", heads=8, short=True)] == [8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"sink": "int32"}, "sink is 'int32'"),
        ({"num_splits": -1}, "num_splits is -1, must be at least 0"),
        ({"page_size": 0}, "page_size is 0, must be positive"),
        ({"page_size": 64}, "page_size is given, it needs seqused_k"),
        ({"heads": 3, "heads_k": 2}, "heads is 3, must be a positive multiple of heads_k, 2"),
        ({"heads_k": 0}, "must be a positive multiple of heads_k, 0"),
        ({"scheduler": "single"}, "scheduler is 'single'"),
    ],
)
def test_plans_that_no_kernel_serves(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        plan_attention("sm_100a", **change)


# -- the warm path, which on a GPU follows the first call with such tensors


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a function in the place of the loaded kernel for such a call, and forbids the slow path.

    CPU tensors do: this path leaves their device to the compiled host code.
    """

    def ready(function: Any, **arguments: Any) -> None:
        monkeypatch.setattr(FORWARD, "ready", {})
        keys: list[Any] = []
        monkeypatch.setattr(FORWARD, "_first_call", lambda key, _: keys.append(key) or (None, None))
        packed = "cu_seqlens_q" in arguments
        (cute_attn.flash_attn_varlen_func if packed else cute_attn.flash_attn_func)(**arguments)
        (key,) = keys
        FORWARD.ready[key] = (function, 0.0625, 2.5, 7, 0, 66, False, None, 0, None)
        monkeypatch.setattr(FORWARD, "_first_call", None)

    return ready


def test_a_warm_call_is_one_look_up(warm: Any):
    calls: list[Any] = []
    warm(lambda *arguments: calls.append(arguments), **dense(causal=True, return_lse=True))
    args = dense(causal=True, return_lse=True)
    o, lse = cute_attn.flash_attn_func(**args)
    (given,) = calls
    tensors = (args["q"], args["k"], args["v"], o, lse)
    assert all(a is b for a, b in zip(given, tensors, strict=False))
    assert given[5:] == (None,) * 6 + (0.0625, 2.5, 7, 0, 66)
    assert lse.shape == (2, 4, 3)


def test_lengths_scales_and_forms_of_the_window_do_not_make_a_call_cold(warm: Any):
    calls: list[Any] = []
    warm(lambda *arguments: calls.append(arguments), **dense())
    for change in ({"sq": 30, "sk": 9000}, {"window_size": [None, None]}, {"softmax_scale": 3}):
        cute_attn.flash_attn_func(**dense(**change))
    assert [call[11] for call in calls] == [0.0625, 0.0625, 3]
    warm(lambda *arguments: calls.append(arguments), **varlen())
    cute_attn.flash_attn_varlen_func(**varlen(sq=60, sk=77, max_seqlen_q=3, max_seqlen_k=1))
    assert len(calls) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"sq": 1000},  # no longer packed
        {"sq": 100},  # no longer few rows
        {"heads": 8},
        {"dim": 128},
        {"batch": 3},
        {"k": bf16(3, 5, 2, 256)},
        {"causal": True},
        {"window_size": (1, None)},
        {"softcap": 1.0},
        {"scheduler": "clc"},
        {"return_lse": True},
        {"learnable_sink": torch.zeros(4)},
        {"dtype": torch.float16},
        {"sq": 0},
        {"sk": 0},
        {"softmax_scale": 0.0},
        {"softmax_scale": math.nan},
        {"softmax_scale": "1"},
        {"q": None},
    ],
    ids=str,
)
def test_what_a_kernel_is_chosen_by_and_checks_of_values_are_not_skipped(
    warm: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
):
    warm(lambda *_: pytest.fail("launched"), **dense())
    slow: list[Any] = []
    monkeypatch.setattr(FORWARD, "_first_call", lambda *arguments: slow.append(arguments))
    args = dense(**change)
    cute_attn.flash_attn_func(**args)
    assert len(slow) == 1


def test_a_window_is_a_pair_in_a_warm_call_too(warm: Any):
    warm(lambda *_: pytest.fail("launched"), **dense())
    with pytest.raises(TypeError, match="window_size is None, must be a pair"):
        cute_attn.flash_attn_func(**dense(window_size=None))


def test_a_warm_call_takes_a_gradient(warm: Any, monkeypatch: pytest.MonkeyPatch):
    """Through a torch.autograd.Function, with a kernel that keeps lse."""
    warm(lambda *_: pytest.fail("launched"), **dense())
    kept: list[Any] = []
    monkeypatch.setattr(FORWARD, "_first_call", lambda key, a: kept.append(a) or FORWARD.outputs(a))
    args = dense()
    args["v"].requires_grad_()
    with cute_attn.emulated("sm_100a"):
        o, lse = cute_attn.flash_attn_func(**args)
    assert o.requires_grad and lse is None
    assert [a.return_lse for a in kept] == [True]


def test_what_the_host_code_refuses_is_said_in_the_operators_words(warm: Any):
    def refuse(*_: Any) -> None:
        raise RuntimeError("Mismatched v.shape[1] on argument #2")

    warm(refuse, **dense())
    with pytest.raises(ValueError, match=r"v has shape \[2, 6, 2, 256\], must be \[2, 5, 2, 256\]"):
        cute_attn.flash_attn_func(**dense(v=bf16(2, 6, 2, 256)))
    with (
        cute_attn.emulated("sm_100a"),
        pytest.raises(RuntimeError, match="Mismatched"),  # nothing is wrong that we know of
    ):
        cute_attn.flash_attn_func(**dense())


# -- FA_CLC


@pytest.fixture
def clean_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FA_CLC", raising=False)
    cute_attn.reload_settings()
    yield monkeypatch
    monkeypatch.delenv("FA_CLC", raising=False)
    cute_attn.reload_settings()


def test_no_scheduler_follows_the_environment_as_it_was_read(clean_settings: pytest.MonkeyPatch):
    def scheduler() -> str:
        return plan_attention("sm_100a")[0][1].scheduler

    assert scheduler() == "static"
    clean_settings.setenv("FA_CLC", "1")
    assert scheduler() == "static"
    assert cute_attn.reload_settings().scheduler == "clc"
    assert scheduler() == "clc"
    assert plan_attention("sm_100a", scheduler="static")[0][1].scheduler == "static"
    clean_settings.setenv("FA_CLC", "0")
    assert cute_attn.reload_settings() == settings()
    assert scheduler() == "static"


def test_reloading_forgets_which_kernel_no_scheduler_meant(clean_settings: pytest.MonkeyPatch):
    clean_settings.setitem(FORWARD.ready, ("anything",), None)
    cute_attn.reload_settings()
    assert not FORWARD.ready


def test_a_bad_value_of_fa_clc_is_named(clean_settings: pytest.MonkeyPatch):
    clean_settings.setenv("FA_CLC", "yes")
    with pytest.raises(ValueError, match="FA_CLC is 'yes', must be 0 or 1"):
        cute_attn.reload_settings()


def test_fa_clc_is_read_by_a_fresh_process():
    code = "from cute_attn.settings import settings; print(settings().scheduler)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FA_CLC": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "clc"


# -- fake tensors and graphs


def fake(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with fake CUDA tensors; for use inside a FakeTensorMode."""
    return {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        if isinstance(x, torch.Tensor) and not name.startswith("max_")
        else x
        for name, x in args.items()
    }


@pytest.mark.parametrize("change", GOOD_DENSE, ids=str)
def test_fake_tensors_get_outputs(change: dict[str, Any]):
    with FakeTensorMode():
        args = fake(dense(**change | {"return_lse": True}))
        o, lse = cute_attn.flash_attn_func(**args)
    assert o.shape == args["q"].shape and o.dtype == args["q"].dtype and o.is_contiguous()
    batch, seqlen, heads, _ = o.shape
    assert lse.shape == (batch, heads, seqlen) and lse.dtype == torch.float32
    assert o.device.type == lse.device.type == "cuda"


def test_fake_packed_tensors_get_outputs():
    with FakeTensorMode():
        o, lse = cute_attn.flash_attn_varlen_func(**fake(varlen(return_lse=True)))
        _, none = cute_attn.flash_attn_varlen_func(**fake(varlen()))
    assert o.shape == (6, 4, 256) and lse.shape == (4, 6)
    assert none is None


def test_fake_tensors_are_checked():
    with FakeTensorMode(), pytest.raises(ValueError, match="v has shape"):
        cute_attn.flash_attn_func(**fake(dense(v=bf16(2, 4, 2, 256))))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic: bool):
    graphs = []

    def capture(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        o, lse = cute_attn.flash_attn_func(
            q, k, v, causal=True, window_size=(5, None), return_lse=True
        )
        return o * 2, lse + 1

    compiled = torch.compile(step, fullgraph=True, backend=capture, dynamic=dynamic)
    args = dense()
    with pytest.raises(ValueError, match="q is on cpu"):  # traced, then run on what it is given
        compiled(*(args[name] for name in "qkv"))
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert any("cute_attn.flash_attn" in str(target) for target in calls), calls


def test_an_exported_program_holds_for_all_sizes():
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return cute_attn.flash_attn_func(q, k, v, causal=True)[0]

    batch, seqlen_q, seqlen_k = map(torch.export.Dim, ("batch", "seqlen_q", "seqlen_k"))
    args = dense()
    program = torch.export.export(
        Layer(),
        tuple(args[name] for name in "qkv"),
        dynamic_shapes=({0: batch, 1: seqlen_q}, *[{0: batch, 1: seqlen_k}] * 2),
    )
    assert len(program.range_constraints) == 3


def test_the_schema_writes_nothing():
    schema = torch.ops.cute_attn.flash_attn.default._schema
    assert not any(a.alias_info for a in [*schema.arguments, *schema.returns])


def test_a_gradient_without_a_kernel_is_refused_before_the_forward(monkeypatch: pytest.MonkeyPatch):
    specs = planned(monkeypatch)
    monkeypatch.delitem(configs.ROWS, ("backward_dq", "sm_90a", 256, 256))
    args = dense(dim=256)
    args["k"].requires_grad_()
    with (
        cute_attn.emulated("sm_90a"),
        pytest.raises(
            NotImplementedError, match="no attention backward for head_dim 256 on sm_90a; there is"
        ),
    ):
        cute_attn.flash_attn_func(**args)
    assert not specs
    with pytest.raises(ValueError, match="q is on cpu"):
        cute_attn.flash_attn_func(**args)
