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

__all__ = [
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule_decode",
    "plan_chunk_gated_delta_rule",
    "plan_chunk_gated_delta_rule_backward",
    "plan_fused_recurrent_gated_delta_rule",
    "plan_gated_delta_rule_decode",
]
