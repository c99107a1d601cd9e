"""A kernel that does nothing but `kda.gates` and `common.decay`, for one number a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_attn.kernels.common.decay import decay_exp, decay_exp2
from cute_attn.kernels.common.spec import Spec
from cute_attn.kernels.delta import gates

THREADS = 128


@dataclass(frozen=True)
class GatesSpec(Spec):
    gate: str  # or "decay", for `common.decay`


class Gates:
    """Columns of the results: with a gate, `log2_decay`, `log_decay`, and the gradients of g and of
    A_log by `log_decay_gradients` and by `accurate_log_decay_gradients`; with "decay", `decay_exp`
    and `decay_exp2` of g."""

    def __init__(self, spec: GatesSpec):
        self.gate = spec.gate

    def fake_args(self) -> tuple[Any, ...]:
        n = cute.sym_int(divisibility=THREADS)
        g, bias = (make_fake_tensor(Float32, (n,), (1,), assumed_align=16) for _ in range(2))
        results = make_fake_tensor(Float32, (n, 6), (6, 1), assumed_align=8)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return g, bias, results, Float32(1.0), Float32(1.0), stream

    @cute.jit
    def __call__(
        self, g: cute.Tensor, bias: cute.Tensor, results: cute.Tensor, rate: Float32,
        lower_bound: Float32, stream: Any,
    ) -> None:  # fmt: skip
        self.kernel(g, bias, results, rate, lower_bound).launch(
            grid=[g.shape[0] // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, g: cute.Tensor, bias: cute.Tensor, results: cute.Tensor, rate: Float32,
        lower_bound: Float32,
    ) -> None:  # fmt: skip
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        at = block * THREADS + thread
        x = g[at]
        if cutlass.const_expr(self.gate == "decay"):
            found = [decay_exp(x), decay_exp2(x)]
        else:
            rest = x, rate, bias[at], lower_bound
            found = [
                gates.log2_decay(self.gate, *rest),
                gates.log_decay(self.gate, *rest),
                *gates.log_decay_gradients(self.gate, Float32(1.0), *rest),
                *gates.accurate_log_decay_gradients(self.gate, Float32(1.0), *rest),
            ]
        for n, y in enumerate(found):
            results[at, n] = y
