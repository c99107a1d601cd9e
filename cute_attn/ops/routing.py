"""Which way a call goes: straight to the kernel, or through the operator registered with torch.

Straight go tensors and parameters. Everything else that torch lets have a say in what happens to a
tensor goes through the dispatcher, as with torch's own operators: dispatch modes, subclasses, and
objects that are no tensor but have `__torch_function__`. The registered operator's implementation
gets what comes out of that, and takes it for the memory that it is.

An operator asks at its top, before anything else and without a call,

    not is_dynamo_compiling() and type(q) is type(k) is ... is Tensor
    and (A_log is None or type(A_log) in PLAIN) and ...
    and forward_ad._current_level < 0 and not dispatch_mode_depth()

and `intercepted` where that is not so. A wrapper without memory must never get further: its
address is 0.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import is_tensor_like

__all__ = [
    "PLAIN",
    "dispatch_mode_depth",
    "forward_ad",
    "intercepted",
    "is_compiling",
    "is_dynamo_compiling",
    "is_grad_enabled",
    "overridden",
    "plain",
]

# Types of tensors that have no say. A buffer is a Tensor too: its class only looks like one.
PLAIN = frozenset({Tensor, Parameter})

is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
dispatch_mode_depth = torch._C._len_torch_dispatch_stack
_no_function = torch._C._disabled_torch_function_impl

# What most arguments are, none of which has a say.
_SILENT = PLAIN | {type(None), bool, int, float, str}

_T = TypeVar("_T")


def intercepted(*arguments: Any) -> bool:
    """Whether a call with these, tensors or not, is for the registered operator."""
    if is_compiling() or dispatch_mode_depth():
        return True
    return not _SILENT.issuperset(map(type, arguments)) and any(
        type(x) not in PLAIN and is_tensor_like(x) for x in arguments
    )


def overridden(*arguments: Any) -> bool:
    """Whether one of these has a `__torch_function__`, which is asked before anything is checked:
    what it hands on need not be what it was given."""
    return any(
        type(x) not in PLAIN
        and getattr(type(x), "__torch_function__", _no_function) is not _no_function
        for x in arguments
    )


def plain(x: _T) -> _T:
    """The same memory as a Tensor, where it is a subclass's."""
    if isinstance(x, Tensor) and type(x) not in PLAIN:
        return x.as_subclass(Tensor)  # type: ignore[return-value]
    return x
