"""Our attention backend in SGLang's real scheduler and model runner, emulated for an H100.

A test serves prompts with a tiny model and compares logits with those of transformers' eager
attention. SGLang's pools hold NaN wherever the model runner has not written.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention_cases import assert_agrees, assert_no_worse

from . import models, sglang_emulated, unpack
from .models import prompt

CHAINS = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_capacity": 10_000,  # SGLang's ten million take 2 GB in each server
}

TREES = CHAINS | {"speculative_ngram_max_bfs_breadth": 2, "page_size": 1}


# What SGLang reads of a model's configuration, and transformers' default has not.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "qwen3_next": {  # SGLang's has experts in every layer
        "full_attention_interval": 2,
        "mlp_only_layers": [],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}


class Served:
    """A server, and transformers with the same weights."""

    def __init__(self, path: Path, dtype: torch.dtype, server: Any) -> None:
        self.path = path
        self.dtype = dtype
        self.server = server

    def check(self, rows: list[Any] | None = None, **change: Any) -> None:
        """Compare rows of logits, all by default, with transformers'.

        With a `change` of the model, show also that the rows depend on what is changed.
        """
        rows = self.server.rows if rows is None else rows
        ours = torch.stack([row.logits for row in rows]).double()
        exact, plain = (self.reference(rows, dtype) for dtype in (torch.float64, self.dtype))
        assert_no_worse(ours, [plain], exact)
        if change:
            other = self.reference(rows, torch.float64, **change)
            assert (other - exact).norm() > 4 * (ours - exact).norm()

    def reference(self, rows: list[Any], dtype: torch.dtype, **change: Any) -> Tensor:
        """What transformers computes in place of the rows' logits."""
        texts = [row.tokens for row in rows]
        longest = [x for x in texts if not any(len(y) > len(x) and y[: len(x)] == x for y in texts)]
        found = [(x, models.logits(self.path, x, dtype, **change).double()) for x in longest]
        return torch.stack(
            [next(y[len(x) - 1] for whole, y in found if whole[: len(x)] == x) for x in texts]
        )


Start = Callable[..., Served]


@pytest.fixture(scope="session")
def sglang() -> Any:
    if "sglang" not in sys.modules:
        sglang_emulated.install()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from . import sglang_server

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield sglang_server
    torch.set_num_threads(threads)


@pytest.fixture
def start(sglang: Any, tmp_path: Path) -> Iterator[Start]:
    """Starts a server: `start(model, **options of SGLang)`."""
    started: list[Any] = []

    def start(model: str, weights: torch.dtype = torch.bfloat16, **options: Any) -> Served:
        path = models.make(model, tmp_path, weights, **CHANGES.get(model, {}))
        started.append(sglang.Server(path, **options))
        return Served(path, weights, started[-1])

    yield start
    for server in started:
        server.close()
    started.clear()
    gc.collect()


# -- the plugin and the selection of a backend


@pytest.mark.clients("The plugin registers `cute_attn`, and `--attention-backend` selects it")
def test_the_plugin_is_loaded(sglang: Any, start: Start):
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.server_args import prepare_server_args

    assert version("sglang") == unpack.version("sglang")
    assert ATTENTION_BACKEND_CHOICES.count("cute_attn") == 1
    served = start("llama")
    command = f"--model-path {served.path} --attention-backend cute_attn --page-size 64"
    parsed = prepare_server_args(command.split())
    assert (parsed.attention_backend, parsed.page_size) == ("cute_attn", 64)
    backend = served.server.backend
    assert type(backend).__module__ == "cute_attn.integrations.sglang_backend"
    assert backend.decode_attention_backend_str == "cute_attn"


ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    engine = sglang.Engine(
        attention_backend="cute_attn", page_size=64, device="cpu", disable_cuda_graph=True,
        max_total_tokens=2048, skip_tokenizer_init=True, log_level="error", **options["engine"]
    )
    replies = engine.generate(**options["call"])
    print(json.dumps([reply["output_ids"] for reply in replies]))
    engine.shutdown()
