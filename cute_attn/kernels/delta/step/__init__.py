"""Kernels that advance the state token by token: decode, and `recurrent` for whole sequences."""
