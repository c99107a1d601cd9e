"""Attention and delta rules over several GPUs, on torch.distributed."""

from .api import ContextParallel, context_parallel
from .decode import decode_over_ranks
from .halo import causal_halo

__all__ = ["ContextParallel", "causal_halo", "context_parallel", "decode_over_ranks"]
