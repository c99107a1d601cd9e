"""Our attention backend in vLLM's real engine, emulated for an H100.

A test serves prompts with a tiny model and compares the tokens and their probabilities with those
of transformers' eager attention. vLLM's KV cache holds NaN wherever the engine has not written.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn.emulator import Emulator
from tests.integrations.vllm_stand_in import assert_takes
from tests.ops.attention_cases import assert_no_worse

from . import models, unpack, vllm_emulated
from .models import prompt

NEW_TOKENS = 6
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Step(NamedTuple):
    """A call of our attention, which a layer makes in each of the engine's steps."""

    queries: list[int]  # of each request
    keys: list[int]
    page_size: int
    window: int | None
    tables: Tensor


class Reply(NamedTuple):
    tokens: list[int]
    logprobs: Tensor  # of each token of the vocabulary, before each of `tokens`
    cached: int  # tokens of the prompt whose keys were in the cache


def logprobs(positions: Sequence[dict[int, Any]]) -> Tensor:
    """vLLM's log-probabilities of all tokens at each position."""
    rows = [[each[token].logprob for token in range(models.VOCABULARY)] for each in positions]
    return torch.tensor(rows, dtype=torch.float64)


@dataclass
class Server:
    """vLLM's engine with a model, and the calls of our attention that it has made."""

    path: Path
    dtype: torch.dtype
    llm: Any
    steps: list[Step] = field(default_factory=list)

    @property
    def runner(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def layers(self) -> dict[str, Any]:
        """The attention layers by name."""
        layers = self.runner.compilation_config.static_forward_context
        return {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}

    def attention_caches(self) -> list[Tensor]:
        return [layer.kv_cache for layer in self.layers().values()]

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[Any]:
        """vLLM's outputs for prompts that arrive together."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        return self.llm.generate(
            [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts],
            SamplingParams(
                max_tokens=NEW_TOKENS,
                temperature=0,
                ignore_eos=True,
                logprobs=models.VOCABULARY,
                detokenize=False,
                **options,
            ),
            use_tqdm=False,
        )

    def serve(self, *prompts: list[int]) -> list[Reply]:
        return [
            Reply(list(reply.token_ids), logprobs(reply.logprobs), output.num_cached_tokens)
            for output in self.generate(prompts)
            for reply in output.outputs
        ]

    def check(self, *prompts: list[int]) -> list[Reply]:
        """Serve the prompts, and compare the replies with transformers'.

        A token is the reference's most probable one, or as probable within the rounding errors of
        transformers in 16 bits.
        """
        replies = self.serve(*prompts)
        exact, plain = (self.reference(prompts, replies, x) for x in (torch.float64, self.dtype))
        tokens = torch.tensor([token for reply in replies for token in reply.tokens])
        behind = exact.amax(-1) - exact[torch.arange(len(tokens)), tokens]
        assert (behind <= (plain - exact).abs().amax(-1)).all(), (tokens, exact.argmax(-1), behind)
        ours = torch.cat([reply.logprobs for reply in replies])
        assert_no_worse(ours, [plain], exact)
        return replies

    def reference(
        self,
        prompts: tuple[list[int], ...],
        replies: list[Reply],
        dtype: torch.dtype,
        **change: Any,
    ) -> Tensor:
        """What transformers computes in place of the replies' logprobs, all rows together."""
        rows = [
            models.logits(self.path, tokens + reply.tokens, dtype, **change)[len(tokens) - 1 : -1]
            for tokens, reply in zip(prompts, replies, strict=True)
        ]
        return torch.cat(rows).double().log_softmax(-1)


@pytest.fixture(scope="session")
def vllm() -> Any:
    if "vllm" not in sys.modules:
        vllm_emulated.install()
    import vllm

    return vllm


Start = Callable[..., Server]


@pytest.fixture
def start(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an engine: `start(model, **options of vllm.LLM)`."""
    from vllm import envs
    from vllm.distributed import parallel_state

    from cute_attn.integrations import vllm_backend

    started: list[Server] = []
    attention = vllm_backend.flash_attn_varlen_func

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        starts, keys = options["cu_seqlens_q"], options["seqused_k"]
        started[-1].steps.append(
            Step(
                starts.diff().tolist(),
                keys.tolist(),
                k.shape[1],
                options["window_size"][0],
                options["page_table"].clone(),
            )
        )
        return attention(q, k, v, **options)

    monkeypatch.setattr(vllm_backend, "flash_attn_varlen_func", recorded)

    def start(
        model: str, *, dtype: str = "bfloat16", change: dict[str, Any] | None = None, **options: Any
    ) -> Server:
        path = models.make(model, tmp_path, DTYPES[dtype], **(change or {}))
        given = {
            "attention_backend": "CUTE_ATTN",
            "block_size": 16,
            "compilation_config": {"custom_ops": ["none"]},  # layers in PyTorch
            "disable_log_stats": True,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**23,
            "max_logprobs": models.VOCABULARY,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "skip_tokenizer_init": True,
        }
        server = Server(path, DTYPES[dtype], vllm.LLM(str(path), dtype=dtype, **given | options))
        started.append(server)
        for cache in server.attention_caches():
            # vLLM leaves block 0 to no request, and allocates fp8 as bytes.
            cache[1:] = torch.nan if cache.is_floating_point() else 0x7F
        return server

    yield start
    for server in started:
        server.llm.llm_engine.engine_core.shutdown()
    # As vLLM's cleanup_dist_env_and_memory, which also collects garbage: here, for many seconds.
    envs.disable_envs_cache()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def fresh_process(program: str) -> str:
    """The last word that a program prints in a process of its own, in which vLLM is set up."""
    start = "from tests.clients import vllm_emulated\nvllm_emulated.install()\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


# -- the plugin and the selection of a backend


@pytest.mark.clients("The plugin registers `CUTE_ATTN` and `CUSTOM`")
def test_the_plugin_is_loaded(vllm: Any):
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert version("vllm") == unpack.version("vllm")
    load_general_plugins()
    for name in ("CUTE_ATTN", "CUSTOM"):
        backend = AttentionBackendEnum[name].get_class()
        assert backend.full_cls_name()[0] == "cute_attn.integrations.vllm_backend"
    assert AttentionBackendEnum[backend.get_name()].get_class() is backend


@pytest.mark.clients(
    "`vllm serve` takes the names `CUTE_ATTN`, in every option, and `CUTE_ATTN_MLA`"
)
def test_the_command_line():
    """In a process that has not loaded the plugin yet."""
    per_kind = '{"backend_per_kind": {"sliding_window": "CUTE_ATTN"}}'
    found = fresh_process(f"""
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
parsed = parser.parse_args(["--attention-backend=CUTE_ATTN", '--attention-config={per_kind}'])
kinds = parsed.attention_config.backend_per_kind
latent = parser.parse_args(["--attention-backend", "CUTE_ATTN_MLA"]).attention_backend
print(parsed.attention_backend + "," + kinds["sliding_window"].name + "," + latent)
""")
    assert found == "CUTE_ATTN,CUTE_ATTN,CUTE_ATTN_MLA"


@pytest.mark.clients("A spawned process finds `CUTE_ATTN` in the configuration")
def test_a_spawned_process_reads_the_configuration(vllm: Any, tmp_path: Path):
    from vllm.config import AttentionConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = AttentionConfig(backend="CUTE_ATTN", backend_per_kind={"sliding_window": "CUTE_ATTN"})
    assert config.compute_hash()
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    found = fresh_process(f"""
import pickle
from pathlib import Path
config = pickle.loads(Path({str(tmp_path / "config")!r}).read_bytes())
assert config.backend.name == config.backend_per_kind["sliding_window"].name == "CUTE_ATTN"
print(config.backend.get_class().__name__)
""")
    assert found == "CuteAttnBackend"


@pytest.mark.clients("The backend's methods take the arguments that vLLM declares")
def test_methods_take_what_vllm_gives(vllm: Any):
    from vllm.v1.attention import backend as base

    from cute_attn.integrations.vllm_backend import CuteAttnBackend

    bases = {
        "backend": base.AttentionBackend,
        "builder": base.AttentionMetadataBuilder,
        "impl": base.AttentionImpl,
    }
    assert assert_takes(CuteAttnBackend, bases) > 20


@pytest.mark.clients("`--attention-backend CUSTOM` and `CUTE_ATTN` choose the backend")
@pytest.mark.parametrize("name", ["CUSTOM", "CUTE_ATTN"])
def test_the_selector_chooses_the_backend(start: Start, name: str):
    server = start("llama", attention_backend=name)
    layers = server.layers().values()
    assert {type(layer.impl).__module__ for layer in layers} == {
        "cute_attn.integrations.vllm_backend"
    }
    server.check(prompt(9))
    assert len(server.steps) == NEW_TOKENS * len(layers)


@pytest.mark.clients("vLLM refuses what the backend lacks, and says why")
@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("llama", {"kv_cache_dtype": "fp8_inc"}, "kv_cache_dtype not supported"),
        ("llama", {"block_size": 24}, "block_size not supported"),
        ("head_dim 96", {}, "head_size not supported"),
    ],
    ids=["fp8_inc KV cache", "block size 24", "head_dim 96"],
)
def test_what_has_no_kernel_is_refused(
    start: Start, model: str, options: dict[str, Any], reason: str
):
    with pytest.raises(Exception, match=rf"CUTE_ATTN is not valid .*{reason}"):
        start(model, **options)


# -- batches


@pytest.mark.clients("Prefill and decode in one step")
def test_a_step_has_prefills_and_decodes(start: Start):
    server = start("llama", max_num_batched_tokens=32, max_num_seqs=3)
    server.check(prompt(9), prompt(50, 1), prompt(3, 2))
    assert any(1 in step.queries and max(step.queries) > 1 for step in server.steps)


@pytest.mark.clients("Chunked prefill")
def test_a_prompt_is_read_in_chunks(start: Start):
    server = start("qwen3", max_num_batched_tokens=16)
    server.check(prompt(45))
    assert [step.keys for step in server.steps[::2]][:3] == [[16], [32], [45]]


@pytest.mark.clients("Prefix caching")
def test_a_second_prompt_finds_the_firsts_keys(start: Start):
    server = start("llama", enable_prefix_caching=True)
    first, again = prompt(40), prompt(40)[:36] + prompt(8, 1)
    server.check(first)
    server.steps.clear()
    (reply,) = server.check(again)
    assert reply.cached == 32
    assert server.steps[0].queries == [12] and server.steps[0].keys == [44]


@pytest.mark.clients("Preempted requests are computed again")
def test_requests_that_find_no_page_are_preempted(start: Start):
    """The cache has six pages for two requests of four."""
    server = start("llama", num_gpu_blocks_override=7, max_model_len=64)
    server.check(prompt(46), prompt(44, 1))
    prefills = [sum(step.queries) for step in server.steps[::2] if max(step.queries) > 1]
    assert len(prefills) > 1 and sum(prefills) > 46 + 44


@pytest.mark.clients("Pages of 48, 544 and 784 tokens, as for hybrid models")
@pytest.mark.parametrize("block_size", [48, 544, 784])
def test_pages_of_hybrid_models(start: Start, block_size: int):
    server = start("llama", block_size=block_size, max_model_len=1024)
    server.check(prompt(60), prompt(7, 1))
    assert {step.page_size for step in server.steps} == {block_size}


@pytest.mark.clients("Every order of the KV cache in memory (`VLLM_KV_CACHE_LAYOUT`)")
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_layouts(start: Start, monkeypatch: pytest.MonkeyPatch, layout: str):
    """Layers, blocks, heads, tokens and content."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    server = start("llama")
    caches = {
        "L": server.attention_caches()[1].data_ptr() - server.attention_caches()[0].data_ptr(),
        **{
            name: stride * server.dtype.itemsize
            for name, stride in zip("BHNC", server.attention_caches()[0].stride(), strict=True)
        },
    }
    assert "".join(sorted(caches, key=lambda name: -abs(caches[name]))) == layout
    server.check(prompt(40), prompt(9, 1))


@pytest.mark.clients("Keys of a long sequence divided among SMs")
def test_a_long_sequence_is_split(start: Start):
    server = start("llama-mha", change={"num_hidden_layers": 1}, max_model_len=1024)
    with cute_attn.emulated("sm_90a", Emulator(num_sms=132)) as emulator:
        server.check(prompt(900))
    assert any("combine" in launch.kernel.lower() for launch in emulator.report.launches)


@pytest.mark.clients("NaN in pages and rows that no request has")
def test_nan_where_nothing_is_written(start: Start):
    server = start("mistral")
    server.check(prompt(40), prompt(9, 1))
    written = 40 + 9 + 2 * (NEW_TOKENS - 1)  # the last token has no key yet
    for cache in server.attention_caches():
        rows = cache[1:].isnan().all(-1).all(1)
        assert (~rows).sum() == written
        used = ~rows.all(-1)
        assert rows[used].any() and not used.all()


@pytest.mark.clients("Speculative decoding with a draft model")
@pytest.mark.parametrize(("draft", "verified"), [("llama", 2), ("llama-mha", 6)])
def test_a_draft_models_tokens_are_verified(
    start: Start, tmp_path: Path, draft: str, verified: int
):
    """A draft that is the model itself is always right, and another model seldom."""
    server = start(
        "llama",
        speculative_config={
            "method": "draft_model",
            "model": str(models.make(draft, tmp_path / "draft")),
            "num_speculative_tokens": 3,
        },
    )
    assert server.runner.speculator.supports_decode_metadata_update
    server.check(prompt(40), prompt(9, 1))
    # Four queries of a request: the last token and its three drafts, in each of the two layers.
    assert sum(max(step.queries) == 4 for step in server.steps) // 2 <= verified
    assert any(step.queries == [4, 4] for step in server.steps)


@pytest.mark.clients("The model runner of older releases (`VLLM_USE_V2_MODEL_RUNNER=0`)")
def test_the_older_model_runner(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    server = start("mistral", max_num_batched_tokens=32)
    assert type(server.runner).__module__ == "vllm.v1.worker.cpu_model_runner"
    server.check(prompt(9), prompt(50, 1))


# -- models


@pytest.mark.clients("The probabilities of every token of a prompt")
def test_prompt_logprobs(start: Start):
    server = start("mistral", max_num_batched_tokens=32)
    tokens = prompt(50)
    (output,) = server.generate([tokens], prompt_logprobs=models.VOCABULARY)
    ours = logprobs(output.prompt_logprobs[1:])
    exact, plain = (
        models.logits(server.path, tokens, x)[:-1].double().log_softmax(-1)
        for x in (torch.float64, server.dtype)
    )
    assert_no_worse(ours, [plain], exact)


@pytest.mark.clients("float16")
def test_float16(start: Start):
    start("llama", dtype="float16").check(prompt(40), prompt(9, 1))


@pytest.mark.clients("Head sizes 64, 128 and 256, with and without grouped heads")
@pytest.mark.parametrize("model", ["llama", "llama-mha", "qwen3", "gemma2"])
def test_heads(start: Start, model: str):
    server = start(model)
    server.check(prompt(40), prompt(9, 1))
    config = server.llm.model_config.hf_config
    (layer, *_) = server.layers().values()
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size) == (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    # Name -> a model, and the change of its configuration that takes the feature away.
    "sliding windows": ("mistral", {"sliding_window": None}),
    "sliding windows beside full attention": ("gemma2", {"sliding_window": 4096}),
    "softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "sinks": ("gpt-oss", {"sinks": None}),
}


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(x, marks=pytest.mark.clients(x[0].upper() + x[1:] + f" ({FEATURES[x][0]})"))
        for x in FEATURES
    ],
)
def test_layers(start: Start, feature: str):
    """Without the feature, the probabilities would be others by far."""
    model, without = FEATURES[feature]
    server = start(model)
    prompts = prompt(40), prompt(9, 1)
    replies = server.check(*prompts)
    exact = server.reference(prompts, replies, torch.float64)
    other = server.reference(prompts, replies, torch.float64, **without)
    ours = torch.cat([reply.logprobs for reply in replies])
    assert (other - exact).norm() > 5 * (ours - exact).norm()


