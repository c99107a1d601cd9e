"""Our attention backend in SGLang's real scheduler and model runner, emulated for an H100.

Models are small and random. What they compute in SGLang is compared with transformers' eager
attention in float32, with the same weights.
"""

from __future__ import annotations

import gc
import os
import types
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from . import sglang_emulated, unpack

if os.environ.get("CUTE_ATTN_CLIENT") == "sglang":
    sglang_emulated.install()
    import transformers
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from .sglang_server import Graph, Row, Server

    torch.set_num_threads(1)

PAGE_SIZE = 16
SIZES = {
    "hidden_size": 128,
    "initializer_range": 0.15,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def configs() -> dict[str, Any]:
    """Models: one for each head_dim, one of them with softcap and windows in the common pool; and
    one with sinks and windows in a pool of their own."""
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {
        "qwen3": transformers.Qwen3Config(**SIZES, **tokens, head_dim=64),
        "llama": transformers.LlamaConfig(**SIZES, **tokens, head_dim=128),
        "gemma2": transformers.Gemma2Config(
            **SIZES,
            **tokens,
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",  # which SGLang reads
            query_pre_attn_scalar=16,
            attn_logit_softcapping=4.0,
            sliding_window=24,
        ),
        "granite": transformers.GraniteSWAConfig(
            **{**SIZES, "hidden_size": 256},
            **tokens,
            attention_multiplier=0.02,
            sliding_window=24,
        ),
    }


class Model:
    """A model's directory, and its logits by transformers."""

    def __init__(self, name: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.path = directory / f"{name}-{dtype}".replace("torch.", "")
        self.config = configs()[name]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(self.config)
        for parameter, x in model.named_parameters():
            if parameter.endswith("sinks"):
                torch.nn.init.normal_(x, mean=4)
        model.to(dtype).save_pretrained(self.path)
        self.dtype = dtype

    @torch.inference_mode()
    def logits(
        self, sequences: list[list[int]], dtype: torch.dtype, sinks: bool = True, **changed: Any
    ) -> list[Tensor]:
        """A row for each token of each sequence."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.path, attn_implementation="eager", dtype=dtype, **changed
        )
        for parameter, x in model.named_parameters():
            if parameter.endswith("sinks") and not sinks:
                x.fill_(-1e4)
        return [model(torch.tensor([tokens])).logits[0].float() for tokens in sequences]

    def rows_of(self, rows: list[Row], dtype: torch.dtype, **changed: Any) -> Tensor:
        """The logits of the given rows' tokens."""
        texts = [row.tokens for row in rows]
        whole = [x for x in texts if not any(y[: len(x)] == x and len(y) > len(x) for y in texts)]
        found = self.logits(whole, dtype, **changed)
        at = [next(i for i, x in enumerate(whole) if x[: len(row.tokens)] == row.tokens) for row in rows]
        return torch.stack([found[i][len(row.tokens) - 1] for i, row in zip(at, rows, strict=True)])

    def check(self, rows: list[Row], **changed: Any) -> None:
        """Assert that rows differ from float32 no more than transformers' own rows in the model's
        dtype, with some room for another order of sums. With a `changed` configuration, the rows
        must be far from what it gives: the rows show what was changed."""
        ours = torch.stack([row.logits for row in rows])
        exact = self.rows_of(rows, torch.float32)
        error = (ours - exact).abs().amax()
        allowed = 2 * (self.rows_of(rows, self.dtype) - exact).abs().amax()
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
        if changed:
            other = self.rows_of(rows, torch.float32, **changed)
            assert (other - exact).abs().amax() > 4 * allowed


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts a server; the server ends after the test."""
    servers: list[Server] = []

    def started(model: Model, **options: Any) -> Server:
        servers.append(Server(model.path, **options))
        return servers[-1]

    yield started
    for server in servers:
        server.close()
    servers.clear()
    gc.collect()


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# -- the plugin


@pytest.mark.clients("The plugin is loaded, and `--attention-backend cute_attn` selects it")
def test_the_plugin_is_loaded(directory: Path, start: Any):
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    assert version("sglang") == unpack.version("sglang")
    assert ATTENTION_BACKEND_CHOICES.count("cute_attn") == 1
    server = start(Model("qwen3", directory))
    backend = type(server.backend)
    assert (backend.__module__, backend.__name__) == (
        "cute_attn.integrations.sglang_backend",
        "CuteAttnBackend",
    )
    assert server.backend.decode_attention_backend_str == "cute_attn"


# -- steps


@pytest.mark.clients("Prefill and decode, head_dim 64, 128 and 256, GQA, bfloat16 and float16")
@pytest.mark.parametrize(
    ("name", "dtype", "page_size"),
    [
        ("qwen3", torch.bfloat16, 16),
        ("llama", torch.float16, 64),
        ("gemma2", torch.bfloat16, 32),
    ],
)
def test_prefill_and_decode(
    directory: Path, start: Any, name: str, dtype: torch.dtype, page_size: int
):
    model = Model(name, directory, dtype)
    server = start(model, page_size=page_size)
    for seed, length in enumerate((70, 3, 16)):
        server.send(prompt(seed, length), 20)
    server.run()
    assert server.modes == [ForwardMode.EXTEND] + [ForwardMode.DECODE] * 19
    model.check(server.rows)


@pytest.mark.clients("Chunked prefill, with decoding requests in the same batch")
def test_chunked_prefill(directory: Path, start: Any):
    model = Model("qwen3", directory)
    server = start(model, chunked_prefill_size=32, enable_mixed_chunk=True)
    server.send(prompt(0, 7), 12)
    while server.modes.count(ForwardMode.DECODE) < 3:
        server.step()
    server.send(prompt(1, 90), 6)
    server.run()
    assert ForwardMode.MIXED in server.modes
    mixed = [row for row in server.rows if row.mode == ForwardMode.MIXED]
    chunks = {len(row.tokens) for row in mixed if row.tokens[:7] == prompt(1, 90)[:7]}
    assert len(chunks) >= 3
    model.check(server.rows)


@pytest.mark.clients("Prefixes of the radix cache")
@pytest.mark.parametrize("name", ["qwen3", "granite"])
def test_radix_prefixes(directory: Path, start: Any, name: str):
    model = Model(name, directory)
    server = start(model)
    server.send(prompt(0, 60), 4)
    server.run()
    server.rows.clear()
    shared = server.send(prompt(0, 60)[:50] + prompt(1, 20), 4)
    again = server.send(prompt(0, 60), 4)
    server.run()
    # Whole pages are shared; the last token of a prompt is always computed.
    assert (shared.cached_tokens, again.cached_tokens) == (48, 48)
    model.check(server.rows)


@pytest.mark.clients("Sliding windows in the common pool, softcap")
@pytest.mark.parametrize("changed", [{"sliding_window": 512}, {"attn_logit_softcapping": None}])
def test_windows_and_softcap(directory: Path, start: Any, changed: dict[str, Any]):
    model = Model("gemma2", directory)
    server = start(model, chunked_prefill_size=48)
    server.send(prompt(0, 100), 4)
    server.send(prompt(1, 20), 10)
    server.run()
    assert type(server.backend.pool).__name__ == "MHATokenToKVPool"
    model.check(server.rows, **changed)


@pytest.mark.clients("Sliding windows in a pool of their own")
def test_windows_in_their_own_pool(directory: Path, start: Any):
    model = Model("granite", directory)
    server = start(model, chunked_prefill_size=48)
    server.send(prompt(0, 150), 40)
    server.send(prompt(1, 20), 60)
    pool, allocator = server.backend.pool, server.scheduler.token_to_kv_pool_allocator
    assert type(pool).__name__ == "SWAKVPool"
    free = []
    while server.step():
        free.append(allocator.swa_available_size())
    assert max(free[len(free) // 2 :]) > min(free)  # tokens before the windows gave their slots back
    model.check(server.rows, sliding_window=512)


@pytest.mark.clients("Sinks")
def test_sinks(directory: Path, start: Any):
    model = Model("granite", directory)
    server = start(model)
    server.send(prompt(0, 40), 4)
    server.run()
    model.check(server.rows, sinks=False)


@pytest.mark.clients("NaN in unused slots of the pool is not read")
@pytest.mark.parametrize("name", ["qwen3", "granite"])
def test_nan_in_unused_slots(directory: Path, start: Any, name: str):
    model = Model(name, directory)
    server = start(model, chunked_prefill_size=48)
    pool = server.backend.pool
    # A token before its window has the window pool's page 0, which SGLang keeps for padding.
    pools = [(pool, 0)] if name == "qwen3" else [(pool.full_kv_pool, 0), (pool.swa_kv_pool, 16)]
    for part, first in pools:
        for buffer in (*part.k_buffer, *part.v_buffer):
            buffer[first:] = float("nan")
    server.send(prompt(0, 100), 20)
    server.send(prompt(1, 5), 30)
    server.run()
    assert all(row.logits.isfinite().all() for row in server.rows)
    model.check(server.rows)


@pytest.mark.clients("Speculative decoding (NGRAM): chains of draft tokens are verified")
def test_speculative_decoding(directory: Path, start: Any):
    model = Model("qwen3", directory)
    server = start(
        model,
        speculative_algorithm="NGRAM",
        speculative_ngram_max_bfs_breadth=1,
        speculative_num_draft_tokens=4,
    )
    requests = [server.send(prompt(0, 33), 60), server.send(prompt(1, 4), 40)]
    server.run()
    verified = [row for row in server.rows if row.mode == ForwardMode.TARGET_VERIFY]
    assert len(verified) > server.modes.count(ForwardMode.TARGET_VERIFY)  # more than one each
    model.check(server.rows)
    accepted = sum(len(x.output_ids) for x in requests) - 2  # the first tokens are of the prefill
    steps = sum(len(b.seq_lens) for b in server.batches if b.forward_mode.is_target_verify())
    assert accepted > steps  # some steps accept drafts


@pytest.mark.clients("An idle batch")
def test_idle_batch(directory: Path, start: Any):
    model = Model("qwen3", directory)
    server = start(model)
    server.send(prompt(0, 20), 6)
    server.step()
    with torch.inference_mode():
        server.running = []
        server.scheduler.run_batch(server.scheduler.dp_attn_adapter.get_idle_batch())
    assert server.modes == [ForwardMode.EXTEND, ForwardMode.IDLE]
    server.run()
    model.check(server.rows)


# -- what has no kernel


@pytest.mark.clients("An error at the start for what has no kernel")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"page_size": None}, ValueError, "pages of 1: start SGLang with --page-size 64"),
        ({"page_size": 8}, ValueError, "a multiple of 16 tokens, got pages of 8"),
        ({"dtype": "float32"}, NotImplementedError, "a model of torch.float32"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 2},
            ValueError,  # by SGLang: with trees, pages have one token
            r"speculative_eagle_topk\(2\) > 1 with page_size\(16\) > 1",
        ),
        (
            {"json_model_override_args": '{"head_dim": 96}', "load_format": "dummy"},
            NotImplementedError,
            r"head_dim 96 \(of v: 96\) on this GPU, there are",
        ),
    ],
    ids=str,
)
def test_refused_options(
    directory: Path, start: Any, options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        start(Model("qwen3", directory), **options)


@pytest.mark.clients("An error at the start for what has no kernel")
def test_refused_models(directory: Path, start: Any, monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.radix_attention import AttentionType

    from cute_attn.integrations import sglang_backend
    from cute_attn.integrations.sglang_backend import refuse

    runner = start(Model("qwen3", directory)).runner
    layer = runner.model.model.layers[1].self_attn.attn
    refuse(runner)
    trees = types.SimpleNamespace(speculative_eagle_topk=4)
    for changed, name, value, message in (
        (sglang_backend, "get_spec", lambda: trees, "trees of draft tokens"),
        (runner.model_config, "attention_arch", AttentionArch.MLA, "MLA"),
        (runner.model_config, "is_encoder_decoder", True, "cross-attention of an encoder-decoder"),
        (runner.model_config, "is_local_attention_model", True, "local attention in chunks"),
        (runner, "kv_cache_dtype", torch.float8_e4m3fn, "a KV cache of torch.float8_e4m3fn beside"),
        (runner, "is_draft_worker", True, "draft models .--speculative-draft-attention-backend"),
        (layer, "attn_type", AttentionType.ENCODER_ONLY, "attention of type encoder_only"),
        (layer, "is_cross_attention", True, "cross-attention"),
        (layer, "v_head_dim", 32, r"head_dim 64 \(of v: 32\)"),
        (layer, "xai_temperature_len", 8, "temperatures by length"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(changed, name, value)
            with pytest.raises(NotImplementedError, match=f"cute_attn has no kernel for {message}"):
                refuse(runner)
    refuse(runner)


# -- CUDA graphs


@pytest.mark.clients("CUDA graphs of decode and verification, with padding, replayed for other lengths")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {}),
        ("granite", {}),
        (
            "qwen3",
            {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_max_bfs_breadth": 1,
                "speculative_num_draft_tokens": 4,
            },
        ),
    ],
    ids=["decode", "windows in their own pool", "verify"],
)
def test_cuda_graphs(directory: Path, start: Any, name: str, options: dict[str, Any]):
    model = Model(name, directory)
    server = start(model, **options)
    first = server.send(prompt(0, 10), 30)
    while len(first.output_ids) < 4:
        server.step()
    graph = Graph(server, server.batches[-1], requests=4)
    server.after_step = graph.replay
    server.send(prompt(1, 130), 12)
    server.send(prompt(2, 64), 3)
    server.run()
    assert len(graph.rows) > 30
    model.check(graph.rows)
