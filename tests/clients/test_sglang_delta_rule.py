"""KDA layers on our kernels, in SGLang's real backend for KDA with its real pool of states.

The model runner is that of SGLang's own unit tests (`sglang.test.kits`), on the CPU, with an H100
that our emulator stands for. SGLang's convolution is a Triton kernel, which gives NaN in Triton's
interpreter: a stand-in in PyTorch takes its place. Each request's outputs are compared with a
float64 reference of the layer, over all steps.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn.reference.kda import kda_reference

from . import sglang_emulated

HEADS, HEAD_DIM, WIDTH = 2, 64, 2
DTYPE = torch.bfloat16


@pytest.fixture(scope="session")
def kit() -> Any:
    """The module of SGLang's test kit for KDA."""
    if "sglang" not in sys.modules:
        sglang_emulated.install()
    from sglang.test.kits.attention_unittest.attention_methods import kda_attention

    return kda_attention


def convolve(x: Tensor, past: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """silu of the convolution of x, `[channels, tokens]`, after `past`; and x with its past."""
    inputs = torch.cat([past, x], dim=1)
    y = F.conv1d(inputs[None].float(), weight[:, None].float(), groups=len(weight))[0]
    return F.silu(y).to(x.dtype), inputs


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any,
) -> Tensor:
    """Stands in for SGLang's function of this name, on `[channels, tokens]`."""
    out = torch.empty_like(x)
    spans = itertools.pairwise(query_start_loc.tolist())
    for i, (start, end) in enumerate(spans):
        state = conv_states[cache_indices[i]]
        past = state if has_initial_state[i] else torch.zeros_like(state)
        out[:, start:end], inputs = convolve(x[:, start:end], past, weight)
        state.copy_(inputs[:, inputs.shape[1] - state.shape[1] :])
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: None,
    *,
    activation: str,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **trees: None,
) -> Tensor:
    """Stands in for SGLang's function of this name, on `[batch, channels]` or, for drafts,
    `[batch, channels, tokens]`. Drafts leave the state as it is, and write a window for each."""
    assert not any(x is not None for x in trees.values())
    rows = x.unsqueeze(-1) if x.dim() == 2 else x
    out = torch.empty_like(rows)
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        state = conv_state[slot]
        out[i], inputs = convolve(rows[i], state, weight)
        width = state.shape[1]
        if intermediate_conv_window is None:
            state.copy_(inputs[:, inputs.shape[1] - width :])
            continue
        for t in range(rows.shape[2]):
            at = intermediate_state_indices[i], t
            intermediate_conv_window[at] = inputs[:, t + 1 : t + 1 + width]
    return out.view(x.shape)


def scatter_mamba_states_after_mtp_verify(
    caches: Any, slots: Tensor, last_steps: Tensor, *tracked: None, src_indices_raw: None = None
) -> None:
    """Stands in for SGLang's Triton kernel, which copies each request's state after its last
    accepted draft to the pool."""
    rows = torch.arange(len(last_steps))
    pairs = [(caches.temporal, caches.intermediate_ssm)]
    pairs += zip(caches.conv, caches.intermediate_conv_window, strict=True)
    for pool, drafts in pairs:
        pool[:, slots.long()] = drafts[:, rows, last_steps]


