"""Kernels for SM100, and the parts that only they have."""
