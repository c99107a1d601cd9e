"""Kernels of multi-head latent attention."""
