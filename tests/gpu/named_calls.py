"""What a family's small calls are made of: `tests.gpu.small_calls` puts the families together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

LENGTHS = (70, 0, 63)  # of sequences that are packed: two chunks, none, and one that is not whole

Named = tuple[str, Callable[[], Any]]  # a call and what it is called


Group = Callable[[str], Iterator[Named]]  # of a device


def on_device(given: dict[str, Any], device: str) -> dict[str, Any]:
    return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in given.items()}


def differentiate(
    function: Callable[..., Any], given: dict[str, Any], of: tuple[str, ...]
) -> Callable[[], None]:
    """A call and its backward, for random gradients of what it returns."""

    def call() -> None:
        leaves = {name: given[name].detach().requires_grad_() for name in of if name in given}
        returned = function(**given | leaves)
        results = [x for x in returned if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(results, [torch.randn_like(x) for x in results])

    return call
