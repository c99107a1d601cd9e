"""Latent attention (MLA) in vLLM's real engine, emulated for an H100: DeepSeek and Kimi Linear.

Tests serve prompts and compare the replies with transformers' eager attention, which computes in
the expanded form. The latent cache holds NaN wherever the engine has not written.
"""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn.cache.specfile import plan_file
from cute_attn.emulation import Emulation
from cute_attn.reference.mla import mla_decode_reference
from tests.ops.attention_cases import assert_no_worse
from tests.ops.mla_cases import assert_agrees

from . import models, test_vllm, vllm_emulated
from .models import prompt
from .test_vllm import NEW_TOKENS, Server, Start, assert_takes, fresh_process

vllm, start = test_vllm.vllm, test_vllm.start  # fixtures

BACKEND = "CUTE_ATTN_MLA"


@dataclass
class Calls:
    """What layers have called: the queries and the lengths of each call of decode, and the queries,
    keys and causal flags of each call of prefill."""

    decodes: list[tuple[int, list[int]]] = field(default_factory=list)
    page_sizes: set[int] = field(default_factory=set)
    prefills: list[tuple[list[int], list[int], bool]] = field(default_factory=list)


@pytest.fixture
def calls(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    from cute_attn.integrations import vllm_mla_backend as backend

    found = Calls()
    decode, prefill = backend.mla_decode, backend.flash_attn_varlen_func

    def decoded(q_nope: Tensor, q_rope: Tensor, cache: Tensor, **options: Any) -> Any:
        found.decodes.append((q_nope.shape[1], options["cache_seqlens"].tolist()))
        found.page_sizes.add(cache.shape[1])
        return decode(q_nope, q_rope, cache, **options)

    def prefilled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        lengths = (options[f"cu_seqlens_{x}"].diff().tolist() for x in "qk")
        found.prefills.append((*lengths, options["causal"]))
        return prefill(q, k, v, **options)

    monkeypatch.setattr(backend, "mla_decode", decoded)
    monkeypatch.setattr(backend, "flash_attn_varlen_func", prefilled)
    return found


def assert_served_here(server: Server) -> None:
    """Decode and prefill of every layer of latent attention are ours."""
    from cute_attn.integrations import vllm_mla_backend as backend

    layers = server.layers().values()
    assert {type(layer.impl) for layer in layers} == {backend.CuteAttnMLAImpl}
    assert {type(layer.prefill_backend) for layer in layers} == {backend.CuteAttnMLAPrefill}


@pytest.mark.clients("The plugin registers `CUTE_ATTN_MLA`, and the MLA prefill `CUTE_ATTN`")
def test_the_plugin_is_loaded(vllm: Any):
    from vllm.config import AttentionConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    load_general_plugins()
    config = AttentionConfig(backend=BACKEND, mla_prefill_backend="CUTE_ATTN")
    backend = config.backend.get_class()
    assert backend.get_name() == BACKEND and backend.is_mla()
    prefill = config.mla_prefill_backend.get_class()
    for nope, rope, of_v, capability, reasons in (
        (128, 64, 128, (9, 0), 0),
        (192, 64, 256, (9, 0), 0),
        (96, 64, 128, (9, 0), 1),
        (128, 64, 128, (10, 0), 1),
    ):
        dims = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=of_v)
        found = prefill.validate_configuration(
            DeviceCapability(*capability), MLAPrefillSelectorConfig(torch.bfloat16, dims)
        )
        assert len(found) == reasons, (dims, capability, found)


@pytest.mark.clients("`CUTE_ATTN_MLA` and the MLA prefill `CUTE_ATTN` in a spawned process")
def test_a_spawned_process_reads_the_configuration(vllm: Any, tmp_path: Path):
    from vllm.config import AttentionConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = AttentionConfig(backend=BACKEND, mla_prefill_backend="CUTE_ATTN")
    assert config.compute_hash()
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    found = fresh_process(f"""
import pickle
from pathlib import Path
config = pickle.loads(Path({str(tmp_path / "config")!r}).read_bytes())
print(config.backend.get_class().__name__ + "," + config.mla_prefill_backend.get_class().__name__)
""")
    assert found == "CuteAttnMLABackend,CuteAttnMLAPrefill"


