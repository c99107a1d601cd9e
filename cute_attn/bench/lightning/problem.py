"""Inputs, byte counts, contenders and the agreement check of the Lightning decode benchmarks.

Imports torch, so the benchmarks' modules import this module only when a benchmark runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..harness.agreement import ROWS, Disagreement, relative_error
from ..harness.registry import Unavailable

if TYPE_CHECKING:
    from cute_attn.cache import KernelDef
    from cute_attn.kernels.lightning.spec import DecodeSpec

DEVICE = "cuda"

REGISTERS_PER_SM = 65536  # the number on every architecture since Kepler


@dataclass(frozen=True)
class Case:
    """The sizes of one decode call; dtypes are torch names."""

    batch: int
    heads: int = 64
    head_dim_k: int = 128
    head_dim_v: int = 128
    tokens: int = 1
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    state_layout: str = "vk"

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        inner = (self.head_dim_k, self.head_dim_v)
        if self.state_layout == "vk":
            inner = (self.head_dim_v, self.head_dim_k)
        return (self.batch, self.heads, *inner)

    @property
    def min_bytes(self) -> int:
        """Bytes that any implementation must move: the state twice, q, k, v, o and decay once."""
        element: int = getattr(torch, self.dtype).itemsize
        state_element: int = getattr(torch, self.state_dtype).itemsize
        state = self.batch * self.heads * self.head_dim_k * self.head_dim_v * state_element
        tokens = self.batch * self.tokens * self.heads
        qkvo = tokens * (2 * self.head_dim_k + 2 * self.head_dim_v) * element
        return 2 * state + qkvo + 4 * self.heads


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call. `out` starts as NaN, which reveals unwritten elements."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    state: torch.Tensor
    decay: torch.Tensor
    out: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def softmax_scale(self) -> float:
        return float(self.case.head_dim_k**-0.5)

    def state_as_kv(self) -> torch.Tensor:
        """A float32 copy of the state as [B, H, K, V], which FLA takes."""
        return as_kv(self.case, self.state).to(
            torch.float32, copy=True, memory_format=torch.contiguous_format
        )


def as_kv(case: Case, state: torch.Tensor) -> torch.Tensor:
    """The case's state as a view [B, H, K, V]."""
    return state if case.state_layout == "kv" else state.transpose(-1, -2)


def make_inputs(case: Case, seed: int) -> Inputs:
    """Fresh random inputs: standard normal, k scaled so that the state stays of order one."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    tokens = (case.tokens,) if case.tokens > 1 else ()

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE) * scale

    leading = (case.batch, *tokens, case.heads)
    heads = torch.arange(1, case.heads + 1, dtype=torch.float32, device=DEVICE)
    return Inputs(
        case=case,
        q=normal(*leading, case.head_dim_k).to(dtype),
        k=normal(*leading, case.head_dim_k, scale=case.head_dim_k**-0.5).to(dtype),
        v=normal(*leading, case.head_dim_v).to(dtype),
        state=normal(*case.state_shape).to(getattr(torch, case.state_dtype)),
        decay=torch.exp2(-8.0 * heads / case.heads),  # the ALiBi-like slopes of Lightning models
        out=torch.full((*leading, case.head_dim_v), float("nan"), dtype=dtype, device=DEVICE),
    )


def ours(case: Case, inputs: Inputs, num_sms: int | None = None) -> Callable[[], object]:
    """A call of the public operator, which updates `inputs.state` and `inputs.out` in place.

    In a green context, which the operator cannot see, `num_sms` selects the kernel for a GPU with
    that many SMs.
    """
    from cute_attn import cache, lightning_attn_decode

    if num_sms is not None:
        arch = cache.current_arch()
        return bare(cache.get(*plan(case, arch, num_sms), arch), inputs)

    def call() -> torch.Tensor:
        return lightning_attn_decode(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.state,
            inputs.decay,
            softmax_scale=inputs.softmax_scale,
            out=inputs.out,
            state_layout=case.state_layout,
        )

    return call


def fla(case: Case, inputs: Inputs) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A call of FLA's fused_recurrent_fwd, which returns (float32 output, new float32 state).

    FLA gets its own state in FLA's default layout [N, H, K, V]. The state is float32 whatever the
    case's dtype, since FLA writes float32.

    Raises:
        Unavailable: flash-linear-attention is not installed.
    """
    try:
        from fla.ops.common.fused_recurrent import fused_recurrent_fwd
    except ImportError as error:
        raise Unavailable(f"flash-linear-attention cannot be imported: {error}") from error

    q, k, v = (x.view(case.batch, case.tokens, case.heads, -1) for x in inputs.qkv)
    state, g_gamma = inputs.state_as_kv(), -inputs.decay

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = fused_recurrent_fwd(
            q,
            k,
            v,
            g_gamma=g_gamma,
            scale=inputs.softmax_scale,
            initial_state=state,
            output_final_state=True,
        )
        return result

    return call


