"""Benchmarks of multi-head latent attention."""
