"""Benchmarks of Lightning Attention, which share `problem`."""