@pytest.mark.clients("A hybrid model, LFM2: layers with states beside attention")
def test_a_hybrid_model(start: Start):
    """All layers share a pool, whose pages are as large as the larger of a state and a block."""
    server = start("lfm2", block_size=48, max_num_batched_tokens=64, enable_prefix_caching=True)
    server.check(prompt(60), prompt(30, 1))
    server.check(prompt(60))
    assert {step.page_size for step in server.steps} == {48}


@pytest.mark.clients(
    "Qwen3-Next: a model of Gated Delta Net and attention layers, all on our kernels"
)
def test_qwen3_next(start: Start, monkeypatch: pytest.MonkeyPatch):
    from cute_attn.integrations import vllm_gated_delta_rule

    vllm_emulated.replace_in_linear_layers(monkeypatch)
    vllm_emulated.replace_linear_layer(monkeypatch, vllm_gated_delta_rule)
    server = start("qwen3_next", block_size=48, max_num_batched_tokens=64)
    layers = server.runner.compilation_config.static_forward_context.values()
    (linear,) = (layer for layer in layers if not hasattr(layer, "impl"))
    assert isinstance(linear, vllm_gated_delta_rule.CuteGatedDeltaNet) and linear.why_not is None
    server.check(prompt(70), prompt(3, 1), prompt(20, 2))
    assert {step.page_size for step in server.steps} == {48}


