"""What the functions of other packages check of their arguments, in front of the operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Window = tuple[int | None, int | None]


def given_tensors(required: dict[str, Any], **optional: Any) -> dict[str, Tensor]:
    """The tensors that are not None, q first. The kernel's operator checks more, but only when the
    operator is called.
    """
    given = required | {name: x for name, x in optional.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != given["q"].device:
            raise ValueError(
                f"{name} is on {x.device}, must be on the device of q, {given['q'].device}"
            )
    return given


def refuse_given(**absent: Any) -> None:
    """Raise NotImplementedError for an argument that is not None."""
    for name, x in absent.items():
        if x is not None:
            raise NotImplementedError(f"{name} is given, must be None: there is no kernel for it")


def window_of(window_size: Any) -> Any:
    """The operators' window_size, for FlashAttention 2's and 3's, where every negative number is no
    bound. What is no pair is refused later."""
    if not isinstance(window_size, tuple | list):
        return window_size
    return tuple(-1 if isinstance(x, int) and x < 0 else x for x in window_size)


def with_contiguous_rows(x: Any) -> Any:
    """x, copied if its last dimension is not contiguous. What is no tensor is refused later."""
    if isinstance(x, Tensor) and x.dim() and x.stride(-1) != 1:
        return x.contiguous()
    return x


def unpacked(name: str, x: Any, shape: str, dims: int) -> tuple[Tensor, ...]:
    """The tensors that are packed along the third dimension from the end."""
    parts = 3 if name == "qkv" else 2
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != dims or x.shape[-3] != parts:
        raise ValueError(f"{name} has shape {list(x.shape)}, must be {shape}")
    return x.unbind(-3)
