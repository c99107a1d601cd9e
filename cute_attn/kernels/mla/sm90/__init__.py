"""Kernels of multi-head latent attention on Hopper."""
