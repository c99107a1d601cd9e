"""The Gated Delta Net's operators."""

from .decode import gated_delta_rule_decode, plan_gated_delta_rule_decode
from .recurrent import (
    fused_recurrent_gated_delta_rule,
    plan_fused_recurrent_gated_delta_rule,
)

__all__ = [
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule_decode",
    "plan_fused_recurrent_gated_delta_rule",
    "plan_gated_delta_rule_decode",
]
