"""Benchmarks of Lightning Attention; `problem` is what they share."""
