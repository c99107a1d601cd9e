"""The Gated Delta Net's operators."""

from .chunk import chunk_gated_delta_rule
from .chunk_plan import (
    plan_chunk_gated_delta_rule,
    plan_chunk_gated_delta_rule_backward,
)
from .decode import gated_delta_rule_decode, plan_gated_delta_rule_decode
from .recurrent import (
    fused_recurrent_gated_delta_rule,
    plan_fused_recurrent_gated_delta_rule,
)

# flash-linear-attention's other names of these functions.
chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "gated_delta_rule_decode",
    "plan_chunk_gated_delta_rule",
    "plan_chunk_gated_delta_rule_backward",
    "plan_fused_recurrent_gated_delta_rule",
    "plan_gated_delta_rule_decode",
]
