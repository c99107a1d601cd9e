"""The examples that check themselves, on small problems. (`make demo` runs the quickstart.)"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import cute_attn
from cute_attn.cache import plan_file
from cute_attn.emulation import Emulation
from cute_attn.emulator import Emulator
from cute_attn.families import FUNCTIONS
from cute_attn.ops.lightning import plan_decode
from tests.ops.kda_stand_ins import stand_ins
from tests.untuned import untuned

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples import modules beside them, as where they are run."""
    monkeypatch.syspath_prepend(EXAMPLES)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_quickstart_runs_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is called by one of its checks; here they only get as far as that."""
    example = load("quickstart")
    called = set()

    class CalledError(Exception):
        pass

    def stop(name: str) -> Any:
        def call(*_: object, **__: object) -> None:
            called.add(name)
            raise CalledError

        return call

    for name in FUNCTIONS:
        monkeypatch.setattr(cute_attn, name, stop(name))
    for check in example.CHECKS.values():
        with pytest.raises(CalledError):
            check.run("cpu", 1)
    assert called == set(FUNCTIONS)


@pytest.mark.slow
def test_the_quickstart_agrees() -> None:
    """Forward and backward: what `make demo` shows."""
    path = str(EXAMPLES / "quickstart.py")
    shown = subprocess.run([sys.executable, path], check=True, capture_output=True, text=True)
    for results in ("o / dq / dk / dv", "dq / dk / dv / dg / dbeta"):
        assert results in shown.stdout
    assert "WRONG" not in shown.stdout


@pytest.mark.parametrize(
    "kind",
    [
        "Gemma 3, sliding",
        pytest.param("Gemma 3, full", marks=pytest.mark.slow),
        pytest.param("Qwen3-Next", marks=pytest.mark.slow),  # other sizes of the same loop
    ],
)
def test_gemma_qwen_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("gemma_qwen_attention")
    monkeypatch.setattr(example, "PROMPTS", (70, 9))
    emulator = Emulator(num_sms=2, schedule="random")
    with cute_attn.emulated("sm_100a", emulator), torch.inference_mode():
        errors = example.prefill_and_decode(example.KINDS[kind], "cpu")
    assert set(errors.kernel) == {"prefill", "decode"}
    assert errors.agree
    assert len(emulator.report.launches) == 1 + example.STEPS


def test_gemma_qwen_attention_notices_a_wrong_window(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("gemma_qwen_attention")
    monkeypatch.setattr(example, "PROMPTS", (70, 9))
    right = cute_attn.flash_attn_varlen_func

    def wrong(window_size: tuple[int, None], **rest: object) -> object:
        return right(window_size=(window_size[0] + 1, None), **rest)

    monkeypatch.setattr(cute_attn, "flash_attn_varlen_func", wrong)
    with cute_attn.emulated("sm_100a"), torch.inference_mode():
        assert not example.prefill_and_decode(example.KINDS["Gemma 3, sliding"], "cpu").agree


def train(
    monkeypatch: pytest.MonkeyPatch, steps: int, windows: tuple[int | None, ...]
) -> tuple[list[float], float, float]:
    example = load("train_step")
    monkeypatch.setattr(example, "TOKENS", 40)
    monkeypatch.setattr(example, "HEADS_K", example.HEADS)  # the kernels of other tests
    monkeypatch.setattr(example, "STEPS", steps)
    monkeypatch.setattr(example, "WINDOWS", windows)
    with cute_attn.emulated("sm_100a", Emulator(num_sms=4, schedule="random")):
        result: tuple[list[float], float, float] = example.train("cpu")
    return result


@pytest.mark.parametrize(
    "windows", [(None,), pytest.param((24, None), marks=pytest.mark.slow)], ids=str
)
def test_train_step(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the full layer alone, and with the sliding one too, whose kernels are others."""
    losses, ours, plain = train(monkeypatch, 2, windows)
    assert losses[1] < losses[0]
    assert ours <= 2 * plain