@pytest.fixture(autouse=True)
def replaced(kit: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SGLang's KDA runs on our kernels; the names of those of SGLang's that are called."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear import kda_backend
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    from cute_attn.integrations import sglang_kda

    theirs: list[str] = []
    for name in ("decode", "packed_decode", "extend", "target_verify"):

        def refuse(*_: Any, name: str = name, **__: Any) -> None:
            theirs.append(name)
            raise NotImplementedError(name)

        monkeypatch.setattr(TritonKDAKernel, name, refuse)
    monkeypatch.setattr(kda_backend, "TritonKDAKernel", kda_backend.TritonKDAKernel)
    monkeypatch.setattr(kda_backend, "causal_conv1d_fn", causal_conv1d_fn)
    monkeypatch.setattr(kda_backend, "causal_conv1d_update", causal_conv1d_update)
    name = scatter_mamba_states_after_mtp_verify.__name__
    monkeypatch.setattr(hybrid_linear_attn_backend, name, scatter_mamba_states_after_mtp_verify)
    sglang_kda.register()
    return theirs


class Layers:
    """A KDA layer of SGLang's, its backend with the pool, and the inputs of each request."""

    def __init__(self, kit: Any, requests: int, drafts: int = 0, lower_bound: float | None = None):
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
        from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
        from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.kit, self.modes, self.requests, self.drafts = kit, ForwardMode, requests, drafts
        mode = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.EXTEND
        case = self.case(mode, (0,) * requests, (drafts or 1,) * requests)
        config = kit.TinyKDAModelConfig(num_heads=HEADS, head_dim=HEAD_DIM, context_len=512)
        self.runner = kit.MockKDAModelRunner(
            case=case, model_config=config, dtype=DTYPE, device="cpu", max_context_len=512,
            head_dim=HEAD_DIM, head_k_dim=HEAD_DIM, head_v_dim=HEAD_DIM,
        )  # fmt: skip
        self.runner.linear_attn_backends = resolve_linear_attn_backends()
        full = ATTENTION_BACKENDS["torch_native"](self.runner)  # of layers that there are none of
        self.backend = HybridLinearAttnBackend(full, KDAAttnBackend(self.runner), [])
        torch.manual_seed(0)
        self.layer = kit.ProjectedKDAAttention(
            num_k_heads=HEADS, num_v_heads=HEADS, head_k_dim=HEAD_DIM, head_v_dim=HEAD_DIM,
            dtype=DTYPE, device="cpu",
        )  # fmt: skip
        attention = self.layer.attn
        attention.conv_weights = torch.randn(3 * HEADS * HEAD_DIM, WIDTH).to(DTYPE)
        attention.lower_bound = lower_bound
        self.pool = self.runner.req_to_token_pool.mamba2_layer_cache(0)
        self.inputs: list[list[tuple[Tensor, ...]]] = [[] for _ in range(requests)]
        self.outputs: list[list[Tensor]] = [[] for _ in range(requests)]

    def case(self, mode: Any, prefixes: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
        return self.kit.KDAAttentionCase(
            name="step", backend="triton", forward_mode=mode, num_k_heads=HEADS, num_v_heads=HEADS,
            page_size=16, prefix_lens=prefixes, extend_lens=lengths,
        )  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        return [sum(len(x[0]) for x in inputs) for inputs in self.inputs]

    def step(self, mode: Any, *lengths: int) -> Tensor:
        """Run a batch in which request i has lengths[i] tokens; of a decode, one each."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        case = self.case(mode, tuple(self.lengths), lengths)
        lengths = case.input_lens
        batch = self.kit._make_forward_batch(case, self.runner, max_context_len=512, device="cpu")
        if mode.is_target_verify():
            offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            ragged = None if len(set(lengths)) == 1 else SimpleNamespace(qo_indptr_device=offsets)
            batch.spec_info = SimpleNamespace(
                draft_token_num=self.drafts, ragged_verify_layout=ragged
            )
        tokens = sum(lengths)
        mixed = torch.randn(tokens, 3 * HEADS * HEAD_DIM).to(DTYPE)
        a = torch.randn(tokens, HEADS * HEAD_DIM).to(DTYPE)
        b = torch.randn(tokens, HEADS).to(DTYPE)
        shaped = a if mode.is_decode() else a.view(1, tokens, HEADS, HEAD_DIM)
        with torch.inference_mode(), forward_context(ForwardContext(attn_backend=self.backend)):
            self.backend.init_forward_metadata(batch)
            o = self.layer(batch, mixed, shaped, b.unsqueeze(0))
        assert o.shape == (1, tokens, HEADS, HEAD_DIM) and o.dtype == DTYPE
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
        x = F.pad(mixed.T, (WIDTH - 1, 0))
        wide = torch.float64 if exact else torch.float32
        y = F.conv1d(x[None].to(wide), weight[:, None].to(wide), groups=len(weight))[0]
        y = F.silu(y).T
        q, k, v = (y if exact else y.to(DTYPE)).view(1, -1, 3, HEADS, HEAD_DIM).unbind(2)
        found = kda_reference(
            q,
            k,
            v,
            a.view(1, -1, HEADS, HEAD_DIM),
            b.unsqueeze(0),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=self.layer.A_log.detach(),
            dt_bias=self.layer.dt_bias.detach(),
            lower_bound=self.layer.attn.lower_bound,
            state_v_first=True,
            dtype=dtype,
        )
        return (found.o if exact else found.o.to(DTYPE))[0], found.final_state[0]


@pytest.mark.clients("Kimi Linear: KDA layers, prefill and decode")
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_and_decode(kit: Any, replaced: list[str], lower_bound: float | None):
    """Prompts in two parts, of which the second starts from the state of the first; then decode."""
    layers = Layers(kit, 3, lower_bound=lower_bound)
    layers.step(layers.modes.EXTEND, 70, 1, 20)
    layers.step(layers.modes.EXTEND, 3, 64, 1)
    for _ in range(2):
        layers.step(layers.modes.DECODE)
    layers.check()
    assert not replaced


@pytest.mark.clients("Kimi Linear: speculative decoding")
@pytest.mark.parametrize("lengths", [(3, 3, 3), (3, 1, 2)], ids=["chains", "ragged chains"])
def test_speculative_decoding(kit: Any, replaced: list[str], lengths: tuple[int, ...]):
    """Verification leaves the pool alone, and what is accepted is committed by SGLang."""
    layers = Layers(kit, 3, drafts=3)
    layers.step(layers.modes.EXTEND, 20, 1, 5)
    for accepted in ((2, 1, 1), (1, 1, 2)):
        before = layers.pool.temporal.clone()
        layers.pool.intermediate_ssm.fill_(torch.nan)
        layers.step(layers.modes.TARGET_VERIFY, *lengths)
        assert torch.equal(layers.pool.temporal, before)
        layers.accept(*accepted)
    layers.step(layers.modes.DECODE)
    layers.check()
    assert not replaced


@pytest.mark.clients("Kimi Linear: the plugin replaces its layers on request")
def test_the_plugin_replaces_kda_on_request(kit: Any, monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.layers.attention.linear import kda_backend
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend

    import cute_attn
    from cute_attn.integrations import sglang as plugin
    from cute_attn.integrations import sglang_kda

    triton = LinearAttnKernelBackend.TRITON
    monkeypatch.setattr(kda_backend, "TritonKDAKernel", TritonKDAKernel)
    for value in ("0", "1", "1"):
        monkeypatch.setenv("CUTE_ATTN_SERVER_KDA", value)
        cute_attn.reload_settings()
        plugin.register()
        dispatcher = kda_backend.KDAKernelDispatcher(triton, triton, triton)
        for kernel in (
            dispatcher.decode_kernel,
            dispatcher.verify_kernel,
            dispatcher.effective_extend_kernel(-5.0, 3),
        ):
            assert isinstance(kernel, sglang_kda.CuteKDAKernel) == (value == "1")
    monkeypatch.delenv("CUTE_ATTN_SERVER_KDA")
    cute_attn.reload_settings()


@pytest.mark.clients("Kimi Linear: other sizes stay on SGLang's kernels")
def test_calls_without_a_kernel_stay_with_sglang(kit: Any, replaced: list[str]):
    from cute_attn.integrations.sglang_kda import CuteKDAKernel

    kernel = CuteKDAKernel()

    def rows(dim: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.zeros(1, 2, HEADS, dim, dtype=dtype)

    def call(name: str, dim: int = HEAD_DIM, states: torch.dtype = torch.float32, **more: Any):
        tokens = (rows(dim),) * 3
        gates = (rows(dim), torch.zeros(1, 2, HEADS))
        given = {
            "ssm_states": torch.zeros(3, HEADS, dim, dim, dtype=states),
            "cache_indices": torch.zeros(1, dtype=torch.int32),
            "query_start_loc": torch.tensor([0, 2]),
        }
        parameters = {"A_log": torch.zeros(HEADS), "dt_bias": torch.zeros(HEADS * dim)}
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
    call("extend", return_intermediate_states=True)  # a snapshot for the radix cache
    call("extend", track_state=torch.zeros(1))
    drafts = torch.zeros(1, 2, HEADS, HEAD_DIM, HEAD_DIM)
    verify = {
        "intermediate_states_buffer": drafts,
        "intermediate_state_indices": torch.zeros(1, dtype=torch.int32),
        "cache_steps": 2,
        "retrieve_parent_token": None,
    }
    call("target_verify", **verify | {"retrieve_parent_token": torch.zeros(1, 2)})  # a tree
    call("target_verify", **verify | {"intermediate_states_buffer": drafts.bfloat16()})
    call("target_verify", **verify, cache_ring=True)
