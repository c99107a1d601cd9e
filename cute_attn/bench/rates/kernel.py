"""Runs timed loops one after the other, and keeps the clocks of each warp.

Shared memory starts with room for mbarriers. The rest holds bfloat16 of magnitude below 2, because
operands of zeros would draw less power.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...kernels.common.arguments import fake_contiguous
from ...kernels.common.entry import entry, gathered, placeholders
from ...kernels.common.ptx.asm import asm
from ...kernels.common.ptx.memory import shared_address, store_shared
from ...kernels.common.smem import SWIZZLE_ALIGNMENT, Buffer, SharedMemory
from ...kernels.common.spec import VECTOR_BYTES, WARP_SIZE
from .loops import LOOPS
from .spec import LoopsSpec
from .timed import BUFFER

_MIXER = -1640531527  # 2 ** 32 over the golden ratio, as an int32
_SMALL = -1073758209  # of both bfloat16: all bits but the exponent's highest


class Arguments(NamedTuple):
    """The kernel's arguments.

    Attributes:
        times: `[CTAs, warps, loops, 4]`, int64: clock at the start and at the end, nanoseconds, and
            a value of no meaning.
        data: bytes that loops read and write.
        count: iterations of each loop.
        size, depth, step, mask: parameters of the loops.
    """

    times: cute.Tensor
    data: cute.Tensor
    count: Int32
    size: Int32
    depth: Int32
    step: Int32
    mask: Int32


class Loops:
    """The kernel for one LoopsSpec; see the module's docstring."""

    def __init__(self, spec: LoopsSpec):
        self.spec = spec
        self.loops = LOOPS[spec.what](spec.width)
        self.words = spec.shared_bytes // 4
        self.smem = SharedMemory(Buffer("all", Int32, self.words, alignment=SWIZZLE_ALIGNMENT))

    def fake_args(self) -> tuple[Any, ...]:
        loops = max(1, len(self.loops))
        return placeholders(
            Arguments(
                times=fake_contiguous(Int64, (cute.sym_int(), self.spec.warps, loops, 4)),
                data=fake_contiguous(Int32, (cute.sym_int(),), VECTOR_BYTES),
                count=Int32(1),
                size=Int32(1),
                depth=Int32(1),
                step=Int32(1),
                mask=Int32(1),
            )
        )

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch a CTA for each row of `times`."""
        a, stream = gathered(Arguments, args)
        self.kernel(a).launch(
            grid=[a.times.shape[0], 1, 1],
            block=[self.spec.warps * WARP_SIZE, 1, 1],
            cluster=[self.spec.cluster, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Arguments) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        storage = self.smem.allocate()
        shared = shared_address(storage.all)
        if cutlass.const_expr(len(self.loops) > 0):
            self.fill(shared, thread)
        for i in cutlass.range_constexpr(len(self.loops)):
            start, end, nanoseconds, result = asm(
                self.loops[i].text,
                [Int64, Int64, Int64, Int32],
                [
                    x.count, thread, shared, x.data.iterator.toint(), x.size, x.depth, x.step,
                    x.mask,
                ],
                memory=True,
            )  # fmt: skip
            if thread % WARP_SIZE == 0:
                warp = thread // WARP_SIZE
                x.times[cta, warp, i, 0] = start
                x.times[cta, warp, i, 1] = end
                x.times[cta, warp, i, 2] = nanoseconds
                x.times[cta, warp, i, 3] = Int64(result)

    @cute.jit
    def fill(self, shared: Int32, thread: Int32) -> None:
        threads = self.spec.warps * WARP_SIZE
        rounds = (self.words - BUFFER // 4 + threads - 1) // threads
        for i in cutlass.range(rounds, unroll=1):
            word = Int32(BUFFER // 4) + i * threads + thread
            if word < self.words:
                value = word * _MIXER
                value = (value ^ (value >> 15)) & _SMALL
                store_shared(Int32, shared + word * 4, [value])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
