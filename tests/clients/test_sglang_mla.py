"""Latent attention (MLA) in SGLang's real scheduler and model runner, emulated for an H100.

Tests serve prompts with tiny models of DeepSeek and compare logits with those of transformers'
eager attention. SGLang's pools hold NaN wherever the model runner has not written.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.mla_cases import assert_agrees

from . import test_sglang, test_sglang_delta_rule
from .models import prompt
from .test_sglang import CHAINS, Start

sglang, start = test_sglang.sglang, test_sglang.start  # fixtures
replaced = test_sglang_delta_rule.replaced


@pytest.fixture
def calls(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The calls of our operators: ("decode", the number of queries) and ("prefill", the lengths of
    keys, whether causal)."""
    from cute_attn.integrations import sglang_mla_backend as backend

    found: list[tuple[str, Any]] = []
    decode, prefill = backend.mla_decode, backend.flash_attn_varlen_func

    def decoded(q_nope: Tensor, *rest: Any, **options: Any) -> Any:
        found.append(("decode", q_nope.shape[1]))
        return decode(q_nope, *rest, **options)

    def prefilled(*qkv: Tensor, **options: Any) -> Any:
        lengths = options["cu_seqlens_k"].diff().tolist()
        found.append(("prefill", (lengths, options["causal"])))
        return prefill(*qkv, **options)

    monkeypatch.setattr(backend, "mla_decode", decoded)
    monkeypatch.setattr(backend, "flash_attn_varlen_func", prefilled)
    return found


@pytest.mark.clients("MLA: prefill and decode, DeepSeek V2 and V3, bfloat16 and float16")
@pytest.mark.parametrize(
    ("model", "dtype", "page_size"),
    [("deepseek_v2", torch.bfloat16, 64), ("deepseek_v3", torch.float16, 32)],
)
def test_deepseek(start: Start, calls: list[Any], model: str, dtype: torch.dtype, page_size: int):
    served = start(model, dtype, page_size=page_size)
    assert type(served.server.backend).__name__ == "CuteAttnMLABackend"
    for seed, length in enumerate((70, 3, 16)):
        served.server.send(prompt(length, seed), 8)
    served.server.run()
    assert served.server.modes == ["EXTEND"] + ["DECODE"] * 7
    assert calls == [("prefill", ([70, 3, 16], True))] * 2 + [("decode", 1)] * 14
    served.check()


@pytest.mark.clients("MLA: chunked prefill, whose parts are merged by lse; mixed batches")
@pytest.mark.parametrize("capacity", [None, 64], ids=["one part", "several parts"])
def test_chunked_prefill(
    start: Start, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capacity: int | None
):
    if capacity is not None:
        monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", str(capacity))
    served = start("deepseek_v3", chunked_prefill_size=48, enable_mixed_chunk=True)
    server = served.server
    server.send(prompt(7), 12)
    while server.modes.count("DECODE") < 2:
        server.step()
    server.send(prompt(150, 1), 4)
    server.run()
    assert "MIXED" in server.modes
    prefixes = [
        lengths for kind, (lengths, causal) in (x for x in calls if x[0] == "prefill") if not causal
    ]
    assert prefixes and (max(map(sum, prefixes)) > 64) == (capacity is None)
    served.check()


@pytest.mark.clients("MLA: prefixes of the radix cache; NaN in unused slots")
def test_radix_prefixes(start: Start, calls: list[Any]):
    served = start("deepseek_v3")
    server = served.server
    server.fill(torch.nan, first_slot=0)
    server.send(prompt(60), 4)
    server.run()
    server.rows.clear()
    shared = server.send(prompt(60)[:50] + prompt(20, 1), 4)
    again = server.send(prompt(60), 4)
    server.run()
    assert (shared.cached_tokens, again.cached_tokens) == (48, 48)
    assert ("prefill", ([48, 48], False)) in calls
    served.check()