"""


@pytest.mark.clients("`sglang.Engine`, whose parts run in processes that load the plugin")
def test_the_engine(sglang: Any, tmp_path: Path):
    path = models.make("llama", tmp_path)
    prompts = [prompt(70), prompt(5, 1)]
    options = {
        "engine": {"model_path": str(path)},
        "call": {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        },
    }
    (tmp_path / "program.py").write_text(ENGINE)
    # Python imports sitecustomize at the start of each process.
    (tmp_path / "sitecustomize.py").write_text(
        "from tests.clients import sglang_emulated\nsglang_emulated.install()\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), json.dumps(options)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    replies = json.loads(done.stdout.splitlines()[-1])
    assert [len(reply) for reply in replies] == [6, 6]
    rows = [
        types.SimpleNamespace(tokens=[*tokens, *reply[:i]])
        for tokens, reply in zip(prompts, replies, strict=True)
        for i in range(len(reply))
    ]
    served = Served(path, torch.bfloat16, None)
    exact, plain = (served.reference(rows, x) for x in (torch.float64, torch.bfloat16))
    behind = exact.amax(-1) - exact[torch.arange(12), torch.tensor(replies).flatten()]
    assert (behind <= (plain - exact).abs().amax(-1)).all()


# -- steps


@pytest.mark.clients("Prefill and decode, head_dim 64, 128 and 256, GQA, bfloat16 and float16")
@pytest.mark.parametrize(
    ("model", "dtype", "page_size"),
    [
        ("llama", torch.bfloat16, 16),
        ("qwen3", torch.float16, 64),
        ("gemma2", torch.bfloat16, 32),
        ("llama", torch.bfloat16, None),  # SGLang's default: 1
        ("qwen3", torch.float16, 4),
    ],
    ids=["64", "128", "256", "64, pages of one token", "128, pages of four"],
)
def test_prefill_and_decode(start: Start, model: str, dtype: torch.dtype, page_size: int | None):
    served = start(model, dtype, page_size=page_size)
    assert served.server.backend.page_size == (page_size or 1)
    for seed, length in enumerate((70, 3, 16)):
        served.server.send(prompt(length, seed), 20)
    served.server.run()
    assert served.server.modes == ["EXTEND"] + ["DECODE"] * 19
    served.check()


@pytest.mark.clients("Chunked prefill, with decoding requests in the same batch")
def test_chunked_prefill(start: Start):
    served = start("llama", chunked_prefill_size=32, enable_mixed_chunk=True)
    server = served.server
    server.send(prompt(7), 12)
    while server.modes.count("DECODE") < 3:
        server.step()
    server.send(prompt(90, 1), 6)
    server.run()
    mixed = [row.tokens for row in server.rows if row.mode == "MIXED"]
    chunks = [tokens for tokens in mixed if tokens == prompt(90, 1)[: len(tokens)]]
    assert len(chunks) >= 3 and len(chunks) < len(mixed)
    served.check()


@pytest.mark.clients("Prefixes of the radix cache")
@pytest.mark.parametrize("model", ["llama", "granite"])
def test_radix_prefixes(start: Start, model: str):
    served = start(model)
    server = served.server
    server.send(prompt(60), 4)
    server.run()
    server.rows.clear()
    shared = server.send(prompt(60)[:50] + prompt(20, 1), 4)
    again = server.send(prompt(60), 4)
    server.run()
    # Whole pages are shared; the last token of a prompt is always computed.
    assert (shared.cached_tokens, again.cached_tokens) == (48, 48)
    served.check()


@pytest.mark.clients("Retracted requests are computed again")
def test_retraction(start: Start, monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.managers import scheduler

    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 5)
    served = start("llama", disable_radix_cache=True)
    requests = [served.server.send(prompt(20, seed), 20) for seed in range(2)]
    served.server.run()
    assert sum(x.retraction_count for x in requests) > 1
    served.check()


@pytest.mark.clients("Sliding windows in the common pool, softcap")
@pytest.mark.parametrize("change", [{"sliding_window": 512}, {"attn_logit_softcapping": None}])
def test_windows_and_softcap(start: Start, change: dict[str, Any]):
    served = start("gemma2", chunked_prefill_size=48)
    served.server.send(prompt(100), 4)
    served.server.send(prompt(20, 1), 10)
    served.server.run()
    assert type(served.server.backend.pool).__name__ == "MHATokenToKVPool"
    served.check(**change)


@pytest.mark.clients("Sliding windows in a pool of their own")
def test_windows_in_their_own_pool(start: Start):
    served = start("granite", chunked_prefill_size=48)
    server = served.server
    server.send(prompt(150), 40)
    server.send(prompt(20, 1), 60)
    assert type(server.backend.pool).__name__ == "SWAKVPool"
    allocator = server.scheduler.token_to_kv_pool_allocator
    all_slots = allocator.full_available_size(), allocator.swa_available_size()
    freed = []  # more slots of the windows' pool than of the other pool
    while server.step():
        free = allocator.full_available_size(), allocator.swa_available_size()
        freed.append(all_slots[0] - free[0] - (all_slots[1] - free[1]))
    assert freed[0] == 0 and max(freed) >= 16
    served.check(sliding_window=512)


@pytest.mark.clients("Sinks")
def test_sinks(start: Start):
    served = start("granite")
    served.server.send(prompt(40), 4)
    served.server.run()
    served.check(sinks=None)


@pytest.mark.clients("NaN in unused slots of the pool, page 0 included, is not read")
def test_nan_in_unused_slots(start: Start):
    served = start("llama", chunked_prefill_size=48)
    served.server.fill(torch.nan, first_slot=0)
    served.server.send(prompt(100), 20)
    served.server.send(prompt(5, 1), 30)
    served.server.run()
    served.check()


@pytest.mark.clients("Speculative decoding (NGRAM): chains of draft tokens are verified")
@pytest.mark.parametrize("model", ["llama", "granite"])
def test_speculative_decoding(start: Start, model: str):
    served = start(model, **CHAINS)
    server = served.server
    requests = [server.send(prompt(33), 60), server.send(prompt(4, 1), 40)]
    server.run()
    steps = [b for b in server.batches if b.forward_mode.is_target_verify()]
    one_each = sum(len(b.seq_lens) for b in steps)
    assert len([row for row in server.rows if row.mode == "TARGET_VERIFY"]) > one_each
    # The first tokens are of the prefill; of the others, some are accepted drafts.
    assert sum(len(x.output_ids) for x in requests) - 2 > one_each
    served.check()


@pytest.mark.clients("Speculative decoding (NGRAM): trees of draft tokens are verified")
def test_trees(start: Start):
    """With pages of one token, as SGLang demands."""
    served = start("llama", **TREES | {"speculative_num_draft_tokens": 6})
    server = served.server
    text = [*prompt(12), *prompt(12), *prompt(6, 1), *prompt(12)]
    requests = [server.send(text, 40), server.send([*text[6:30], *text[:11]], 30)]
    server.run()
    steps = [b for b in server.batches if b.forward_mode.is_target_verify()]
    rows = [row for row in server.rows if row.mode == "TARGET_VERIFY"]
    places = [b.positions.view(len(b.seq_lens), -1) for b in steps]
    assert any((x.diff() != 1).any() for x in places), "no step has a tree that branches"
    assert len(rows) > sum(len(b.seq_lens) for b in steps)
    assert sum(len(x.output_ids) for x in requests) == 70
    served.check()


@pytest.mark.clients("Speculative decoding (NGRAM): trees of draft tokens are verified")
def test_masks_of_trees_on_a_gpu(start: Start, monkeypatch: pytest.MonkeyPatch):
    """SGLang's mask on a GPU has all columns of each request, and none of padding requests."""
    from cute_attn.integrations import sglang_backend

    start("llama", **TREES)
    drafts, lengths = 6, [3, 0, 9, 5]
    bits = torch.randint(0, 2**drafts, (3, drafts))
    last = (bits[:, :, None] >> torch.arange(drafts)) & 1 == 1
    whole = [
        torch.cat([torch.ones(drafts, n, dtype=torch.bool), own], 1).flatten()
        for n, own in zip(lengths, last, strict=False)
    ]
    for mode, mask in (("FULL_MASK", torch.cat(whole)), ("QLEN_ONLY", last.flatten())):
        monkeypatch.setattr(
            sglang_backend,
            "default_tree_mask_mode",
            lambda mode=mode: sglang_backend.TreeMaskMode[mode],
        )
        step = types.SimpleNamespace(
            spec_info=types.SimpleNamespace(custom_mask=mask),
            seq_lens=torch.tensor(lengths),
            batch_size=4,
        )
        metadata = types.SimpleNamespace(
            drafts=drafts, tree_mask=torch.full((4 * drafts,), -1, dtype=torch.int64)
        )
        sglang_backend.write_tree(metadata, step)
        assert torch.equal(metadata.tree_mask.view(4, drafts)[:3], bits)


