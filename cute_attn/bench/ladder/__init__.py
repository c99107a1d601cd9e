"""Benchmark of the FMHA ladder, and the names of the contenders that are timed beside the steps."""

FA2, FA4, PRODUCTION = "flash-attention-2", "flash-attention-4", "production"
