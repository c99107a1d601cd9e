"""A CTA's shared memory, declared as a list of buffers and checked against the CTA's limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute

from .carried import Carried
from .spec import MAX_SMEM_BYTES

SWIZZLE_ALIGNMENT = 1024  # bytes, for a buffer with a 128-byte swizzle


@dataclass(frozen=True)
class Buffer:
    """Elements in shared memory.

    Attributes:
        element: type of an element.
        count: elements of a stage.
        alignment: in bytes, a power of two.
        holds: contents, for the documentation.
        inside: the buffers that make up a stage; see `ring`.
    """

    name: str
    element: type[cutlass.Numeric]
    count: int
    stages: int = 1
    alignment: int = 16
    holds: str = ""
    inside: SharedMemory | None = None

    @classmethod
    def ring(cls, name: str, stage: SharedMemory, stages: int) -> Buffer:
        """A ring whose stages consist of several buffers; every stage has the first buffer's
        alignment."""
        nbytes = -(-stage.nbytes // stage.alignment) * stage.alignment
        return cls(name, cutlass.Int8, nbytes, stages, stage.alignment, inside=stage)

    @property
    def stage_bytes(self) -> int:
        return self.count * self.element.width // 8

    @property
    def nbytes(self) -> int:
        return self.stages * self.stage_bytes


class SharedMemory:
    """Buffers in the order given, each at its alignment.

    Raises:
        ValueError: two buffers have one name, or the buffers take more than `limit` bytes in all.
    """

    def __init__(self, *buffers: Buffer, limit: int = MAX_SMEM_BYTES):
        self.buffers = {buffer.name: buffer for buffer in buffers}
        if len(self.buffers) < len(buffers):
            raise ValueError(f"two buffers have one name: {[buffer.name for buffer in buffers]}")
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for buffer in buffers:
            start = -(-self.nbytes // buffer.alignment) * buffer.alignment
            self.offsets[buffer.name] = start
            self.nbytes = start + buffer.nbytes
        if self.nbytes > limit:
            sizes = ", ".join(f"{buffer.name} {buffer.nbytes}" for buffer in buffers)
            raise ValueError(f"{self.nbytes} bytes of shared memory, at most {limit}: {sizes}")

    def __getitem__(self, name: str) -> int:
        """Byte offset of a buffer, for kernels that compute addresses themselves."""
        return self.offsets[name]

    @property
    def alignment(self) -> int:
        """Alignment of the first byte, in bytes."""
        return max(buffer.alignment for buffer in self.buffers.values())

    def names(self, address: int) -> dict[str, tuple[int, int, int]]:
        """For the emulator: name -> (address, bytes, bytes of a stage). The name of a buffer inside
        a ring includes its stage."""
        names = {}
        for name, buffer in self.buffers.items():
            at = address + self.offsets[name]
            if buffer.inside is None:
                names[name] = (at, buffer.nbytes, buffer.stage_bytes)
                continue
            for stage in range(buffer.stages):
                inside = buffer.inside.names(at + stage * buffer.stage_bytes)
                names |= {f"{name}[{stage}].{inner}": place for inner, place in inside.items()}
        return names

    def allocate(self) -> Pointers:
        """On the device: pointers to the buffers, as attributes with their names."""
        allocator = cutlass.utils.SmemAllocator()
        return Pointers(
            **{
                name: allocator.allocate_array(
                    buffer.element, buffer.stages * buffer.count, byte_alignment=buffer.alignment
                )
                for name, buffer in self.buffers.items()
            }
        )


class Pointers(Carried):
    """The buffers of a SharedMemory as attributes."""

    def __init__(self, **pointers: cute.Pointer):
        vars(self).update(pointers)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> cute.Pointer: ...
