"""Constants that the Specs of all KDA kernels share. Importing this loads no compiler."""

from __future__ import annotations

L2NORM_EPSILON = 1e-6  # added to the sum of squares

GATES = ("none", "softplus", "lower_bound")
INDEX_DTYPES = ("none", "int32", "int64")
