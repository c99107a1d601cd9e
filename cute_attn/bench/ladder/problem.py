"""A size of the FMHA ladder: inputs, contenders, and the check that comes before timing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from ... import launch
from ...kernels.attention import table as attention_table
from ...kernels.ladder.spec import FmhaLadderSpec
from ...kernels.ladder.table import LadderStep
from ..attention.agreement import MAX_ERROR_RATIO, Expected, error_ratio, expected_in
from ..harness.agreement import Disagreement
from . import FA2, FA4, PRODUCTION

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Call = Callable[[], torch.Tensor]


class NotHere(RuntimeError):
    """A contender that does not exist on this machine: an architecture or a package is missing."""


@dataclass(frozen=True)
class Case:
    """A size of the inputs."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def flops(self) -> float:
        """Floating-point operations of both products; with a causal mask half of the operations
        count."""
        pairs = self.seqlen**2 / (2 if self.causal else 1)
        return 4.0 * self.batch * self.heads * pairs * self.head_dim

    def tflops(self, time_us: float) -> float:
        return self.flops / time_us / 1e6


class Problem:
    """Inputs `[B, S, H, D]` of a case, and the expected output in a few heads."""

    def __init__(self, case: Case, device: str, seed: int):
        self.case = case
        generator = torch.Generator(device).manual_seed(seed)
        shape = (case.batch, case.seqlen, case.heads, case.head_dim)
        self.q, self.k, self.v = (
            torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])
            for _ in range(3)
        )
        self.scale = case.head_dim**-0.5
        self.out = torch.empty_like(self.q)

    @cached_property
    def _expected(self) -> list[Expected]:
        """The expected output of the first and the last head."""
        ends = {(0, 0), (self.case.batch - 1, self.case.heads - 1)}
        return expected_in(self.q, self.k, self.v, sorted(ends), causal=self.case.causal)

    def check(self, who: str, call: Call) -> float:
        """Run a contender and compare its output with the reference, in the norm and in the worst
        element.

        Returns:
            The larger of the two errors, as a multiple of plain arithmetic's error.

        Raises:
            Disagreement: an element is not finite, or an error is more than MAX_ERROR_RATIO times
                plain arithmetic's error.
        """
        self.out.fill_(math.nan)
        o = call()
        if not bool(torch.isfinite(o).all()):
            raise Disagreement(who, f"{who} left elements that are not finite at {self.case}")
        worst = error_ratio(o, self._expected)
        if not worst <= MAX_ERROR_RATIO:
            raise Disagreement(
                who,
                f"{who} has {worst:.3g} times the error of plain {self.case.dtype} arithmetic at "
                f"{self.case}, at most {MAX_ERROR_RATIO:g}",
            )
        return worst

    # -- contenders ---------------------------------------------------------------------------

    def step(self, step: LadderStep, spec: FmhaLadderSpec | None) -> Call:
        """A call of a step; `spec` is None for PyTorch."""
        if step.kernel is None:
            return self.pytorch()
        function = launch.get_for(self.q.device, step.kernel, spec)
        arguments = [self.q, self.k, self.v, self.out, self.scale]
        if step.persistent:
            counter = torch.zeros(1, dtype=torch.int32, device=self.q.device)
            arguments += [launch.num_sms(self.q.device), counter]
        call = partial(function, *arguments)

        def run() -> torch.Tensor:
            call()
            return self.out

        return run

    def pytorch(self, backend: Any = None) -> Call:
        """PyTorch's scaled_dot_product_attention, with a given backend or with PyTorch's choice."""
        from torch.nn.attention import sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))

        def run() -> torch.Tensor:
            o: torch.Tensor = scaled_dot_product_attention(
                q, k, v, is_causal=self.case.causal, scale=self.scale
            )
            return o.transpose(1, 2)

        def forced() -> torch.Tensor:
            with sdpa_kernel(backend):
                return run()

        return run if backend is None else forced

    def pytorch_backend(self) -> str:
        """The backend that PyTorch chooses, such as "CUDNN_ATTENTION"."""
        from torch.nn.attention import SDPBackend

        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        choice = torch._fused_sdp_choice(q, k, v, is_causal=self.case.causal)
        return str(SDPBackend(choice).name)

    def flash_attention_2(self) -> Call:
        """PyTorch's flash backend, which is FlashAttention-2."""
        from torch.nn.attention import SDPBackend

        if not self.q.is_cuda:
            raise NotHere("FlashAttention-2 needs a GPU")
        return self.pytorch(SDPBackend.FLASH_ATTENTION)

    def flash_attention_4(self) -> Call:
        """
        Raises:
            NotHere: the package is missing, or there is no GPU.
        """
        if not self.q.is_cuda:
            raise NotHere("FlashAttention-4 needs a GPU")
        try:
            from flash_attn.cute import flash_attn_func
        except ImportError as error:
            raise NotHere(f"FlashAttention-4 cannot be imported: {error}") from error

        def run() -> torch.Tensor:
            out = flash_attn_func(
                self.q, self.k, self.v, softmax_scale=self.scale, causal=self.case.causal
            )
            o: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return o

        return run

    def production(self) -> Call:
        """`cute_attn.flash_attn_func`.

        Raises:
            NotHere: the operator has no kernel for this architecture and head_dim.
        """
        from cute_attn import flash_attn_func

        arch = launch.arch_for(self.q.device)
        try:
            attention_table.find("forward", arch, self.case.head_dim)
        except NotImplementedError as error:
            raise NotHere(str(error)) from error

        def run() -> torch.Tensor:
            o, _ = flash_attn_func(
                self.q, self.k, self.v, softmax_scale=self.scale, causal=self.case.causal
            )
            return o

        return run


def peers(problem: Problem) -> dict[str, Callable[[], Call]]:
    """The contenders that are timed beside the steps, by name. Each value is a function that makes
    the call."""
    return {
        FA2: problem.flash_attention_2,
        FA4: problem.flash_attention_4,
        PRODUCTION: problem.production,
    }


def compile_all(steps: Sequence[tuple[LadderStep, FmhaLadderSpec]], arch: str) -> None:
    """Compile the steps' kernels on all cores. A kernel that does not compile fails again, by name,
    when it is loaded."""
    from ... import cache

    requests = [(step.kernel, spec) for step, spec in steps if step.kernel is not None]
    with contextlib.suppress(cache.CompileError):
        launch.warmup(requests, arch=arch)
