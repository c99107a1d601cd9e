"""Puts vLLM's engine on the CPU, with an H100 that our emulator stands for.

vLLM has a CPU platform, with a worker and a model runner that inherit from CUDA's. `install` makes
this platform vLLM's, with the selection of attention backends that CUDA's platform has on an H100.
What vLLM's wheel has compiled is left out by `unpack`; STUBS names each function that the engine
then misses, and stands in for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # vLLM takes Triton for usable, which then finds no GPU
    "CUTE_ATTN_EMULATE": "1",
    "HF_HUB_OFFLINE": "1",  # models are directories
    "TRITON_INTERPRET": "1",  # the model runner has kernels in Triton
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


class Stub(NamedTuple):
    """A function of vLLM's compiled extension.

    Attributes:
        schema: as `torch.library` writes it.
        reason: why the engine calls the function.
        function: computes what the compiled function does, or nothing if `reason` says so.
        library: what `torch.ops` calls the extension.
    """

    schema: str
    reason: str
    function: Callable[..., Any]
    library: str = "_C"

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def prepack(weight: Tensor, packed: Tensor, isa: str) -> None:
    packed.copy_(weight)


def swiglu_oai(x: Tensor) -> Tensor:
    """gpt-oss's activation of interleaved gates and values."""
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def fused_moe(
    out: Tensor,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor,
    w2_bias: Tensor,
    weights: Tensor,
    ids: Tensor,
    skip_weighted: bool,
    activation: str,
    isa: str,
) -> None:
    """Each token's sum over its experts, in float32."""
    if activation != "swigluoai" or skip_weighted:
        raise NotImplementedError(f"the stub has gpt-oss's experts only, not {activation}")
    hidden = torch.einsum("th,teih->tei", x.float(), w13[ids].float()) + w13_bias[ids]
    found = torch.einsum("tei,tehi->teh", swiglu_oai(hidden), w2[ids].float()) + w2_bias[ids]
    out.copy_((weights[:, :, None] * found).sum(dim=1))


def accept_greedily(
    output: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    target_argmax: Tensor,
    bonus_token_ids: Tensor,
    is_greedy: Tensor | None,
    max_spec_len: int,
) -> None:
    """Write each request's accepted drafts and the token after them; the rest stays as it is."""
    if is_greedy is not None and not is_greedy.all():
        raise NotImplementedError("the stub has greedy requests only")
    start = 0
    for row, end, bonus in zip(output, cu_num_draft_tokens, bonus_token_ids.flatten(), strict=True):
        chosen = target_argmax[start:end]
        wrong = (chosen != draft_token_ids[start:end]).nonzero().flatten().tolist()
        count = wrong[0] + 1 if wrong else len(chosen)
        row[:count] = chosen[:count]
        if not wrong:
            row[count] = bonus
        start = int(end)


def convolution_step(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    slots: Tensor,
    query_start_loc: Tensor | None,
    padding_slot: int,
) -> Tensor:
    """A causal convolution's next value for each sequence, `[sequences, channels]`."""
    if query_start_loc is not None or activation is not None or (slots == padding_slot).any():
        raise NotImplementedError("the stub has a token of each sequence, and LFM2's convolution")
    seen = torch.cat([states[slots], x[:, :, None]], dim=-1)
    states[slots] = seen[:, :, 1:]
    found = (seen.float() * weight.float()).sum(dim=-1)
    return (found if bias is None else found + bias).to(x.dtype)


def insert_latent(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write tokens' latent vectors and rotated keys to the cache."""
    assert (slots >= 0).all()
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.cat((kv_c, k_pe), dim=-1)


def concat_keys_and_insert(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    k: Tensor,
    cache: Tensor,
    slots: Tensor,
    block_size: int,
    positions: Tensor | None,
    cos_sin: Tensor | None,
) -> None:
    """The keys of all heads, and the latent vectors in the cache."""
    if positions is not None:
        raise NotImplementedError("the stub has no rotary embedding")
    concat_keys(k_nope, k_pe, k)
    insert_latent(kv_c, k_pe, cache, slots)


def concat_keys(k_nope: Tensor, k_pe: Tensor, k: Tensor) -> None:
    k.copy_(torch.cat((k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)), dim=-1))


