"""Kernels for SM90, and the parts that only they have."""
