"""Kimi Linear's layers on our KDA kernels, in vLLM's real engine, emulated for an H100.

The model is Kimi Linear without its MLA layers. A test serves prompts, and compares the output of
each KDA layer for each token with a float64 reference of the layer on the same inputs. vLLM's
states hold NaN wherever the engine has not written.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cute_attn.reference.kda import kda_reference

from . import vllm_emulated

HEADS, HEAD_DIM, WIDTH, VOCABULARY = 2, 64, 4, 64
NORM_EPSILON = 1e-5


@pytest.fixture(scope="session")
def vllm() -> Any:
    if "vllm" not in sys.modules:
        vllm_emulated.install()
    import vllm

    return vllm


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Stands in for vLLM's Triton kernel of this name: a decode step of the convolution. With
    accepted tokens, a state is the inputs since the first that is still in a window."""
    assert activation == "silu" and conv_state_indices is not None and out is not None
    starts = torch.arange(len(x) + 1) if query_start_loc is None else query_start_loc
    width = weight.shape[1]
    for i, slot in enumerate(conv_state_indices.tolist()):
        start, end = starts[i : i + 2].tolist()
        if start == end or slot == 0:
            continue
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[i]) - 1
        past = conv_state[slot, :, first : first + width - 1].clone()
        rows = x[start:end]
        y = F.conv1d(
            torch.cat([past, rows.T], 1).to(weight.dtype)[None],
            weight[:, None],
            bias,
            groups=len(weight),
        )
        out[start:end] = F.silu(y[0]).T.to(x.dtype)
        kept = torch.cat([past, rows.T], 1)
        if num_accepted_tokens is None:
            conv_state[slot, :, : width - 1] = kept[:, 1 - width :]
        else:
            kept = kept[:, 1:]
            conv_state[slot, :, : kept.shape[1]] = kept
    return out


@dataclass
class Layer:
    """What a KDA layer was given, and what it returned, by request and position."""

    module: Any
    rows: dict[str, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)


