"""Linear layers of Kimi Linear, Qwen3-Next and Qwen3.5 on our kernels, in vLLM's real engine,
emulated for an H100.

The model has linear layers only, but for the test of a hybrid one. A test serves prompts, and
compares the output of each linear layer for each token with a float64 reference of the layer on the
same inputs. vLLM's states hold NaN wherever the engine has not written.
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

from cute_attn.reference.gated_delta_rule import gated_delta_rule_reference
from cute_attn.reference.kda import kda_reference

from . import vllm_emulated

HEADS, HEADS_V, HEAD_DIM, WIDTH, VOCABULARY = 2, 4, 64, 4, 64
NORM_EPSILON = 1e-5


@pytest.fixture(scope="session")
def vllm() -> Any:
    if "vllm" not in sys.modules:
        vllm_emulated.install()
    import vllm

    return vllm


@dataclass
class Layer:
    """What a linear layer was given, and what it returned, by request and position."""

    module: Any
    rows: dict[str, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)


@dataclass
class Server:
    llm: Any
    kind: Kind
    layers: dict[str, Layer] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)  # tokens of each request in each step
    modes: list[str] = field(default_factory=list)
    requests: dict[str, list[int]] = field(default_factory=dict)  # prompt and reply
    prepared: Any = None
    positions: list[int] = field(default_factory=list)  # of the present step's tokens

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

        def positioned(_: Any, args: Any, given: dict[str, Any]) -> None:
            self.positions = given["positions"].tolist()

        runner.model.register_forward_pre_hook(positioned, with_kwargs=True)
        for name, module in runner.compilation_config.static_forward_context.items():
            if isinstance(module, self.kind.layer):
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
                    # A draft that is not accepted is replaced by the next step's token.
                    rows[self.positions[t]] = given["hidden_states"][t].clone(), output[t].clone()

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
            assert layer.module.why_not is None
            errors = []
            for request in self.requests:
                rows = self.rows(layer, request)
                x, ours = (torch.stack(part) for part in zip(*rows, strict=True))
                assert ours.isfinite().all(), (name, request)
                exact, plain = (
                    self.kind.reference(layer.module, x, exact=e) for e in (True, False)
                )
                errors.append([(y.double() - exact).norm() for y in (ours, plain)])
            mine, theirs = torch.tensor(errors).norm(dim=0).tolist()
            assert mine <= 2 * theirs, f"{name}: error {mine:.3e}, plain PyTorch {theirs:.3e}"


class Arithmetic:
    """A layer's steps in float64, or in the dtypes in which PyTorch would compute them."""

    def __init__(self, layer: Any, *, exact: bool):
        self.layer, self.exact = layer, exact
        self.dtype = torch.float64 if exact else torch.float32

    def of(self, parameter: Tensor) -> Tensor:
        return parameter.detach().double() if self.exact else parameter.detach()

    def linear(self, x: Tensor, projection: Any) -> Tensor:
        return F.linear(x, self.of(projection.weight))

    def convolved(self, mixed: Tensor) -> Tensor:
        weight = self.of(self.layer.conv1d.weight)
        inputs = F.pad(mixed.T.to(weight.dtype), (weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(inputs[None], weight, groups=len(weight))[0]).T.to(mixed.dtype)

    def parameters(self) -> dict[str, Any]:
        return {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "A_log": self.layer.A_log.detach(),
            "dt_bias": self.layer.dt_bias.detach(),
            "dtype": self.dtype,
        }

    def finished(self, o: Tensor, gate: Tensor, norm: Any, projection: Any) -> Tensor:
        """The projection of o after its norm, where `gate` is behind its activation."""
        wide = o if self.exact else o.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPSILON)
        wide = wide * self.of(norm.weight) * gate.to(wide.dtype)
        return self.linear(wide.to(gate.dtype).flatten(1), projection)


def kimi_reference(layer: Any, x: Tensor, *, exact: bool) -> Tensor:
    """The layer's output for a sequence `[tokens, hidden]`."""
    it = Arithmetic(layer, exact=exact)
    x = x.double() if exact else x
    heads = (layer.local_num_heads, layer.head_dim)
    width = heads[0] * heads[1]
    mixed, beta, f_a = it.linear(x, layer.in_proj_qkvgfab).split([3 * width, *heads], dim=-1)
    output_gate = it.linear(it.linear(x, layer.g_a_proj), layer.g_b_proj).unflatten(-1, heads)
    g = it.linear(f_a, layer.f_b_proj).unflatten(-1, heads)
    q, k, v = it.convolved(mixed).view(1, len(x), 3, *heads).unbind(2)
    found = kda_reference(
        q, k, v, g[None], beta[None], lower_bound=layer.gate_lower_bound, **it.parameters()
    )
    return it.finished(found.o[0].to(x.dtype), output_gate.sigmoid(), layer.o_norm, layer.o_proj)