def concat_queries_and_insert(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    q: Tensor,
    cache: Tensor,
    slots: Tensor,
    block_size: int,
    positions: Tensor | None,
    cos_sin: Tensor | None,
) -> None:
    """The absorbed queries of all heads, and the latent vectors in the cache."""
    if positions is not None:
        raise NotImplementedError("the stub has no rotary embedding")
    q.copy_(torch.cat((q_nope, q_pe), dim=-1))
    insert_latent(kv_c, k_pe, cache, slots)


def gather_latent(
    cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    dtype: str,
    scale: Tensor,
    starts: Tensor | None,
) -> None:
    """Write the cached rows of sequences, from `starts` on, one after another."""
    sequences = token_to_seq[:num_tokens].long()
    at = torch.arange(num_tokens) - cu_seq_lens[sequences]
    if starts is not None:
        at = at + starts[sequences]
    blocks = block_table[sequences, at // cache.shape[1]].long()
    out[:num_tokens] = cache[blocks, at % cache.shape[1]]


STUBS = (
    Stub(
        "init_cpu_memory_env(int[] nodes) -> ()",
        "binds the process to a memory node; computes nothing",
        lambda nodes: None,
    ),
    Stub(
        "greedy_argmax(Tensor logits) -> Tensor",
        "of the sampler at temperature 0, which is `argmax` on a GPU",
        lambda logits: logits.argmax(dim=-1).view(-1),
    ),
    Stub(
        "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor cu_num_draft_tokens, "
        "Tensor draft_token_ids, Tensor target_argmax, Tensor bonus_token_ids, "
        "Tensor? is_greedy, int max_spec_len) -> ()",
        "of the rejection sampler, which is a Triton kernel on a GPU",
        accept_greedily,
    ),
    Stub(
        "prepack_moe_weight(Tensor weight, Tensor(a!) packed, str isa) -> ()",
        "orders experts' weights for the next function, of which the stand-in has the plain order",
        prepack,
    ),
    Stub(
        "cpu_fused_moe(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor? w13_bias, "
        "Tensor? w2_bias, Tensor weights, Tensor ids, bool skip_weighted, str activation, "
        "str isa) -> ()",
        "of gpt-oss's experts, which are a Triton kernel on a GPU",
        fused_moe,
    ),
    Stub(
        "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) states, Tensor weight, Tensor? bias, "
        "str? activation, Tensor slots, Tensor? query_start_loc, int padding_slot) -> Tensor",
        "of LFM2's convolutions, which are a Triton kernel on a GPU",
        convolution_step,
    ),
    Stub(
        "fused_kimi_k3_mla_key_concat_kv_cache_insert(Tensor q, Tensor k_nope, Tensor k_pe, "
        "Tensor kv_c, Tensor(a!) k, Tensor(b!) cache, Tensor slots, int block_size, "
        "Tensor? positions, Tensor? cos_sin) -> ()",
        "of Kimi Linear's latent attention: writes a prompt's keys, and the cache",
        concat_keys_and_insert,
    ),
    Stub(
        "fused_kimi_k3_mla_kv_concat(Tensor k_nope, Tensor k_pe, Tensor(a!) k) -> ()",
        "likewise: writes the keys of earlier tokens",
        concat_keys,
    ),
    Stub(
        "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(Tensor q_nope, Tensor q_pe, "
        "Tensor kv_c, Tensor k_pe, Tensor(a!) q, Tensor(b!) cache, Tensor slots, "
        "int block_size, Tensor? positions, Tensor? cos_sin) -> ()",
        "likewise: writes the queries of decode, and the cache",
        concat_queries_and_insert,
    ),
    Stub(
        "gather_and_maybe_dequant_cache(Tensor cache, Tensor(a!) out, Tensor block_table, "
        "Tensor cu_seq_lens, Tensor token_to_seq, int num_tokens, str dtype, Tensor scale, "
        "Tensor? starts) -> ()",
        "likewise: reads earlier tokens from the cache",
        gather_latent,
        "_C_cache_ops",
    ),
)


class Answer(NamedTuple):
    """What a function of torch says of the machine in place of the truth."""

    module: ModuleType
    name: str
    reason: str
    value: Any


ANSWERS = (
    Answer(
        torch.cpu,
        "_is_amx_tile_supported",
        "vLLM has compiled kernels for such processors: PyTorch's take their place",
        False,
    ),
    Answer(torch.cpu, "_is_avx512_bf16_supported", "likewise for AVX-512 with bfloat16", False),
    Answer(
        torch.cuda, "get_device_capability", "kernels in Triton choose their tiles by it", (9, 0)
    ),
)


class NotCpu:
    """vLLM's platform for the module of Qwen's linear layer."""

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        from vllm.platforms import current_platform

        return getattr(current_platform, name)


def replace_in_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What linear layers of Kimi Linear and of Qwen3-Next need: see IN_TESTS."""
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, qwen_gdn_linear_attn
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
    from vllm.model_executor.models.qwen3_next import QwenNextMixtureOfExperts

    for module in (kimi_gdn_linear_attn, qwen_gdn_linear_attn):
        monkeypatch.setattr(module, "causal_conv1d_fn", causal_conv1d_fn_cpu)
    monkeypatch.setattr(qwen_gdn_linear_attn, "current_platform", NotCpu())
    monkeypatch.setattr(QwenNextMixtureOfExperts, "set_moe_parameters", lambda _: None)


def replace_linear_layer(monkeypatch: pytest.MonkeyPatch, integration: ModuleType) -> None:
    """Register the layer of a module of ours, until the test's end."""
    from vllm.model_executor.custom_op import op_registry_oot

    monkeypatch.delitem(op_registry_oot, integration.NAME, raising=False)
    integration.register()


# What a single test file replaces.
IN_TESTS = (
    (
        "causal_conv1d_fn",
        "the linear layers' convolution of prompts, which is a Triton kernel on a GPU",
    ),
    (
        "qwen_gdn_linear_attn.current_platform",
        "Qwen's linear layer has a path of its own on a CPU",
    ),
    (
        "QwenGatedDeltaNetAttention.__init__",
        "Qwen3.5's layer is tried in Qwen3-Next's model, since Qwen3.5's module needs torchvision",
    ),
    (
        "QwenNextMixtureOfExperts.set_moe_parameters",
        "Qwen3-Next has no experts here, which vLLM expects",
    ),
)


def stand_ins() -> list[tuple[str, str]]:
    """(what, why) for the table in docs/clients.md."""
    found = [(f"torch.ops.{stub.library}.{stub.name}", stub.reason) for stub in STUBS]
    found += [(f"{x.module.__name__}.{x.name}", x.reason) for x in ANSWERS]
    return found + list(IN_TESTS)


def install() -> None:
    """Make vLLM, which must not be imported yet, run as above."""
    assert "vllm" not in sys.modules
    os.environ.update(ENVIRONMENT)
    # CUDA's platform imports the extension at its top, only in order to load it.
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    for answer in ANSWERS:
        setattr(answer.module, answer.name, lambda *_, value=answer.value: value)
    for stub in STUBS:
        library = torch.library.Library(stub.library, "FRAGMENT")
        KEPT.append(library)
        library.define(stub.schema)
        library.impl(stub.name, stub.function, "CompositeExplicitAutograd")

    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class EmulatedHopper(CpuPlatform):  # type: ignore[misc]
        """The CPU, with CUDA's choice of an attention backend for an H100."""

        get_attn_backend_cls = classmethod(CudaPlatformBase.get_attn_backend_cls.__func__)
        get_valid_backends = classmethod(CudaPlatformBase.get_valid_backends.__func__)

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """As the CPU's, which with MLA changes what its own kernel does not have."""
            of = vllm_config.cache_config, vllm_config.scheduler_config
            names = (
                ("block_size", "enable_prefix_caching"),
                ("enable_chunked_prefill", "max_num_batched_tokens"),
            )
            given = [[getattr(x, name) for name in of_x] for x, of_x in zip(of, names, strict=True)]
            super().check_and_update_config(vllm_config)
            if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
                for x, of_x, values in zip(of, names, given, strict=True):
                    for name, value in zip(of_x, values, strict=True):
                        setattr(x, name, value)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

    vllm.platforms._current_platform = EmulatedHopper()


KEPT: list[Any] = []  # a library's definitions last as long as the object
