"""KDA and Gated Delta Net layers on our kernels, in SGLang's real backends with its real pools of
states.

The model runner is that of SGLang's own unit tests (`sglang.test.kits`), on the CPU, with an H100
that our emulator stands for. SGLang's convolution is a Triton kernel, which gives NaN in Triton's
interpreter: a stand-in in PyTorch takes its place. Each request's outputs are compared with a
float64 reference of the layer, over all steps.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn.reference.gated_delta_rule import gated_delta_rule_reference
from cute_attn.reference.kda import kda_reference

from . import sglang_emulated

HEADS, HEAD_DIM, TAPS = 2, 64, 4
DTYPE = torch.bfloat16
PARTS = "sglang.srt.layers.attention.linear"


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        short: in the names of SGLang's modules and classes.
        ours: the module of our kernels.
        heads_v: number of value heads.
        channels: numbers that a gate has, for each value head.
        shape: the class of SGLang's that gives the shape of a pool, and its parameter for the taps
            of the convolution, of which the kit's layers have 2.
    """

    short: str
    ours: str
    switch: str
    heads_v: int
    channels: int
    shape: tuple[str, str]
    reference: Callable[..., Any]

    @property
    def kit(self) -> Any:
        """The module of SGLang's test kit."""
        if "sglang" not in sys.modules:
            sglang_emulated.install()
        sglang_emulated.import_gated_delta_net()
        methods = "sglang.test.kits.attention_unittest.attention_methods"
        return importlib.import_module(f"{methods}.{self.short.lower()}_attention")

    def of_kit(self, name: str) -> Any:
        """A class of the kit, by its name for KDA."""
        return getattr(self.kit, name.replace("KDA", self.short))

    @property
    def backend(self) -> Any:
        return importlib.import_module(f"{PARTS}.{self.short.lower()}_backend")

    @property
    def triton(self) -> Any:
        """SGLang's class of Triton kernels."""
        module = importlib.import_module(f"{PARTS}.kernels.{self.short.lower()}_triton")
        return getattr(module, self.kernel)

    @property
    def kernel(self) -> str:
        return f"Triton{self.short}Kernel"

    @property
    def integration(self) -> Any:
        return importlib.import_module(f"cute_attn.integrations.{self.ours}")

    @property
    def backend_name(self) -> str:
        return f"{self.short}AttnBackend"

    @property
    def our_kernel(self) -> Any:
        return getattr(self.integration, f"Cute{self.short}Kernel")


KINDS = {
    "Kimi Linear": Kind(
        "KDA",
        "sglang_kda",
        "CUTE_ATTN_SERVER_KDA",
        HEADS,
        HEAD_DIM,
        ("KimiLinearStateShape", "conv_kernel_size"),
        kda_reference,
    ),
    "Qwen3-Next": Kind(
        "GDN",
        "sglang_gated_delta_rule",
        "CUTE_ATTN_SERVER_GDN",
        2 * HEADS,
        1,
        ("Mamba2StateShape", "conv_kernel"),
        gated_delta_rule_reference,
    ),
}


def kinds(feature: str) -> Any:
    """The test's argument `kind`, of each name."""
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, id=name, marks=pytest.mark.clients(f"{name}: {feature}"))
            for name, kind in KINDS.items()
        ],
    )