def qwen_reference(layer: Any, x: Tensor, *, exact: bool) -> Tensor:
    """The layer's output for a sequence `[tokens, hidden]`."""
    it = Arithmetic(layer, exact=exact)
    x = x.double() if exact else x
    heads, heads_v, dim, dim_v = HEADS, HEADS_V, HEAD_DIM, HEAD_DIM
    qkvz, ba = it.linear(x, layer.in_proj_qkvz), it.linear(x, layer.in_proj_ba)
    widths = [dim, dim, heads_v // heads * dim_v, heads_v // heads * dim_v]
    if layer.gqa_interleaved_layout:  # Qwen3-Next: by key head
        parts = qkvz.unflatten(-1, (heads, -1)).split(widths, dim=-1)
        b, a = (y.flatten(1) for y in ba.unflatten(-1, (heads, 2, -1)).unbind(2))
    else:
        parts = qkvz.split([heads * width for width in widths], dim=-1)
        b, a = ba.chunk(2, dim=-1)
    *qkv, z = (y.flatten(1) for y in parts)
    mixed = it.convolved(torch.cat(qkv, dim=-1))
    q, k, v = mixed.split([heads * dim, heads * dim, heads_v * dim_v], dim=-1)
    found = gated_delta_rule_reference(
        q.view(1, -1, heads, dim),
        k.view(1, -1, heads, dim),
        v.view(1, -1, heads_v, dim_v),
        a[None],
        b[None],
        **it.parameters(),
    )
    gate = F.silu(z.view(-1, heads_v, dim_v))
    return it.finished(found.o[0].to(x.dtype), gate, layer.norm, layer.out_proj)


@dataclass(frozen=True)
class Kind:
    """A model's kind of linear layer.

    Attributes:
        theirs, ours: the modules of vLLM's layer and of ours.
        classes: the names of vLLM's class, of its method that computes the recurrence, and of ours.
        switch: the environment variable that makes the plugin replace the layer.
        configuration: of the model; `linear` writes what belongs to the linear layers.
        small: a change that leaves the layer without a kernel.
        of_layer: arguments of the layer that differ from the model's: Qwen3.5's layer is tried in
            Qwen3-Next's model, because the module of Qwen3.5 needs torchvision.
    """

    theirs: str
    ours: str
    classes: tuple[str, str, str]
    switch: str
    configuration: dict[str, Any]
    linear: Callable[..., dict[str, Any]]
    reference: Callable[..., Tensor]
    small: dict[str, Any]
    of_layer: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> Any:
        return importlib.import_module(f"vllm.model_executor.layers.mamba.gdn.{self.theirs}")

    @property
    def integration(self) -> Any:
        return importlib.import_module(f"cute_attn.integrations.{self.ours}")

    @property
    def layer(self) -> Any:
        return getattr(self.module, self.classes[0])


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 2048,
    "rms_norm_eps": NORM_EPSILON,
}


def kimi(**of_kda: Any) -> dict[str, Any]:
    return {
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [],
            "head_dim": HEAD_DIM,
            "num_heads": HEADS,
            "short_conv_kernel_size": WIDTH,
            **of_kda,
        }
    }


def qwen(**changes: Any) -> dict[str, Any]:
    return {
        "layer_types": ["linear_attention", "linear_attention"],
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
        "linear_num_key_heads": HEADS,
        "linear_num_value_heads": HEADS_V,
        "linear_conv_kernel_dim": WIDTH,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        **changes,
    }


QWEN_LAYER = {
    "theirs": "qwen_gdn_linear_attn",
    "ours": "vllm_gated_delta_rule",
    "configuration": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 0,
        "mlp_only_layers": [0, 1],
    },
    "classes": ("QwenGatedDeltaNetAttention", "_forward_core", "CuteGatedDeltaNet"),
    "switch": "CUTE_ATTN_SERVER_GDN",
    "linear": qwen,
    "reference": qwen_reference,
    "small": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
KINDS = {
    "Kimi Linear": Kind(
        theirs="kimi_gdn_linear_attn",
        ours="vllm_kda",
        classes=("KimiGatedDeltaNetAttention", "_forward", "CuteKimiDeltaAttention"),
        switch="CUTE_ATTN_SERVER_KDA",
        configuration={
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "num_attention_heads": HEADS,
            "head_dim": HEAD_DIM,
        },
        linear=kimi,
        reference=kimi_reference,
        small={"head_dim": 32, "num_heads": 4},
    ),
    "Qwen3-Next": Kind(**QWEN_LAYER),
    "Qwen3.5": Kind(of_layer={"gqa_interleaved_layout": False}, **QWEN_LAYER),
}


def kinds(feature: str, *names: str) -> Any:
    """The test's argument `name`: a kind of layer, of all or of those named."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.clients(f"{name}: {feature}"))
            for name in names or KINDS
        ],
    )


def make(directory: Path, kind: Kind, **changes: Any) -> Path:
    """Write the configuration of a model."""
    configuration = COMMON | kind.configuration | kind.linear(**changes)
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
    """Starts an engine: `start(name of the kind, changes, **options of vllm.LLM)`."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    vllm_emulated.replace_in_linear_layers(monkeypatch)
    for kind in KINDS.values():
        vllm_emulated.replace_linear_layer(monkeypatch, kind.integration)
    started: list[Server] = []

    def start(name: str, changes: dict[str, Any] | None = None, **options: Any) -> Server:
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
        kind = KINDS[name]
        init = kind.layer.__init__
        monkeypatch.setattr(
            kind.layer, "__init__", lambda *args, **given: init(*args, **given | kind.of_layer)
        )
        llm = vllm.LLM(str(make(tmp_path, kind, **changes or {})), **given | options)
        server = Server(llm, kind)
        started.append(server)
        set_weights(server.runner.model)
        server.watch()
        for layer in server.layers.values():
            assert type(layer.module).__name__ == kind.classes[2]
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