@pytest.mark.clients("The methods of both MLA backends take the arguments that vLLM declares")
def test_methods_take_what_vllm_gives(vllm: Any):
    from vllm.v1.attention import backend as base
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

    from cute_attn.integrations import vllm_mla_backend as backend

    bases = {
        "backend": base.AttentionBackend,
        "builder": base.AttentionMetadataBuilder,
        "impl": base.MLAAttentionImpl,
    }
    assert assert_takes(backend.CuteAttnMLABackend, bases) > 20
    for name in ("run_prefill_new_tokens", "run_prefill_context_chunk", "validate_configuration"):
        ours, theirs = (
            inspect.signature(getattr(x, name))
            for x in (backend.CuteAttnMLAPrefill, MLAPrefillBackend)
        )
        assert list(ours.parameters) == list(theirs.parameters), name


@pytest.mark.clients("MLA: prefill and decode, DeepSeek V2 and V3, bfloat16 and float16")
@pytest.mark.parametrize(
    ("model", "dtype"), [("deepseek_v2", "bfloat16"), ("deepseek_v3", "float16")]
)
def test_deepseek(start: Start, calls: Calls, model: str, dtype: str):
    server = start(model, attention_backend=BACKEND, dtype=dtype)
    server.check(prompt(40), prompt(9, 1))
    assert_served_here(server)
    assert len(calls.decodes) == 2 * (NEW_TOKENS - 1)
    assert [sorted(q) for q, _, _ in calls.prefills] == [[9, 40]] * 2


@pytest.mark.clients("MLA: prefill and decode in one step, NaN in unused pages")
def test_a_step_has_prefills_and_decodes(start: Start, calls: Calls):
    server = start(
        "deepseek_v3", attention_backend=BACKEND, max_num_batched_tokens=32, max_num_seqs=3
    )
    server.check(prompt(9), prompt(50, 1), prompt(3, 2))
    assert any(causal and calls.decodes for _, _, causal in calls.prefills)
    written = 9 + 50 + 3 + 3 * (NEW_TOKENS - 1)  # the last token is not cached yet
    for cache in server.attention_caches():
        rows = cache[1:].isnan().all(-1)
        assert (~rows).sum() == written
        assert any(used.any() and not used.all() for used in ~rows)


@pytest.mark.clients("MLA: chunked prefill, whose parts are merged by lse")
@pytest.mark.parametrize("workspace", [None, 32], ids=["one part", "several parts"])
def test_a_prompt_is_read_in_chunks(
    start: Start, calls: Calls, monkeypatch: pytest.MonkeyPatch, workspace: int | None
):
    """A small workspace holds less than the earlier tokens of a request."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    if workspace is not None:
        monkeypatch.setattr(
            MLACommonMetadataBuilder,
            "determine_chunked_prefill_workspace_size",
            staticmethod(lambda _: workspace),
        )
    server = start("deepseek_v3", attention_backend=BACKEND, max_num_batched_tokens=48)
    server.check(prompt(150), prompt(9, 1))
    parts = [k for _, k, causal in calls.prefills if not causal]
    assert ([48] in parts and [96] in parts) if workspace is None else ([32] in parts)


@pytest.mark.clients("MLA: prefix caching")
def test_a_second_prompt_finds_the_firsts_tokens(start: Start, calls: Calls):
    server = start("deepseek_v3", attention_backend=BACKEND, enable_prefix_caching=True)
    server.check(prompt(40))
    calls.prefills.clear()
    (reply,) = server.check(prompt(40)[:36] + prompt(8, 1))
    assert reply.cached == 32
    assert calls.prefills[:2] == [([12], [12], True), ([12], [32], False)]


@pytest.mark.clients("MLA: pages of 8, 24, 48, 64 and 784 tokens")
@pytest.mark.parametrize("block_size", [8, 24, 48, 64, 784])
def test_pages(start: Start, calls: Calls, block_size: int):
    server = start(
        "deepseek_v2", attention_backend=BACKEND, block_size=block_size, max_model_len=1024
    )
    server.check(prompt(60), prompt(7, 1))
    assert calls.page_sizes == {block_size}


@pytest.mark.clients("MLA: fp8 latent caches (e4m3), with a factor")
def test_fp8_caches(start: Start, monkeypatch: pytest.MonkeyPatch):
    """Every step's attention is right for what the cache holds, and vLLM gives the factor."""
    from cute_attn.integrations import vllm_mla_backend as backend

    server = start("deepseek_v3", attention_backend=BACKEND, kv_cache_dtype="fp8")
    for layer in server.layers().values():
        layer._k_scale.fill_(0.25)
    decode, seen = backend.mla_decode, []

    def checked(q: Tensor, q_rope: Tensor, cache: Tensor, **options: Any) -> Any:
        found = decode(q, q_rope, cache, **options)
        args = {"q_nope": q, "q_rope": q_rope, "kv_cache": cache, **options}
        assert args.pop("return_lse") is False  # which the definition always returns
        assert_agrees(args, found[0], None)
        seen.append((cache.dtype, float(options["kv_descale"])))
        return found

    monkeypatch.setattr(backend, "mla_decode", checked)
    server.serve(prompt(40), prompt(9, 1))
    assert len(seen) == 2 * (NEW_TOKENS - 1) and set(seen) == {(torch.float8_e4m3fn, 0.25)}