def test_train_step_notices_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cute_attn.flash_attn_func
    wrong = functools.partial(right, softmax_scale=0.06)
    monkeypatch.setattr(cute_attn, "flash_attn_func", wrong)
    _, ours, plain = train(monkeypatch, 0, (None,))
    assert ours > 2 * plain


@pytest.mark.slow
def test_train_step_notices_a_wrong_window(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cute_attn.flash_attn_func

    def wrong(*args: Any, window_size: tuple[int | None, None], **rest: Any) -> object:
        left, _ = window_size
        return right(*args, window_size=(left and left + 1, None), **rest)

    monkeypatch.setattr(cute_attn, "flash_attn_func", wrong)
    _, ours, plain = train(monkeypatch, 0, (24,))
    assert ours > 2 * plain


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize(
    ("name", "first"), [("gemma_qwen_attention", "prefill_and_decode"), ("train_step", "train")]
)
def test_a_gpu_with_kernels_is_used(
    name: str, first: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        """The example has chosen a device, which is the last argument."""

    def reach(*args: Any) -> None:
        raise Reached(args[-1])

    example = load(name)
    monkeypatch.setattr(example, first, reach)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(Reached, match=r"^cuda$"):
        example.main()


Errors = dict[str, tuple[float, float]]


def train_kimi_linear(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...], generated: int, steps: int = 2
) -> tuple[list[float], Errors]:
    example = load("kimi_linear")
    monkeypatch.setattr(example, "LAYERS", layers)
    sizes = {"TOKENS": 12, "STEPS": steps, "PROMPT": 6, "GENERATED": generated}
    for name, value in sizes.items():
        monkeypatch.setattr(example, name, value)
    result: tuple[list[float], Errors] = example.train("cpu")
    return result


def test_train_kimi_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the kernels: `test_train_kimi_linear_emulated` runs the kernels."""
    with stand_ins() as kernels, cute_attn.emulated("sm_90a"):
        losses, errors = train_kimi_linear(monkeypatch, ("linear",), 1)
    assert losses[1] < losses[0]
    assert len(errors) == 2
    assert all(ours <= 2 * plain for ours, plain in errors.values())
    assert kernels.names.count("kda_gradients") == 1 + 2


@pytest.mark.slow
def test_train_kimi_linear_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {}
    for name in ("kda_decode", "mla_decode"):
        calls[name] = mock.Mock(wraps=getattr(cute_attn, name))
        monkeypatch.setattr(cute_attn, name, calls[name])
    with cute_attn.emulated("sm_90a", Emulator(num_sms=4, schedule="random")):
        losses, errors = train_kimi_linear(monkeypatch, (*["linear"] * 3, "latent"), 3)
    assert losses[1] < losses[0]
    assert len(errors) == 2
    assert all(0 < ours <= 2 * plain for ours, plain in errors.values())
    assert [call.call_count for call in calls.values()] == [3 * 2, 2]


def test_train_kimi_linear_notices_a_gradient_twice_as_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = cute_attn.chunk_kda

    def wrong(*args: Any, A_log: torch.Tensor, **rest: Any) -> object:
        return right(*args, A_log=2 * A_log - A_log.detach(), **rest)

    monkeypatch.setattr(cute_attn, "chunk_kda", wrong)
    with stand_ins(), cute_attn.emulated("sm_90a"):
        _, errors = train_kimi_linear(monkeypatch, ("linear",), 1, steps=0)
    ours, plain = errors["gradients"]
    assert ours > 2 * plain


def generate(monkeypatch: pytest.MonkeyPatch, example_name: str, layer: str) -> tuple[float, float]:
    """The errors of the logits, by a model of one layer before its training."""
    example = load(example_name)
    monkeypatch.setattr(example, "GENERATED", 3)
    torch.manual_seed(0)
    model = example.language_model.Model([getattr(example, layer)()])
    prompt = example.language_model.repeated_tokens(1, 6, "cpu")
    with cute_attn.emulated("sm_90a", Emulator(num_sms=2)):
        errors: tuple[float, float] = example.generated(model, prompt)
    return errors


@pytest.mark.slow
def test_generate_with_a_latent_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = generate(monkeypatch, "kimi_linear", "LatentAttention")
    assert 0 < ours <= 2 * plain


@pytest.mark.slow
def test_generate_with_a_latent_cache_notices_a_token_that_is_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = cute_attn.mla_decode

    def short(*args: Any, cache_seqlens: torch.Tensor, **rest: Any) -> object:
        return right(*args, cache_seqlens=cache_seqlens - 1, **rest)

    monkeypatch.setattr(cute_attn, "mla_decode", short)
    ours, plain = generate(monkeypatch, "kimi_linear", "LatentAttention")
    assert ours > 2 * plain


def train_qwen3_next(
    monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...]
) -> tuple[list[float], Errors]:
    example = load("train_qwen3_next")
    monkeypatch.setattr(example, "LAYERS", layers)
    for name, value in {"TOKENS": 12, "STEPS": 2, "PROMPT": 6, "GENERATED": 2}.items():
        monkeypatch.setattr(example, name, value)
    with cute_attn.emulated("sm_90a", Emulator(num_sms=2, schedule="random")):
        result: tuple[list[float], Errors] = example.train("cpu")
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers", [("linear",), ("linear", "linear", "linear", "softmax")], ids=len
)
def test_train_qwen3_next(layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    losses, errors = train_qwen3_next(monkeypatch, layers)
    assert losses[1] < losses[0]
    assert len(errors) == 2
    assert all(0 < ours <= 2 * plain for ours, plain in errors.values())


def test_generate_with_qwen3_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = generate(monkeypatch, "train_qwen3_next", "GatedDeltaNet")
    assert 0 < ours <= 2 * plain


def test_generate_with_qwen3_next_notices_a_state_that_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = cute_attn.gated_delta_rule_decode

    def forgetful(*args: Any, **rest: Any) -> object:
        *inputs, state = args
        return right(*inputs, torch.zeros_like(state), **rest)

    monkeypatch.setattr(cute_attn, "gated_delta_rule_decode", forgetful)
    ours, plain = generate(monkeypatch, "train_qwen3_next", "GatedDeltaNet")
    assert ours > 2 * plain


@pytest.mark.gpu
def test_train_kimi_linear_with_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla.models.kda", exc_type=ImportError)
    untuned(monkeypatch)
    monkeypatch.setenv("FLA_CUTE_ATTN", "1")  # which the example changes
    assert load("kimi_linear").main()


def kimi_linear() -> dict[str, tuple[float, float]]:
    example = load("kimi_linear_layer")
    sizes = example.Sizes(heads=1, heads_v=2, head_dim=64, prompts=(90, 5), piece=66, steps=2)
    emulator = Emulator(num_sms=2, schedule="random")
    with cute_attn.emulated("sm_90a", emulator), torch.inference_mode():
        errors: dict[str, tuple[float, float]] = example.serve(sizes, "cpu")
    return errors


def test_kimi_linear_layer() -> None:
    errors = kimi_linear()
    assert set(errors) == {"prefill", "decode"}
    assert all(ours <= 2 * plain for ours, plain in errors.values())


def test_kimi_linear_layer_notices_a_state_that_is_not_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = cute_attn.chunk_kda

    def forgetful(initial_state: torch.Tensor, **rest: object) -> object:
        return right(initial_state=torch.zeros_like(initial_state), **rest)

    monkeypatch.setattr(cute_attn, "chunk_kda", forgetful)
    errors = kimi_linear()
    assert all(ours > 2 * plain for ours, plain in errors.values())


@pytest.mark.parametrize("num_sms", [132, 78])
def test_the_decode_server_prebuilds_for_its_gpu(
    num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H20, with 78 SMs, takes another kernel than an H200."""
    example = load("decode_server")
    planned: list[Any] = []

    def build_image(command: list[str], **_: object) -> None:
        arch = command[command.index("--arch") + 1]
        planned.extend(plan_file(command[command.index("build") + 1], arch))

    gpu = SimpleNamespace(multi_processor_count=num_sms)
    monkeypatch.setattr(subprocess, "run", build_image)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(example.cache, "current_arch", lambda: "sm_90a")
    monkeypatch.setattr(example, "serve", lambda *_: True)
    monkeypatch.setattr(sys, "argv", ["decode_server.py"])
    monkeypatch.setenv("CUTE_ATTN_PREBUILT", "")
    assert example.main() == 0
    heads = {"head_dim_k": example.HEAD_DIM, "head_dim_v": example.HEAD_DIM}
    assert planned == plan_decode("sm_90a", dtype="float32", indexed=True, num_sms=num_sms, **heads)


def test_the_paged_server_prebuilds_what_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("paged_server")
    monkeypatch.setattr(example, "WIDTH", 16)  # no kernel's shape depends on it
    monkeypatch.setenv("CUTE_ATTN_PREBUILT", "")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: None)
        example.prebuild(tmp_path, "sm_90a")
    monkeypatch.delenv("CUTE_ATTN_PREBUILT")
    used: set[Any] = set()

    def function(_self: Emulation, kernel: Any, spec: Any) -> Any:
        used.add((kernel, spec))
        return lambda *_: None

    monkeypatch.setattr(Emulation, "function", function)
    monkeypatch.setattr(example, "errors", lambda *_: (0.0, 0.0))
    monkeypatch.setattr(example, "other_tokens", lambda *_: 0)
    for arch in ("sm_90a", "sm_100a"):
        used.clear()
        with cute_attn.emulated(arch, Emulator(num_sms=132)):
            prompts = [300, 1, 20, *[5] * 8, 1100]
            found = example.run("cpu", prompts, [0] * len(prompts), 8, 1)
        assert found.prefills > 5 and found.decodes > 15
        assert len(used) > 1 and used <= set(plan_file(tmp_path / "server.toml", arch))