def bare(function: Callable[..., None], inputs: Inputs) -> Callable[..., None]:
    """A call of the compiled function, which takes `kernels.lightning.arguments.Arguments`."""
    return partial(
        function,
        *inputs.qkv,
        inputs.out,
        inputs.state,
        inputs.decay,
        *(None,) * 4,  # state_indices, draft_k, draft_v, num_accepted
        inputs.softmax_scale,
    )


def plan(case: Case, arch: str, num_sms: int | None = None) -> tuple[KernelDef, DecodeSpec]:
    """The kernel and Spec that the operator uses for this case, on a GPU of `num_sms` SMs."""
    from cute_attn.ops.lightning import plan_decode

    if num_sms is None:
        num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    ((kernel, spec),) = plan_decode(
        arch,
        num_sms=num_sms,
        dtype=case.dtype,
        state_dtype=case.state_dtype,
        head_dim_k=case.head_dim_k,
        head_dim_v=case.head_dim_v,
        state_layout=case.state_layout,
        multi_token=case.tokens > 1,
        indexed=False,
    )
    return kernel, spec


Candidate = tuple["KernelDef", "DecodeSpec"]


def candidates(
    kernel: KernelDef, spec: DecodeSpec, vary: Mapping[str, Sequence[int | str]]
) -> dict[str, Candidate]:
    """The kernels to time, by name: "chosen" is (kernel, spec) itself.

    All other kernels have the fields in `vary`, in all legal combinations. If `vary` is empty, the
    other kernels are the tunings that the package itself compares, including tunings of the
    pipelined kernel.

    Raises:
        TypeError: a name in `vary` is no field of the Spec.
    """
    from cute_attn.kernels.lightning.heuristics import candidate_configs
    from cute_attn.kernels.lightning.spec import PipelinedDecodeSpec
    from cute_attn.kernels.lightning.table import DECODE_PIPELINED

    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    configs: list[dict[str, Any]]
    if vary:
        configs = [
            dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())
        ]
    else:
        configs = candidate_configs(spec.head_dim_k)
    found: dict[str, Candidate] = {"chosen": (kernel, spec)}
    for config in configs:
        try:
            candidate: Candidate = (
                (DECODE_PIPELINED, PipelinedDecodeSpec(**(fields | config)))
                if "num_stages" in config
                else (kernel, dataclasses.replace(spec, **config))
            )
        except ValueError:
            continue  # this combination has no kernel
        if candidate not in found.values():
            found[" ".join(f"{name}={value}" for name, value in config.items())] = candidate
    return found


def variants(
    case: Case, inputs: Inputs, vary: Mapping[str, Sequence[int | str]], num_sms: int | None
) -> tuple[dict[str, Callable[[], None]], list[str]]:
    """Return (a bare call for each of the case's `candidates`, the names of candidates that do not
    compile).

    Raises:
        Disagreement: a candidate computes a wrong result.
    """
    from cute_attn import cache

    arch = cache.current_arch()
    specs = candidates(*plan(case, arch, num_sms), vary)
    with contextlib.suppress(cache.CompileError):  # raised again below, by name
        cache.warmup(specs.values(), arch=arch)

    calls: dict[str, Callable[[], None]] = {}
    refused = []
    for name, (kernel, spec) in specs.items():
        try:
            function = cache.get(kernel, spec, arch)
        except cache.CompileError:
            refused.append(name)
            continue
        if spec.persistent:
            (use,) = cache.compile(kernel, spec, arch).kernels
            ctas = _resident_ctas(spec, use.registers, num_sms)
            calls[name] = partial(bare(function, inputs), ctas)
        else:
            calls[name] = bare(function, inputs)
    expected, initial = _reference(case, inputs), inputs.state.clone()
    for name, call in calls.items():
        inputs.state.copy_(initial)
        inputs.out.fill_(float("nan"))
        call()
        actual = (inputs.out, as_kv(case, inputs.state))
        _hold(name, case, compare(case, actual, inputs.state.dtype, expected))
    return calls, refused


def _resident_ctas(spec: Any, registers: int, num_sms: int | None) -> int:
    """Resident CTAs of a persistent kernel on the GPU, or on `num_sms` of its SMs."""
    gpu = torch.cuda.get_device_properties(DEVICE)
    per_sm = min(
        gpu.shared_memory_per_multiprocessor // (spec.smem_bytes + 1024),  # the system takes 1 KiB
        gpu.max_threads_per_multi_processor // spec.num_threads,
        REGISTERS_PER_SM // (-(-registers // 8) * 8 * spec.num_threads),
    )
    return int(max(1, per_sm) * (num_sms or gpu.multi_processor_count))


