"""The operators. Importing a family's module defines its `torch.ops.cute_attn.*`."""

from __future__ import annotations

import importlib

from ..families import FAMILIES


def register_operators() -> None:
    """Define all `torch.ops.cute_attn.*`, which an exported program refers to by name.

    This package's functions define their operators on first use. A process that loads an exported
    program (`torch.export.load`) may use none of the functions, and calls `register_operators`
    instead.

        cute_attn.register_operators()
        program = torch.export.load(path)

    The call takes as long as importing all functions, and loads neither the compiler nor a kernel.
    A second call changes nothing.
    """
    for family in FAMILIES:
        importlib.import_module(family.operators)
