"""Checks of arguments that all operators share: tensors, dtypes, strides, numbers and flags.

No check reads device memory, and all checks but `check_state_address` work on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int32: "int32",
    torch.int64: "int64",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, which kernels may lack: "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


# The smallest and the largest normal number of float32.
SMALLEST, LARGEST = 2.0**-126, torch.finfo(torch.float32).max

_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_dispatch_keys = torch._C._dispatch_keys
_BATCHED = torch._C._dispatch_key_parse("Batched")  # the dispatch key of vmap before torch.func
_unpack_dual = forward_ad.unpack_dual


# -- tensors ------------------------------------------------------------------------------------


def check_tensors(required: dict[str, Any], optional: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that are not None; raise an exception if kernels cannot read one.

    Raises:
        TypeError: an argument is no tensor, or has a layout that is not strided.
        ValueError: a tensor is on another device than the first tensor, is a negated or conjugated
            view, or has no memory.
        NotImplementedError: a tensor comes from a transform of torch.func, is a batch of gradients,
            or has a tangent.
    """
    given = required | {name: x for name, x in optional.items() if x is not None}
    first, reference = next(iter(required.items()))
    for name, x in given.items():
        check_tensor(name, x)
        if x._is_zerotensor():
            raise ValueError(f"{name} is zero without memory (_is_zerotensor): give {name}.clone()")
        if x.device != reference.device:
            raise ValueError(
                f"{name} is on {x.device}, must be on the device of {first}, {reference.device}"
            )
    return given


def check_tensor(name: str, x: Any) -> None:
    """Raise the exceptions of `check_tensors` for x, except for its device and memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    check_transforms(**{name: x})
    if _dispatch_keys(x).has(_BATCHED):
        raise NotImplementedError(
            f"{name} is a batch of tensors (is_grads_batched, or a vectorized jacobian), and "
            "operators have no rule for these: take one gradient after the other"
        )
    check_tangents(**{name: x})
    if x.is_nested or x.layout is not torch.strided:
        layout = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} has layout {layout}, must be torch.strided and not nested")
    if x.is_neg() or x.is_conj():
        bit = "neg" if x.is_neg() else "conj"
        raise ValueError(
            f"{name} is a view whose values differ from those in memory (is_{bit}): give "
            f"{name}.resolve_{bit}()"
        )


def check_transforms(**tensors: Any) -> None:
    """Refuse tensors that a transform of torch.func made."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and _is_functorch_wrapped(x):
            raise NotImplementedError(
                f"{name} comes from a transform of torch.func (vmap, grad, jvp ...), and operators "
                "have no rule for these: batch by the dimensions that they take, and differentiate "
                "with torch.autograd"
            )


def check_tangents(**tensors: Any) -> None:
    """Refuse tensors with forward-mode tangents, which operators would drop."""
    if forward_ad._current_level < 0:
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and _unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} has a tangent (torch.autograd.forward_ad), and there is no forward-mode "
                f"derivative: give forward_ad.unpack_dual({name}).primal"
            )


def check_dtype(name: str, x: Tensor, allowed: Sequence[str]) -> None:
    if DTYPE_NAMES.get(x.dtype) not in allowed:
        expected = f"one of {tuple(allowed)}" if len(allowed) > 1 else allowed[0]
        raise TypeError(f"{name} has dtype {x.dtype}, must be {expected}")


def check_dtypes_are(given: dict[str, Tensor], names: Sequence[str], dtype: torch.dtype) -> None:
    for name in names:
        if name in given and given[name].dtype != dtype:
            raise TypeError(f"{name} has dtype {given[name].dtype}, must be {dtype}")


def check_int32(
    given: dict[str, Tensor], names: Sequence[str], expected: str = "torch.int32"
) -> None:
    """Check the dtype of lengths and indices. uint32 is reinterpreted as int32: compiled host code
    does not tell the two apart, so a warm call could not refuse uint32."""
    for name in names:
        if name in given and given[name].dtype not in (torch.int32, torch.uint32):
            raise TypeError(f"{name} has dtype {given[name].dtype}, must be {expected}")