@pytest.mark.clients("MLA: pages of one token, SGLang's default, are read in place")
def test_pages_of_one_token(start: Start, calls: list[Any], monkeypatch: pytest.MonkeyPatch):
    from cute_attn.integrations import sglang_mla_backend as backend

    served = start("deepseek_v3", page_size=None)
    server = served.server
    pool = server.runner.token_to_kv_pool
    decode, seen = backend.mla_decode, []

    def checked(q: Tensor, q_rope: Tensor, cache: Tensor, **options: Any) -> Any:
        seen.append(cache.shape[1:])
        assert cache.data_ptr() in {x.data_ptr() for x in pool.kv_buffer}
        return decode(q, q_rope, cache, **options)

    monkeypatch.setattr(backend, "mla_decode", checked)
    server.fill(torch.nan, first_slot=0)
    server.send(prompt(60), 4)
    server.run()
    server.rows.clear()
    shared = server.send(prompt(60)[:50] + prompt(20, 1), 4)
    server.send(prompt(9, 2), 6)
    server.run()
    assert shared.cached_tokens == 50
    assert set(seen) == {torch.Size([1, 576])}
    served.check()


@pytest.mark.clients("MLA: fp8 latent caches (e4m3)")
@pytest.mark.parametrize(
    ("page_size", "factor"),
    [(None, None), (64, 1.0), (64, 0.25)],
    ids=["pages of 1", "pages of 64, a factor of 1", "pages of 64, a checkpoint's factor"],
)
def test_fp8_caches(
    start: Start, monkeypatch: pytest.MonkeyPatch, page_size: int | None, factor: float | None
):
    """SGLang rounds the vectors, and every step's attention is right for what its pool then holds:
    the pool does not divide by a layer's factor. SGLang's CPU platform allocates no pool of fp8, so
    its pool becomes one here."""
    from cute_attn.integrations import sglang_mla_backend as backend

    server = start("deepseek_v3", page_size=page_size).server
    monkeypatch.setattr(server.runner, "kv_cache_dtype", torch.float8_e4m3fn)
    if factor is not None:  # as SGLang's BaseKVCacheMethod leaves a layer
        for layer in server.runner.model.model.layers:
            attention = layer.self_attn.attn_mqa
            attention.k_scale = torch.nn.Parameter(torch.tensor(factor), requires_grad=False)
            attention.v_scale, attention.k_scale_float = attention.k_scale, factor
            attention.v_scale_float = factor
    assert backend.missing(server.runner) == []
    with monkeypatch.context() as patch:
        patch.setattr(server.runner, "prefill_attention_backend_str", "triton")
        found = ["fp8 latents with a factor, k_scale, in two backends (one for all modes)"]
        assert backend.missing(server.runner) == (2 * found if factor == 0.25 else [])
    pool = server.runner.token_to_kv_pool
    pool.dtype, pool.store_dtype = torch.float8_e4m3fn, torch.uint8
    pool.kv_buffer[:] = [torch.full(x.shape, 0x7F, dtype=torch.uint8) for x in pool.kv_buffer]
    decode, write, seen = backend.mla_decode, pool.set_mla_kv_buffer, []
    written_rows: list[int] = []

    def written(layer: Any, where: Any, latent: Tensor, rope: Tensor) -> None:
        write(layer, where, latent, rope)
        slots = getattr(where, "loc", where)
        found = pool.get_key_buffer(layer.layer_id).view(torch.uint8)[slots]
        wanted = torch.cat((latent, rope), -1).float()
        written_rows.append(len(wanted))
        found = found.view(torch.float8_e4m3fn).float().view_as(wanted)
        torch.testing.assert_close(found, wanted, rtol=2.0**-3, atol=2.0**-9)

    def checked(q: Tensor, q_rope: Tensor, cache: Tensor, **options: Any) -> Any:
        found = decode(q, q_rope, cache, **options)
        out = options.pop("out")
        assert_agrees({"q_nope": q, "q_rope": q_rope, "kv_cache": cache, **options}, out, None)
        seen.append(cache.dtype)
        return found

    monkeypatch.setattr(pool, "set_mla_kv_buffer", written)
    monkeypatch.setattr(backend, "mla_decode", checked)
    server.send(prompt(40), 3)
    server.send(prompt(7, 1), 4)
    server.run()
    assert written_rows and len(seen) >= 6 and set(seen) == {torch.float8_e4m3fn}


