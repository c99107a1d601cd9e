"""Benchmark of the FMHA ladder, and the names of what is timed beside the steps."""

FA2, FA4, PRODUCTION = "flash-attention-2", "flash-attention-4", "production"
