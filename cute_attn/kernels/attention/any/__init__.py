"""Kernels that run on every architecture."""