def test_the_paged_server_notices_a_request_whose_bits_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = load("paged_server")
    calls = itertools.count()

    def logits_of_a_step(self: Any, tokens: torch.Tensor, attend: Any) -> torch.Tensor:
        logits = torch.arange(float(example.VOCABULARY)).expand(len(tokens), -1).clone()
        return logits + (next(calls) if spoiled else 0)

    monkeypatch.setattr(example.Model, "forward", logits_of_a_step)
    monkeypatch.setattr(example, "errors", lambda *_: (0.0, 1.0))
    for spoiled in (False, True):
        found = example.run("cpu", [70, 5], [0, 9], 2, 2)
        assert (found.same, found.alone) == (0 if spoiled else 2, 2)
        assert found.passed != spoiled


def test_the_replay_is_a_poisson_process_of_lengths_from_16_to_16k() -> None:
    prompts, arrivals = load("paged_server").replay(2000)
    assert min(prompts) in range(16, 20) and max(prompts) in range(16000, 16385)
    gaps = torch.tensor(arrivals).diff().float()
    assert abs(gaps.mean() - 4) < 0.5 and abs(gaps.std() - 4) < 0.6


@pytest.mark.slow
def test_the_paged_server_agrees_with_plain_attention() -> None:
    assert load("paged_server").main(requests=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("2",), ("4", "--fsdp")], ids=["sums", "fsdp"])
def test_training_over_ranks(options: tuple[str, ...]) -> None:
    """Losses and gradients of ranks agree with one process, with FSDP2 in a mesh too."""
    count, *flags = options
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    script = str(EXAMPLES / "train_context_parallel.py")
    done = subprocess.run([*command, count, script, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "as rounding does" in done.stdout
