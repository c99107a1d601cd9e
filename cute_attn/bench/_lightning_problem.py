"""Inputs, byte counts, contenders and the agreement check of the Lightning decode benchmarks.

Imports torch, so the benchmark modules import it only when they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .registry import Unavailable

DEVICE = "cuda"

CHUNK = 32  # sequences of the float64 reference at a time: its state takes twice the memory


@dataclass(frozen=True)
class Case:
    """The sizes of one decode call; dtypes by their torch names."""

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
    """Tensors of one call. `out` starts as NaN, so that an element left unwritten shows."""

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
        """A float32 copy of the state as [B, H, K, V], which is what FLA takes."""
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


def ours(case: Case, inputs: Inputs, **options: Any) -> Callable[[], torch.Tensor]:
    """A call of the public operator; it updates `inputs.state` and `inputs.out` in place."""
    from cute_attn import lightning_attn_decode

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
            **options,
        )

    return call


def fla(case: Case, inputs: Inputs) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A call of FLA's fused_recurrent_fwd, which returns (float32 output, new float32 state).

    It gets a state of its own in its default layout [N, H, K, V], float32 whatever the case's
    dtype, since that is what it writes.

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


def copy(case: Case) -> Callable[[], torch.Tensor]:
    """A plain copy, within device memory, of as many bytes as the case must move."""
    source = torch.randn(case.min_bytes // 2 // 4, device=DEVICE)
    return partial(torch.empty_like(source).copy_, source)


def variants(case: Case, inputs: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """A call per tuning candidate of the kernel for this case and GPU, by its description."""
    from cute_attn import cache
    from cute_attn.kernels.lightning.heuristics import candidate_configs

    return {
        str(config): ours(case, inputs, config=config)
        for config in candidate_configs(
            cache.current_arch(),
            head_dim_k=case.head_dim_k,
            head_dim_v=case.head_dim_v,
            state_dtype=case.state_dtype,
            state_layout=case.state_layout,
        )
    }


@dataclass(frozen=True)
class Agreement:
    """Relative errors ||x - reference|| / ||reference|| against the float64 reference, and the
    bounds they must keep: half a unit in the last place of the stored dtype, plus one float32
    rounding for each term of the sum over K."""

    output_error: float
    state_error: float
    output_bound: float
    state_bound: float

    @property
    def holds(self) -> bool:
        # written so that NaN fails
        return self.output_error <= self.output_bound and self.state_error <= self.state_bound


class Disagreement(AssertionError):
    """A contender does not compute the operator; its time would mean nothing."""


def check_agreement(case: Case, seed: int) -> dict[str, Agreement]:
    """Compare ours and FLA with the float64 reference on fresh random inputs.

    Raises:
        Disagreement: NaN or an error over its bound; the message holds all four numbers.
    """
    inputs = make_inputs(case, seed)
    expected_out, expected_state = _reference(case, inputs)  # before ours updates the state
    fla_out, fla_state = fla(case, inputs)()
    ours(case, inputs)()

    def compare(out: torch.Tensor, state: torch.Tensor, stored: torch.dtype) -> Agreement:
        sums = case.tokens * case.head_dim_k * torch.finfo(torch.float32).eps
        return Agreement(
            relative_error(out.reshape(expected_out.shape), expected_out),
            relative_error(state, expected_state),
            torch.finfo(out.dtype).eps / 2 + sums,
            torch.finfo(stored).eps / 2 + sums,
        )

    found = {
        "ours": compare(inputs.out, as_kv(case, inputs.state), inputs.state.dtype),
        "fla": compare(fla_out, fla_state, fla_state.dtype),
    }
    for name, agreement in found.items():
        if not agreement.holds:
            raise Disagreement(f"{name} against the float64 reference at {case}: {agreement}")
    return found


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64, taken in chunks of the first dimension."""
    difference = torch.zeros((), dtype=torch.float64, device=expected.device)
    norm = torch.zeros_like(difference)
    for a, e in zip(actual.split(CHUNK), expected.split(CHUNK), strict=True):
        difference += (a.double() - e.double()).square().sum()
        norm += e.double().square().sum()
    return float((difference / norm).sqrt())


def _reference(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, state as [B, H, K, V]) in float64, chunk by chunk."""
    from cute_attn.reference.lightning import lightning_attn_decode_reference

    outs, states = [], []
    for start in range(0, case.batch, CHUNK):
        part = slice(start, start + CHUNK)
        out, new_state = lightning_attn_decode_reference(
            *(x[part] for x in inputs.qkv),
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
        kernel = kernel.fn  # the autotuner lies under other decorators
    return str(kernel.best_config)
