"""The operators. Importing a family's module defines its `torch.ops.cute_attn.*`."""

from __future__ import annotations

import importlib

from ..families import FAMILIES


def register_operators() -> None:
    """Define all `torch.ops.cute_attn.*`, which an exported program refers to by name.

    A process that loads such a program (`torch.export.load`) need not use any of this package's
    functions, each of which defines what it needs when it is first named.

        cute_attn.register_operators()
        program = torch.export.load(path)

    It takes as long as importing these functions, and loads neither the compiler nor a kernel.
    Calling it again changes nothing.
    """
    for family in FAMILIES:
        importlib.import_module(family.operators)
