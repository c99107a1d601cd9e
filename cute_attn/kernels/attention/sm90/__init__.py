"""Kernels for SM90, and parts that only SM90 kernels use."""