@pytest.fixture
def replaced(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SGLang runs on our kernels; the names of those of SGLang's that are called."""
    assert kind.kit
    from sglang.srt.layers.attention.linear import gdn_backend

    default = gdn_backend.flashinfer_gdn_prefill_default
    monkeypatch.setattr(gdn_backend, "flashinfer_gdn_prefill_default", default)  # undone at the end
    theirs = sglang_emulated.refuse_their_kernels(monkeypatch, kind.triton)
    monkeypatch.setattr(kind.backend, kind.kernel, kind.triton)
    monkeypatch.setattr(kind.backend, kind.backend_name, getattr(kind.backend, kind.backend_name))
    sglang_emulated.replace_in_linear_layers(monkeypatch)
    kind.integration.register()
    return theirs


@contextmanager
def taps_of_pools(kind: Kind, taps: int) -> Iterator[None]:
    """Pools of the kit are for a convolution of so many taps."""
    name, parameter = kind.shape
    create = getattr(kind.kit, name).create
    shape = SimpleNamespace(create=lambda **given: create(**given | {parameter: taps}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind.kit, name, shape)
        yield


class Layers:
    """A layer of SGLang's, its backend with the pool, and the inputs of each request."""

    def __init__(
        self, kind: Kind, requests: int, drafts: int = 0, lower_bound: float | None = None,
        taps: int = TAPS,
    ):  # fmt: skip
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
        from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.kind, self.modes, self.requests, self.drafts = kind, ForwardMode, requests, drafts
        mode = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.EXTEND
        case = self.case(mode, (0,) * requests, (drafts or 1,) * requests)
        config = kind.of_kit("TinyKDAModelConfig")(
            num_heads=HEADS, head_dim=HEAD_DIM, context_len=512
        )
        self.taps, self.together = taps, False
        with taps_of_pools(kind, taps):
            self.runner = kind.of_kit("MockKDAModelRunner")(
                case=case, model_config=config, dtype=DTYPE, device="cpu", max_context_len=512,
                head_dim=HEAD_DIM, head_k_dim=HEAD_DIM, head_v_dim=HEAD_DIM,
            )  # fmt: skip
        self.runner.linear_attn_backends = resolve_linear_attn_backends()
        full = ATTENTION_BACKENDS["torch_native"](self.runner)  # of layers that there are none of
        backend = getattr(kind.backend, kind.backend_name)(self.runner)
        self.backend = HybridLinearAttnBackend(full, backend, [])
        torch.manual_seed(0)
        self.layer = kind.of_kit("ProjectedKDAAttention")(
            num_k_heads=HEADS, num_v_heads=kind.heads_v, head_k_dim=HEAD_DIM, head_v_dim=HEAD_DIM,
            dtype=DTYPE, device="cpu",
        )  # fmt: skip
        attention = self.layer.attn
        self.widths = [HEADS * HEAD_DIM, HEADS * HEAD_DIM, kind.heads_v * HEAD_DIM]
        attention.conv_weights = torch.randn(sum(self.widths), taps).to(DTYPE)
        attention.lower_bound, attention.activation = lower_bound, "silu"
        self.pool = self.runner.req_to_token_pool.mamba2_layer_cache(0)
        self.inputs: list[list[tuple[Tensor, ...]]] = [[] for _ in range(requests)]
        self.outputs: list[list[Tensor]] = [[] for _ in range(requests)]

    def case(self, mode: Any, prefixes: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
        return self.kind.of_kit("KDAAttentionCase")(
            name="step", backend="triton", forward_mode=mode, num_k_heads=HEADS,
            num_v_heads=self.kind.heads_v, page_size=16, prefix_lens=prefixes, extend_lens=lengths,
        )  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        return [sum(len(x[0]) for x in inputs) for inputs in self.inputs]

    def step(self, mode: Any, *lengths: int) -> Tensor:
        """Run a batch in which request i has lengths[i] tokens; of a decode, one each."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        case = self.case(mode, tuple(self.lengths), lengths)
        lengths = case.input_lens
        batch = self.kind.kit._make_forward_batch(
            case, self.runner, max_context_len=512, device="cpu"
        )
        if mode.is_target_verify():
            offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            ragged = None if len(set(lengths)) == 1 else SimpleNamespace(qo_indptr_device=offsets)
            batch.spec_info = SimpleNamespace(
                draft_token_num=self.drafts, ragged_verify_layout=ragged
            )
        tokens = sum(lengths)
        heads, channels = self.kind.heads_v, self.kind.channels
        mixed = torch.randn(tokens, sum(self.widths)).to(DTYPE)
        a = torch.randn(tokens, heads * channels).to(DTYPE)
        b = torch.randn(tokens, heads).to(DTYPE)
        gates, given = (a, b), mixed
        if self.kind.short == "KDA":
            shaped = a if mode.is_decode() else a.view(1, tokens, heads, channels)
            gates = shaped, b.unsqueeze(0)
        if self.together:
            z = torch.randn(tokens, self.widths[2]).to(DTYPE)
            given = torch.cat([mixed, z], -1), torch.cat([b, a], -1)
        with torch.inference_mode(), forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_forward_metadata(batch)
            o = self.layer(batch, given, *gates)
        if self.together:
            o, same_z = o
            assert torch.equal(same_z, z.view(same_z.shape))
        assert o.shape == (1, tokens, heads, HEAD_DIM) and o.dtype == DTYPE
        start = 0
        for i, length in enumerate(lengths):
            rows = slice(start, start + length)
            self.inputs[i].append((mixed[rows], a[rows], b[rows]))
            self.outputs[i].append(o[0, rows])
            start += length
        return o

    def accept(self, *counts: int) -> None:
        """Accept so many of each request's drafts of the last step, and commit their states."""
        last = torch.tensor(counts) - 1
        self.backend.update_mamba_state_after_mtp_verify(last, None, None, None)
        for i, count in enumerate(counts):
            self.inputs[i][-1] = tuple(x[:count] for x in self.inputs[i][-1])
            self.outputs[i][-1] = self.outputs[i][-1][:count]

    def check(self) -> None:
        """Compare all outputs, and the states in the pool, with the reference."""
        pool = self.runner.req_to_token_pool
        slots = pool.get_mamba_indices(torch.arange(self.requests))
        errors: dict[str, list[Any]] = {"o": [], "state": []}
        for i in range(self.requests):
            ours = torch.cat(self.outputs[i]), self.pool.temporal[slots[i]]
            exact, plain = (self.reference(i, dtype) for dtype in (torch.float64, torch.float32))
            for name, x, right, usual in zip(errors, ours, exact, plain, strict=True):
                assert x.isfinite().all(), name
                errors[name].append([(y.double() - right).norm() for y in (x, usual)])
        for name, pairs in errors.items():
            mine, theirs = torch.tensor(pairs).norm(dim=0).tolist()
            assert 0 < mine <= 2 * theirs, f"{name}: error {mine:.3e}, plain PyTorch {theirs:.3e}"

    def reference(self, request: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A request's outputs and last state, from a state of 0."""
        mixed, a, b = (torch.cat(parts) for parts in zip(*self.inputs[request], strict=True))
        exact = dtype == torch.float64
        weight = self.layer.attn.conv_weights
        x = F.pad(mixed.T, (self.taps - 1, 0))
        wide = torch.float64 if exact else torch.float32
        y = F.conv1d(x[None].to(wide), weight[:, None].to(wide), groups=len(weight))[0]
        y = F.silu(y).T
        qkv = (y if exact else y.to(DTYPE)).split(self.widths, dim=-1)
        q, k, v = (x.view(1, len(mixed), -1, HEAD_DIM) for x in qkv)
        of_kda = {"lower_bound": self.layer.attn.lower_bound} if self.kind.short == "KDA" else {}
        shape = (1, len(mixed), self.kind.heads_v, self.kind.channels)
        found = self.kind.reference(
            q,
            k,
            v,
            a.view(shape) if of_kda else a.view(shape[:3]),
            b.unsqueeze(0),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=self.layer.A_log.detach(),
            dt_bias=self.layer.dt_bias.detach(),
            state_v_first=True,
            dtype=dtype,
            **of_kda,
        )
        return (found.o if exact else found.o.to(DTYPE))[0], found.final_state[0]


@contextmanager
def counted_convolutions(kind: Kind) -> Iterator[list[int]]:
    """The numbers of rows that SGLang's convolution of decode steps and drafts is called with."""
    theirs, counts = kind.backend.causal_conv1d_update, []

    def convolution(x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        counts.append(len(x))
        found: Tensor = theirs(x, *arguments, **named)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind.backend, "causal_conv1d_update", convolution)
        yield counts


def served(layers: Layers) -> None:
    """Prompts in two parts, of which the second starts from the state of the first; then decode."""
    layers.step(layers.modes.EXTEND, 70, 1, 20)
    layers.step(layers.modes.EXTEND, 3, 64, 1)
    for _ in range(2):
        layers.step(layers.modes.DECODE)
    layers.check()


@kinds("linear layers, prefill and decode")
@pytest.mark.parametrize("taps", [TAPS, 2])
def test_prefill_and_decode(kind: Kind, replaced: list[str], taps: int):
    """A decode step is one launch, if there is a kernel for the convolution."""
    with counted_convolutions(kind) as counts:
        served(Layers(kind, 3, taps=taps))
    assert counts == ([] if taps == TAPS else [3, 3])
    assert not replaced


@pytest.mark.clients("Qwen3-Next: linear layers, prefill and decode")
@pytest.mark.parametrize("kind", [KINDS["Qwen3-Next"]])
def test_projections_of_qwen_3_5_are_read_in_place(kind: Kind, replaced: list[str]):
    """q, k, v and z in one tensor, b and a in another: the result is that of tensors apart."""
    results = []
    for together in (False, True):
        layers = Layers(kind, 2)
        layers.step(layers.modes.EXTEND, 5, 3)
        layers.together = together
        with counted_convolutions(kind) as counts:
            results.append(layers.step(layers.modes.DECODE))
        assert not counts
        layers.check()
    assert torch.equal(*results)
    assert not replaced


@pytest.mark.clients("Kimi Linear: linear layers, prefill and decode")
@pytest.mark.parametrize("kind", [KINDS["Kimi Linear"]])
def test_a_lower_bound_of_the_gate(kind: Kind, replaced: list[str]):
    served(Layers(kind, 3, lower_bound=-5.0))
    assert not replaced


def verified(kind: Kind, *lengths: int) -> None:
    """Verification leaves the pool alone, and what is accepted is committed by SGLang."""
    layers = Layers(kind, 3, drafts=3)
    layers.step(layers.modes.EXTEND, 20, 1, 5)
    for accepted in ((2, 1, 1), (1, 1, 2)):
        before = layers.pool.temporal.clone()
        layers.pool.intermediate_ssm.fill_(torch.nan)
        layers.step(layers.modes.TARGET_VERIFY, *lengths)
        assert torch.equal(layers.pool.temporal, before)
        layers.accept(*accepted)
    layers.step(layers.modes.DECODE)
    layers.check()


@kinds("speculative decoding")
def test_chains_of_drafts(kind: Kind, replaced: list[str]):
    verified(kind, 3, 3, 3)
    assert not replaced


@pytest.mark.clients("Kimi Linear: speculative decoding")
@pytest.mark.parametrize("kind", [KINDS["Kimi Linear"]])
def test_ragged_chains_of_drafts(kind: Kind, replaced: list[str]):
    verified(kind, 3, 1, 2)
    assert not replaced


@kinds("the plugin replaces its layers on request")
def test_the_plugin_replaces_kernels_on_request(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    assert kind.kit
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend

    import cute_attn
    from cute_attn.integrations import sglang as plugin

    triton = LinearAttnKernelBackend.TRITON
    monkeypatch.setattr(kind.backend, kind.kernel, kind.triton)
    monkeypatch.setattr(kind.backend, kind.backend_name, getattr(kind.backend, kind.backend_name))
    theirs = gdn_backend.flashinfer_gdn_prefill_default
    monkeypatch.setattr(gdn_backend, "flashinfer_gdn_prefill_default", theirs)
    for value in ("0", "1", "1"):
        monkeypatch.setenv(kind.switch, value)
        cute_attn.reload_settings()
        plugin.register()
        found = getattr(kind.backend, f"{kind.short}KernelDispatcher")(triton, triton, triton)
        extend = (
            found.effective_extend_kernel(-5.0, 3) if kind.short == "KDA" else found.extend_kernel
        )
        for kernel in (found.decode_kernel, found.verify_kernel, extend):
            assert isinstance(kernel, kind.our_kernel) == (value == "1")
    # SGLang would have FlashInfer's kernels for prefill in place of Triton's, where it can.
    default = gdn_backend.flashinfer_gdn_prefill_default
    assert (default is theirs) == (kind.short == "KDA")
    assert kind.short == "KDA" or default(None) is None
    monkeypatch.delenv(kind.switch)
    cute_attn.reload_settings()


@kinds("other sizes stay on SGLang's kernels")
def test_calls_without_a_kernel_stay_with_sglang(kind: Kind, replaced: list[str]):
    kernel, heads = kind.our_kernel(), kind.heads_v

    def rows(heads: int, dim: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.zeros(1, 2, heads, dim, dtype=dtype)

    def call(name: str, dim: int = HEAD_DIM, states: torch.dtype = torch.float32, **more: Any):
        tokens = rows(HEADS, dim), rows(HEADS, dim), rows(heads, dim)
        gates = (rows(heads, dim), torch.zeros(1, 2, heads))
        given = {
            "ssm_states": torch.zeros(3, heads, dim, dim, dtype=states),
            "cache_indices": torch.zeros(1, dtype=torch.int32),
            "query_start_loc": torch.tensor([0, 2]),
        }
        parameters = {"A_log": torch.zeros(heads), "dt_bias": torch.zeros(heads * dim)}
        replaced.clear()
        with pytest.raises(NotImplementedError, match=name):
            getattr(kernel, name)(
                **dict(zip("qkv", tokens, strict=True)),
                **dict(zip(("g", "beta") if name == "extend" else "ab", gates, strict=True)),
                **given | parameters | more,
            )
        assert replaced == [name]

    for name in ("decode", "extend"):
        call(name, dim=32)
        call(name, states=torch.float16)
    call("extend", track_state=torch.zeros(1))  # a snapshot for the radix cache
    if kind.short == "KDA":
        call("extend", return_intermediate_states=True)
    else:
        call("extend", inplace_update=False)  # scores of several items
    drafts = torch.zeros(1, 2, heads, HEAD_DIM, HEAD_DIM)
    verify = {
        "intermediate_states_buffer": drafts,
        "intermediate_state_indices": torch.zeros(1, dtype=torch.int32),
        "cache_steps": 2,
        "retrieve_parent_token": None,
    }
    call("target_verify", **verify | {"retrieve_parent_token": torch.zeros(1, 2)})  # a tree
    call("target_verify", **verify | {"intermediate_states_buffer": drafts.bfloat16()})
    call("target_verify", **verify, cache_ring=True)


@pytest.mark.clients("Qwen3-Next: snapshots for the radix cache")
@pytest.mark.parametrize("kind", [KINDS["Qwen3-Next"]])
def test_snapshots_come_from_sglangs_states(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    """SGLang's kernels give the states at the start of all chunks, request after request."""
    assert kind.kit
    h = torch.arange(6.0).view(1, 6, 1, 1, 1).expand(1, 6, 2, 3, 3)
    monkeypatch.setattr(kind.triton, "extend", lambda *_, **__: ("o", None, h))
    out = torch.full((4, 2, 3, 3), torch.nan)
    found = kind.our_kernel().extend(
        *(torch.zeros(1, 1, 1, 1),) * 5,
        ssm_states=torch.zeros(1),
        cache_indices=torch.zeros(4),
        query_start_loc=torch.tensor([0, 65, 66, 66 + 128, 66 + 129]),
        track_state=out,
        track_chunk_idx=torch.tensor([1, 0, 1, -1], dtype=torch.int32),
    )
    assert found[0] == "o" and found[2] is h
    assert out[:3, 0, 0, 0].tolist() == [1, 2, 4]
