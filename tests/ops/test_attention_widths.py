"""Attention whose v is narrower than q and k; the sweep is `test_attention_sm90`'s."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import cute_attn
from cute_attn.cache.specfile import plan_file
from cute_attn.emulator import Emulator
from cute_attn.kernels.attention import configs
from tests.gpu.small_calls import idle_kernels

from .attention_cases import CACHE, CAUSAL, Case, Machine, Target, assert_agrees, on_target, run
from .attention_gradient_cases import Upstream, assert_gradients_agree, gradients

ARCH = "sm_90a"
WIDTHS = (192, 128)


@pytest.mark.slow
def test_decode_in_splits_agrees_with_the_reference():
    case = Case(CACHE, (1, 0, 3), (300,) * 3, unused_k=(0, 9, 299), group=2)
    with on_target(Target(ARCH, WIDTHS[0])):
        args = case.arguments()
        assert (args["q"].shape[-1], args["v"].shape[-1]) == WIDTHS
        o, lse = run(args, on=Machine(num_sms=2, schedule="adversarial"), num_splits=2)
        assert o.shape == (*args["q"].shape[:-1], WIDTHS[1])
        assert_agrees(args, o, lse)


def test_a_training_step_agrees_with_the_reference():
    """More than a tile of queries and of keys, and two query heads of a K/V head."""
    with on_target(Target(ARCH, WIDTHS[0])):
        args = Case(CAUSAL, (140,), (150,), heads_k=1, group=2).arguments()
        on = Machine(num_sms=2, schedule="adversarial")
        assert_agrees(args, *run(args, on=on))
        do, dlse = Upstream(of_lse=True).gradients(args)
        assert_gradients_agree(args, gradients(args, do, dlse, on=on), do, dlse)


def of_widths(head_dim: int, head_dim_v: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 5, 2, dim).bfloat16() for dim in (head_dim, head_dim, head_dim_v))


@pytest.mark.parametrize("widths", [(128, 64), (192, 192), (64, 128)], ids=str)
def test_other_widths_are_refused_with_a_list(widths: tuple[int, int]):
    message = rf"head_dim of v is {widths[1]} and of q {widths[0]}, .*\(192, 128\)"
    with (
        cute_attn.emulated(ARCH, Emulator()),
        pytest.raises(NotImplementedError, match=message),
    ):
        cute_attn.flash_attn_func(*of_widths(*widths))


def test_widths_without_a_kernel_on_blackwell_are_refused():
    message = "no attention forward for head_dim 192 and head_dim_v 128 on sm_100a"
    with cute_attn.emulated("sm_100a", Emulator()) as emulator:
        with pytest.raises(NotImplementedError, match=message):
            cute_attn.flash_attn_func(*of_widths(*WIDTHS))
        assert not emulator.report.launches


def test_out_has_the_width_of_v():
    q, k, v = of_widths(*WIDTHS)
    with (
        cute_attn.emulated(ARCH, Emulator()),
        pytest.raises(ValueError, match=r"out has shape .* must be \[1, 5, 2, 128\]"),
    ):
        cute_attn.flash_attn_func(q, k, v, out=torch.empty_like(q))


@pytest.mark.parametrize("way", sorted({way for way, *_ in configs.ROWS}))
def test_a_head_dim_has_one_width_of_v(way: str):
    """The keys of warm calls hold no width of v; the compiled host code refuses any other."""
    shapes = configs.shapes(way)
    assert len(dict(shapes)) == len(shapes)


def test_the_table_of_the_pairs_is_that_of_the_kernels():
    """docs/operators.md says which pair of head dimensions has which kernels where."""
    page = (Path(__file__).parents[2] / "docs/operators.md").read_text()
    section = page.split("### Head dimensions")[1].split("\n### ")[0]
    found = {
        (int(of_q), int(of_v)): cells
        for of_q, of_v, *cells in re.findall(
            r"^\| (\d+) \| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE
        )
    }
    pairs = configs.shapes("forward")
    assert tuple(found) == pairs
    for pair in pairs:
        archs = [arch for way, arch, *of in configs.ROWS if (way, *of) == ("forward", *pair)]
        of_fp8 = [arch for arch in archs if configs.has_fp8(arch, *pair)]
        backward = [arch for arch in archs if configs.has("backward_dq", arch, *pair)]
        assert found[pair] == [", ".join(x) or "no" for x in (archs, of_fp8, backward)]


def test_models_name_the_kernels_of_a_training_step():
    q, k, v = (torch.randn(1, 300, 2, n).bfloat16().requires_grad_() for n in (192, 192, 128))
    offsets = torch.tensor([0, 70, 300], dtype=torch.int32)
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone()}
    for num_sms in (4, 148):  # with and without splits
        with cute_attn.emulated(ARCH, Emulator(num_sms=num_sms)), idle_kernels() as used:
            dense, _ = cute_attn.flash_attn_func(q, k, v, causal=True)
            ragged, _ = cute_attn.flash_attn_varlen_func(q[0], k[0], v[0], **packed, causal=True)
            (dense.sum() + ragged.sum()).backward()
        assert "sm90_wide_backward_dkdv" in {kernel.name for kernel, _ in used}
        models = Path(cute_attn.__file__).parent / "models" / "kimi_training.toml"
        assert set(used) <= set(plan_file(models, ARCH))
