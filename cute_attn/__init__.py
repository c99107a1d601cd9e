"""Attention kernels for Hopper and Blackwell, written in the CuTe Python DSL.

Importing the package loads neither the compiler nor a kernel, because every public name is resolved
on first use. `families.EXPORTS` says where each name is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:  # public names for type checkers and editors, compared by tests/test_families.py
    from .emulation import emulated as emulated
    from .launch import warmup as warmup
    from .ops import register_operators as register_operators
    from .ops.attention import flash_attn_combine as flash_attn_combine
    from .ops.attention import flash_attn_func as flash_attn_func
    from .ops.attention import flash_attn_varlen_func as flash_attn_varlen_func
    from .ops.gated_delta_rule import chunk_gated_delta_rule as chunk_gated_delta_rule
    from .ops.gated_delta_rule import chunk_gdn as chunk_gdn
    from .ops.gated_delta_rule import (
        fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule,
    )
    from .ops.gated_delta_rule import fused_recurrent_gdn as fused_recurrent_gdn
    from .ops.gated_delta_rule import gated_delta_rule_decode as gated_delta_rule_decode
    from .ops.kda import chunk_kda as chunk_kda
    from .ops.kda import fused_recurrent_kda as fused_recurrent_kda
    from .ops.kda import kda_decode as kda_decode
    from .ops.lightning import lightning_attn_decode as lightning_attn_decode
    from .ops.mla import mla_decode as mla_decode
    from .settings import reload_settings as reload_settings


def __getattr__(name: str) -> Any:
    from .families import EXPORTS

    if name == "__all__":
        value: Any = ["__version__", *sorted(EXPORTS)]
    elif name in EXPORTS:
        value = getattr(importlib.import_module(EXPORTS[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # later accesses do not come through here
    return value


def __dir__() -> list[str]:
    from .families import EXPORTS

    return sorted({*globals(), *EXPORTS})
