"""Benchmark of the FMHA ladder."""