GEMMA4 = {
    "two layers": {},
    # As E2B and E4B: the last two layers read the keys and values of the first two.
    "shared keys and values": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.clients("Gemma 4: layers of head sizes 256 and 512")
def test_layers_of_two_head_sizes(start: Start):
    server = start("gemma4")
    server.check(prompt(40), prompt(9, 1))
    layers = list(server.layers().values())
    assert [(x.head_size, x.backend.name) for x in layers] == [
        (256, "CUTE_ATTN"),
        (512, "CUTE_ATTN"),
    ]
    assert len(server.steps) == NEW_TOKENS * len(layers)


@pytest.mark.clients("Gemma 4: sliding layers, beside another backend for head size 512")
@pytest.mark.parametrize("change", GEMMA4)
def test_a_backend_for_each_kind_of_layer(start: Start, change: str):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if "PLAIN" not in AttentionBackendEnum.__members__:
        register_backend("PLAIN", "tests.clients.vllm_plain_backend.PlainBackend")
    server = start(
        "gemma4",
        change=GEMMA4[change],
        attention_backend=None,
        attention_config={
            "backend_per_kind": {"sliding_window": "CUSTOM", "full_attention": "PLAIN"}
        },
    )
    server.check(prompt(40), prompt(9, 1))
    layers = list(server.layers().values())
    assert [(x.head_size, x.backend.name) for x in layers] == [
        (256, "CUTE_ATTN"),
        (512, "PLAIN"),
    ] * (len(layers) // 2)
    assert len(server.steps) == NEW_TOKENS * len(layers) // 2
