"""PyTorch's attention functions on this package's kernels: `cute_attn.integrations.torch_sdpa`.

Without a GPU, the operators are replaced for CPU tensors, on which the emulator runs the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn.emulator import Emulator
from cute_attn.integrations import torch_sdpa
from cute_attn.ops.attention import backward
from tests.ops.attention_cases import assert_agrees, is_known
from tests.ops.attention_gradient_cases import assert_gradients_agree

attention = torch.nn.attention
if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip(f"torch {torch.__version__} has no implementations to choose from",
                allow_module_level=True)  # fmt: skip

from torch.nn.attention import varlen  # noqa: E402

NAMES = ("q", "k", "v")
HEAD_DIM = 64
SDPA = torch.ops.aten._scaled_dot_product_flash_attention
PAGES = pytest.mark.skipif(
    "block_table" not in str(torch.ops.aten._flash_attention_forward.default._schema),
    reason=f"torch {torch.__version__} has no pages",
)


@pytest.fixture
def emulated() -> Iterator[None]:
    emulator = Emulator(num_sms=2)
    with cute_attn.emulated("sm_90a", emulator):
        yield
    assert all(map(is_known, emulator.report.findings)), emulator.report


@pytest.fixture
def active(emulated: None) -> Iterator[None]:
    """The operators are replaced, for tensors on the CPU."""
    stands_in = torch_sdpa._activate(dispatch_key="CPU")
    yield
    stands_in.remove()


def tensors(
    *, heads: int = 2, heads_k: int = 2, head_dim: int = HEAD_DIM, layout: str = "bshd"
) -> list[torch.Tensor]:
    """q, k and v as `scaled_dot_product_attention` takes them."""
    generator = torch.Generator().manual_seed(heads)
    found = []
    for count, rows in ((heads, 24), (heads_k, 24), (heads_k, 24)):
        x = torch.randn(2, rows, count, head_dim, generator=generator).bfloat16().transpose(1, 2)
        if layout == "bhsd":
            x = x.contiguous()
        elif layout == "columns":  # no row is contiguous
            x = x.mT.contiguous().mT
        found.append(x)
    return found


def arguments(given: list[torch.Tensor], **options: Any) -> dict[str, Any]:
    """Of the reference."""
    rows_first = (x.detach().transpose(1, 2) for x in given)
    return dict(zip(NAMES, rows_first, strict=True)) | options


# ---- registration


@pytest.fixture
def registry() -> Iterator[None]:
    from torch.nn.attention import _registry

    with mock.patch.dict(_registry._FLASH_ATTENTION_IMPLS):
        yield
        attention.restore_flash_attention_impl(_raise_warn=False)


def has_kernel(dispatch_key: str) -> bool:
    name = "aten::_scaled_dot_product_flash_attention"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key)


def test_registration_activation_and_restoration(registry: None):
    before = has_kernel("CUDA")
    torch_sdpa.register()
    assert "cute_attn" in attention.list_flash_attention_impls()
    assert has_kernel("CUDA") == before and attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("cute_attn")
    assert has_kernel("CUDA") and attention.current_flash_attention_impl() == "cute_attn"
    attention.activate_flash_attention_impl("cute_attn")  # in place of itself
    attention.restore_flash_attention_impl()
    assert has_kernel("CUDA") == before and attention.current_flash_attention_impl() is None


def test_every_operator_of_flashattention_stands_in(emulated: None):
    assert not has_kernel("CPU")
    stands_in = torch_sdpa._activate(dispatch_key="CPU")
    try:
        for name in (n for n in torch_sdpa._FUNCTIONS if hasattr(torch.ops.aten, n)):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU")
    finally:
        stands_in.remove()
    assert not has_kernel("CPU")


@pytest.mark.parametrize("gone", ["attention", "library"])
def test_an_older_torch_is_refused_by_its_version(gone: str, monkeypatch: pytest.MonkeyPatch):
    if gone == "attention":
        monkeypatch.delattr(attention, "register_flash_attention_impl")
    else:
        monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(RuntimeError, match=f"PyTorch {torch.__version__.replace('+', '.')} has no"):
        torch_sdpa.register()


# ---- what no kernel takes


def own(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Stands for PyTorch's own operator, and says what it was called with."""
    results = SDPA_RESULTS(query, key)
    calls.append((query.shape, args[1:], kwargs))
    return results