@pytest.mark.clients("Prefill here and decode in another backend, and the reverse")
@pytest.mark.parametrize("ours", ["prefill", "decode"])
def test_beside_another_backend(start: Start, ours: str):
    names = dict.fromkeys(("prefill", "decode"), "torch_native") | {ours: "cute_attn"}
    served = start("llama", **{f"{phase}_attention_backend": name for phase, name in names.items()})
    served.server.send(prompt(40), 8)
    served.server.run()
    both = served.server.backend
    found = {"prefill": type(both.prefill_backend), "decode": type(both.decode_backend)}
    assert found[ours].__name__ == "CuteAttnBackend"
    assert len(set(found.values())) == 2
    served.check()


@pytest.mark.clients("An idle batch")
def test_idle_batch(start: Start):
    served = start("llama")
    server = served.server
    server.send(prompt(20), 6)
    server.step()
    idle = []

    def stop(batch: Any, *rest: Any, **named: Any) -> None:
        idle.append(batch)
        raise InterruptedError  # SGLang's rotary embedding of the CPU takes no empty batch

    server.runner.forward = stop
    with torch.inference_mode(), pytest.raises(InterruptedError):
        server.scheduler.run_batch(server.scheduler.dp_attn_adapter.get_idle_batch())
    server.runner.forward = server.observed
    assert idle[0].forward_mode.name == "IDLE"
    server.backend.init_forward_metadata(idle[0])
    layer = server.runner.model.model.layers[0].self_attn.attn
    x = torch.empty(0, 256, dtype=torch.bfloat16)
    k = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    assert server.backend.forward(x, k, k, layer, idle[0]).shape == (0, 256)
    server.run()
    served.check()


