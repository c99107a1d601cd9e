"""Kernels that advance the state token by token: decode, and whole sequences."""