@pytest.mark.clients("MLA: speculative decoding with a draft model")
@pytest.mark.parametrize(("model", "verified"), [("deepseek_v2", 2), ("deepseek_v3", 6)])
def test_drafts_are_verified(start: Start, calls: Calls, tmp_path: Path, model: str, verified: int):
    """A draft that is the model itself is always right, and another model seldom. Both have latent
    attention."""
    server = start(
        model,
        attention_backend=BACKEND,
        speculative_config={
            "method": "draft_model",
            "model": str(models.make("deepseek_v2", tmp_path / "draft")),
            "num_speculative_tokens": 3,
        },
    )
    server.check(prompt(40), prompt(9, 1))
    # Four queries of a request: the last token and its three drafts, in each of the two layers.
    verifications = [lengths for queries, lengths in calls.decodes if queries == 4]
    assert any(len(lengths) == 2 for lengths in verifications)
    assert len(verifications) // 2 <= verified


@pytest.mark.clients("MLA: the model runner of older releases (`VLLM_USE_V2_MODEL_RUNNER=0`)")
def test_the_older_model_runner(start: Start, calls: Calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    server = start("deepseek_v3", attention_backend=BACKEND, max_num_batched_tokens=32)
    assert type(server.runner).__module__ == "vllm.v1.worker.cpu_model_runner"
    server.check(prompt(9), prompt(50, 1))
    assert calls.decodes and {causal for _, _, causal in calls.prefills} == {True, False}


@pytest.mark.clients("MLA: the metadata of a CUDA graph are right for other batches too")
@pytest.mark.parametrize("queries", [1, 4])
def test_metadata_of_a_graph(start: Start, queries: int):
    """The metadata of a graph of four requests, two of which pad the second batch."""
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

    server = start("deepseek_v2", attention_backend=BACKEND)
    ((group,),) = server.runner.attn_groups
    builder = group.get_metadata_builder()
    builder.reorder_batch_threshold = queries  # as with speculative decoding
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    starts = torch.arange(0, 5 * queries, queries, dtype=torch.int32)
    lengths = torch.tensor([20, 33, 16, 7], dtype=torch.int32)
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]], dtype=torch.int32)
    metadata = builder.build_for_cudagraph_capture(
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=4,
            num_actual_tokens=4 * queries,
            max_query_len=queries,
            max_seq_len=48,
            block_table_tensor=table,
            slot_mapping=torch.full((4 * queries,), -1),
        )
    )
    assert (metadata.num_decodes, metadata.num_prefills) == (4, 0)
    layer = next(iter(server.layers().values()))
    cache = torch.randn_like(layer.kv_cache[:13])
    q_nope = torch.randn(4 * queries, 3, 512).bfloat16()
    q_rope = torch.randn(4 * queries, 3, 192).bfloat16()[..., 128:]
    for step in range(2):
        if step:
            lengths.copy_(torch.tensor([48, 5, 0, 0]))
            table.copy_(table.flip(1))
            table[2:] = 2**30  # not read
        o, _ = layer.impl.forward_mqa((q_nope, q_rope), cache, metadata, layer)
        given = [x.unflatten(0, (4, queries)) for x in (q_nope, q_rope)]
        exact, plain = (
            mla_decode_reference(
                *given,
                cache,
                block_table=table,
                cache_seqlens=lengths,
                softmax_scale=layer.scale,
                dtype=dtype,
            )[0].flatten(0, 1)
            for dtype in (torch.float64, None)
        )
        assert_no_worse(o, [plain], exact)


