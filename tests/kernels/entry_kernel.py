"""A kernel whose arguments are listed once, and reach the device in structs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_attn.kernels.common.arguments import fake_contiguous
from cute_attn.kernels.common.carried import Carried
from cute_attn.kernels.common.entry import entry, gathered, placeholders
from cute_attn.kernels.common.spec import Spec

THREADS = 32


@dataclass(frozen=True)
class ScaleSpec(Spec):
    bias: bool


class Arguments(NamedTuple):
    x: cute.Tensor
    bias: cute.Tensor | None
    factor: Float32
    y: cute.Tensor


@dataclass(frozen=True)
class Vectors(Carried):
    x: cute.Tensor
    bias: cute.Tensor | None
    width: int

    def value(self, i: Int32) -> Float32:
        return self.x[i] if self.bias is None else self.x[i] + self.bias[i]


@dataclass(frozen=True)
class Operands(Carried):
    vectors: Vectors
    factor: Float32
    y: cute.Tensor


class Scale:
    """y = factor * (x + bias), a warp to `THREADS` numbers at a time."""

    def __init__(self, spec: ScaleSpec):
        self.spec = spec

    def fake_args(self) -> tuple[Any, ...]:
        n = cute.sym_int(divisibility=THREADS)
        x, bias, y = (fake_contiguous(Float32, (n,)) for _ in range(3))
        return placeholders(Arguments(x, bias if self.spec.bias else None, Float32(1.0), y))

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
        x = Operands(Vectors(a.x, a.bias, THREADS), a.factor, a.y)
        self.kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: Operands) -> None:
        thread, _, _ = cute.arch.thread_idx()
        for first in cutlass.range(0, x.y.shape[0], x.vectors.width, unroll=1):
            x.y[first + thread] = x.factor * x.vectors.value(first + thread)


class TwoMore(Scale):
    """As `Scale`, of the first `count` numbers, by a factor that is the product of two."""

    def fake_args(self) -> tuple[Any, ...]:
        *arguments, _ = super().fake_args()
        return placeholders(tuple(arguments), Float32(1.0), Int32(1))

    @entry(Arguments, second=Float32, count=Int32)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        *given, second, count, stream = args
        a = Arguments(*given)
        y = cute.make_tensor(a.y.iterator, cute.make_layout((count,)))
        x = Operands(Vectors(a.x, a.bias, THREADS), a.factor * second, y)
        self.kernel(x).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)
