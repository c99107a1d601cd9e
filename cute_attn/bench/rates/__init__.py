"""Rates and latencies of a GPU's units, by micro-benchmarks."""