def served(server: Server) -> None:
    """Six requests for four places, so that prompts arrive while others are decoded."""
    server.serve(*(prompt(n, seed=n) for n in (70, 1, 3, 130, 9, 64)), tokens=4)
    assert {"prefill", "decode"} == set(server.modes)
    assert any(1 in batch and max(batch) > 1 for batch in server.batches)
    server.check()


@kinds("linear layers, prefill and decode")
def test_prefill_and_decode(start: Start, name: str):
    served(start(name))


@pytest.mark.clients("Kimi Linear: linear layers, prefill and decode")
def test_a_lower_bound_of_the_gate(start: Start):
    served(start("Kimi Linear", {"gate_lower_bound": -5.0}))


@kinds("the plugin replaces its layers on request", "Kimi Linear", "Qwen3-Next")
def test_the_plugin_replaces_the_layers_on_request(
    vllm: Any, name: str, monkeypatch: pytest.MonkeyPatch
):
    from vllm.model_executor.custom_op import op_registry_oot

    import cute_attn
    from cute_attn.integrations import vllm as plugin

    kind = KINDS[name]
    replaced = kind.integration.NAME
    monkeypatch.delitem(op_registry_oot, replaced, raising=False)
    for value in ("0", "", "1", "1"):
        monkeypatch.setenv(kind.switch, value)
        cute_attn.reload_settings()
        plugin.register()
        assert (replaced in op_registry_oot) == (value == "1")
    assert op_registry_oot[replaced] is getattr(kind.integration, kind.classes[2])
    theirs = type("Theirs", (), {})
    monkeypatch.setitem(op_registry_oot, replaced, theirs)
    plugin.register()
    assert op_registry_oot[replaced] is theirs  # another plugin's
    monkeypatch.delenv(kind.switch)
    cute_attn.reload_settings()


@kinds("other sizes stay on vLLM's kernels", "Kimi Linear", "Qwen3-Next")
def test_layers_without_a_kernel_stay_with_vllm(
    start: Start, name: str, monkeypatch: pytest.MonkeyPatch
):
    kind = KINDS[name]
    calls: list[str] = []
    monkeypatch.setattr(
        kind.layer, kind.classes[1], lambda layer, *_, **__: calls.append(layer.prefix)
    )
    server = start(name, kind.small)
    (why,) = {layer.module.why_not for layer in server.layers.values()}
    assert why == "the head_dim of keys is 32, there are kernels for (64, 128)"
    calls.clear()
    server.serve(prompt(3), tokens=1)
    assert calls == list(server.layers)


@kinds("chunked prefill", "Kimi Linear", "Qwen3-Next")
def test_prompts_in_parts(start: Start, name: str):
    """Later parts start from the state of the part before, in the same batch as new prompts."""
    server = start(name, max_num_batched_tokens=64, max_num_seqs=3)
    server.serve(prompt(150), prompt(20, 1), prompt(90, 2), tokens=3)
    assert max(map(sum, server.batches)) <= 64 < 150
    server.check()


@kinds("prefix cache", "Kimi Linear", "Qwen3-Next")
def test_a_cached_prefix(start: Start, name: str):
    server = start(name, enable_prefix_caching=True, max_num_seqs=2)
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


@kinds("speculative decoding", "Kimi Linear", "Qwen3-Next")
def test_speculative_decoding(start: Start, name: str, monkeypatch: pytest.MonkeyPatch):
    """Some drafts are accepted in whole, some in part, and prompts arrive beside drafts. Only the
    model runner of older releases takes a drafter of the user's."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    prompts = [prompt(n, seed=n) for n in (70, 12, 30)]
    # Equal replies need it: a step of several tokens rounds states in bfloat16 less often.
    states = {"mamba_ssm_cache_dtype": "float32"}
    plain = start(name, **states)
    replies = plain.serve(*prompts, tokens=16)
    known = [given + reply for given, reply in zip(prompts, replies, strict=True)]
    # vLLM imports the module again, under its name.
    module = importlib.import_module("tests.clients.test_vllm_delta_rule")
    monkeypatch.setattr(module.Drafter, "known", known)
    server = start(
        name,
        speculative_config={
            "method": "custom_class",
            "model": "tests.clients.test_vllm_delta_rule.Drafter",
            "num_speculative_tokens": 3,
        },
        max_num_seqs=2,
        **states,
    )
    assert server.serve(*prompts, tokens=16) == replies
    assert {"prefill", "verify ", "verify prefill"} <= set(server.modes)
    assert len(server.batches) < len(plain.batches) + 16
    server.check()
