"""vLLM's attention backend, with a stand-in of vLLM: `vllm_stand_in` says what it is."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn.cache.specfile import plan_file
from cute_attn.emulator import Emulator
from cute_attn.integrations import vllm as integration
from cute_attn.ops.attention import plan_attention
from cute_attn.reference.attention import attention_in_low_precision, attention_reference
from tests.integrations import vllm_stand_in
from tests.integrations.vllm_stand_in import (
    AMPERE,
    BASES,
    BLACKWELL,
    HOPPER,
    AttentionCGSupport,
    AttentionType,
    Runner,
    assert_takes,
    installed,
)
from tests.ops.attention_cases import assert_no_worse
from tests.ops.attention_stand_ins import StandIns, stand_ins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    return installed(monkeypatch)


@pytest.fixture
def backend(registry: Any) -> Any:
    integration.register()
    return registry.AttentionBackendEnum.CUSTOM.get_class()


@pytest.fixture
def launched() -> Iterator[StandIns]:
    """Launches of kernels for which a float64 reference stands in."""
    with stand_ins() as found, cute_attn.emulated("sm_90a", Emulator(num_sms=132)):
        yield found


# -- the plugin


@pytest.mark.parametrize("names", [True, False], ids=["own name", "CUSTOM only"])
def test_the_entry_point_registers_the_backend(monkeypatch: pytest.MonkeyPatch, names: bool):
    registry = installed(monkeypatch, takes_names=names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (path,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = path.partition(":")
    register = getattr(importlib.import_module(module), name)
    for _ in range(2):  # once in each of vLLM's processes, and some load plugins again
        register()
    members = registry.AttentionBackendEnum
    classes = {members[name].get_class() for name in ("CUSTOM", *(["CUTE_ATTN"] if names else []))}
    (cls,) = classes
    assert members[cls.get_name()].get_class() is cls  # as vLLM's attention layer looks it up
    assert cls.get_impl_cls().__module__ == "cute_attn.integrations.vllm_backend"


def test_another_plugins_backend_stays(registry: Any, caplog: pytest.LogCaptureFixture):
    members = registry.AttentionBackendEnum
    registry.register_backend(members.CUSTOM, "other.Backend")
    integration.register()
    assert members.CUSTOM.get_path() == "other.Backend"
    assert "other.Backend already: cute_attn leaves it and is CUTE_ATTN only" in caplog.text
    assert members["CUTE_ATTN"].get_class().get_name() == "CUTE_ATTN"


def test_a_process_that_unpickles_the_backend_has_registered_it(registry: Any):
    """As a process that vLLM spawns, which gets the configuration before it loads plugins."""
    integration.register()
    value = pickle.dumps(registry.AttentionBackendEnum["CUTE_ATTN"].value)
    members = registry.AttentionBackendEnum
    del members._member_map_["CUTE_ATTN"], members._value2member_map_[integration.BACKEND]
    assert members(pickle.loads(value)) is members["CUTE_ATTN"]


def test_methods_take_what_vllm_gives(backend: Any):
    assert assert_takes(backend, BASES) > 20


# -- what the backend says of itself


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_size": 64},
        {"head_size": 256, "dtype": torch.float16, "block_size": 544, "has_sink": True},
        {"head_size": 256, "device_capability": BLACKWELL, "kv_cache_dtype": "bfloat16"},
        {"block_size": None, "kv_cache_dtype": None},
        {"kv_cache_dtype": "fp8_e5m2", "dtype": torch.float16},
        {"use_dcp": True},
    ],
    ids=str,
)
def test_what_vllm_may_choose_it_for(backend: Any, change: dict[str, Any]):
    assert backend.validate_configuration(**change) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 96}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_inc"}, "kv_cache_dtype not supported"),
        (
            {"kv_cache_dtype": "fp8", "head_size": 256, "device_capability": BLACKWELL},
            "a KV cache of fp8 has no kernel on this GPU",
        ),
        (
            {"kv_cache_dtype": "fp8", "head_size": 512},
            "a KV cache of fp8 has no kernel for head_size 512, there are: (64, 128, 256)",
        ),
        ({"kv_cache_dtype": "float16"}, "a KV cache of float16 beside a model of torch.bfloat16"),
        (
            {"kv_cache_dtype": "bfloat16", "dtype": torch.float16},
            "a KV cache of bfloat16 beside a model of torch.float16",
        ),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"device_capability": AMPERE}, "compute capability not supported"),
        (
            {"attn_type": AttentionType.ENCODER_ONLY},
            f"attention type {AttentionType.ENCODER_ONLY} ",
        ),
        ({"device_capability": BLACKWELL}, "head_size 128 has no kernel on this GPU, there are"),
    ],
    ids=str,
)
def test_what_vllm_is_told_not_to(backend: Any, change: dict[str, Any], reason: str):
    found = backend.validate_configuration(**change)
    assert any(x.startswith(reason) for x in found), found


def test_the_head_sizes_are_those_with_a_kernel(backend: Any):
    from cute_attn.kernels.attention import table

    for capability, arch in ((HOPPER, "sm_90a"), (BLACKWELL, "sm_100a")):
        for head_size in backend.get_supported_head_sizes():
            fits = not backend.validate_configuration(
                head_size=head_size, device_capability=capability
            )
            assert fits == table.has("forward", arch, head_size)


GOOD = {"num_heads": 4, "head_size": 128, "scale": 0.1, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_size": 80}, NotImplementedError, r"head_size 80, there are: \[64, 128, 256, 512\]"),
        (
            {"head_size": 512, "kv_cache_dtype": "fp8"},
            NotImplementedError,
            "a KV cache of fp8 has no kernel for head_size 512",
        ),
        ({"alibi_slopes": [0.5] * 4}, NotImplementedError, "no ALiBi"),
        ({"kv_cache_dtype": "fp8_inc"}, NotImplementedError, "KV cache of dtype 'fp8_inc'"),
        ({"attn_type": AttentionType.ENCODER}, NotImplementedError, "attention of type"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks has 3 heads, must have 4"),
    ],
    ids=str,
)
def test_layers_without_a_kernel_are_refused(
    backend: Any, change: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        backend.get_impl_cls()(**GOOD | change)


def test_calls_that_have_no_kernel_are_refused(backend: Any, launched: StandIns):
    impl = backend.get_impl_cls()(**GOOD)
    x, cache = torch.zeros(3, 4, 128), torch.zeros(4, 2, 16, 256)
    for given, error, message in (
        ({"output": None}, ValueError, "output is None"),
        ({"output": x, "output_scale": x}, NotImplementedError, "no quantised output"),
    ):
        with pytest.raises(error, match=message):
            impl.forward(None, x, x, x, cache, None, **given)
    for wrong in (torch.zeros(2, 4, 16, 2, 128), torch.zeros(4, 2, 16, 128)):
        with pytest.raises(
            ValueError, match=r"kv_cache has shape .* must be \[num_blocks, 2, block"
        ):
            impl.do_kv_cache_update(None, x, x, wrong, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="block_size is 24, must be a multiple of 16"):
        backend.get_kv_cache_shape(4, 24, 2, 128)
    runner = Runner(backend, heads=4, heads_k=2, head_size=128)
    common = runner.metadata({0: 2}, *[runner.randn(2, 2, 128)] * 2, 0, 0)
    common.causal = torch.tensor([True])
    with pytest.raises(NotImplementedError, match="causal for some requests"):
        runner.builder.build(0, common)
    common.causal, common.rswa_prefix_lens = True, torch.tensor([1])
    with pytest.raises(NotImplementedError, match="no R-SWA"):
        runner.builder.build(0, common)
    assert not launched.names


def test_a_profiling_run_has_no_metadata(backend: Any, launched: StandIns):
    impl = backend.get_impl_cls()(**GOOD)
    output = torch.full((3, 4, 128), torch.nan)
    assert impl.forward(None, *[output] * 3, torch.zeros(0), None, output=output) is output
    assert not output.any() and not launched.names


# -- steps


def assert_agrees(runner: Runner, queries: list[Tensor], output: Tensor, requests: Any) -> None:
    """With attention of each request over its own tokens alone."""
    impl, exact_rows, plain_rows = runner.impl, [], []
    for q, request in zip(queries, requests, strict=True):
        given = [x[None].cpu() for x in (q, runner.keys[request], runner.values[request])]
        options = {
            "softmax_scale": impl.scale,
            "causal": True,
            "window_size": (impl.left, None),
            "softcap": impl.softcap,
            "learnable_sink": None if impl.sinks is None else impl.sinks.cpu(),
        }
        exact_rows.append(attention_reference(*given, **options)[0][0])
        plain_rows.append(attention_in_low_precision(*given, **options)[0][0])
    exact, plain = torch.cat(exact_rows), torch.cat(plain_rows)
    # Of all rows: the largest error of a single one of them is a matter of luck.
    ours = output[: len(exact)].cpu()
    assert_no_worse(ours, plain, exact, torch.finfo(ours.dtype).eps / 2)


LAYERS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "sliding window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])},
}


def serve(runner: Runner) -> None:
    """Prefill, chunked prefill, decode, all of them in one step, and a padded batch."""
    for step, padding in (
        ({0: 33, 1: 1}, {}),
        ({0: 40, 1: 1, 2: 17}, {}),  # a later piece of a prompt, a decode and a first piece
        ({2: 1, 0: 1, 1: 1}, {}),
        ({1: 1, 0: 1, 2: 1}, {"pad_rows": 5, "pad_requests": 5}),
        ({1: 60, 2: 3}, {"pad_rows": 1, "pad_requests": 1}),
    ):
        queries, output = runner.step(step, **padding)
        assert_agrees(runner, queries, output, step)


@pytest.mark.parametrize(
    "layer",
    [
        "sliding window",
        *(pytest.param(x, marks=pytest.mark.slow) for x in LAYERS if x != "sliding window"),
    ],
)
def test_steps_agree_with_attention_over_each_requests_tokens(
    backend: Any, launched: StandIns, layer: str
):
    serve(Runner(backend, heads=4, heads_k=2, head_size=128, **LAYERS[layer]))
    assert launched.names == ["sm90_forward"] * 5
    plan = plan_attention(
        "sm_90a",
        head_dim=128,
        heads=4,
        heads_k=2,
        causal=True,
        window_left=layer == "sliding window",
        softcap=layer == "softcap",
        sink="float32" if layer == "sinks" else None,
        varlen_q=True,
        seqused_k=True,
        page_size=16,
        num_splits=0,
    )
    assert {spec for _, spec, _ in launched.launched} <= {spec for _, spec in plan}


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_an_fp8_cache(backend: Any, launched: StandIns, name: str):
    """The cache holds keys and values divided by the layer's scales, rounded."""
    runner = Runner(backend, heads=4, heads_k=2, head_size=128, kv_cache_dtype=name)
    fp8, layer = runner.impl.fp8, runner.layer

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).to(fp8).to(x.dtype) * scale  # exact, since the scale is a power of 2

    for step in ({0: 33, 1: 1}, {0: 40, 1: 1, 2: 17}, {2: 1, 0: 1, 1: 1}):
        queries, output = runner.step(step)
        kept = runner.keys, runner.values
        runner.keys = [rounded(x, layer._k_scale) for x in runner.keys]
        runner.values = [rounded(x, layer._v_scale) for x in runner.values]
        assert_agrees(runner, queries, output, step)
        runner.keys, runner.values = kept
    assert launched.names == ["sm90_forward"] * 3
    assert {spec.fp8 for _, spec, _ in launched.launched} == {str(fp8).removeprefix("torch.")}


