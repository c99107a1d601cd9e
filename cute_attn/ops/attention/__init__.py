"""Softmax attention: the operators."""

from .api import flash_attn_func, flash_attn_varlen_func, refuse_varlen
from .combine import flash_attn_combine
from .plan import plan_attention, plan_attention_backward, plan_attention_combine

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "plan_attention",
    "plan_attention_backward",
    "plan_attention_combine",
    "refuse_varlen",
]
