"""Attention over several GPUs, on torch.distributed: sequences that no single GPU holds."""

from .api import ContextParallel, context_parallel
from .decode import decode_over_ranks

__all__ = ["ContextParallel", "context_parallel", "decode_over_ranks"]
