"""Decode context parallelism of vLLM's backend, with a stand-in of vLLM whose ranks are threads."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn.emulation import current_emulation
from cute_attn.emulator import Emulator
from cute_attn.integrations import vllm as integration
from cute_attn.reference.mla import mla_decode_reference
from tests.integrations.test_vllm import GOOD, LAYERS, assert_agrees
from tests.integrations.vllm_stand_in import Runner, ThreadGroup, installed
from tests.ops.attention_stand_ins import stand_ins

HEADS, DIM = 4, 64  # of a rank


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    registry = installed(monkeypatch)
    integration.register()
    return registry.AttentionBackendEnum.CUSTOM.get_class()


# Prompts, a later piece of a prompt beside decode and a first piece, decode, and a padded batch.
STEPS: tuple[tuple[dict[int, int], dict[str, int]], ...] = (
    ({0: 33, 1: 1}, {}),
    ({0: 40, 1: 1, 2: 17}, {}),
    ({2: 1, 0: 1, 1: 1}, {}),
    ({1: 1, 0: 1, 2: 1}, {"pad_rows": 2, "pad_requests": 2}),
)


def serve(
    backend: Any, group: ThreadGroup, interleave: int, steps: Any = STEPS, **layer: Any
) -> list[Runner]:
    """Run steps on all ranks, and compare each rank's heads with attention over all tokens."""
    world, heads_k = group.world_size, 2
    sinks = layer.pop("sinks", None)

    def make(rank: int) -> Runner:
        own = {} if sinks is None else {"sinks": sinks + rank}
        return Runner(
            backend, heads=HEADS, heads_k=heads_k, head_size=DIM, interleave=interleave,
            **own, **layer,
        )  # fmt: skip

    runners: list[Runner] = group.run(make)
    draw = torch.Generator().manual_seed(1)
    for queries, padding in steps:
        rows = sum(queries.values()) + padding.get("pad_rows", 0)
        q, k, v = (
            torch.randn(rows, n, DIM, generator=draw).to(torch.bfloat16)
            for n in (world * HEADS, heads_k, heads_k)
        )
        step = Step(runners, queries, padding, q, k, v)
        for rank, output in enumerate(group.run(step)):
            own = q.chunk(world, 1)[rank][: sum(queries.values())]
            parts = list(own.split(list(queries.values())))
            assert_agrees(runners[rank], parts, output, queries)
    return runners


class Step:
    """A step of all ranks, with the emulator of this thread. `q` has the heads of all ranks."""

    def __init__(
        self, runners: list[Runner], queries: dict[int, int], padding: dict[str, int], *qkv: Tensor
    ) -> None:
        self.runners, self.queries, self.padding = runners, queries, padding
        self.q, self.k, self.v = qkv
        self.emulation = current_emulation()

    def __call__(self, rank: int) -> Tensor:
        """The output of a rank's heads."""
        assert self.emulation is not None
        runner = self.runners[rank]
        q = self.q.chunk(len(self.runners), 1)[rank].contiguous()
        pads = (self.padding.get(name, 0) for name in ("pad_rows", "pad_requests"))
        common = runner.metadata(self.queries, self.k, self.v, *pads)
        metadata = runner.builder.build(0, common)
        output = torch.full_like(q, torch.nan)
        with cute_attn.emulated(self.emulation.arch, self.emulation.emulator):
            runner.forward(metadata, q, self.k, self.v, output)
        return output


@pytest.mark.parametrize(
    ("world", "interleave", "layer"),
    [
        pytest.param(2, 1, "grouped heads", marks=pytest.mark.slow),
        (3, 16, "sinks"),
        pytest.param(2, 4, "softcap", marks=pytest.mark.slow),
    ],
)
def test_steps_over_ranks_agree_with_attention_over_each_requests_tokens(
    backend: Any, world: int, interleave: int, layer: str
) -> None:
    with stand_ins() as found, cute_attn.emulated("sm_90a", Emulator(num_sms=132)):
        runners = serve(backend, ThreadGroup(world), interleave, **LAYERS[layer])
    # In the first step no request has earlier tokens: no rank reads the cache.
    assert found.names == ["sm90_forward"] * world * (2 * len(STEPS) - 1)
    kept = [(~x.kv_cache[1:].isnan().any(-1)).sum() for x in runners]
    everything = 2 * sum(len(x) for x in runners[0].keys)
    assert sum(kept) == everything and max(kept) < everything  # each token on one rank


@pytest.mark.slow
@pytest.mark.parametrize("interleave", [1, 16])
def test_the_kernels_serve_over_ranks(backend: Any, interleave: int) -> None:
    emulator = Emulator(schedule="random", seed=0)
    with cute_attn.emulated("sm_90a", emulator):
        serve(backend, ThreadGroup(2), interleave, STEPS[1:])
    assert not [x for x in emulator.report.findings if x.severity == "error"], emulator.report