# -- linear layers


@pytest.fixture
def our_gated_delta_net(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The plugin replaces SGLang's Gated Delta Net. Names SGLang's own kernels that are called."""
    import cute_attn
    from cute_attn.integrations import sglang as plugin

    sglang_emulated.replace_in_linear_layers(monkeypatch)
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    for name in ("TritonGDNKernel", "flashinfer_gdn_prefill_default"):  # undone at the end
        monkeypatch.setattr(gdn_backend, name, getattr(gdn_backend, name))
    theirs = sglang_emulated.refuse_their_kernels(monkeypatch, TritonGDNKernel)
    monkeypatch.setenv("CUTE_ATTN_SERVER_GDN", "1")
    cute_attn.reload_settings()
    plugin.register()
    yield theirs
    monkeypatch.delenv("CUTE_ATTN_SERVER_GDN")
    cute_attn.reload_settings()


# SGLang's states without copies for the radix cache go with pages of one token.
SMALL_PAGES = {"page_size": 1, "mamba_radix_cache_strategy": "no_buffer"}
ALL_OURS = "Qwen3-Next: a model of Gated Delta Net and attention layers, all on our kernels"


@pytest.mark.clients(ALL_OURS)
@pytest.mark.parametrize(
    "options", [SMALL_PAGES, {"page_size": 64, "disable_radix_cache": True}], ids=["1", "64"]
)
def test_qwen3_next(start: Start, our_gated_delta_net: list[str], options: dict[str, Any]):
    served = start("qwen3_next", chunked_prefill_size=64, **options)
    server = served.server
    assert type(server.backend.full_attn_backend).__name__ == "CuteAttnBackend"
    for seed, length in enumerate((150, 3, 16)):
        server.send(prompt(length, seed), 6)
    server.run()
    assert server.modes.count("EXTEND") > 1 and server.modes.count("DECODE") > 4
    assert not our_gated_delta_net
    served.check()


@pytest.mark.clients("Qwen3-Next: prefixes of the radix cache start from cached states")
def test_qwen3_next_prefixes(start: Start, our_gated_delta_net: list[str]):
    served = start("qwen3_next", **SMALL_PAGES)
    server = served.server
    first = server.send(prompt(60), 4)
    server.run()
    server.rows.clear()
    again = server.send([*first.origin_input_ids, *first.output_ids, *prompt(20, 1)], 4)
    server.run()
    assert again.cached_tokens >= 60
    assert not our_gated_delta_net
    served.check()


@pytest.mark.clients("Qwen3-Next: drafts are verified in both kinds of layers")
def test_qwen3_next_drafts(start: Start, our_gated_delta_net: list[str]):
    served = start("qwen3_next", **SMALL_PAGES, **CHAINS)
    server = served.server
    first = server.send(prompt(20), 12)
    server.run()
    server.batches.clear()
    again = server.send(prompt(20), 12)  # whose drafts are the first request's tokens
    server.run()
    steps = [b for b in server.batches if b.forward_mode.is_target_verify()]
    assert again.output_ids == first.output_ids
    assert len(steps) <= 6  # of 11 tokens after the prefill's
    assert not our_gated_delta_net
    served.check()


# -- fp8


@pytest.mark.clients("fp8 KV caches")
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_caches(start: Start, monkeypatch: pytest.MonkeyPatch, fp8: torch.dtype):
    """SGLang divides keys by the layer's scale, and every step's attention is right for what its
    pool then holds. SGLang's CPU platform allocates no pool of fp8, so its pool becomes one here.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    from cute_attn.integrations import sglang_backend

    server = start("llama").server
    monkeypatch.setattr(server.runner, "kv_cache_dtype", fp8)
    sglang_backend.refuse(server.runner)
    server.backend.fp8 = True
    pool = server.runner.token_to_kv_pool
    pool.dtype, pool.store_dtype = fp8, torch.uint8
    for buffers in (pool.k_buffer, pool.v_buffer):
        buffers[:] = [torch.full(x.shape, 0x7F, dtype=torch.uint8) for x in buffers]  # NaN
    for layer in server.runner.model.modules():
        if isinstance(layer, RadixAttention):
            layer.k_scale, layer.v_scale = torch.tensor(0.25), torch.tensor(0.125)
    attend, keep, seen = sglang_backend.flash_attn_varlen_func, pool.set_kv_buffer, []

    def kept(layer: Any, where: Any, k: Tensor, v: Tensor, *scales: Any) -> None:
        given = k.double(), v.double()
        keep(layer, where, k, v, *scales)
        slots = getattr(where, "loc", where)
        for x, wanted, scale in zip(
            pool.get_kv_buffer(layer.layer_id), given, (0.25, 0.125), strict=True
        ):
            found = x[slots].double().view_as(wanted) * scale
            torch.testing.assert_close(found, wanted, rtol=2.0**-3, atol=2.0**-10)

    def checked(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        attend(q, k, v, **options)
        pages = options.pop("page_table").long()
        args = {"q": q, **options}
        for key, x in (("k", k), ("v", v)):
            args[key] = x.view(torch.uint8)[pages].view(x.dtype).flatten(1, 2)
        out = args.pop("out")
        for unused in ("batch_invariant", "num_splits", "max_seqlen_k", "max_seqlen_q"):
            args.pop(unused)
        assert_agrees(args, out, None)
        seen.append(k.dtype)

    monkeypatch.setattr(pool, "set_kv_buffer", kept)
    monkeypatch.setattr(sglang_backend, "flash_attn_varlen_func", checked)
    server.send(prompt(40), 3)
    server.run()
    assert len(seen) >= 6 and set(seen) == {fp8}


# -- what has no kernel


@pytest.mark.clients("An error at the start for what has no kernel")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
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
    start: Start, options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        start("llama", **options)


@pytest.mark.clients("An error at the start for what has no kernel")
@pytest.mark.parametrize("page_size", [None, 8])
def test_refused_pages(start: Start, page_size: int | None, monkeypatch: pytest.MonkeyPatch):
    """On Blackwell."""
    monkeypatch.setattr("cute_attn.integrations.sglang_backend.page_step", lambda device: 16)
    message = f"a multiple of 16 tokens on this GPU, got pages of {page_size or 1}: start SGLang"
    with pytest.raises(ValueError, match=message):
        start("llama", page_size=page_size)


@pytest.mark.clients("An error at the start for what has no kernel")
def test_refused_models(start: Start, monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.layers.radix_attention import AttentionType

    from cute_attn.integrations import sglang_backend
    from cute_attn.integrations.sglang_backend import refuse

    runner = start("llama").server.runner
    layer = runner.model.model.layers[0].self_attn.attn
    refuse(runner)
    trees = types.SimpleNamespace(speculative_eagle_topk=4, speculative_num_draft_tokens=65)
    for changed, name, value, message in (
        (sglang_backend, "get_spec", lambda: trees, "trees of 65 draft tokens"),
        (runner.model_config, "attention_arch", AttentionArch.MLA, "MLA"),
        (runner.model_config, "is_encoder_decoder", True, "cross-attention of an encoder-decoder"),
        (runner.model_config, "is_local_attention_model", True, "local attention in chunks"),
        (runner, "kv_cache_dtype", torch.float32, "a KV cache of torch.float32 beside"),
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


@pytest.mark.clients(
    "CUDA graphs of decode and verification, with padding, replayed for other lengths"
)
@pytest.mark.parametrize(
    ("model", "options"),
    [("llama", {}), ("granite", {}), ("llama", CHAINS), ("llama", TREES)],
    ids=["decode", "windows in their own pool", "verify", "verify trees"],
)
def test_cuda_graphs(sglang: Any, start: Start, model: str, options: dict[str, Any]):
    """Without a GPU, what SGLang's graph runner captures is recorded, and computed again."""
    served = start(model, **options)
    server = served.server
    first = server.send(prompt(10), 30)
    while len(first.output_ids) < 4:
        server.step()
    graph = sglang.Graph(server, server.batches[-1], requests=4)
    server.after_step = graph.replay
    server.send(prompt(130, 1), 12)
    server.send(prompt(64, 2), 3)
    server.run()
    assert len(graph.rows) > 30
    served.check(graph.rows)


@pytest.mark.clients("CUDA graphs of prefill: attention alone")
def test_prefill_graphs(sglang: Any, start: Start):
    """A graph of 64 rows and 4 requests, and attention that writes to a graph's own tensor."""
    served = start("granite")
    server, backend = served.server, served.server.backend
    layers = [layer.self_attn.attn for layer in server.runner.model.model.layers]
    q = torch.randn(64, 256).bfloat16()
    sizes = {"extend_seq_lens": 4, "out_cache_loc": 64, "positions": 64}
    sizes |= {"req_pool_indices": 4, "seq_lens": 4}
    graph, recorder, found = None, sglang.Recorder(backend.pool), []

    def check(batch: Any, rows: list[Any]) -> None:
        nonlocal graph
        if graph is None:
            graph = copy.copy(batch)
            graph.batch_size = 4
            for name, size in sizes.items():
                setattr(graph, name, torch.zeros(size, dtype=torch.int64))
            backend.init_forward_metadata_out_graph(graph, in_capture=True)
            with recorder:
                backend.init_forward_metadata_in_graph(graph)
                found.extend(
                    backend.forward(q, None, None, layer, graph, False) for layer in layers
                )
        for name in sizes:
            given = getattr(batch, name)
            getattr(graph, name).zero_()[: len(given)] = given
        backend.init_forward_metadata_out_graph(graph)
        recorder.repeat()
        tokens = len(batch.input_ids)
        backend.init_forward_metadata(batch)
        for layer, of_graph in zip(layers, found, strict=True):
            plain = backend.forward(q[:tokens], None, None, layer, batch, False)
            assert plain.isfinite().all() and torch.equal(of_graph[:tokens], plain)
            assert not of_graph[tokens:].any()
            batch._attn_output = torch.empty_like(plain)
            given = backend.forward(q[:tokens], None, None, layer, batch, False)
            assert given.data_ptr() == batch._attn_output.data_ptr()
            assert torch.equal(given, plain)
            batch._attn_output = None

    server.after_step = check
    for seed, lengths in enumerate(((20, 30, 5), (64,), (1, 2, 3, 40))):
        for length in lengths:
            server.send(prompt(length, seed), 1)
        server.step()
    assert server.modes == ["EXTEND"] * 3 and len(found) == 2
