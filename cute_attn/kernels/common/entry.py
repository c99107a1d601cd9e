"""The entry of a kernel: its arguments are listed once, in a NamedTuple.

Compiled code takes the arguments one by one, then the stream, because a struct would cost each call
0.1 us. A kernel's `__call__` gathers the arguments:

    class Arguments(NamedTuple):
        x: cute.Tensor
        scale: Float32

    @entry(Arguments)
    @cute.jit
    def __call__(self, *args: Any) -> None:
        a, stream = gathered(Arguments, args)
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from cutlass.cute.runtime import make_fake_stream

Function = TypeVar("Function", bound=Callable[..., Any])
Listed = TypeVar("Listed", bound=tuple[Any, ...])


def entry(arguments: type[tuple[Any, ...]], **more: type) -> Callable[[Function], Function]:
    """Declare what a jitted `__call__(self, *args)` takes, for the compiler and its messages: the
    fields of `arguments`, then `more` by their types, and then a stream."""

    def declare(function: Function) -> Function:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        types = typing.get_type_hints(arguments) | more
        parameters = [
            inspect.Parameter("self", kind),
            *(inspect.Parameter(name, kind, annotation=types[name]) for name in types),
            inspect.Parameter("stream", kind),
        ]
        inspect.unwrap(function).__signature__ = inspect.Signature(parameters)
        return function

    return declare


def gathered(arguments: type[Listed], args: tuple[Any, ...]) -> tuple[Listed, Any]:
    """The arguments and the stream that `__call__` was given."""
    return arguments(*args[:-1]), args[-1]


def placeholders(arguments: tuple[Any, ...], *more: Any) -> tuple[Any, ...]:
    """Placeholders of a kernel's arguments and of a stream, to compile the kernel against."""
    return (*arguments, *more, make_fake_stream(use_tvm_ffi_env_stream=True))