def test_a_step_over_ranks_is_launched_from_shapes_alone(backend: Any) -> None:
    """The number of earlier tokens is in memory that stays, as a CUDA graph needs."""

    def metadata(rank: int) -> list[Any]:
        runner = Runner(backend, heads=4, heads_k=2, head_size=DIM)
        assert not runner.builder.supports_draft_decode_metadata_update
        k = runner.randn(7, 2, DIM)
        steps = ({0: 4, 1: 3}, {0: 1, 1: 1}, {1: 1, 0: 1})
        found = [runner.builder.build(0, runner.metadata(x, k, k, 0, 0)) for x in steps]
        assert [x.most_earlier for x in found] == [0, 3, 3]
        return [x.earlier for x in found]

    first, second = ThreadGroup(2).run(metadata)
    assert len({x.data_ptr() for x in first}) == 1
    assert (first[-1] + second[-1]).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 20}, "sliding windows"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of dtype fp8"),
        ({"kv_sharing_target_layer_name": "layers.3"}, "layers that share a KV cache"),
    ],
    ids=str,
)
def test_layers_that_are_refused_over_ranks(
    backend: Any, change: dict[str, Any], message: str
) -> None:
    def make(_: int) -> None:
        with pytest.raises(NotImplementedError, match=f"parallelism with {message}"):
            backend.get_impl_cls()(**GOOD | change)

    backend.get_impl_cls()(**GOOD | change)  # on one rank there is a kernel
    ThreadGroup(2).run(make)


# -- latent attention

MLA_BASES = {
    "vllm.config": ("get_current_vllm_config",),
    "vllm.model_executor.layers.attention.mla_attention": (
        "MLACommonBackend",
        "MLACommonImpl",
        "MLACommonMetadata",
        "MLACommonMetadataBuilder",
        "QueryLenSupport",
    ),
    "vllm.v1.attention.backends.mla.prefill.base": ("MLAPrefillBackend",),
}


@pytest.fixture
def mla_impl(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of latent attention, whose base classes have nothing."""
    for name, members in MLA_BASES.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (), {"UNIFORM": None}))
        monkeypatch.setitem(sys.modules, name, module)
    name = "cute_attn.integrations.vllm_mla_backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).CuteAttnMLAImpl
    del sys.modules[name]


def decode_over_ranks(
    cls: Any, combine: Any, world: int, interleave: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A step of decode of latent attention: (ours over ranks, one rank's reference, float64).

    Args:
        cls: the class of latent attention.
        combine: combines o `[ranks, tokens, heads, dim]` and lse `[ranks, tokens, heads]`.
    """
    draw = torch.Generator().manual_seed(0)
    latent, rope, page, heads, scale = 512, 64, 16, 4, 0.1
    lengths = [37, 1, 20]  # rank 1 has no token of the second request
    q = torch.randn(len(lengths), heads, latent + rope, generator=draw).to(torch.bfloat16)
    rows = [torch.randn(n, latent + rope, generator=draw).to(torch.bfloat16) for n in lengths]

    def cache_of(own: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        pages = torch.full((16, page, latent + rope), torch.nan, dtype=torch.bfloat16)
        pages[0] = 0
        table, free = torch.zeros(len(own), 4, dtype=torch.int32), 1
        for request, x in enumerate(own):
            for block, part in enumerate(x.split(page)):
                pages[free, : len(part)] = part
                table[request, block] = free
                free += 1
        return pages, table, torch.tensor([len(x) for x in own], dtype=torch.int32)

    parts = []
    for rank in range(world):
        own = [x[(torch.arange(len(x)) // interleave) % world == rank] for x in rows]
        pages, table, used = cache_of(own)
        impl = object.__new__(cls)
        impl.kv_lora_rank, impl.qk_rope_head_dim, impl.scale = latent, rope, scale
        impl.need_to_return_lse_for_decode, impl.kv_cache_dtype = True, "auto"
        decode = SimpleNamespace(block_table=table, seq_lens=used)
        step = SimpleNamespace(num_decodes=len(own), decode=decode)
        parts.append(impl.forward_mqa(q, pages, step, None))
        impl.need_to_return_lse_for_decode = False
        assert impl.forward_mqa(q, pages, step, None)[1] is None
    o, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    assert lse.shape == (world, len(lengths), heads)
    pages, table, used = cache_of(rows)
    given = q[:, None, :, :latent], q[:, None, :, latent:], pages
    options = {"block_table": table, "cache_seqlens": used, "softmax_scale": scale}
    exact = mla_decode_reference(*given, **options)[0].flatten(0, 1)
    return combine(o, lse), exact.to(torch.bfloat16), exact


def combined(o: Tensor, lse: Tensor) -> Tensor:
    return (o.double() * lse.double().softmax(0)[..., None]).sum(0)


@pytest.mark.parametrize("interleave", [1, 16])
def test_latent_attention_returns_what_ranks_combine(
    mla_impl: Any, interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reference(*given: Any, causal: bool, head_dim_v: int, return_lse: bool, **more: Any) -> Any:
        o, lse = mla_decode_reference(*given, **more)
        return o.to(torch.bfloat16), lse.float() if return_lse else None

    monkeypatch.setattr(sys.modules[mla_impl.__module__], "mla_decode", reference)
    found, one, exact = decode_over_ranks(mla_impl, combined, 2, interleave)
    assert (found - exact).norm() <= 2 * (one.double() - exact).norm()


@pytest.mark.slow
def test_the_kernel_of_latent_attention_over_ranks(mla_impl: Any) -> None:
    emulator = Emulator(schedule="random", seed=0, num_sms=4)
    with cute_attn.emulated("sm_90a", emulator):
        found, one, exact = decode_over_ranks(mla_impl, combined, 2, 1)
    assert not [x for x in emulator.report.findings if x.severity == "error"], emulator.report
    assert (found - exact).norm() <= 2 * (one.double() - exact).norm()
