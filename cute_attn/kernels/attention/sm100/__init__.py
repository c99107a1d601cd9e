"""Kernels for SM100, and parts that only SM100 kernels use."""