def check_shapes(
    given: dict[str, Tensor],
    expected: Mapping[str, Sequence[int]],
    dimensions: Mapping[str, str] | None = None,
) -> None:
    """Check the shapes of the tensors that are given. Messages name the `dimensions` of a tensor,
    such as "batch, heads", beside its sizes."""
    for name, shape in expected.items():
        if name in given and tuple(given[name].shape) != tuple(shape):
            sizes = str(list(shape))
            if dimensions and name in dimensions:
                sizes += f": [{dimensions[name]}]"
            raise ValueError(f"{name} has shape {list(given[name].shape)}, must be {sizes}")


def check_rows(given: dict[str, Tensor], names: Sequence[str]) -> None:
    for name in names:
        if name in given and given[name].stride(-1) != 1:
            raise ValueError(
                f"{name} has strides {given[name].stride()}, the last dimension must be contiguous"
            )


def check_contiguous(given: dict[str, Tensor], names: Sequence[str]) -> None:
    for name in names:
        if name in given and not given[name].is_contiguous():
            raise ValueError(f"{name} has strides {given[name].stride()}, must be contiguous")


def check_not_expanded(given: dict[str, Tensor], names: Sequence[str]) -> None:
    """Raise ValueError if a tensor that the operator writes is expanded."""
    for name in names:
        if name in given and any(
            stride == 0 and size > 1
            for size, stride in zip(given[name].shape, given[name].stride(), strict=True)
        ):
            raise ValueError(f"{name} is expanded: it is written, so its elements must be distinct")


def check_state_strides(state: Tensor, vector_bytes: int, name: str = "state") -> None:
    """Raise ValueError unless kernels can read `state`, `[slots, ..., heads, rows, columns]`."""
    vector = vector_bytes // state.element_size()
    *leading, row, column = state.stride()
    if column != 1 or row != state.shape[-1] or any(stride % vector for stride in leading):
        raise ValueError(
            f"{name} has strides {state.stride()}: a head's matrix must be contiguous, and slots "
            f"and heads start on {vector_bytes}-byte boundaries"
        )


def check_state_address(state: Tensor, vector_bytes: int, name: str = "state") -> None:
    address = state.data_ptr()
    if address % vector_bytes:
        raise ValueError(
            f"{name} starts at address {address:#x}, must be {vector_bytes}-byte aligned"
        )


def exceeds(size: Any, most: int) -> bool:
    """Whether a size is more than `most`; False for a symbolic size. A comparison would make a
    guard in the graph, and the call with numbers is checked anyway."""
    return isinstance(size, int) and size > most


def check_has_slots(name: str, pool: Tensor, slots: str = "slots") -> None:
    """Raise ValueError for a pool without a slot, in which no index can name one."""
    count: Any = pool.shape[0]
    if isinstance(count, int) and count == 0:
        raise ValueError(f"{name} has 0 {slots}, must have at least 1")


# -- flags and numbers --------------------------------------------------------------------------


_FLAGS = (bool, int)


def check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, _FLAGS):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def require_flags(*flags: Any) -> None:
    """Raise TypeError unless each value is a flag. `check_flags` raises an error that names the
    argument."""
    for value in flags:
        if not isinstance(value, _FLAGS):
            raise TypeError(f"a flag is {value!r}, must be a bool")


def is_int(value: Any) -> bool:
    """Whether value is an int or a SymInt, and not a bool."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def check_number(name: str, value: Any) -> None:
    """Raise unless value is None or a number that is 0 or normal in float32."""
    if value is None:
        return
    check_is_number(name, value)
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} is {value}, must be finite in float32")
    if -SMALLEST < value < SMALLEST and value != 0:
        raise ValueError(
            f"{name} is {value}, must be 0 or at least 2**-126 in size: kernels take less for 0"
        )


def check_is_number(name: str, value: Any) -> None:
    """Raise TypeError unless value is a number; bools and tensors are no numbers."""
    if isinstance(value, bool) or not isinstance(
        value, int | float | torch.SymInt | torch.SymFloat
    ):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