def launch_paths(case: Case, inputs: Inputs, public_name: str) -> dict[str, Callable[[], object]]:
    """The ways to launch the operator, from the public call down to the compiled function."""
    from cute_attn import cache, lightning_attn_decode

    arch = cache.current_arch()
    slots = torch.arange(case.batch, dtype=torch.int32, device=DEVICE)
    scale = inputs.softmax_scale
    q, k, v = inputs.qkv
    state, decay, out = inputs.state, inputs.decay, inputs.out
    decode, operator = lightning_attn_decode, torch.ops.cute_attn.lightning_attn_decode
    return {
        public_name: lambda: decode(q, k, v, state, decay, softmax_scale=scale, out=out),
        "the same with state_indices": lambda: decode(
            q, k, v, state, decay, softmax_scale=scale, out=out, state_indices=slots
        ),
        "the same without out": lambda: decode(q, k, v, state, decay, softmax_scale=scale),
        "torch.ops.cute_attn.lightning_attn_decode": lambda: operator(
            q, k, v, state, decay, out, scale
        ),
        "compiled TVM-FFI function": bare(cache.get(*plan(case, arch), arch), inputs),
    }


@dataclass(frozen=True)
class Agreement:
    """Relative errors ||x - reference|| / ||reference|| against the float64 reference, and their
    bounds. A bound is half a unit in the last place of the stored dtype, plus one float32 rounding
    for each term of the sum over K."""

    output_error: float
    state_error: float
    output_bound: float
    state_bound: float

    @property
    def holds(self) -> bool:
        # The negated comparison also fails for NaN.
        return self.output_error <= self.output_bound and self.state_error <= self.state_bound


def check_agreement(case: Case, seed: int, num_sms: int | None = None) -> dict[str, Agreement]:
    """Compare ours and FLA with the float64 reference on fresh random inputs.

    Raises:
        Disagreement: NaN, or an error over its bound. The message holds all four numbers.
    """
    inputs = make_inputs(case, seed)
    expected = _reference(case, inputs)  # before our kernel updates the state
    fla_out, fla_state = fla(case, inputs)()
    ours(case, inputs, num_sms)()
    ours_result = (inputs.out, as_kv(case, inputs.state))
    found = {
        "ours": compare(case, ours_result, inputs.state.dtype, expected),
        "fla": compare(case, (fla_out, fla_state), fla_state.dtype, expected),
    }
    for name, agreement in found.items():
        _hold(name, case, agreement)
    return found


def _hold(name: str, case: Case, agreement: Agreement) -> None:
    if not agreement.holds:
        message = f"{name} against the float64 reference at {case}: {agreement}"
        raise Disagreement(name, message)


def compare(
    case: Case,
    actual: tuple[torch.Tensor, torch.Tensor],
    state_dtype: torch.dtype,
    expected: tuple[torch.Tensor, torch.Tensor],
) -> Agreement:
    """Errors of (output, state [B, H, K, V]); the state is stored as `state_dtype`."""
    (out, state), (expected_out, expected_state) = actual, expected
    sums = case.tokens * case.head_dim_k * torch.finfo(torch.float32).eps
    return Agreement(
        relative_error(out.reshape(expected_out.shape), expected_out),
        relative_error(state, expected_state),
        torch.finfo(out.dtype).eps / 2 + sums,
        torch.finfo(state_dtype).eps / 2 + sums,
    )


def _reference(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (o, state as [B, H, K, V]) in float64, chunk by chunk."""
    from cute_attn.reference.lightning import lightning_attn_decode_reference

    outs, states = [], []
    for start in range(0, case.batch, ROWS):
        part = slice(start, start + ROWS)
        out, new_state = lightning_attn_decode_reference(
            inputs.q[part],
            inputs.k[part],
            inputs.v[part],
            inputs.state[part],
            inputs.decay,
            softmax_scale=inputs.softmax_scale,
            state_layout=case.state_layout,
        )
        outs.append(out)
        states.append(as_kv(case, new_state))
    return torch.cat(outs), torch.cat(states)


def fla_tuning() -> str:
    """The configuration that FLA's autotuner settled on, once `fla` has run."""
    from fla.ops.common.fused_recurrent import fused_recurrent_fwd_kernel

    kernel = fused_recurrent_fwd_kernel
    while not hasattr(kernel, "best_config"):
        kernel = kernel.fn  # the autotuner is below other decorators
    return str(kernel.best_config)
