"""Every public operator with a good call on the CPU, for tests that hold for all of them."""

from __future__ import annotations

import pkgutil

from cute_attn.families import FAMILIES
from tests.ops.calls import Operator as Operator
from tests.ops.calls import tensors_in as tensors_in
from tests.ops.calls import values as values

OPERATORS: dict[str, Operator] = {
    name: operator
    for family in FAMILIES
    for name, operator in pkgutil.resolve_name(family.calls).items()
}
DIFFERENTIABLE = tuple(name for name, it in OPERATORS.items() if it.differentiable)
