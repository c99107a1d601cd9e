"""Constants of float32 arithmetic."""

from __future__ import annotations

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
INF, NAN = float("inf"), float("nan")
FLOAT32_MAX = 2.0**128 - 2.0**104