@pytest.mark.clients("MLA: speculative decoding (NGRAM), chains of draft tokens are verified")
def test_speculative_decoding(start: Start, calls: list[Any]):
    served = start("deepseek_v3", **CHAINS)
    server = served.server
    requests = [server.send(prompt(33), 40), server.send(prompt(4, 1), 30)]
    server.run()
    steps = [b for b in server.batches if b.forward_mode.is_target_verify()]
    one_each = sum(len(b.seq_lens) for b in steps)
    assert calls.count(("decode", 4)) == 2 * len(steps)
    # The first tokens are of the prefill; of the others, some are accepted drafts.
    assert sum(len(x.output_ids) for x in requests) - 2 > one_each
    served.check()


@pytest.mark.clients(
    "MLA: CUDA graphs of decode and verification, with padding, replayed for other lengths"
)
@pytest.mark.parametrize("options", [{}, CHAINS], ids=["decode", "verify"])
def test_cuda_graphs(sglang: Any, start: Start, options: dict[str, Any]):
    """Without a GPU, what SGLang's graph runner captures is recorded, and computed again."""
    served = start("deepseek_v3", **options)
    server = served.server
    first = server.send(prompt(10), 30)
    while len(first.output_ids) < 4:
        server.step()
    graph = sglang.Graph(server, server.batches[-1], requests=4)
    server.after_step = graph.replay
    server.send(prompt(130, 1), 12)
    server.send(prompt(64, 2), 3)
    server.run()
    assert len(graph.rows) > 20
    served.check(graph.rows)


@pytest.mark.clients("Kimi Linear: a model of KDA and MLA layers, all on our kernels")
@pytest.mark.parametrize("kind", [test_sglang_delta_rule.KINDS["Kimi Linear"]], ids=["KDA"])
def test_kimi_linear(kind: Any, replaced: list[str], start: Start, calls: list[Any]):
    served = start("kimi_linear", page_size=64, disable_radix_cache=True, chunked_prefill_size=64)
    server = served.server
    server.send(prompt(100), 6)
    server.send(prompt(5, 1), 9)
    server.run()
    assert type(server.backend.full_attn_backend).__name__ == "CuteAttnMLABackend"
    assert replaced == [] and ("decode", 1) in calls
    served.check()


@pytest.mark.clients("MLA: an error at the start for what has no kernel")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"disable_chunked_prefix_cache": True},
            NotImplementedError,
            "MLA with --disable-chunked-prefix-cache",
        ),
        (
            {**CHAINS, "speculative_num_draft_tokens": 17},
            NotImplementedError,
            "17 draft tokens of a request, at most 16",
        ),
    ],
    ids=["chunked prefix", "drafts"],
)
def test_refused_options(
    start: Start, options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        start("deepseek_v3", **options)


@pytest.mark.clients("MLA: an error at the start for what has no kernel")
def test_refused_models(start: Start, monkeypatch: pytest.MonkeyPatch):
    from cute_attn.integrations import sglang_mla_backend as backend

    runner = start("deepseek_v3").server.runner
    layer = runner.model.model.layers[0].self_attn
    assert backend.missing(runner) == []
    for changed, name, value, message in (
        (backend, "is_deepseek_dsa", lambda config: True, "sparse attention (DeepSeek V3.2)"),
        (
            backend,
            "check_cuda_graph_backend",
            lambda phase, of: False,
            "CUDA graphs of prefill with MLA (--disable-prefill-cuda-graph)",
        ),
        (layer.attn_mqa, "tp_q_head_num", 192, "192 heads of MLA on a GPU, at most 128"),
        (layer.attn_mqa, "v_head_dim", 448, "head_dim 576 (of v: 448)"),
        (layer.attn_mha, "v_head_dim", 96, "head_dim 192 (of v: 96)"),
        (runner, "is_draft_worker", True, "draft models"),
        (
            runner,
            "kv_cache_dtype",
            torch.float8_e5m2,
            "a latent cache in float8_e5m2 (--kv-cache-dtype fp8_e4m3)",
        ),
        (
            runner,
            "server_args",
            types.SimpleNamespace(enable_deterministic_inference=True),
            "MLA with --enable-deterministic-inference",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(changed, name, value)
            (found,) = backend.missing(runner)
            assert found.startswith(message)
    assert backend.missing(runner) == []
