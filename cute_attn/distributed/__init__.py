"""Attention over several GPUs, on torch.distributed: sequences that no single GPU holds."""

from .decode import decode_over_ranks
from .plan import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel", "decode_over_ranks"]