@pytest.mark.clients("MLA: pages that hold all layers (`VLLM_KV_CACHE_LAYOUT`)")
def test_pages_far_from_each_other(start: Start, calls: Calls, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLNHC")
    server = start("deepseek_v2", attention_backend=BACKEND)
    first, second = server.attention_caches()
    assert first.stride(0) == 2 * 16 * 576 and second.data_ptr() - first.data_ptr() == 2 * 16 * 576
    server.check(prompt(40), prompt(9, 1))


@pytest.mark.clients("MLA: the kernels of the package's spec file are those that vLLM calls")
def test_the_models_kernels_are_in_the_file(start: Start):
    """Prompts with and without a cached prefix, long and short, and decode."""
    models_kernels = Path(cute_attn.__file__).parent / "models" / "vllm.toml"
    planned = {spec for _, spec in plan_file(models_kernels, "sm_90a")}
    found: set[Any] = set()
    function = Emulation.function

    def noted(emulation: Emulation, kernel: Any, spec: Any) -> Any:
        found.add(spec)
        return function(emulation, kernel, spec)

    server = start(
        "deepseek_v3", attention_backend=BACKEND, block_size=64, max_num_batched_tokens=144
    )
    with mock.patch.object(Emulation, "function", noted), cute_attn.emulated("sm_90a"):
        server.check(prompt(140), prompt(9, 1))
        server.check(prompt(150))
    assert len(found) >= 4 and found <= planned


@pytest.mark.clients("Kimi Linear: a model of KDA and MLA layers, all on our kernels")
def test_kimi_linear(start: Start, calls: Calls, monkeypatch: pytest.MonkeyPatch):
    from cute_attn.integrations import vllm_kda

    vllm_emulated.replace_in_linear_layers(monkeypatch)
    vllm_emulated.replace_linear_layer(monkeypatch, vllm_kda)
    server = start("kimi_linear", attention_backend=BACKEND, max_num_batched_tokens=64)
    assert_served_here(server)
    layers = server.runner.compilation_config.static_forward_context.values()
    (linear,) = (layer for layer in layers if not hasattr(layer, "impl"))
    assert isinstance(linear, vllm_kda.CuteKimiDeltaAttention) and linear.why_not is None
    server.check(prompt(70), prompt(3, 1), prompt(20, 2))
    assert {causal for _, _, causal in calls.prefills} == {True, False}
    assert calls.decodes


@pytest.mark.clients("MLA: what has no kernel is refused by name")
@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("deepseek_v3", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ("llama", {}, "non-MLA not supported"),
        ("deepseek_v3", {"change": {"kv_lora_rank": 128}}, "head_size not supported"),
        (
            "deepseek_v3",
            {"change": {"qk_nope_head_dim": 96}},
            r"no prefill with head_dim 160 \(of v: 128\).*mla_prefill_backend",
        ),
    ],
    ids=["fp8_e5m2", "no MLA", "latent vector", "prefill"],
)
def test_what_has_no_kernel_is_refused(
    start: Start, model: str, options: dict[str, Any], reason: str
):
    with pytest.raises(Exception, match=reason):
        start(model, **{"attention_backend": BACKEND, **options})


@pytest.mark.clients("MLA: what has no kernel is refused by name")
def test_more_drafts_than_queries_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch):
    from cute_attn.integrations.vllm_mla_backend import CuteAttnMLAMetadataBuilder

    # As vLLM sets it for 16 draft tokens.
    monkeypatch.setattr(CuteAttnMLAMetadataBuilder, "reorder_batch_threshold", 17)
    with pytest.raises(
        NotImplementedError, match=r"at most 15 draft tokens of a request, got .* 16"
    ):
        start("deepseek_v2", attention_backend=BACKEND)


@pytest.mark.clients("MLA: what has no kernel is refused by name")
def test_options_that_are_refused(vllm: Any):
    from vllm.platforms.interface import DeviceCapability

    from cute_attn.integrations.vllm_mla_backend import CuteAttnMLABackend

    given = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    for change, reason in (
        ({}, None),
        ({"use_sparse": True}, "sparse not supported"),  # DeepSeek V3.2
        ({"use_dcp": True}, None),
        ({"use_pcp": True}, "PCP not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"device_capability": DeviceCapability(10, 0)}, "compute capability not supported"),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"block_size": 8}, None),
        ({"kv_cache_dtype": "float16"}, "a latent cache of float16 beside a model of"),
    ):
        found = CuteAttnMLABackend.validate_configuration(**given | change)
        assert (not found) if reason is None else (reason in found[0] and len(found) == 1), found