def SDPA_RESULTS(query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
    state = torch.zeros(2, dtype=torch.uint64)
    return (
        query + 1, query.sum(-1).float(), None, None, query.shape[2], key.shape[2], state,
        state[0], query.new_empty(0),
    )  # fmt: skip


calls: list[Any] = []


@pytest.mark.parametrize(
    ("dtype", "head_dim", "args", "reason"),
    [
        (torch.bfloat16, 64, (0.1,), "dropout_p is 0.1"),
        (torch.bfloat16, 64, (0.0, False, True), "return_debug_mask is True"),
        (torch.bfloat16, 96, (), "head_dim 96 of q, 96 of v on cpu"),
        (torch.float32, 64, (), "there is no kernel for torch.float32"),
    ],
)
def test_other_calls_go_to_the_operator_of_before(
    emulated: None, dtype: torch.dtype, head_dim: int, args: tuple[Any, ...], reason: str
):
    q, k, v = (x.to(dtype) for x in tensors(head_dim=head_dim))
    stands_in = torch_sdpa._activate(dispatch_key="CPU")
    with pytest.raises(NotImplementedError, match=reason):  # there is none to go to
        SDPA(q, k, v, *args, scale=0.3)
    stands_in.remove()
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", own, "CPU")
    calls.clear()
    for fallback in (True, False):
        stands_in = torch_sdpa._activate(fallback=fallback, dispatch_key="CPU")
        if fallback:
            o, *_ = SDPA(q, k, v, *args, scale=0.3)
            assert torch.equal(o, q + 1) and calls == [(q.shape, args, {"scale": 0.3})]
        else:
            with pytest.raises(NotImplementedError, match=reason):
                SDPA(q, k, v, *args, scale=0.3)
        stands_in.remove()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes is given"),
        pytest.param(
            {"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "without seqused_k", marks=PAGES
        ),
        ({}, "cum_seq_q is given without cum_seq_k"),
    ],
)
def test_packed_calls_without_a_kernel(active: None, options: dict[str, Any], reason: str):
    x, bounds = torch.ones(8, 2, 64).bfloat16(), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=reason):
        torch.ops.aten._flash_attention_forward(
            x, x, x, bounds, None, 8, 8, 0.0, False, False, **options
        )


# ---- results


def test_forward_agrees_with_the_reference(active: None):
    """By the layout of q, which o has too, as the fake operator says that compiled graphs use."""
    for layout in ("bshd", "bhsd", "columns"):
        given = tensors(layout=layout)
        o, lse, cum_q, cum_k, max_q, max_k, *extras = SDPA(*given, is_causal=True)
        fakes = SDPA(*(x.to("meta") for x in given), is_causal=True)
        assert (cum_q, cum_k, max_q, max_k) == (None, None, 24, 24)
        for real, fake in zip((o, lse, *extras), (*fakes[:2], *fakes[6:]), strict=True):
            assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
        assert o.stride() == fakes[0].stride()
        assert_agrees(arguments(given, causal=True), o.transpose(1, 2).contiguous(), lse)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "columns"])