@dataclass
class Server:
    llm: Any
    layers: dict[str, Layer] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)  # tokens of each request in each step
    modes: list[str] = field(default_factory=list)
    requests: dict[str, list[int]] = field(default_factory=dict)  # prompt and reply
    prepared: Any = None

    @property
    def runner(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def batch(self) -> tuple[list[str], list[int]]:
        """The present step's requests, and where each one's tokens start."""
        runner = self.runner
        if self.prepared is None:  # the model runner of older releases
            requests = runner.input_batch.req_ids
            return requests, runner.query_start_loc.np[: len(requests) + 1].tolist()
        requests = self.prepared.req_ids
        return requests, self.prepared.query_start_loc_np[: len(requests) + 1].tolist()

    def watch(self) -> None:
        """Record the inputs and outputs of all layers from here on."""
        runner = self.runner
        if hasattr(runner, "prepare_inputs"):
            prepare_inputs = runner.prepare_inputs

            def prepared(*arguments: Any, **named: Any) -> Any:
                self.prepared = prepare_inputs(*arguments, **named)
                return self.prepared

            runner.prepare_inputs = prepared
        for name, module in self.runner.compilation_config.static_forward_context.items():
            self.layers[name] = Layer(module)
            module.register_forward_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, given: dict[str, Any], output: Tensor) -> None:
            from vllm.forward_context import get_forward_context

            metadata = get_forward_context().attn_metadata
            if metadata is None:
                return
            m = metadata[name]
            requests, starts = self.batch()
            layer = self.layers[name]
            if name == next(iter(self.layers)):
                self.batches.append([b - a for a, b in itertools.pairwise(starts)])
                self.modes.append(
                    ("verify " if m.num_spec_decodes else "")
                    + ("prefill" if m.num_prefills else "decode" if m.num_decodes else "")
                )
            for request, start, end in zip(requests, starts, starts[1:], strict=False):
                rows = layer.rows.setdefault(request.partition("-")[0], {})
                for t in range(start, end):
                    at = int(given["positions"][t])
                    # A draft that is not accepted is replaced by the next step's token.
                    rows[at] = given["hidden_states"][t].clone(), output[t].clone()

        return hook

    def serve(self, *prompts: list[int], tokens: int = 5) -> list[list[int]]:
        """Generate so many tokens for each prompt, all of which arrive together."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        replies = [list(output.outputs[0].token_ids) for output in outputs]
        for output, given, reply in zip(outputs, prompts, replies, strict=True):
            self.requests[output.request_id.partition("-")[0]] = given + reply
        return replies

    def rows(self, layer: Layer, request: str) -> list[tuple[Tensor, Tensor]]:
        """The layer's inputs and outputs for a request's tokens but the last, which no step has
        as its input. Rows of a cached prefix are those of an earlier request."""
        tokens = self.requests[request]
        found = []
        for t in range(len(tokens) - 1):
            of = next(
                other
                for other in (request, *self.requests)
                if t in layer.rows[other] and self.requests[other][: t + 1] == tokens[: t + 1]
            )
            found.append(layer.rows[of][t])
        return found

    def check(self) -> None:
        """Compare all that has been recorded with the reference, in each layer."""
        assert self.layers
        for name, layer in self.layers.items():
            assert type(layer.module).__name__ == "CuteKimiDeltaAttention"
            assert layer.module.why_not is None
            errors = []
            for request in self.requests:
                rows = self.rows(layer, request)
                x, ours = (torch.stack(part) for part in zip(*rows, strict=True))
                assert ours.isfinite().all(), (name, request)
                exact, plain = (layer_reference(layer.module, x, exact=e) for e in (True, False))
                errors.append([(y.double() - exact).norm() for y in (ours, plain)])
            mine, theirs = torch.tensor(errors).norm(dim=0).tolist()
            assert mine <= 2 * theirs, f"{name}: error {mine:.3e}, plain PyTorch {theirs:.3e}"


def layer_reference(layer: Any, x: Tensor, *, exact: bool) -> Tensor:
    """The layer's output for a sequence `[tokens, hidden]`: in float64, or in the dtypes in which
    PyTorch would compute it."""

    def of(parameter: Tensor) -> Tensor:
        return parameter.detach().double() if exact else parameter.detach()

    def linear(x: Tensor, projection: Any) -> Tensor:
        return F.linear(x, of(projection.weight))

    x = x.double() if exact else x
    tokens, heads = len(x), (layer.local_num_heads, layer.head_dim)
    width = heads[0] * heads[1]
    mixed, beta, f_a = linear(x, layer.in_proj_qkvgfab).split([3 * width, *heads], dim=-1)
    output_gate = linear(linear(x, layer.g_a_proj), layer.g_b_proj).unflatten(-1, heads)
    g = linear(f_a, layer.f_b_proj).unflatten(-1, heads)
    weight = of(layer.conv1d.weight)
    inputs = F.pad(mixed.T.to(weight.dtype), (weight.shape[-1] - 1, 0))
    mixed = F.silu(F.conv1d(inputs[None], weight, groups=len(weight))[0]).T.to(x.dtype)
    q, k, v = mixed.view(1, tokens, 3, *heads).unbind(2)
    o = kda_reference(
        q,
        k,
        v,
        g[None],
        beta[None],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=layer.A_log.detach(),
        dt_bias=layer.dt_bias.detach(),
        lower_bound=layer.gate_lower_bound,
        dtype=torch.float64 if exact else torch.float32,
    ).o[0]
    o = o.to(x.dtype)
    wide = o if exact else o.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPSILON)
    wide = wide * of(layer.o_norm.weight) * output_gate.to(wide.dtype).sigmoid()
    return linear(wide.to(x.dtype).flatten(1), layer.o_proj)


def make(directory: Path, **of_kda: Any) -> Path:
    """Write the configuration of a model."""
    configuration = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [],
            "head_dim": HEAD_DIM,
            "num_heads": HEADS,
            "short_conv_kernel_size": WIDTH,
            **of_kda,
        },
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 2048,
    }
    (directory / "config.json").write_text(json.dumps(configuration))
    return directory


def set_weights(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, x in model.named_parameters():
        normal = torch.randn(x.shape, generator=generator)
        if name.endswith("norm.weight"):
            normal = 1 + 0.1 * normal
        elif "conv1d" in name:
            normal = 0.5 * normal
        elif x.dim() == 2:
            normal = normal * x.shape[1] ** -0.5 * (8 if "embed" in name else 1)
        x.data.copy_(normal)


Start = Callable[..., Server]


@pytest.fixture
def start(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an engine: `start(**options of vllm.LLM)`."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    from cute_attn.integrations import vllm_kda

    monkeypatch.setattr(kimi_gdn_linear_attn, "causal_conv1d_fn", causal_conv1d_fn_cpu)
    monkeypatch.setattr(kimi_gdn_linear_attn, "causal_conv1d_update", causal_conv1d_update)
    monkeypatch.delitem(op_registry_oot, vllm_kda.NAME, raising=False)
    vllm_kda.register()
    started: list[Server] = []

    def start(of_kda: dict[str, Any] | None = None, **options: Any) -> Server:
        given = {
            "disable_log_stats": True,
            "dtype": "bfloat16",
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**22,
            "load_format": "dummy",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "skip_tokenizer_init": True,
        }
        server = Server(vllm.LLM(str(make(tmp_path, **of_kda or {})), **given | options))
        started.append(server)
        set_weights(server.runner.model)
        server.watch()
        for layer in server.layers.values():
            for cache in layer.module.kv_cache:
                cache.fill_(torch.nan)
        return server

    yield start
    for server in started:
        server.llm.llm_engine.engine_core.shutdown()
    started.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.mark.clients("Kimi Linear: KDA layers, prefill and decode")
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_prefill_and_decode(start: Start, lower_bound: float | None):
    """Six requests for four places, so that prompts arrive while others are decoded."""
    server = start({} if lower_bound is None else {"gate_lower_bound": lower_bound})
    server.serve(*(prompt(n, seed=n) for n in (70, 1, 3, 130, 9, 64)), tokens=4)
    assert {"prefill", "decode"} == set(server.modes)
    assert any(1 in batch and max(batch) > 1 for batch in server.batches)
    server.check()


@pytest.mark.clients("Kimi Linear: the plugin replaces its layers on request")
def test_the_plugin_replaces_the_layers_on_request(vllm: Any, monkeypatch: pytest.MonkeyPatch):
    from vllm.model_executor.custom_op import op_registry_oot

    import cute_attn
    from cute_attn.integrations import vllm as plugin
    from cute_attn.integrations import vllm_kda

    monkeypatch.delitem(op_registry_oot, vllm_kda.NAME, raising=False)
    for value in ("0", "", "1", "1"):
        monkeypatch.setenv("CUTE_ATTN_SERVER_KDA", value)
        cute_attn.reload_settings()
        plugin.register()
        assert (vllm_kda.NAME in op_registry_oot) == (value == "1")
    assert op_registry_oot[vllm_kda.NAME] is vllm_kda.CuteKimiDeltaAttention
    theirs = type("Theirs", (), {})
    monkeypatch.setitem(op_registry_oot, vllm_kda.NAME, theirs)
    plugin.register()
    assert op_registry_oot[vllm_kda.NAME] is theirs  # another plugin's
    monkeypatch.delenv("CUTE_ATTN_SERVER_KDA")
    cute_attn.reload_settings()


@pytest.mark.clients("Kimi Linear: other sizes stay on vLLM's kernels")
def test_layers_without_a_kernel_stay_with_vllm(start: Start, monkeypatch: pytest.MonkeyPatch):
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
        KimiGatedDeltaNetAttention,
    )

    calls: list[str] = []
    monkeypatch.setattr(
        KimiGatedDeltaNetAttention, "_forward", lambda layer, *_, **__: calls.append(layer.prefix)
    )
    server = start({"head_dim": 32, "num_heads": 4})
    (why,) = {layer.module.why_not for layer in server.layers.values()}
    assert why == "head_dim is 32, there are kernels for (64, 128)"
    calls.clear()
    server.serve(prompt(3), tokens=1)
    assert calls == list(server.layers)


@pytest.mark.clients("Kimi Linear: chunked prefill")
def test_prompts_in_parts(start: Start):
    """Later parts start from the state of the part before, in the same batch as new prompts."""
    server = start(max_num_batched_tokens=64, max_num_seqs=3)
    server.serve(prompt(150), prompt(20, 1), prompt(90, 2), tokens=3)
    assert max(map(sum, server.batches)) <= 64 < 150
    server.check()


@pytest.mark.clients("Kimi Linear: prefix cache")
def test_a_cached_prefix(start: Start):
    server = start(enable_prefix_caching=True, max_num_seqs=2)
    first = server.serve(prompt(100), tokens=2)
    before = len(server.batches)
    again = server.serve(prompt(100), [*prompt(100)[:96], 5, 6, 7], tokens=2)
    assert again[0] == first[0]
    assert sorted(server.batches[before]) == [3, 4], server.batches
    server.check()


class Drafter:
    """Drafts what is known to follow, with a mistake at a place that changes from draft to draft.
    vLLM makes an instance (`custom_class`)."""

    known: ClassVar[list[list[int]]] = []

    def __init__(self, vllm_config: Any):
        self.count = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model."""

    def propose(
        self, sampled: list[list[int]], lengths: Any, tokens: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        drafts: list[list[int]] = []
        for i, new in enumerate(sampled):
            so_far = tokens[i, : lengths[i]].tolist()
            known = [x for x in self.known if x[: len(so_far)] == so_far]
            draft = known[0][len(so_far) :][: self.count] if new and known else []
            if draft and len(so_far) % 4 < len(draft):
                at = len(so_far) % 4
                draft[at] = 3 + (draft[at] + 1) % (VOCABULARY - 3)
            drafts.append(draft)
        return drafts


@pytest.mark.clients("Kimi Linear: speculative decoding")
def test_speculative_decoding(start: Start, monkeypatch: pytest.MonkeyPatch):
    """Some drafts are accepted in whole, some in part, and prompts arrive beside drafts. Only the
    model runner of older releases takes a drafter of the user's."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    prompts = [prompt(n, seed=n) for n in (70, 12, 30)]
    plain = start()
    replies = plain.serve(*prompts, tokens=16)
    known = [given + reply for given, reply in zip(prompts, replies, strict=True)]
    # vLLM imports the module again, under its name.
    module = importlib.import_module("tests.clients.test_vllm_kda")
    monkeypatch.setattr(module.Drafter, "known", known)
    server = start(
        speculative_config={
            "method": "custom_class",
            "model": "tests.clients.test_vllm_kda.Drafter",
            "num_speculative_tokens": 3,
        },
        max_num_seqs=2,
    )
    assert server.serve(*prompts, tokens=16) == replies
    assert {"prefill", "verify ", "verify prefill"} <= set(server.modes)
    assert len(server.batches) < len(plain.batches) + 16
    server.check()
