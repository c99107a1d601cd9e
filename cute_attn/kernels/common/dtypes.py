"""The element types that specs name."""

from __future__ import annotations

import cutlass

DTYPE = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
}