@pytest.mark.parametrize("heads_k", [1, 2])
def test_gradients_agree_with_the_reference(active: None, layout: str, heads_k: int):
    """Through PyTorch's own formula for the operator's gradient."""
    given = tensors(heads=2, heads_k=heads_k, layout=layout)
    leaves = [x.detach().requires_grad_() for x in given]
    o, *_ = SDPA(*leaves, is_causal=True, scale=0.2)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    gradients = torch.autograd.grad(o, leaves, do)
    for x, gradient in zip(given, gradients, strict=True):
        assert gradient.stride() == torch.empty_like(x).stride()
    found = dict(zip(NAMES, (x.transpose(1, 2) for x in gradients), strict=True))
    args = arguments(given, causal=True, softmax_scale=0.2)
    assert_gradients_agree(args, found, do.transpose(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_step_compiles_into_one_graph(active: None, layout: str, monkeypatch: pytest.MonkeyPatch):
    given = tensors(layout=layout)

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        return SDPA(*leaves, is_causal=True)[0]

    found: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(backward, "is_deterministic", lambda a: True)
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in given]
        o = function(*leaves)
        found.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


def packed() -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(24, 2, HEAD_DIM, generator=generator).bfloat16() for _ in NAMES]
    return given, torch.tensor([0, 7, 24], dtype=torch.int32)


@pytest.mark.slow
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (5, 2)], ids=str)
def test_varlen_attention_agrees_with_the_reference(active: None, window: tuple[int, int]):
    given, bounds = packed()
    leaves = [x.requires_grad_() for x in given]
    aux = varlen.AuxRequest(lse=True)
    o, lse = varlen.varlen_attn(*leaves, bounds, bounds, 17, 17, window_size=window, return_aux=aux)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    gradients = torch.autograd.grad(o, leaves, do)
    args: dict[str, Any] = dict(zip(NAMES, (x.detach() for x in given), strict=True))
    args |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "window_size": window}
    assert_agrees(args, o.detach(), lse.detach())
    assert_gradients_agree(args, dict(zip(NAMES, gradients, strict=True)), do)
    # Into a given tensor, with rows that kernels write in place and with others.
    if not hasattr(varlen, "varlen_attn_out"):
        return  # of a newer PyTorch
    for out in (torch.empty_like(o), torch.empty(24, HEAD_DIM, 2).bfloat16().mT):
        with torch.no_grad():
            varlen.varlen_attn_out(out, *given, bounds, bounds, 17, 17, window_size=window)
        assert torch.equal(out, o)


@PAGES
@pytest.mark.slow
def test_varlen_attention_reads_pages(active: None):
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 4, 32, 2, HEAD_DIM, generator=generator).bfloat16()
    k[2, 9:] = v[2, 9:] = math.nan
    q = torch.randn(2, 4, HEAD_DIM, generator=generator).bfloat16()
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    bounds, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [35, 9]))
    for splits in (None, 1, 2):
        o = varlen.varlen_attn(
            q, k, v, bounds, None, 1, 35, enable_gqa=True, seqused_k=used, block_table=table,
            num_splits=splits,
        )  # fmt: skip
        rows = [
            torch.cat([x[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(used.tolist())])
            for x in (k, v)
        ]
        args = {"q": q, "k": rows[0], "v": rows[1], "cu_seqlens_q": bounds}
        assert_agrees(args | {"cu_seqlens_k": torch.tensor([0, 35, 44])}, o, None)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_scaled_dot_product_attention_on_a_gpu(registry: None, compiled: bool):
    head_dim = 256 if torch.cuda.get_device_capability()[0] == 10 else 128
    given = [x.cuda() for x in tensors(head_dim=head_dim)]
    leaves = [x.detach().requires_grad_() for x in given]
    function = torch.nn.functional.scaled_dot_product_attention
    torch_sdpa.register(fallback=False)
    attention.activate_flash_attention_impl("cute_attn")
    with (
        attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION),
        mock.patch.object(torch_sdpa.BACKWARD, "routed", wraps=torch_sdpa.BACKWARD.routed) as ours,
    ):
        o = (torch.compile(function) if compiled else function)(*leaves, is_causal=True)
        do = torch.randn_like(o)
        gradients = torch.autograd.grad(o, leaves, do)
    assert ours.called
    args = arguments([x.cpu() for x in given], causal=True)
    assert_agrees(args, o.detach().transpose(1, 2).contiguous().cpu(), None)
    found = dict(zip(NAMES, (x.transpose(1, 2).cpu() for x in gradients), strict=True))
    assert_gradients_agree(args, found, do.transpose(1, 2).cpu())