LAYOUTS = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3)}  # blocks, heads, tokens, content in memory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_has_the_layout_that_vllm_asks_for(
    backend: Any, launched: StandIns, monkeypatch: pytest.MonkeyPatch, layout: str
):
    """`VLLM_KV_CACHE_LAYOUT`, or what a KV connector takes the cache for."""
    utils = sys.modules["vllm.v1.attention.backends.utils"]
    monkeypatch.setattr(utils, "get_kv_cache_layout", lambda: layout)
    assert backend.get_kv_cache_stride_order() == LAYOUTS[layout]
    serve(Runner(backend, heads=4, heads_k=2, head_size=128))


# Of vLLM's main: the order in memory of layers, blocks, heads, tokens and content.
MEMORY = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORY)
def test_the_kernels_read_a_cache_in_any_order(backend: Any, memory: str):
    emulator = Emulator(schedule="random", seed=0)
    with cute_attn.emulated("sm_90a", emulator):
        serve(Runner(backend, heads=4, heads_k=2, head_size=64, memory=MEMORY[memory]))
    assert not [x for x in emulator.report.findings if x.severity == "error"], emulator.report


def test_keys_and_values_go_to_their_slots_and_padding_nowhere(backend: Any):
    runner = Runner(backend, heads=2, heads_k=2, head_size=64, block_size=32)
    before = runner.kv_cache.clone()
    k, v = runner.randn(5, 2, 64), runner.randn(5, 2, 64)
    slots = torch.tensor([37, -1, 33, 95])  # fewer than rows, as vLLM's may be
    runner.impl.do_kv_cache_update(runner.layer, k, v, runner.kv_cache, slots)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before[slot // 32, :, slot % 32] = torch.cat([k[row], v[row]], dim=-1)
    torch.testing.assert_close(runner.kv_cache, before, rtol=0, atol=0, equal_nan=True)


def test_a_layer_that_shares_its_cache_does_not_write(backend: Any):
    impl = backend.get_impl_cls()(**GOOD, kv_sharing_target_layer_name="layers.3")
    cache = torch.zeros(2, 2, 16, 256)
    impl.do_kv_cache_update(
        None, *[torch.ones(1, 2, 128)] * 2, cache, torch.zeros(1, dtype=torch.int64)
    )
    assert not cache.any()


def test_a_step_is_launched_from_shapes_alone(backend: Any, launched: StandIns):
    """What a CUDA graph needs: nothing but tensors that it reads differs between two steps of the
    same batch, in which requests have other lengths and blocks."""
    runner = Runner(backend, heads=4, heads_k=2, head_size=128, most_blocks=64)
    builder = runner.builder
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS
    runner.step({0: 100, 1: 3, 2: 50})
    seen = []
    for step in ({0: 1, 1: 1, 2: 1}, {2: 1, 1: 1, 0: 1}):
        launched.launched.clear()
        k, v = (runner.randn(3, 2, 128) for _ in range(2))
        common = runner.metadata(step, k, v, 0, 0)
        common.max_seq_len = runner.most_blocks * runner.block_size  # as vLLM captures
        metadata = builder.build_for_cudagraph_capture(common)
        q, output = runner.randn(3, 4, 128), torch.empty(3, 4, 128, dtype=torch.bfloat16)
        runner.forward(metadata, q, k, v, output)
        assert_agrees(runner, list(q.split(1)), output, step)
        seen.append(
            [
                (name, spec, [x.shape if isinstance(x, Tensor) else x for x in args])
                for name, spec, args in launched.launched
            ]
        )
    assert seen[0] == seen[1]
    assert [(name, spec.scheduler) for name, spec, _ in seen[0]] == [("sm90_forward", "pieces")]


def test_steps_with_batch_invariance(
    backend: Any, launched: StandIns, monkeypatch: pytest.MonkeyPatch
):
    """Neither prefill nor decode splits keys."""
    assert backend.supports_batch_invariance()
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    runner = Runner(backend, heads=4, heads_k=2, head_size=128)
    for step in ({0: 100, 1: 3}, {0: 1, 1: 1}, {1: 70, 0: 1}):
        queries, output = runner.step(step)
        assert_agrees(runner, queries, output, step)
    specs = [spec for _, spec, _ in launched.launched]
    assert len(specs) == 3
    assert {(spec.batch_invariant, spec.split, spec.scheduler) for spec in specs} == {
        (True, False, "counter")
    }


@pytest.mark.parametrize("names", [True, False], ids=["in envs", "a function"])
def test_older_releases_say_by_a_function_whether_they_are_batch_invariant(
    backend: Any, monkeypatch: pytest.MonkeyPatch, names: bool
):
    found = sys.modules[backend.__module__].is_batch_invariant
    assert not found()
    if names:
        monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    else:
        monkeypatch.delattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT")
        assert not found()  # a release without either
        path = "vllm.model_executor.layers.batch_invariant"
        for name in ("vllm.model_executor", "vllm.model_executor.layers", path):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(vllm_is_batch_invariant=lambda: True)
    assert found()


@pytest.mark.parametrize(
    ("heads", "heads_k", "head_size", "window", "block_size"),
    [
        (4, 1, 256, 512, 16),
        pytest.param(16, 8, 256, None, 48, marks=pytest.mark.slow),
        (32, 16, 128, 1024, 16),
        pytest.param(32, 16, 128, None, 16, marks=pytest.mark.slow),
        pytest.param(16, 2, 256, None, 544, marks=pytest.mark.slow),
        pytest.param(16, 2, 256, None, 576, marks=pytest.mark.slow),
    ],
    ids=[
        "Gemma 3 1B", "Gemma 3 12B", "Gemma 3 27B, sliding", "Gemma 3 27B, global", "Qwen3-Next",
        "Qwen3-Next in blocks of 64",
    ],
)  # fmt: skip
def test_the_models_kernels_are_in_the_file(
    backend: Any, launched: StandIns, heads: int, heads_k: int, head_size: int, window: Any,
    block_size: int,
):  # fmt: skip
    planned = plan_file(Path(cute_attn.__file__).parent / "models" / "vllm.toml", "sm_90a")
    runner = Runner(
        backend, heads=heads, heads_k=heads_k, head_size=head_size, block_size=block_size,
        num_blocks=12, sliding_window=window,
    )  # fmt: skip
    runner.most_blocks = 4096 // block_size
    for step in ({0: 140}, {0: 1}):
        k, v = (runner.randn(sum(step.values()), heads_k, head_size) for _ in range(2))
        common = runner.metadata(step, k, v, 0, 0)
        common.max_seq_len = runner.most_blocks * block_size
        q = runner.randn(sum(step.values()), heads, head_size)
        runner.forward(runner.builder.build(0, common), q, k, v, torch.empty_like(q))
    specs = {spec for _, spec, _ in launched.launched}
    assert len(specs) >= 3 and specs <= {spec for _, spec in planned}


def test_lengths_may_be_numpys(backend: Any, launched: StandIns):
    """As those of vLLM's chunked local attention (Llama 4) are."""
    runner = Runner(backend, heads=4, heads_k=2, head_size=128)
    k, v, q = runner.randn(20, 2, 128), runner.randn(20, 2, 128), runner.randn(20, 4, 128)
    common = runner.metadata({0: 20}, k, v, 0, 0)
    common.max_query_len = np.int32(common.max_query_len)
    common.max_seq_len = np.int64(common.max_seq_len)
    output = torch.empty_like(q)
    runner.forward(runner.builder.build(0, common), q, k, v, output)
    assert_agrees(runner, [q], output, [0])


def test_a_block_table_may_be_replaced(backend: Any):
    runner = Runner(backend, heads=4, heads_k=2, head_size=128)
    common = runner.metadata({0: 2}, *[runner.randn(2, 2, 128)] * 2, 0, 0)
    metadata = runner.builder.build(0, common)
    table, slots = torch.ones(1, 12, dtype=torch.int32), torch.tensor([5, 6])
    again = runner.builder.update_block_table(metadata, table, slots)
    assert again.block_table is table and again.slot_mapping is slots
    assert metadata.block_table is common.block_table_tensor
    assert again.seq_lens is metadata.seq_lens and runner.builder.supports_update_block_table


def test_a_drafts_metadata_refers_to_vllms_tensors(backend: Any):
    """So that a graph of a draft's steps needs no new metadata between its steps."""
    runner = Runner(backend, heads=4, heads_k=2, head_size=128)
    common = runner.metadata({0: 1}, *[runner.randn(1, 2, 128)] * 2, 0, 0)
    assert runner.builder.supports_draft_decode_metadata_update
    metadata = runner.builder.build_for_drafting(common, draft_index=1)
    runner.builder.update_draft_decode_metadata(metadata)
    assert metadata.seq_lens is common.seq_lens and metadata.slot_mapping is common.slot_mapping
    assert metadata.query_start_loc is common.query_start_loc
    assert metadata.block_table is common.block_table_tensor


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_size"), [("sm_90a", 64), ("sm_90a", 256), ("sm_100a", 256)])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_kernels_serve_too(backend: Any, arch: str, head_size: int, layer: str):
    emulator = Emulator(schedule="random", seed=0)
    with cute_attn.emulated(arch, emulator):
        serve(Runner(backend, heads=4, heads_k=2, head_size=head_size, **LAYERS[layer]))
    assert not [x for x in emulator.report.findings if x.severity == "error"], emulator.report


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("layer", LAYERS)
def test_on_a_gpu_with_a_graph(backend: Any, head_size: int, layer: str):
    """A captured decode step serves other lengths."""
    options = {k: x.cuda() if isinstance(x, Tensor) else x for k, x in LAYERS[layer].items()}
    capability = vllm_stand_in.DeviceCapability(*torch.cuda.get_device_capability())
    if backend.validate_configuration(head_size=head_size, device_capability=capability):
        pytest.skip("there is no kernel for this GPU")
    runner = Runner(backend, heads=4, heads_k=2, head_size=head_size, device="cuda", **options)
    serve(runner)
    k, v, q = (
        runner.randn(3, 2, head_size),
        runner.randn(3, 2, head_size),
        runner.randn(3, 4, head_size),
    )
    metadata = runner.builder.build_for_cudagraph_capture(
        runner.metadata({0: 1, 1: 1, 2: 1}, k, v, 0, 0)
    )
    output = torch.empty_like(q)
    runner.forward(metadata, q, k, v, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.forward(metadata, q, k, v, output)
    for _ in range(3):
        for x in (q, k, v):
            x.copy_(runner.randn(*x.shape))
        common = runner.metadata({0: 1, 1: 1, 2: 1}, k, v, 0, 0)
        for buffer, x in (
            (metadata.seq_lens, common.seq_lens),
            (metadata.block_table, common.block_table_tensor),
            (metadata.slot_mapping, common.slot_mapping),
        ):
            buffer.copy_(x)
        graph.replay()
        assert_agrees(runner, list(q.split(1)), output, range(3))
