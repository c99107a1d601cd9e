"""Running PTX without host code, on numpy arrays, as most tests of the emulator do."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .library import engine
from .lowering import lower
from .machine import Machine, Run
from .program import Parameter, Program
from .ptx import Module, parse


@dataclass(frozen=True)
class Buffer:
    """Memory to pass to `run_ptx`, with properties that a plain array does not have.

    Attributes:
        array: a numpy array, torch tensor, bytearray or ctypes array.
        initialised: False if the kernel must write the memory before reading it.
        writable: False if the kernel may only read the memory.
        name: the memory's name in findings.
    """

    array: Any
    initialised: bool = True
    writable: bool = True
    name: str = ""


def run_ptx(
    text: str | Module,
    kernel: str | None = None,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32,
    args: Sequence[Any] = (),
    *,
    cluster: int | Sequence[int] | None = None,
    dynamic_shared: int = 0,
    cooperative: bool = False,
    machine: Machine | None = None,
    **options: Any,
) -> Run:
    """Run one kernel of a PTX text.

    Args:
        text: the PTX, or a parsed module.
        kernel: the kernel's symbol; needed if the module has several kernels.
        grid, block, cluster: sizes, as one to three numbers. Without `cluster` the size that the
            kernel requires.
        args: one for each parameter: integers, floats, bytes, or arrays (see `Buffer`), whose
            addresses are passed.
        dynamic_shared: bytes of dynamic shared memory.
        cooperative: whether all CTAs are resident together.
        machine: the machine to run on; by default a new `Machine(**options)`.
    """
    module = parse(text) if isinstance(text, str) else text
    program = lower(module, engine().forms, kernel)
    runner = machine or Machine(**options)
    if cluster is None:
        cluster = program.kernel.directive("reqnctapercluster") or 1
    keep: list[Any] = []
    return runner.launch(
        program,
        _sizes(grid),
        _sizes(block),
        _sizes(cluster),
        dynamic_shared,
        pack_arguments(program, args, runner, keep),
        cooperative=cooperative,
    )


def _sizes(sizes: int | Sequence[int]) -> Sequence[int]:
    return (sizes,) if isinstance(sizes, int) else sizes


def pack_arguments(
    program: Program, args: Sequence[Any], machine: Machine, keep: list[Any]
) -> bytes:
    """The parameters of a launch as bytes. Arrays among `args` become regions of the machine.

    Objects that have to live until the launch is over are appended to `keep`.
    """
    if len(args) != len(program.parameters):
        raise ValueError(f"{program.name} takes {len(program.parameters)} parameters: {len(args)}")
    block = bytearray(program.parameter_bytes)
    for number, (argument, parameter) in enumerate(zip(args, program.parameters, strict=True)):
        data = _argument_bytes(argument, parameter, machine, keep, f"args[{number}]")
        block[parameter.offset : parameter.offset + parameter.bytes] = data
    return bytes(block)


def _argument_bytes(
    argument: Any, parameter: Parameter, machine: Machine, keep: list[Any], name: str
) -> bytes:
    size = parameter.bytes
    if isinstance(argument, bytes):
        if len(argument) != size:
            raise ValueError(f"{name} is {len(argument)} bytes, the parameter has {size}")
        return argument
    if isinstance(argument, float):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], argument)
    if isinstance(argument, int):
        return (argument & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    buffer = argument if isinstance(argument, Buffer) else Buffer(argument)
    base, extent = _extent(buffer.array, keep)
    if extent:
        machine.add_region(
            base,
            extent,
            buffer.name or name,
            initialised=buffer.initialised,
            writable=buffer.writable,
        )
    return base.to_bytes(size, "little")


def _extent(array: Any, keep: list[Any]) -> tuple[int, int]:
    """Address and bytes of an array's memory."""
    keep.append(array)
    if hasattr(array, "data_ptr"):  # torch
        last = sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True))
        return array.data_ptr(), (last + 1) * array.element_size() if array.numel() else 0
    if hasattr(array, "__array_interface__"):  # numpy
        if not array.flags.c_contiguous:
            raise ValueError("arrays of numpy have to be contiguous")
        return array.ctypes.data, array.nbytes
    view = (ctypes.c_char * len(memoryview(array).cast("B"))).from_buffer(array)
    keep.append(view)
    return ctypes.addressof(view), ctypes.sizeof(view)
