"""Loads and stores of 4, 8 or 16 bytes. Addresses are integers, of 32 bits in shared memory and of
64 in global memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric

from .asm import asm, operands

LINE_WORDS = 32  # words of an L2 line

_BITS = {Int32: "b32", Float32: "f32"}


def shared_address(pointer: cute.Pointer) -> Int32:
    """Return the 32-bit address of a pointer to shared memory."""
    return Int32(pointer.toint())


def load_shared(kind: type[Numeric], address: Int32, count: int = 1) -> Sequence[Numeric]:
    """Load `count` (1, 2 or 4) Int32 or Float32 from shared memory, aligned to their size."""
    return _load("shared", kind, Int32(address), count)


def store_shared(kind: type[Numeric], address: Int32, values: Sequence[Numeric]) -> None:
    """Store 1, 2 or 4 Int32 or Float32 to shared memory, aligned to their size."""
    _store("shared", kind, Int32(address), values)


def load_global(kind: type[Numeric], address: Int64, count: int = 1) -> Sequence[Numeric]:
    """Load `count` (1, 2 or 4) Int32 or Float32 from a 64-bit address in global memory."""
    return _load("global", kind, Int64(address), count)


def store_global(kind: type[Numeric], address: Int64, values: Sequence[Numeric]) -> None:
    """Store 1, 2 or 4 Int32 or Float32 to a 64-bit address in global memory."""
    _store("global", kind, Int64(address), values)


def prefetch_global(x: cute.Tensor, index: Int32) -> None:
    """Bring an element's line to L2, for a contiguous tensor in global memory. An index past the
    end stands for the last element."""
    at = x.iterator + cutlass.min(index, cute.size(x) - 1)
    prefetch_line(at.toint())


def prefetch_line(address: Int64) -> None:
    """Bring the line of a 64-bit address in global memory to L2."""
    asm("prefetch.global.L2 [$0];", [], [Int64(address)], volatile=True)


def add_global(address: Int64, values: Sequence[Float32]) -> None:
    """Add 4 Float32 to 4 Float32 at a 64-bit address in global memory, 16-byte aligned (sm_90 and
    newer). Each of the 4 additions is atomic at GPU scope.
    """
    _, sources = _vector(1, len(values))
    text = f"red.relaxed.gpu.global.add.v4.f32 [$0], {sources};"
    asm(text, [], [Int64(address), *map(Float32, values)], memory=True)


NEVER = 0x7FFFFFFF  # a number that no counter of `increment_global` reaches


def increment_global(address: Int64, last: Int32) -> Int32:
    """Add 1 to the Int32 at a 64-bit address in global memory, or set it to 0 if it is `last`;
    atomic at GPU scope. Return the old value."""
    text = "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;"
    return asm(text, [Int32], [Int64(address), Int32(last)], memory=True)


def count_arrival(address: Int64, count: Int32) -> Int32:
    """Count one of `count` arrivals at the Int32 at a 64-bit address in global memory, and return
    the number of earlier arrivals. The last arrival sets the number to 0. An arrival sees all
    writes that come before earlier arrivals, at GPU scope."""
    text = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
    return asm(text, [Int32], [Int64(address), Int32(count - 1)], memory=True)


def add_release(address: Int64, value: Int32) -> None:
    """Add an Int32 to the Int32 at a 64-bit address in global memory, with release semantics. A
    thread that reads the sum by `load_acquire` sees all earlier writes of this thread, and all
    writes that this thread has seen."""
    text = "red.release.gpu.global.add.u32 [$0], $1;"
    asm(text, [], [Int64(address), Int32(value)], memory=True)


def load_acquire(address: Int64) -> Int32:
    """Load the Int32 at a 64-bit address in global memory; see `add_release`."""
    return asm("ld.acquire.gpu.global.u32 $0, [$1];", [Int32], [Int64(address)], memory=True)


def sleep(nanoseconds: int) -> None:
    """Suspend the warp for about this many nanoseconds."""
    asm(f"nanosleep.u32 {nanoseconds};", [], [], volatile=True)


def store_global_where(condition: Boolean, address: Int64, *values: Int32) -> None:
    """Store 1, 2 or 4 Int32 to a 64-bit global address if `condition` is not 0, with a predicated
    store rather than a branch."""
    width, sources = _vector(2, len(values))
    text = (
        "{\n.reg .pred some;\nsetp.ne.b32 some, $1, 0;\n"
        f"@some st.global{width}.b32 [$0], {sources};\n}}"
    )
    asm(text, [], [Int64(address), Int32(condition), *map(Int32, values)], memory=True)


def load_global_where(
    condition: Boolean, kind: type[Numeric], address: Int64, count: int
) -> Sequence[Numeric]:
    """Load 2 or 4 numbers of 32 bits from a 64-bit global address if `condition` is not 0, with a
    predicated load rather than a branch; otherwise return zeros."""
    width, results = _vector(0, count)
    zeros = "".join(f"mov.b32 ${i}, 0;\n" for i in range(count))
    text = (
        f"{{\n.reg .pred some;\nsetp.ne.b32 some, ${count + 1}, 0;\n{zeros}"
        f"@some ld.global{width}.{_BITS[kind]} {results}, [${count}];\n}}"
    )
    return asm(text, [kind] * count, [Int64(address), Int32(condition)], memory=True)


def _vector(first: int, count: int) -> tuple[str, str]:
    """Return the width and the operands of an access of `count` registers, from operand `first`."""
    return ("", f"${first}") if count == 1 else (f".v{count}", f"{{{operands(first, count)}}}")


def _load(space: str, kind: type[Numeric], address: Int32 | Int64, count: int) -> Sequence[Numeric]:
    width, results = _vector(0, count)
    text = f"ld.{space}{width}.{_BITS[kind]} {results}, [${count}];"
    out = asm(text, [kind] * count, [address], memory=True)
    return out if count > 1 else (out,)


def _store(
    space: str, kind: type[Numeric], address: Int32 | Int64, values: Sequence[Numeric]
) -> None:
    width, sources = _vector(1, len(values))
    text = f"st.{space}{width}.{_BITS[kind]} [$0], {sources};"
    asm(text, [], [address, *map(kind, values)], memory=True)
